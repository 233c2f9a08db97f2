"""The data that modules pass to each other: prompts, completions, groups and training batches.

Position `t` of every `[batch, time]` tensor belongs to token `t`: `behaviour_logprobs[i, t]` is
the log-probability of `tokens[i, t]` given `tokens[i, :t]`. All log-probs are natural, float32,
over the full vocabulary at the sampling temperature, and 0 where `loss_mask` is False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class RolloutGroup:
    """All completions of a prompt. Produced by `loop/sampling.py`, rewards by `data/rewards.py`."""

    prompt: Prompt
    completions: list[Completion]
    rewards: list[float]  # one per completion
    parts: list[dict[str, float]] = field(default_factory=list)  # named parts of each reward


@dataclass
class TrainBatch:
    """The rows a learner trains on, one per completion; the same on every rank.

    Produced by `loop/sampling.py`. The tensors that are None at first are filled later in the step:
    log-probs of the learner by `loop/train.py`, all tensors of PPO by `learner/critic.py`.
    """

    tokens: Tensor  # [batch, time] int64: prompt, response, padding
    loss_mask: Tensor  # [batch, time] bool, True on sampled tokens
    behaviour_logprobs: Tensor  # [batch, time] float32, from the engine that sampled the tokens
    rewards: Tensor  # [batch, time] float32: a completion's reward at its last token, 0 elsewhere
    advantages: Tensor | None = None  # [batch, time] float32, 0 outside loss_mask; PPO: by critic
    proximal_logprobs: Tensor | None = None  # [batch, time] float32, learner before any update
    reference_logprobs: Tensor | None = None  # [batch, time] float32, model before any training
    values: Tensor | None = None  # PPO: [batch, time] float32, critic before its update
    returns: Tensor | None = None  # PPO: [batch, time] float32, what the critic learns to predict
    # [batch, time] int64: the weight version trained against minus the version that sampled the
    # token, 0 outside loss_mask
    token_lags: Tensor | None = None

    def rows(self, index: slice | Tensor) -> TrainBatch:
        """Return a batch of only the rows that `index` selects."""
        return self.map(lambda tensor: tensor[index])

    def split(self, parts: int) -> Iterator[TrainBatch]:
        """Yield `parts` batches of equal numbers of rows, in order."""
        rows = len(self) // parts
        return (self.rows(slice(start, start + rows)) for start in range(0, len(self), rows))

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """Return a batch of `change(tensor)` for every tensor that is not None."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return TrainBatch(*(None if t is None else change(t) for t in tensors))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.tokens.shape[0]


def pack(
    groups: list[RolloutGroup],
    pad_token_id: int,
    advantages: list[list[float]] | None = None,
    version: int | None = None,
) -> TrainBatch:
    """Lay groups out as one right-padded batch, one row per completion, in order.

    `advantages[group][completion]` is given to every token of that completion. `version` is the
    weight version trained against, from which lags are counted; None: every lag is 0.
    """
    rows = [
        (group.prompt.token_ids, completion, reward)
        for group in groups
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]
    time = max(len(prompt) + len(completion.token_ids) for prompt, completion, _ in rows)
    shape = (len(rows), time)
    lags = torch.zeros(shape, dtype=torch.int64)
    batch = TrainBatch(
        tokens=torch.full(shape, pad_token_id, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(shape),
        rewards=torch.zeros(shape),
        token_lags=lags,
    )
    for row, (prompt, completion, reward) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(completion.token_ids)
        batch.tokens[row, :end] = torch.tensor(prompt + completion.token_ids)
        batch.loss_mask[row, start:end] = True
        batch.behaviour_logprobs[row, start:end] = torch.tensor(completion.behaviour_logprobs)
        batch.rewards[row, end - 1] = reward
        if version is not None:
            lags[row, start:end] = version - torch.tensor(completion.token_versions)
    if advantages is not None:
        per_row = torch.tensor([advantage for group in advantages for advantage in group])
        batch.advantages = torch.where(batch.loss_mask, per_row[:, None], 0.0)
    return batch
