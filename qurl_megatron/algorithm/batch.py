"""The data that modules pass to each other: prompts, completions, groups and training batches.

A training batch is ragged: its sequences lie one behind another, and position `t` of every
`[tokens]` tensor belongs to token `t`. `behaviour_logprobs[t]` is the log-probability of
`tokens[t]` given the tokens before it in its sequence. All log-probs are natural, float32, at the
sampling temperature, and 0 where `loss_mask` is False. They are over the full vocabulary or, with
sampling masks, over the candidates of `tokens[t]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qurl_megatron.algorithm.score import Question, Score


@dataclass(frozen=True)
class Prompt:
    """A problem as the policy sees it. Produced by `data/prompts.py`."""

    id: str  # a hash of the question (and of the answers if an earlier problem has the question)
    question: str
    answer: Any
    token_ids: list[int]  # after the chat template, if the tokenizer has one
    metadata: dict[str, Any] = field(default_factory=dict)  # fields for the verifier
    answers: tuple[str, ...] = ()  # the data's list of right answers, if it has one
    columns: dict[str, Any] = field(default_factory=dict)  # the data's entry, for a user's reward
    part: int = 0  # of the data's sources, the number of its own
    given: Any = None  # the answer as the data has it

    @property
    def asked(self) -> Question:
        """What a verifier, a reward function or an agent learns of the problem."""
        learned = self.question, self.answer, self.metadata, self.answers, self.columns, self.given
        return Question(*learned)


class SamplingMasks(NamedTuple):
    """The candidates of each sampled token: the tokens that top_p kept when it was drawn."""

    sizes: Tensor  # [tokens] int32, the number of candidates of each sampled token
    token_ids: Tensor  # [sum of sizes] int32, the candidates, token after token


@dataclass(frozen=True)
class Completion:
    """What follows a prompt: a sampled answer, or an episode of an agent.

    All tokens of an answer are sampled. The sampled tokens of an episode are in several spans; the
    tokens between them were only read by the policy. Produced by `rollout/client.py`.
    """

    token_ids: list[int]  # with a sampled end-of-sequence token; the last token is always sampled
    behaviour_logprobs: list[float]  # one per sampled token, from the engine that sampled it
    text: str  # decoded without special tokens; of an episode, the last turn only
    truncated: bool  # ended by a limit: max_completion_length, or an episode's turns or tokens
    token_versions: list[int]  # one per sampled token, the weight version that sampled it
    # [prompt and completion tokens - 1, layers, experts per token] int16: the experts that the
    # engine chose in the pass that read token t and predicted token t + 1; None: not recorded
    routed_experts: Tensor | None = None
    sampling_masks: SamplingMasks | None = None  # of the sampled tokens; None: not recorded
    cached_tokens: int = 0  # tokens before it whose keys and values the server had cached
    score: Score | None = None  # that it comes with; None: the run's reward scores its text
    episode: Episode | None = None  # None: an answer

    @property
    def sampled(self) -> list[bool]:
        """One per token: True if the policy sampled it, False if the policy only read it."""
        return self.episode.sampled if self.episode else [True] * len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, over all branches."""
        branches = self.episode.branches if self.episode else []
        return len(self.behaviour_logprobs) + sum(branch.num_sampled for branch in branches)

    @property
    def oldest_version(self) -> int:
        """The smallest weight version that sampled a token, in any branch."""
        return min(min(sequence.token_versions) for sequence in self.sequences())

    @property
    def failure(self) -> str:
        """Why it comes without a reward, and is not trained on; empty if it does not."""
        return self.score.failure if self.score else ""

    @property
    def longest_turn(self) -> int:
        """Number of sampled tokens of the longest turn; of an answer, all its tokens."""
        turns = self.episode.turns if self.episode else []
        return max((turn.length for turn in turns), default=len(self.token_ids))

    def sequences(self) -> list[Completion]:
        """Return what is trained on: the branches of an episode, then the completion itself."""
        return [*(self.episode.branches if self.episode else []), self]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens before the completion: those of `prompt`, or what an agent chose."""
        return self.episode.prompt_ids if self.episode else prompt.token_ids


class TurnTokens(NamedTuple):
    """What a policy sampled at once in an episode."""

    length: int  # sampled tokens
    context: int  # tokens before them
    cached_tokens: int  # tokens of the context whose keys and values the server had cached


@dataclass(frozen=True)
class Episode:
    """What an agent's completion has beyond an answer."""

    prompt_ids: list[int]  # before the first sampled token
    sampled: list[bool]  # one per token of the completion
    end: str = ""  # what ended the episode; empty in a branch
    turns: list[TurnTokens] = field(default_factory=list)  # over all branches, in order
    # Sequences that the agent left for one with another history; each is trained on too.
    branches: list[Completion] = field(default_factory=list)


@dataclass(frozen=True)
class RolloutGroup:
    """All completions of a prompt. Produced by `loop/producer.py`, scores by `data/rewards.py`."""

    prompt: Prompt
    completions: list[Completion]  # without failed ones
    rewards: list[float]  # one per completion
    scores: list[Score] = field(default_factory=list)  # one per completion; rewards come from them
    sampled_at_s: float = 0.0  # time.perf_counter() after the last completion
    failed: list[Completion] = field(default_factory=list)  # completions without a reward


@dataclass
class TrainBatch:
    """Sequences to train on, each a prompt with one completion, one behind another.

    Produced by `loop/sampling.py` on global rank 0, which deals it out to the data-parallel
    replicas. A tensor that is None is filled later in the step, or this rank does not need it. In a
    micro batch, all tensors of tokens are [1, tokens], and `mask_ids` is
    [tokens, largest mask], padded with -1.
    """

    lengths: Tensor  # [sequences] int64, the tokens of each sequence
    tokens: Tensor  # [tokens] int32: prompt and completion of each sequence
    loss_mask: Tensor  # [tokens] bool, True on sampled tokens
    # [sequences] int64: the number of the completion that a sequence is, or is a branch of, in
    # ascending order; None: each is one of its own
    completions: Tensor | None = None
    behaviour_logprobs: Tensor | None = None  # [tokens] float32, from the engine that sampled them
    # [tokens] float32: a completion's reward at its last token, 0 elsewhere
    rewards: Tensor | None = None
    # [tokens] float32: likewise the mean reward of the completion's group; None: nothing reads it
    group_means: Tensor | None = None
    advantages: Tensor | None = None  # [tokens] float32, 0 outside loss_mask; PPO: by critic
    loss_weights: Tensor | None = None  # [tokens] float32, normalized over the whole minibatch
    proximal_logprobs: Tensor | None = None  # [tokens] float32, learner before any update
    # [tokens] float32, what the learner expects of the engine: it computes as the engine does
    predicted_logprobs: Tensor | None = None
    entropy: Tensor | None = None  # [tokens] float32, of the learner before any update
    reference_logprobs: Tensor | None = None  # [tokens] float32, model before any training
    values: Tensor | None = None  # PPO: [tokens] float32, critic before its update
    returns: Tensor | None = None  # PPO: [tokens] float32, what the critic learns to predict
    # [tokens] int32: the weight version trained against minus the version that sampled the token,
    # 0 outside loss_mask
    token_staleness: Tensor | None = None
    # [tokens, layers, experts per token] int16: the experts that the engine chose for each token,
    # -1 for the last token of a sequence, which the engine did not read; None: not recorded
    routed_experts: Tensor | None = None
    # [tokens] int32: the number of candidates of each token, 0 outside loss_mask; None: all tokens
    mask_sizes: Tensor | None = None
    mask_ids: Tensor | None = None  # [sum of mask_sizes] int32: the candidates
    # [tokens] bool: True in completions that weigh nothing in the loss; None: there is none
    left_out: Tensor | None = None

    @classmethod
    def empty(cls) -> TrainBatch:
        """Return a batch without sequences, for ranks other than global rank 0."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(lengths=nothing, tokens=nothing.int(), loss_mask=nothing.bool())

    def only(self, *names: str) -> TrainBatch:
        """Return the batch with its sequences, loss mask and the tensors of these names."""
        kept = {name: getattr(self, name) for name in ("completions", *names)}
        return TrainBatch(self.lengths, self.tokens, self.loss_mask, **kept)

    def split(self, parts: int) -> Iterator[TrainBatch]:
        """Yield `parts` batches in order; their numbers of completions differ by one at most."""
        of_completion = torch.arange(len(self)) if self.completions is None else self.completions
        counts = of_completion.unique_consecutive(return_counts=True)[1]  # type: ignore[no-untyped-call]
        ends = [0, *counts.cumsum(0).tolist()]
        bounds = [ends[part * len(counts) // parts] for part in range(parts + 1)]
        for first, after in pairwise(bounds):
            yield self.select(range(first, after))

    def select(self, numbers: Sequence[int]) -> TrainBatch:
        """Return a batch of these sequences, in this order."""
        chosen = torch.tensor(numbers, dtype=torch.int64)
        index = _places(self.lengths, chosen)
        selected = self.map(lambda tensor: tensor[index])
        selected.lengths = self.lengths[chosen]
        if self.completions is not None:
            selected.completions = self.completions[chosen]
        if self.mask_sizes is not None and self.mask_ids is not None:
            selected.mask_ids = self.mask_ids[_places(self.mask_sizes, index)]
        return selected

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """Return the batch with `change(tensor)` in place of every [tokens] tensor."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        kept = {name: tensors.pop(name) for name in ("lengths", "completions", "mask_ids")}
        changed = {name: None if t is None else change(t) for name, t in tensors.items()}
        return TrainBatch(**kept, **changed)  # type: ignore[arg-type]

    @property
    def trained(self) -> Tensor:
        """[tokens] bool: `loss_mask` without what is left out."""
        return self.loss_mask if self.left_out is None else self.loss_mask & ~self.left_out

    def __len__(self) -> int:
        return len(self.lengths)


def pack(
    groups: list[RolloutGroup],
    advantages: list[list[float]] | None = None,
    version: int | None = None,
    *,
    leaves_out_truncated: bool = False,
    has_group_means: bool = False,
) -> TrainBatch:
    """Lay groups out as one batch, in order: one sequence per completion, or per branch of it.

    `advantages[group][completion]` is given to every sampled token of that completion. `version` is
    the weight version trained against, from which staleness is counted; None: no staleness.
    `leaves_out_truncated` leaves completions that a limit ended out of the loss. With
    `has_group_means` an objective can read the mean reward of each completion's group.
    """
    rows = [
        (sequence, sequence.prompt_ids(group.prompt), index, number)
        for index, group in enumerate(groups)
        for number, completion in enumerate(group.completions)
        for sequence in completion.sequences()
    ]
    lengths = torch.tensor([len(prompt) + len(each.token_ids) for each, prompt, _, _ in rows])
    ends = lengths.cumsum(0).tolist()
    batch = TrainBatch(
        lengths=lengths,
        tokens=torch.zeros(ends[-1], dtype=torch.int32),
        loss_mask=torch.zeros(ends[-1], dtype=torch.bool),
        completions=torch.repeat_interleave(
            torch.tensor([len(c.sequences()) for group in groups for c in group.completions])
        ),
        behaviour_logprobs=(behaviour_logprobs := torch.zeros(ends[-1])),
        rewards=(rewards := torch.zeros(ends[-1])),
        group_means=torch.zeros(ends[-1]) if has_group_means else None,
        token_staleness=(staleness := torch.zeros(ends[-1], dtype=torch.int32)),
    )
    for end, (sequence, prompt, index, number) in zip(ends, rows, strict=True):
        start = end - len(sequence.token_ids)
        batch.tokens[start - len(prompt) : end] = torch.tensor(prompt + sequence.token_ids)
        sampled: slice | Tensor = slice(start, end)
        if sequence.episode:
            sampled = start + torch.tensor(sequence.sampled).nonzero().squeeze(1)
        batch.loss_mask[sampled] = True
        behaviour_logprobs[sampled] = torch.tensor(sequence.behaviour_logprobs)
        rewards[end - 1] = groups[index].rewards[number]
        if batch.group_means is not None:
            batch.group_means[end - 1] = fmean(groups[index].rewards)
        if version is not None:
            staleness[sampled] = version - torch.tensor(sequence.token_versions, dtype=torch.int32)
    recorded = [sequence.routed_experts for sequence, *_ in rows]
    known = [experts for experts in recorded if experts is not None]
    if len(known) == len(rows):
        of_last = (0, 0, 0, 0, 0, 1)  # one more row, for the token that no pass has read
        batch.routed_experts = torch.cat(
            [torch.nn.functional.pad(experts, of_last, value=-1) for experts in known]
        )
    masks = [each.sampling_masks for each, *_ in rows if each.sampling_masks]
    if masks:
        batch.mask_sizes = torch.zeros(ends[-1], dtype=torch.int32)
        batch.mask_sizes[batch.loss_mask] = torch.cat([each.sizes for each in masks])
        batch.mask_ids = torch.cat([each.token_ids for each in masks])
    if leaves_out_truncated:
        is_out = [groups[index].completions[number].truncated for *_, index, number in rows]
        batch.left_out = torch.tensor(is_out).repeat_interleave(lengths)
    if advantages is not None:
        of_sequences = torch.tensor([advantages[index][number] for *_, index, number in rows])
        of_tokens = of_sequences.repeat_interleave(lengths)
        batch.advantages = torch.where(batch.loss_mask, of_tokens, 0.0)
    return batch


def _places(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Return the positions of the items of chosen runs; all runs lie one behind another."""
    of_chosen = lengths[chosen]
    # All items of a run move by the same distance.
    moves = (lengths.cumsum(0) - lengths)[chosen] - (of_chosen.cumsum(0) - of_chosen)
    return torch.arange(int(of_chosen.sum())) + moves.repeat_interleave(of_chosen)
