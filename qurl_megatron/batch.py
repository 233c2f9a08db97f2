"""The contracts between rooms: what a prompt, a completion, a group and a training batch carry.

Position `t` of every `[batch, time]` tensor speaks of token `t`: `behaviour_logprobs[i, t]` is the
log-probability of `tokens[i, t]` given `tokens[i, :t]`. All log-probs are natural, float32, of the
full vocabulary at the sampling temperature, and 0 where `loss_mask` is False.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A problem as the policy sees it. Produced by `data.py`."""

    id: str  # stable across runs: a hash of the question
    question: str
    answer: str
    token_ids: list[int]  # after the chat template, if the tokenizer has one
    metadata: dict[str, Any] = field(default_factory=dict)  # a verifier's own fields


@dataclass(frozen=True)
class Completion:
    """One sampled answer. Produced by `rollout.py`; `reward` by `rewards.py`."""

    token_ids: list[int]  # sampled tokens, the end-of-sequence token included if it was sampled
    behaviour_logprobs: list[float]  # one a token, by the engine that sampled it
    text: str  # token_ids decoded without special tokens
    truncated: bool  # ended by max_response_length
    weight_version: int  # the publish it was sampled with


@dataclass(frozen=True)
class RolloutGroup:
    """All completions of one prompt with their rewards."""

    prompt: Prompt
    completions: list[Completion]
    rewards: list[float]


@dataclass
class TrainBatch:
    """What the learner trains on; the same on every rank. Produced by `advantages.py`."""

    tokens: Tensor  # [batch, time] int64, prompt then response then padding
    loss_mask: Tensor  # [batch, time] bool, True on sampled tokens
    behaviour_logprobs: Tensor  # [batch, time] float32, from the engine
    advantages: Tensor  # [batch, time] float32, 0 outside loss_mask
    # Of the learner before any update, and of the model as it was; [batch, time] float32.
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    def rows(self, index: slice | Tensor) -> TrainBatch:
        """The same batch with only the rows `index` selects."""
        return self.map(lambda tensor: tensor[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """The same batch with every tensor it has changed by `change`."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return TrainBatch(*(None if t is None else change(t) for t in tensors))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.tokens.shape[0]


def pack(
    groups: list[RolloutGroup], advantages: list[list[float]], pad_token_id: int
) -> TrainBatch:
    """Lay groups out as one right-padded batch, one row a completion, in order."""
    rows = [
        (group.prompt.token_ids, completion, advantage)
        for group, group_advantages in zip(groups, advantages, strict=True)
        for completion, advantage in zip(group.completions, group_advantages, strict=True)
    ]
    time = max(len(prompt) + len(completion.token_ids) for prompt, completion, _ in rows)
    shape = (len(rows), time)
    batch = TrainBatch(
        tokens=torch.full(shape, pad_token_id, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(shape),
        advantages=torch.zeros(shape),
    )
    for row, (prompt, completion, advantage) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(completion.token_ids)
        batch.tokens[row, :end] = torch.tensor(prompt + completion.token_ids)
        batch.loss_mask[row, start:end] = True
        batch.behaviour_logprobs[row, start:end] = torch.tensor(completion.behaviour_logprobs)
        batch.advantages[row, start:end] = advantage
    return batch
