"""PPO's values: advantages and returns over them, and the loss that trains them."""

import torch
from torch import Tensor

from qurl_megatron.algorithm.objective import ObjectiveOutput


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


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_weights: Tensor,
    *,
    value_clip: float,
) -> ObjectiveOutput:
    """Return PPO's clipped value loss: half the larger of two squared errors, weighted and summed.

    The two errors are those of `values` and of `values` clipped to within `value_clip` of
    `old_values`, which are the values before the update. All are float32 and of one shape.
    Only `values` has a gradient, and positions with a loss weight of 0 contribute nothing.

    `stats` are sums over the tokens of positive weight: `tokens`, their number, and `clipped`,
    how many the clip leaves without a gradient.
    """
    counted = loss_weights > 0
    values, old_values, returns = (
        torch.where(counted, each, 0.0) for each in (values, old_values, returns)
    )
    kept = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
    error, kept_error = (values - returns).square(), (kept - returns).square()
    loss = (torch.where(counted, loss_weights, 0.0) * torch.maximum(error, kept_error)).sum() / 2
    clipped = (kept_error > error).sum()
    stats = {"tokens": counted.sum(), "clipped": clipped}
    return ObjectiveOutput(loss, {name: value.to(loss.dtype) for name, value in stats.items()})
