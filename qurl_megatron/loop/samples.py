"""Choose the completions of a step that are kept to be read.

The choice depends on the step's data alone. It takes turns between four kinds: the best and the
worst completion of the prompt whose rewards differ most, a completion that was cut off, and the one
with the token that quantization changed most. Then the next of each kind follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import RolloutGroup
from qurl_megatron.device import from_rank_zero
from qurl_megatron.learner.shares import Share
from qurl_megatron.report.samples import KINDS, Sample, ends, shorten

DIGITS = 3  # of a ratio, after the point
_ZERO = torch.zeros(1)


def pick_samples(
    step: int, groups: list[RolloutGroup], shares: Sequence[Share], tokenizer: Any, count: int
) -> list[Sample]:
    """Return at most `count` completions of a step, on global rank 0; none on other ranks.

    Collective. The step's minibatches are made of `groups`, which global rank 0 has, and `shares`
    are those of the minibatches, with proximal log-probs. Of these, only the largest ratio of each
    completion and the ratios of the chosen ones travel to global rank 0.
    """
    log_ratios = [_log_ratios(share) for share in shares]  # of this replica
    largest: list[float] = []  # of each completion, on global rank 0
    for share, own in zip(shares, log_ratios, strict=True):
        found = share.collect([torch.cat([each.abs(), _ZERO]).amax(0, True) for each in own])
        largest += map(float, found)

    def choose_completions() -> tuple[dict[int, str], int]:
        return choose(groups, largest, count), len(largest) // len(shares)

    chosen, rows = from_rank_zero(choose_completions)
    found = []
    for number, (share, own) in enumerate(zip(shares, log_ratios, strict=True)):
        is_chosen = [rows * number + each in chosen for each in share.numbers]
        sent = [each[: len(each) * use] for each, use in zip(own, is_chosen, strict=True)]
        found += share.collect(sent)
    if not groups:
        return []
    return make_samples(step, groups, chosen, {row: found[row] for row in chosen}, tokenizer)


def _log_ratios(share: Share) -> list[Tensor]:
    """Return log(proximal / behaviour) of the sampled tokens of each of this replica's sequences.

    The last pipeline stage has them.
    """
    batch = share.batch
    assert batch.behaviour_logprobs is not None
    lengths = batch.lengths.tolist()
    behaviour, masks = batch.behaviour_logprobs.split(lengths), batch.loss_mask.split(lengths)
    return [
        (proximal - of_engine)[mask]
        for proximal, of_engine, mask in zip(
            share.scores("proximal_logprobs"), behaviour, masks, strict=True
        )
    ]


def make_samples(
    step: int,
    groups: list[RolloutGroup],
    chosen: dict[int, str],
    log_ratios: dict[int, Tensor],
    tokenizer: Any,
) -> list[Sample]:
    """Return the completions `chosen` of `groups`; `log_ratios` are of their tokens, by row."""
    completions = [(group, index) for group in groups for index, _ in enumerate(group.completions)]
    samples = []
    for row, kind in chosen.items():
        group, index = completions[row]
        completion = group.completions[index]
        ratios = log_ratios[row].exp()
        shown = ends(list(range(len(completion.token_ids))))
        samples.append(
            Sample(
                step=step,
                kind=kind,
                prompt=shorten(group.prompt.question),
                text=shorten(completion.text),
                reward=group.rewards[index],
                parts=group.parts[index] if group.parts else {},
                length=len(completion.token_ids),
                truncated=completion.truncated,
                weight_versions=sorted(set(completion.token_versions)),
                tokens=tokenizer.batch_decode([[completion.token_ids[place]] for place in shown]),
                ratios=[round(float(ratios[place]), DIGITS) for place in shown],
            )
        )
    return samples


def choose(groups: list[RolloutGroup], largest: list[float], count: int) -> dict[int, str]:
    """Return the kind of each chosen completion, by its row: its number among all of `groups`.

    `largest` is the largest |log ratio| of each row.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    truncated = [completion.truncated for group in groups for completion in group.completions]
    spans, start = [], 0
    for group in groups:
        spans.append(range(start, start + len(group.rewards)))
        start += len(group.rewards)

    def spread(span: range) -> float:
        values = rewards[span.start : span.stop]
        return max(values) - min(values)

    spans.sort(key=spread, reverse=True)  # stable: the first of equals stays first
    rows = range(len(rewards))
    candidates = (
        [max(span, key=lambda row: rewards[row]) for span in spans],
        [min(span, key=lambda row: rewards[row]) for span in spans],
        [row for row in rows if truncated[row]],
        sorted(rows, key=lambda row: -largest[row]),
    )
    queues = dict(zip(KINDS, map(iter, candidates), strict=True))
    chosen: dict[int, str] = {}
    while queues and len(chosen) < count:
        for kind, queue in list(queues.items()):
            row = next((row for row in queue if row not in chosen), None)
            if row is None:
                del queues[kind]
            elif len(chosen) < count:
                chosen[row] = kind
    return chosen
