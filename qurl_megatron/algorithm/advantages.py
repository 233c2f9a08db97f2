"""Rewards -> how much better than expected each completion (GRPO) or token (PPO) is.

DAPO (Yu et al., 2025) is GRPO with a looser upper clip and a token mean, which are the objective's
settings, and with what is here: a soft penalty for length and a test for groups that teach nothing.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor


def grpo_advantages(rewards: list[list[float]], epsilon: float = 1e-6) -> list[list[float]]:
    """GRPO: `(reward - mean) / (std + epsilon)` within each group (QuRL, Section 3).

    `rewards[group][completion]` -> advantages of the same shape, one for all tokens of a
    completion. `std` is that of a sample (n - 1), as in verl, which the paper's experiments ran
    on. A group whose rewards are all equal, or of one completion, teaches nothing: its advantages
    are exactly 0.
    """
    return [_group_advantages(group, epsilon) for group in rewards]


def _group_advantages(rewards: list[float], epsilon: float) -> list[float]:
    if teaches_nothing(rewards):
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + epsilon) for reward in rewards]


def teaches_nothing(rewards: list[float]) -> bool:
    """True of a group whose advantages are all 0; DAPO samples another prompt in its place."""
    return len(set(rewards)) <= 1


def soft_overlong_penalty(length: int, max_length: int, soft_tokens: int) -> float:
    """What a response of `length` tokens loses: 0 down to -1 over the last `soft_tokens` (DAPO).

    `max_length` is the most there can be; 0 `soft_tokens` is no penalty.
    """
    beyond = length - (max_length - soft_tokens)
    return -beyond / soft_tokens if soft_tokens and beyond > 0 else 0.0


def generalized_advantages(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, *, discount: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """PPO: generalized advantage estimation (Schulman et al., 2016, Eq. 16), and returns.

    With delta_t = reward_t + discount * value_{t+1} - value_t, the advantage of token t is the sum
    over k of (discount * gae_lambda)^k * delta_{t+k}, and its return advantage + value. Nothing is
    expected after a completion's last token, also where it was cut off.

    All are `[batch, time]` float32 but `loss_mask`, bool, whose True positions follow each other;
    results are 0 outside it.
    """
    values = values * loss_mask
    advantages = torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[:, 0])
    for time in reversed(range(values.shape[1])):
        delta = rewards[:, time] + discount * next_value - values[:, time]
        advantage = (delta + discount * gae_lambda * advantage) * loss_mask[:, time]
        advantages[:, time] = advantage
        next_value = values[:, time]
    return advantages, (advantages + values) * loss_mask


def whitened(advantages: Tensor, loss_mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """PPO: advantages `[batch, time]` with mean 0 and variance 1 over the tokens of `loss_mask`.

    Raises ValueError for fewer than two tokens.
    """
    chosen = advantages[loss_mask]
    if len(chosen) < 2:
        raise ValueError("whitening wants two tokens at least")
    return (advantages - chosen.mean()) / (chosen.std() + epsilon) * loss_mask
