"""Choose the completions of a step that are kept to be read.

The choice depends on the step's data alone. It takes turns between four kinds: the best and the
worst completion of the prompt whose rewards differ most, a completion that was cut off, and the one
with the token that quantization changed most. Then the next of each kind follow.
"""

from __future__ import annotations

from typing import Any

from qurl_megatron.algorithm.batch import RolloutGroup, TrainBatch
from qurl_megatron.report.samples import KINDS, Sample, ends, shorten

DIGITS = 3  # of a ratio, after the point


def pick_samples(
    step: int, groups: list[RolloutGroup], batch: TrainBatch, tokenizer: Any, count: int
) -> list[Sample]:
    """Return at most `count` completions of a step, of whose `groups` the rows of `batch` are made.

    `batch` has its proximal log-probs. Without groups, as on all ranks but 0, none are returned.
    """
    if not groups:
        return []
    assert batch.proximal_logprobs is not None
    log_ratios = batch.proximal_logprobs - batch.behaviour_logprobs  # [batch, time]
    largest = log_ratios.abs().masked_fill(~batch.loss_mask, 0.0).amax(1).tolist()
    completions = [(group, index) for group in groups for index, _ in enumerate(group.completions)]
    samples = []
    for row, kind in _choose(groups, largest, count).items():
        group, index = completions[row]
        completion = group.completions[index]
        ratios = log_ratios[row, batch.loss_mask[row]].exp()
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


def _choose(groups: list[RolloutGroup], largest: list[float], count: int) -> dict[int, str]:
    """Return the kind of each chosen row; `largest` is the largest |log ratio| of each row."""
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
