"""The policy objective (QuRL Eq. 1, 3, 4, 5 and 9), what weighs its tokens, and what it reports.

Three log-probs of the sampled tokens, and only three:

- `behaviour_logprobs`: the engine that sampled them, quantized;
- `proximal_logprobs`: the learner before any update of this step, in full precision;
- `current_logprobs`: the learner as it is now, the only one with a gradient.

With R = current / anchor, rho = proximal / behaviour (a constant) and A the advantage, every
objective is `weight * min(R * A, clip(R, 1 - eps_low, upper) * A)`:

    objective   equation   anchor      weight        upper
    naive       Eq. 3      behaviour   1             1 + eps_high
    on_policy   Eq. 1      proximal    1             1 + eps_high
    decoupled   Eq. 4      proximal    rho           1 + eps_high
    tis         Eq. 5      proximal    min(rho, C)   1 + eps_high
    acr         Eq. 9      proximal    min(rho, C)   (1 + eps_high) / r, with r = min(1, C / rho)

Where rho <= C, r is exactly 1 and `acr` is `tis`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import Config, Objective, ObjectiveConfig

OBJECTIVES: tuple[str, ...] = get_args(Objective)

# Two models that give one token probabilities e^20 = 4.9e8 apart no longer speak of the same text:
# past that only finiteness matters. rho * R and its square, which a gradient norm sums, stay below
# float32's 3.4e38 (e^80 = 5.5e34); the largest rho the paper saw is 1e5 = e^11.5. At the clamp R
# has no gradient.
MAX_LOG_RATIO = 20.0


class ObjectiveOutput(NamedTuple):
    """`loss`, a scalar to minimize; `stats`, sums over tokens, scalars without a gradient."""

    loss: Tensor
    stats: dict[str, Tensor]


def policy_objective(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    *,
    objective: str,
    eps_low: float,
    eps_high: float,
    ratio_cap: float,
    kl_coefficient: float = 0.0,
    reference_logprobs: Tensor | None = None,
) -> ObjectiveOutput:
    """`loss = -sum(loss_weights * J)` with J one of the objectives above (QuRL Eq. 1, 3, 4, 5, 9).

    All tensors are `[batch, time]` float32. Positions whose `loss_weights` is 0 contribute nothing
    to loss, gradient or stats, whatever the other tensors hold there, NaN and infinity included; a
    NaN anywhere else reaches the loss, where it belongs.

    `ratio_cap` is C. With `kl_coefficient` > 0, J loses `kl_coefficient * k3`, where
    k3 = x - 1 - log x with x = reference / current estimates KL(current || reference), GRPO's
    penalty (QuRL Section 3).

    `stats` are sums over tokens with weight > 0, to be added up over micro-batches and ranks first
    and divided by `tokens` after:

    - `tokens`: how many they are;
    - `clipped`: tokens whose gradient the clip took away;
    - `acr_widened`: tokens that `acr` lets through and `tis` would have clipped;
    - `kl_reference`: sum of k3, 0 without a reference.

    Raises ValueError for an unknown objective, or a `kl_coefficient` without `reference_logprobs`.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; valid are {', '.join(OBJECTIVES)}")
    if kl_coefficient != 0 and reference_logprobs is None:
        raise ValueError(f"kl_coefficient {kl_coefficient} needs reference_logprobs")

    # Masked before any arithmetic: NaN * 0 is NaN, in the loss and in the gradient alike.
    counted = loss_weights > 0
    current = _where(counted, current_logprobs)
    proximal = _where(counted, proximal_logprobs).detach()
    behaviour = _where(counted, behaviour_logprobs).detach()
    advantages = _where(counted, advantages)

    rho = _ratio(proximal, behaviour)
    truncated_rho = rho.clamp(max=ratio_cap)
    ratio = _ratio(current, behaviour if objective == "naive" else proximal)
    weight = {
        "naive": torch.ones_like(rho),
        "on_policy": torch.ones_like(rho),
        "decoupled": rho,
        "tis": truncated_rho,
        "acr": truncated_rho,
    }[objective]
    r = (ratio_cap / rho).clamp(max=1.0) if objective == "acr" else torch.ones_like(rho)
    lower = torch.full_like(rho, 1 - eps_low)
    upper = (1 + eps_high) / r

    clipped_ratio = torch.minimum(torch.maximum(ratio, lower), upper)
    gain = weight * torch.minimum(ratio * advantages, clipped_ratio * advantages)

    kl_reference = torch.zeros_like(rho)
    if reference_logprobs is not None:
        kl_reference = _k3(_where(counted, reference_logprobs).detach(), current)
        gain = gain - kl_coefficient * kl_reference
    loss = -(_where(counted, loss_weights) * gain).sum()

    with torch.no_grad():
        rising, falling = advantages > 0, advantages < 0
        clipped = (rising & (ratio > upper)) | (falling & (ratio < lower))
        widened = rising & (ratio > 1 + eps_high) & ~clipped
        stats = {
            "tokens": counted.sum(),
            "clipped": clipped.sum(),
            "acr_widened": widened.sum(),
            "kl_reference": kl_reference.sum(),
        }
    return ObjectiveOutput(loss, {name: value.to(loss.dtype) for name, value in stats.items()})


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_weights: Tensor,
    *,
    value_clip: float,
) -> ObjectiveOutput:
    """PPO's clipped value loss: the larger of two squared errors, halved.

    One error is that of `values`, one that of `values` kept within `value_clip` of `old_values`,
    those before the update. All tensors are `[batch, time]` float32; only `values` has a gradient,
    and positions whose `loss_weights` is 0 contribute nothing.

    `stats` are sums over tokens with weight > 0: `tokens`, and `clipped`, those whose gradient the
    clip took away.
    """
    counted = loss_weights > 0
    values = _where(counted, values)
    old_values, returns = _where(counted, old_values), _where(counted, returns)
    kept = torch.minimum(torch.maximum(values, old_values - value_clip), old_values + value_clip)
    error, kept_error = (values - returns).square(), (kept - returns).square()
    loss = (_where(counted, loss_weights) * torch.maximum(error, kept_error)).sum() / 2
    clipped = (kept_error > error).sum()
    stats = {"tokens": counted.sum(), "clipped": clipped}
    return ObjectiveOutput(loss, {name: value.to(loss.dtype) for name, value in stats.items()})


def token_weights(loss_mask: Tensor, aggregation: str) -> Tensor:
    """What each token weighs in the loss, `[batch, time]` float32, from a bool mask of that shape.

    The weights of the whole batch sum to 1, so make them before it is split over micro-batches and
    ranks, whose losses then simply add up.

    - `sequence_mean`: 1 / (N * |o_i|), N being the sequences with at least one token (QuRL Eq. 1);
    - `token_mean`: 1 / all tokens (DAPO).

    Raises ValueError for an unknown aggregation or a batch without a single token.
    """
    mask = loss_mask.to(torch.float32)
    lengths = mask.sum(dim=1, keepdim=True)
    if not lengths.any():
        raise ValueError("loss_mask has no token to train on")
    if aggregation == "sequence_mean":
        return mask / (lengths.clamp(min=1) * (lengths > 0).sum())
    if aggregation == "token_mean":
        return mask / mask.sum()
    raise ValueError(f"unknown aggregation {aggregation!r}; valid are sequence_mean, token_mean")


def rollout_statistics(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor, ratio_cap: float
) -> dict[str, float]:
    """How far the engine that sampled is from the learner, over the tokens of `loss_mask`.

    Everything is `[batch, time]`; the log-probs are float32, `loss_mask` is bool. With
    rho = proximal / behaviour, and tokens sampled from behaviour:

    - `kl_behaviour_proximal`: mean of -log rho, the plain ("k1") estimate of
      KL(behaviour || proximal); it can be negative;
    - `kl_behaviour_proximal_k3`: mean of (rho - 1) - log rho, which estimates the same KL,
      as rho - 1 has mean 0 under behaviour; never negative, and with far less variance;
    - `logprob_abs_diff`: mean of |log rho|;
    - `ratio_proximal_behaviour_max`: largest rho (QuRL Fig. 3b), at most e^20;
    - `tis_truncated_fraction`: fraction of tokens with rho > `ratio_cap`.

    Raises ValueError for a batch without a single token.
    """
    if not loss_mask.any():
        raise ValueError("loss_mask has no token to measure")
    proximal = proximal_logprobs[loss_mask].double()
    behaviour = behaviour_logprobs[loss_mask].double()
    log_rho = proximal - behaviour
    rho = _ratio(proximal, behaviour)
    return {
        "kl_behaviour_proximal": -log_rho.mean().item(),
        "kl_behaviour_proximal_k3": _k3(proximal, behaviour).mean().item(),
        "logprob_abs_diff": log_rho.abs().mean().item(),
        "ratio_proximal_behaviour_max": rho.max().item(),
        "tis_truncated_fraction": (rho > ratio_cap).double().mean().item(),
    }


def _where(counted: Tensor, values: Tensor) -> Tensor:
    """`values` where `counted`, 0 with a gradient of 0 elsewhere."""
    return torch.where(counted, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    return (numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """A ratio of probabilities, each of which could underflow on its own."""
    return _log_ratio(numerator_logprobs, denominator_logprobs).exp()


def _k3(target_logprobs: Tensor, sampled_logprobs: Tensor) -> Tensor:
    """k3 = x - 1 - log x, x = target / sampled: an estimate of KL(sampled || target) per token."""
    log_ratio = _log_ratio(target_logprobs, sampled_logprobs)
    return torch.expm1(log_ratio) - log_ratio


@dataclass(frozen=True)
class PolicyLoss:
    """The loss function the learner minimizes: QuRL's objective with a run's settings."""

    config: ObjectiveConfig

    def __call__(
        self,
        current_logprobs: Tensor,
        entropy: Tensor,
        batch: TrainBatch,
        loss_weights: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.proximal_logprobs is not None
        output = policy_objective(
            current_logprobs,
            batch.proximal_logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            loss_weights,
            objective=self.config.objective,
            eps_low=self.config.eps_low,
            eps_high=self.config.eps_high,
            ratio_cap=self.config.ratio_cap,
            reference_logprobs=batch.reference_logprobs,
            kl_coefficient=self.config.kl_coefficient,
        )
        moved = (current_logprobs.detach() - batch.proximal_logprobs).abs()
        moved = moved.where(loss_weights > 0, 0).sum()
        return output.loss, {**output.stats, "current_proximal_abs_diff": moved}


def minibatches(config: Config, batch: TrainBatch) -> Iterator[tuple[TrainBatch, Tensor]]:
    """Equal parts of the batch, in order, with their loss weights."""
    for minibatch in batch.split(config.optimizer.minibatches_per_step):
        yield minibatch, token_weights(minibatch.loss_mask, config.objective.aggregation)
