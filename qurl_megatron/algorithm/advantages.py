"""Advantages of GRPO: how much better a completion was than the others of its prompt.

DAPO (Yu et al., 2025) adds to GRPO a looser upper clip and a token mean (settings of the
objective), a soft penalty for long completions, and the replacement of zero-variance groups.
"""

import statistics


def grpo_advantages(rewards: list[list[float]], epsilon: float = 1e-6) -> list[list[float]]:
    """Return GRPO's `(reward - mean) / (std + epsilon)` within each group (QuRL, Section 3).

    Both `rewards` and the result are `[group][completion]`; an advantage holds for all tokens of
    its completion. `std` is the sample standard deviation (n - 1), as in verl, which the paper used
    for its experiments. The advantages of a zero-variance group are exactly 0.
    """
    return [_group_advantages(group, epsilon) for group in rewards]


def _group_advantages(rewards: list[float], epsilon: float) -> list[float]:
    if is_zero_variance(rewards):
        return [0.0] * len(rewards)
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + epsilon) for reward in rewards]


def is_zero_variance(rewards: list[float]) -> bool:
    """Return True for a group of equal rewards, whose advantages are all 0.

    Such a group gives no gradient. DAPO's dynamic sampling replaces it by another prompt's group.
    """
    return len(set(rewards)) <= 1


def soft_overlong_penalty(length: int, max_length: int, soft_tokens: int) -> float:
    """Return DAPO's penalty for a completion of `length` tokens, between -1 and 0.

    It falls linearly from 0 to -1 over the last `soft_tokens` tokens before `max_length`. A
    `soft_tokens` of 0 disables it.
    """
    excess = length - (max_length - soft_tokens)
    return -excess / soft_tokens if soft_tokens and excess > 0 else 0.0
