"""Rewards of a group of completions -> how much better than the group each of them is.

DAPO (Yu et al., 2025) is GRPO with a looser upper clip and a token mean, which are the objective's
settings, and with what is here: a soft penalty for length and a test for groups that teach nothing.
"""

from __future__ import annotations

import statistics


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
