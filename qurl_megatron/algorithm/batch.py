"""The data that modules pass to each other: prompts, completions, groups and training batches.

A training batch is ragged: its sequences lie one behind another, and position `t` of every
`[tokens]` tensor belongs to token `t`. `behaviour_logprobs[t]` is the log-probability of
`tokens[t]` given the tokens before it in its sequence. All log-probs are natural, float32, over
the full vocabulary at the sampling temperature, and 0 where `loss_mask` is False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.score import Score


@dataclass(frozen=True)
class Prompt:
    """A problem as the policy sees it. Produced by `data/prompts.py`."""

    id: str  # a hash of the question (and answer, if not its first): the same in every run
    question: str
    answer: str
    token_ids: list[int]  # after the chat template, if the tokenizer has one
    metadata: dict[str, Any] = field(default_factory=dict)  # fields for the verifier


@dataclass(frozen=True)
class Completion:
    """A sampled answer to a prompt. Produced by `rollout/client.py`."""

    token_ids: list[int]  # sampled tokens, with the end-of-sequence token if it was sampled
    behaviour_logprobs: list[float]  # one per token, from the engine that sampled it
    text: str  # token_ids decoded without special tokens
    truncated: bool  # ended by max_response_length
    token_versions: list[int]  # one per token, the weight version that sampled it
    # [prompt and response tokens - 1, layers, experts per token] int16: the experts that the engine
    # chose in the pass that read token t, and predicted token t + 1; None: not recorded
    routed_experts: Tensor | None = None
    # one per token, the ids that top_p and top_k left to choose from; None: not recorded
    sampling_masks: list[list[int]] | None = None


@dataclass(frozen=True)
class RolloutGroup:
    """All completions of a prompt. Produced by `loop/producer.py`, scores by `data/rewards.py`."""

    prompt: Prompt
    completions: list[Completion]
    rewards: list[float]  # one per completion
    scores: list[Score] = field(default_factory=list)  # that rewards come from, one each
    sampled_at_s: float = 0.0  # time.perf_counter() when the completions were there


@dataclass
class TrainBatch:
    """Sequences to train on, each a prompt with one completion, one behind another.

    Produced by `loop/sampling.py` on global rank 0, which deals it out to the data-parallel
    replicas. The tensors that are None at first are filled later in the step, or are of no use to
    who has this batch. In a micro batch, all tensors but `lengths` are [1, tokens].
    """

    lengths: Tensor  # [sequences] int64, the tokens of each sequence
    tokens: Tensor  # [tokens] int32: prompt and response of each sequence
    loss_mask: Tensor  # [tokens] bool, True on sampled tokens
    behaviour_logprobs: Tensor | None = None  # [tokens] float32, from the engine that sampled them
    # [tokens] float32: a completion's reward at its last token, 0 elsewhere
    rewards: Tensor | None = None
    advantages: Tensor | None = None  # [tokens] float32, 0 outside loss_mask; PPO: by critic
    loss_weights: Tensor | None = None  # [tokens] float32, normalized over the whole minibatch
    proximal_logprobs: Tensor | None = None  # [tokens] float32, learner before any update
    entropy: Tensor | None = None  # [tokens] float32, of the learner before any update
    reference_logprobs: Tensor | None = None  # [tokens] float32, model before any training
    values: Tensor | None = None  # PPO: [tokens] float32, critic before its update
    returns: Tensor | None = None  # PPO: [tokens] float32, what the critic learns to predict
    # [tokens] int32: the weight version trained against minus the version that sampled the token,
    # 0 outside loss_mask
    token_lags: Tensor | None = None
    # [tokens, layers, experts per token] int16: the experts that the engine chose for each token,
    # -1 for the last token of a sequence, which it did not read; None: not recorded
    routed_experts: Tensor | None = None

    @classmethod
    def empty(cls) -> TrainBatch:
        """Return a batch without sequences, as ranks other than global rank 0 have it."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(lengths=nothing, tokens=nothing.int(), loss_mask=nothing.bool())

    def only(self, *names: str) -> TrainBatch:
        """Return the batch with its tokens and mask, and of the other tensors only these."""
        kept = {name: getattr(self, name) for name in names}
        return TrainBatch(self.lengths, self.tokens, self.loss_mask, **kept)

    def split(self, parts: int) -> Iterator[TrainBatch]:
        """Yield `parts` batches of equal numbers of sequences, in order."""
        count = len(self) // parts
        for part in range(parts):
            yield self.select(range(part * count, (part + 1) * count))

    def select(self, numbers: Sequence[int]) -> TrainBatch:
        """Return a batch of these sequences, in this order."""
        chosen = torch.tensor(numbers, dtype=torch.int64)
        lengths = self.lengths[chosen]
        # A token moves by what its sequence moves.
        moves = (self.lengths.cumsum(0) - self.lengths)[chosen] - (lengths.cumsum(0) - lengths)
        index = torch.arange(int(lengths.sum())) + moves.repeat_interleave(lengths)
        return replace(self.map(lambda tensor: tensor[index]), lengths=lengths)

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """Return a batch of `change(tensor)` for every [tokens] tensor that is not None."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        lengths = tensors.pop("lengths")
        changed = {name: None if t is None else change(t) for name, t in tensors.items()}
        return TrainBatch(lengths, **changed)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.lengths)


def pack(
    groups: list[RolloutGroup],
    advantages: list[list[float]] | None = None,
    version: int | None = None,
) -> TrainBatch:
    """Lay groups out as one batch, one sequence per completion, in order.

    `advantages[group][completion]` is given to every token of that completion. `version` is the
    weight version trained against, from which lags are counted; None: every lag is 0.
    """
    sequences = [
        (group.prompt.token_ids, completion, reward)
        for group in groups
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]
    lengths = torch.tensor([len(prompt) + len(each.token_ids) for prompt, each, _ in sequences])
    ends = lengths.cumsum(0).tolist()
    batch = TrainBatch(
        lengths=lengths,
        tokens=torch.zeros(ends[-1], dtype=torch.int32),
        loss_mask=torch.zeros(ends[-1], dtype=torch.bool),
        behaviour_logprobs=(behaviour_logprobs := torch.zeros(ends[-1])),
        rewards=(rewards := torch.zeros(ends[-1])),
        token_lags=(lags := torch.zeros(ends[-1], dtype=torch.int32)),
    )
    for end, (prompt, completion, reward) in zip(ends, sequences, strict=True):
        response = slice(end - len(completion.token_ids), end)
        batch.tokens[response.start - len(prompt) : end] = torch.tensor(
            prompt + completion.token_ids
        )
        batch.loss_mask[response] = True
        behaviour_logprobs[response] = torch.tensor(completion.behaviour_logprobs)
        rewards[end - 1] = reward
        if version is not None:
            lags[response] = version - torch.tensor(completion.token_versions, dtype=torch.int32)
    recorded = [completion.routed_experts for _, completion, _ in sequences]
    known = [experts for experts in recorded if experts is not None]
    if len(known) == len(sequences):
        of_last = (0, 0, 0, 0, 0, 1)  # one more row, for the token that no pass has read
        batch.routed_experts = torch.cat(
            [torch.nn.functional.pad(experts, of_last, value=-1) for experts in known]
        )
    if advantages is not None:
        of_sequences = torch.tensor([advantage for group in advantages for advantage in group])
        of_tokens = of_sequences.repeat_interleave(lengths)
        batch.advantages = torch.where(batch.loss_mask, of_tokens, 0.0)
    return batch
