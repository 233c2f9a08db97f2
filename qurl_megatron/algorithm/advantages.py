"""Advantages: how much better a completion was than others.

DAPO (Yu et al., 2025) adds to GRPO a looser upper clip and a token mean (settings of the
objective), a soft penalty for long completions, and the replacement of zero-variance groups.
"""

import statistics

import torch
from torch import Tensor

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages are whitened over the tokens of the step."""


def group_advantages(
    rewards: list[list[float]], estimator: str, epsilon: float = 1e-6
) -> list[list[float]]:
    """Return the advantage of each completion; it holds for all its tokens.

    Both `rewards` and the result are `[group][completion]`. With the mean and the sample standard
    deviation (n - 1) of a group of n, as in verl, the estimators are

        grpo                          (reward - mean) / (std + epsilon)    QuRL, Section 3
        dr_grpo                       reward - mean
        rloo                          reward - mean of the n - 1 others
        reinforce_plus_plus           reward
        reinforce_plus_plus_baseline  reward - mean

    and those of `WHITENED` are whitened afterwards. The advantages of a zero-variance group are
    exactly 0, except with `reinforce_plus_plus`.
    """
    return [_of_group(group, estimator, epsilon) for group in rewards]


def _of_group(rewards: list[float], estimator: str, epsilon: float) -> list[float]:
    if estimator == "reinforce_plus_plus":
        return rewards
    if is_zero_variance(rewards):
        return [0.0] * len(rewards)
    mean, size = statistics.fmean(rewards), len(rewards)
    divisor = {
        "grpo": statistics.stdev(rewards) + epsilon,
        "dr_grpo": 1.0,
        "rloo": (size - 1) / size,
        "reinforce_plus_plus_baseline": 1.0,
    }[estimator]
    return [(reward - mean) / divisor for reward in rewards]


def whiten(advantages: Tensor, loss_mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Return advantages with mean 0 and variance 1 over the tokens of `loss_mask`.

    They are `(advantage - mean) / sqrt(variance + epsilon)`, with the sample variance (n - 1) as in
    verl and TRL. Because `epsilon` is under the root, advantages that hardly differ stay close to
    0. Otherwise their rounding noise would be scaled up to a standard deviation of 1.

    `advantages` and the result are `[tokens]` float32; the result is 0 outside `loss_mask`.

    Raises:
        ValueError: `loss_mask` has fewer than two tokens.
    """
    chosen = advantages[loss_mask]
    if len(chosen) < 2:
        raise ValueError("whitening needs at least two tokens")
    whitened = (advantages - chosen.mean()) * torch.rsqrt(chosen.var() + epsilon)
    return torch.where(loss_mask, whitened, 0.0)


def is_zero_variance(rewards: list[float]) -> bool:
    """Return True for a group of equal rewards, none of which is better than the others.

    Such a group gives GRPO no gradient. DAPO's dynamic sampling replaces it by that of another
    prompt.
    """
    return len(set(rewards)) <= 1


def soft_overlong_penalty(length: int, max_length: int, soft_tokens: int) -> float:
    """Return DAPO's penalty for a completion of `length` tokens, between -1 and 0.

    It falls linearly from 0 to -1 over the last `soft_tokens` tokens before `max_length`. A
    `soft_tokens` of 0 disables it.
    """
    excess = length - (max_length - soft_tokens)
    return -excess / soft_tokens if soft_tokens and excess > 0 else 0.0
