"""Rewards of a group of completions -> how much better than the group each of them is."""

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
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + epsilon) for reward in rewards]
