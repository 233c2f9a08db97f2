"""Advantages: how much better a completion (GRPO) or a token (PPO) was than expected.

DAPO (Yu et al., 2025) adds to GRPO a looser upper clip and a token mean (settings of the
objective), a soft penalty for long completions, and the replacement of zero-variance groups.
"""

import statistics

import torch
from torch import Tensor


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


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    lengths: Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return PPO's advantages and returns by generalized advantage estimation.

    With delta_t = reward_t + discount * value_{t+1} - value_t, the advantage of token t is the sum
    over k >= 0 of (discount * gae_lambda)^k * delta_{t+k} (Schulman et al., 2016, Eq. 16), and its
    return is advantage + value. The value after the last token of a completion is 0, even if the
    completion was truncated. Here t + 1 is the next token of `loss_mask`: the sum skips tokens that
    the policy did not sample, such as a user's turn in a conversation, and does not discount for
    them (as in verl). A reward at such a token is ignored.

    Tensors are `[tokens]`, sequence after sequence: `rewards`, `values` and both results float32,
    `loss_mask` bool. `lengths` is `[sequences]` int64. The results are 0 outside `loss_mask`.
    """
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    # Longest first, so that the sequences with `back` tokens or more are the first `count`.
    order = lengths.argsort(descending=True)
    ends, lengths = lengths.cumsum(0)[order], lengths[order]
    advantage = next_value = values.new_zeros(len(lengths))
    for back in range(1, int(lengths.max()) + 1):
        count = int((lengths >= back).sum())
        time = ends[:count] - back
        advantage, next_value = advantage[:count], next_value[:count]
        mask, value = loss_mask[time], values[time]
        delta = rewards[time] + discount * next_value - value
        advantage = torch.where(mask, delta + discount * gae_lambda * advantage, advantage)
        next_value = torch.where(mask, value, next_value)
        advantages[time] = torch.where(mask, advantage, 0.0)
        returns[time] = torch.where(mask, advantage + value, 0.0)
    return advantages, returns


def whiten(advantages: Tensor, loss_mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Return PPO's advantages with mean 0 and variance 1 over the tokens of `loss_mask`.

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
