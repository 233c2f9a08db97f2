"""The contracts between rooms: what a prompt, a completion, a group and a training batch carry.

Position `t` of every `[batch, time]` tensor speaks of token `t`: `behaviour_logprobs[i, t]` is the
log-probability of `tokens[i, t]` given `tokens[i, :t]`. All log-probs are natural, float32, of the
full vocabulary at the sampling temperature, and 0 where `loss_mask` is False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    rewards: Tensor  # [batch, time] float32, a completion's at its last token, 0 elsewhere
    advantages: Tensor  # [batch, time] float32, 0 outside loss_mask
    # Of the learner before any update, and of the model as it was; [batch, time] float32.
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    # Of PPO, [batch, time] float32: what the critic expects before token t is sampled, before its
    # update, and what came of it. Produced by `critic.py`.
    values: Tensor | None = None
    returns: Tensor | None = None

    def rows(self, index: slice | Tensor) -> TrainBatch:
        """The same batch with only the rows `index` selects."""
        return self.map(lambda tensor: tensor[index])

    def split(self, parts: int) -> Iterator[TrainBatch]:
        """The batch cut into `parts` of equal numbers of rows, in order."""
        rows = len(self) // parts
        return (self.rows(slice(start, start + rows)) for start in range(0, len(self), rows))

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """The same batch with every tensor it has changed by `change`."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return TrainBatch(*(None if t is None else change(t) for t in tensors))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.tokens.shape[0]


def pack(
    groups: list[RolloutGroup],
    rewards: list[list[float]],
    advantages: list[list[float]],
    pad_token_id: int,
) -> TrainBatch:
    """Lay groups out as one right-padded batch, one row a completion, in order.

    `rewards` and `advantages` are `[group][completion]`; an advantage goes to all tokens of its
    completion.
    """
    rows = [
        (group.prompt.token_ids, *of_completion)
        for group, *of_group in zip(groups, rewards, advantages, strict=True)
        for of_completion in zip(group.completions, *of_group, strict=True)
    ]
    time = max(len(prompt) + len(completion.token_ids) for prompt, completion, *_ in rows)
    shape = (len(rows), time)
    batch = TrainBatch(
        tokens=torch.full(shape, pad_token_id, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(shape),
        rewards=torch.zeros(shape),
        advantages=torch.zeros(shape),
    )
    for row, (prompt, completion, reward, advantage) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(completion.token_ids)
        batch.tokens[row, :end] = torch.tensor(prompt + completion.token_ids)
        batch.loss_mask[row, start:end] = True
        batch.behaviour_logprobs[row, start:end] = torch.tensor(completion.behaviour_logprobs)
        batch.rewards[row, end - 1] = reward
        batch.advantages[row, start:end] = advantage
    return batch
