"""The policy objectives, the weights of tokens in them, and the statistics they report.

QuRL ("QuRL: Efficient Reinforcement Learning with Quantized Rollout") samples completions from a
quantized copy of the policy, because that is fast, and trains the policy in full precision. The two
give a sampled token different probabilities: the train-inference mismatch. Ignoring it biases the
gradient, and correcting for it carelessly makes training collapse.

Each sampled token has three log-probs:

- `behaviour_logprobs`: from the quantized engine that sampled it;
- `proximal_logprobs`: from the learner before any update of this step, in full precision;
- `current_logprobs`: from the learner during its updates, the only one with a gradient.

They make two ratios of probabilities:

- rho = proximal / behaviour is how far the engine is from the learner. It is constant during an
  update. As a weight, it makes tokens from the engine count as if the learner had sampled them
  (importance sampling). Where a token was sampled under older weights, rho contains their distance
  to the learner's as well.
- R = current / anchor is how far updates have moved the policy from an anchor. Clipping R takes the
  gradient from a token that has already moved far enough, as in PPO.

With A the advantage, each objective maximizes, token by token,

    J = weight * min(R * A, clip(R, 1 - eps_low, upper) * A)

    objective      equation   anchor      weight          upper
    naive          Eq. 3      behaviour   1               1 + eps_high
    on_policy      Eq. 1      proximal    1               1 + eps_high
    decoupled      Eq. 4      proximal    rho             1 + eps_high
    tis            Eq. 5      proximal    min(rho, C)     1 + eps_high
    acr            Eq. 9      proximal    min(rho, C)     (1 + eps_high) / r, r = min(1, C / rho)
    sequence_tis   -          proximal    min(rho_s, C)   1 + eps_high
    gspo           -          proximal    min(rho, C)     1 + eps_high
    cispo          -          proximal    min(rho, C)     1 + eps_high

- `naive` is PPO with the engine as the old policy. R contains the mismatch, so it clips tokens that
  no update has moved. Training collapses (Fig. 2).
- `on_policy` pretends that the learner sampled the tokens. It is stable, but ends well below
  full-precision training.
- `decoupled` (decoupled PPO) corrects for the engine with rho and clips against the learner. rho
  can reach 1e5 (Fig. 3), and the gradient explodes with it.
- `tis` (truncated importance sampling) caps rho at C, which bounds the gradient. For rho > C this
  multiplies the token's gradient by r = C / rho, and its upper bound too: r * R is clipped at
  r * (1 + eps_high) instead of 1 + eps_high (Eq. 8).
- `acr` (adaptive clipping range), QuRL's own objective, divides the upper bound by r, so that r * R
  is clipped at 1 + eps_high and more tokens with a positive advantage keep their gradient. Where
  rho <= C, r is exactly 1 and `acr` is `tis`, bit for bit.
- `sequence_tis` is not from the paper. It caps rho_s, the product of all rho of the token's
  sequence: the importance weight of the sequence, to which the reward and so the advantage belong.
  Tokens that the policy only read have no part in it.
- `gspo` (Zheng et al., 2025) has one R for all tokens of a sequence: the geometric mean of theirs,
  which moves by thousandths. Its gradient in a token's log current is R, as in GSPO-token.
- `cispo` (MiniMax-M1, 2025) clips no token. It maximizes weight * min(R, upper) * A * log current,
  with R constant, so that every token has a gradient. `eps_low` and dual clip have no part in it.

A token with a negative advantage has no bound above: the further an update raises its probability,
the larger its gradient. Dual clip (Ye et al., 2020, Eq. 5; verl's `clip_ratio_c`) adds one, d:

    J = weight * max(min(R * A, clip(R, 1 - eps_low, upper) * A), d * A)    where A < 0

so that R > d has no gradient. For every objective the bound is on R itself: the weight is applied
after it, and ACR's r does not change it, because r only widens the bound of positive advantages.
The gradient of such a token in log R is then at most weight * d * |A|.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import OBJECTIVES, Config, ObjectiveConfig

# Log-ratios are clamped to +-20. The largest rho in the paper is 1e5 = e^11.5; beyond e^20 = 4.9e8
# only finiteness matters: rho * R and its square, which a gradient norm sums, stay below the 3.4e38
# of float32 (e^80 = 5.5e34). At the clamp, R has no gradient.
MAX_LOG_RATIO = 20.0

# Statistics are kept by token staleness: name of the bucket, its smallest and largest staleness.
STALENESS_BUCKETS = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5+": (5, 2**31 - 1)}
# The penalty's k3 is at most 10, as in verl, slime and OpenRLHF, and has no gradient beyond. It
# reaches 10 at reference / current = 13.6, where its gradient in log current is 1 - 13.6. Without
# the cap, one token that the policy hardly samples any more could outweigh a batch: its gradient
# would be e^20.
MAX_K3_PENALTY = 10.0
USER = "user/"  # prefix of the names of statistics of a user's own objective


class ObjectiveOutput(NamedTuple):
    """The scalar `loss` to minimize, and `stats`: sums over tokens, scalars without a gradient."""

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
    dual_clip: float | None = None,
    kl_coefficient: float = 0.0,
    reference_logprobs: Tensor | None = None,
    entropy_coefficient: float = 0.0,
    entropy: Tensor | None = None,
    sum_over_sequences: Callable[[Tensor], Tensor] | None = None,
    token_staleness: Tensor | None = None,
) -> ObjectiveOutput:
    """Return `loss = -sum(loss_weights * J)`, with J of the module docstring (QuRL Eq. 1, 3-5, 9).

    All tensors are float32 and of one shape. A position with a loss weight of 0 contributes nothing
    to loss, gradient or stats, even if the other tensors hold NaN or infinity there. A NaN anywhere
    else reaches the loss.

    Args:
        loss_weights: weight of each token, from `token_weights`.
        ratio_cap: C, the cap on rho.
        dual_clip: d, the bound on R where the advantage is negative; None: no bound.
        kl_coefficient: if positive, J is reduced by `kl_coefficient * k3`, GRPO's penalty (QuRL
            Section 3). With x = reference / current, k3 = x - 1 - log x estimates
            KL(current || reference). It is clamped at `MAX_K3_PENALTY`, without a gradient beyond.
        reference_logprobs: from the model before any training; only the penalty needs them.
        entropy_coefficient: if positive, J is raised by `entropy_coefficient * entropy`.
        entropy: of the current policy's distribution of each token, in nats, with a gradient; only
            `entropy_coefficient` needs it.
        sum_over_sequences: returns for each token the sum of a tensor over its sequence; only
            `sequence_tis` and `gspo` need it.
        token_staleness: int32, weight versions between a token's sampling and its training; only
            the stats use it.

    Returns:
        The loss, and sums over the tokens of positive weight. Add the sums up over micro batches
        and ranks first, then divide them by `tokens`.

        - `tokens`: number of these tokens;
        - `clipped`: tokens that have no gradient because of `eps_low` or `eps_high`; of `cispo`,
          tokens with R above its cap;
        - `dual_clipped`: tokens that have no gradient because of `dual_clip`;
        - `acr_widened`: tokens that `acr` does not clip and `tis` would clip;
        - `kl_reference`: sum of the clamped k3; 0 without a reference;
        - `tokens/NAME`, `clipped/NAME`, `acr_widened/NAME`: the same counts over the tokens of each
          bucket of `STALENESS_BUCKETS`; only with `token_staleness`.

    Raises:
        ValueError: a penalty has no `reference_logprobs`, a bonus no `entropy`, or an objective of
            sequences no `sum_over_sequences`.
    """
    # Mask before any arithmetic: NaN * 0 is NaN, both in the loss and in the gradient.
    counted = loss_weights > 0
    current = masked(counted, current_logprobs)
    proximal = masked(counted, proximal_logprobs).detach()
    behaviour = masked(counted, behaviour_logprobs).detach()
    advantages = masked(counted, advantages)

    rho = to_truncate = _ratio(proximal, behaviour)
    log_ratio = _log_ratio(current, behaviour if objective == "naive" else proximal)
    if objective in ("sequence_tis", "gspo"):
        if sum_over_sequences is None:
            raise ValueError(f"{objective} needs sum_over_sequences")
        if objective == "gspo":
            tokens = sum_over_sequences(counted.to(rho.dtype)).clamp(min=1)
            of_sequence = sum_over_sequences(log_ratio.detach()) / tokens
            log_ratio = of_sequence + (current - current.detach())
        else:
            of_sequence = sum_over_sequences(proximal - behaviour)
            to_truncate = of_sequence.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    truncated_rho = to_truncate.clamp(max=ratio_cap)
    ratio = log_ratio.exp()
    weight = {
        "naive": torch.ones_like(rho),
        "on_policy": torch.ones_like(rho),
        "decoupled": rho,
        "tis": truncated_rho,
        "acr": truncated_rho,
        "sequence_tis": truncated_rho,
        "gspo": truncated_rho,
        "cispo": truncated_rho,
    }[objective]
    r = (ratio_cap / rho).clamp(max=1.0) if objective == "acr" else torch.ones_like(rho)
    lower = torch.full_like(rho, 1 - eps_low)
    upper = (1 + eps_high) / r

    clipped_ratio = torch.minimum(torch.maximum(ratio, lower), upper)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    if objective == "cispo":
        surrogate = torch.minimum(ratio, upper).detach() * advantages * current

    rising, falling = advantages > 0, advantages < 0
    clipped = (rising & (ratio > upper)) | (falling & (ratio < lower))
    if objective == "cispo":
        clipped = counted & (ratio > upper)
    return penalized_loss(
        weight * surrogate,
        current,
        loss_weights,
        clipped=clipped,
        dual_clipped=falling & (ratio > (math.inf if dual_clip is None else dual_clip)),
        acr_widened=rising & (ratio > 1 + eps_high) & ~clipped,
        kl_coefficient=kl_coefficient,
        reference_logprobs=reference_logprobs,
        entropy_coefficient=entropy_coefficient,
        entropy=entropy,
        token_staleness=token_staleness,
    )


def penalized_loss(
    gain: Tensor,
    current_logprobs: Tensor,
    loss_weights: Tensor,
    *,
    kl_coefficient: float,
    reference_logprobs: Tensor | None,
    entropy_coefficient: float,
    entropy: Tensor | None,
    token_staleness: Tensor | None,
    **masks: Tensor,
) -> ObjectiveOutput:
    """Return the loss of tokens whose J is `gain`, less the penalty and with the bonus.

    Arguments and stats are those of `policy_objective`. `masks` has the tokens that the stats of
    these names count; a sum without one is 0.

    Raises:
        ValueError: a penalty has no `reference_logprobs`, or a bonus no `entropy`.
    """
    if kl_coefficient != 0 and reference_logprobs is None:
        raise ValueError(f"kl_coefficient {kl_coefficient} needs reference_logprobs")
    if entropy_coefficient != 0 and entropy is None:
        raise ValueError(f"entropy_coefficient {entropy_coefficient} needs entropy")

    counted = loss_weights > 0
    gain, kl_reference = masked(counted, gain), torch.zeros_like(loss_weights)
    if reference_logprobs is not None:
        reference = masked(counted, reference_logprobs).detach()
        kl_reference = _k3(reference, masked(counted, current_logprobs)).clamp(max=MAX_K3_PENALTY)
        gain = gain - kl_coefficient * kl_reference
    if entropy_coefficient and entropy is not None:
        gain = gain + entropy_coefficient * masked(counted, entropy)
    loss = -(masked(counted, loss_weights) * gain).sum()

    none = dict.fromkeys(("clipped", "dual_clipped", "acr_widened"), torch.zeros_like(counted))
    counts = {"tokens": counted, **none, **masks}
    stats = {name: mask.sum() for name, mask in counts.items()}
    stats["kl_reference"] = kl_reference.detach().sum()
    if token_staleness is not None:
        for bucket, at_staleness in staleness_masks(token_staleness).items():
            for name in ("tokens", "clipped", "acr_widened"):
                stats[f"{name}/{bucket}"] = (at_staleness & counts[name]).sum()
    return ObjectiveOutput(loss, {name: value.to(loss.dtype) for name, value in stats.items()})


@dataclass(frozen=True)
class PolicyLoss:
    """The loss function that the learner minimizes: `policy_objective` with a run's settings."""

    config: ObjectiveConfig
    by_staleness: bool = False  # also return the stats of tokens by their staleness
    # A `UserObjective` of `extensions/user_objective`, in place of a built-in objective.
    user: Callable[..., tuple[ObjectiveOutput, dict[str, Tensor]]] | None = None

    def __call__(
        self,
        current_logprobs: Tensor,
        entropy: Tensor,
        batch: TrainBatch,
        loss_weights: Tensor,
        sum_over_sequences: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the statistics of its tokens.

        A batch without proximal log-probs is in its first pass, so its current log-probs are the
        proximal ones. The batch keeps them and their entropy.

        Args:
            sum_over_sequences: returns for each token the sum of a tensor over its sequence;
                `sequence_tis`, `gspo` and a user's own objective need it.

        Returns:
            The loss, and statistics for `add_up`: those of `policy_objective`, `entropy`,
            `mismatch_sums`, also by staleness, and `tokens` and the sum of `log_rho` over the
            tokens of positive and of negative advantages.
        """
        if batch.proximal_logprobs is None:
            batch.proximal_logprobs, batch.entropy = current_logprobs.detach(), entropy.detach()
        assert batch.behaviour_logprobs is not None and batch.entropy is not None
        assert batch.advantages is not None
        settings = dataclasses.asdict(self.config)
        del settings["aggregation"], settings["advantage_estimator"]  # in other inputs
        counted = loss_weights > 0
        more: dict[str, Any] = {
            "reference_logprobs": batch.reference_logprobs,
            "entropy": entropy,
            "token_staleness": batch.token_staleness if self.by_staleness else None,
        }
        statistics: dict[str, Tensor] = {}
        if self.user is None:
            output = policy_objective(
                current_logprobs,
                batch.proximal_logprobs,
                batch.behaviour_logprobs,
                batch.advantages,
                loss_weights,
                sum_over_sequences=sum_over_sequences,
                **settings,
                **more,
            )
        else:
            assert sum_over_sequences is not None
            output, statistics = self.user(
                current_logprobs, batch, loss_weights, sum_over_sequences, self.config, **more
            )
        stats = {
            **output.stats,
            "entropy": masked(counted, batch.entropy).sum(dtype=torch.float64),
        }
        for name, values in statistics.items():
            stats[f"{USER}{name}"] = masked(counted, values.detach()).sum(dtype=torch.float64)
        masks = {"": counted}
        if self.by_staleness:
            assert batch.token_staleness is not None
            at_staleness = staleness_masks(batch.token_staleness)
            masks |= {f"/{bucket}": counted & mask for bucket, mask in at_staleness.items()}
        for suffix, mask in masks.items():
            sums = mismatch_sums(
                batch.proximal_logprobs, batch.behaviour_logprobs, mask, self.config.ratio_cap
            )
            stats |= {name + suffix: value for name, value in sums.items()}
        advantages = masked(counted, batch.advantages)
        log_rho = masked(counted, batch.proximal_logprobs - batch.behaviour_logprobs)
        for sign, of_sign in (("positive", advantages > 0), ("negative", advantages < 0)):
            stats[f"tokens/{sign}"] = of_sign.sum(dtype=torch.float64)
            stats[f"log_rho/{sign}"] = masked(of_sign, log_rho).sum(dtype=torch.float64)
        return output.loss, stats


def token_weights(batch: TrainBatch, aggregation: str, longest_completion: int = 1) -> Tensor:
    """Return the weight of each token in the loss, `[tokens]` float32.

    The weights of a whole batch sum to 1, except with `dr_grpo`. Compute them before a batch is
    split over micro batches and ranks, whose losses then add up.

    Args:
        aggregation: `sequence_mean` weighs a token of completion i by 1 / (N * |o_i|), where N is
            the number of completions with at least one token (QuRL Eq. 1), and an episode is one
            with all its branches; `token_mean` weighs every token by 1 / number of tokens (DAPO);
            `dr_grpo` by 1 / (number of completions * `longest_completion`) (Liu et al., 2025).
        longest_completion: the most tokens that a completion may have.

    Raises:
        ValueError: sequences have no token to train on.
    """
    mask = batch.trained.to(torch.float32)
    # Ranks other than global rank 0 have a batch without sequences.
    if len(batch) and not batch.loss_mask.any():
        raise ValueError("loss_mask has no token to train on")
    if aggregation == "token_mean":
        return mask / mask.sum().clamp(min=1)
    numbers = torch.arange(len(batch))
    if batch.completions is not None:
        numbers = batch.completions.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    if aggregation == "dr_grpo":
        return mask / (len(numbers.unique()) * longest_completion)
    of_tokens = numbers.repeat_interleave(batch.lengths)
    counts = torch.zeros(len(batch)).index_add(0, of_tokens, mask)
    return mask / (counts.clamp(min=1)[of_tokens] * (counts > 0).sum().clamp(min=1))


def minibatches(config: Config, batch: TrainBatch) -> Iterator[TrainBatch]:
    """Yield the minibatches of a step in order, each with its loss weights.

    Each has the tensors of `batch` that the learner needs.
    """
    names = ["behaviour_logprobs", "advantages", "routed_experts", "mask_sizes", "mask_ids"]
    if config.rollout.max_staleness:
        names.append("token_staleness")
    if config.objective.objective not in OBJECTIVES:
        names += ["rewards", "group_means"]
    for minibatch in batch.only("left_out", *names).split(config.optimizer.minibatches_per_step):
        minibatch.loss_weights = token_weights(
            minibatch, config.objective.aggregation, config.rollout.longest_completion
        )
        yield minibatch


def add_up(statistics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up statistics by name, but take the largest where a name begins with `largest_`."""
    total: dict[str, float] = {}
    for each in statistics:
        for name, value in each.items():
            if name.startswith("largest_"):
                total[name] = max(total.get(name, -math.inf), value)
            else:
                total[name] = total.get(name, 0.0) + value
    return total


def mismatch_sums(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor, ratio_cap: float
) -> dict[str, Tensor]:
    """Measure how far the engine is from the learner, over the tokens of `loss_mask`.

    All tensors have one shape; the log-probs are float32, `loss_mask` is bool. With
    rho = proximal / behaviour, and tokens sampled from behaviour, the sums over tokens are:

    - `tokens`: their number;
    - `kl_behaviour_proximal`: -log rho; its mean is the plain ("k1") estimate of
      KL(behaviour || proximal), in nats, and can be negative;
    - `kl_behaviour_proximal_k3`: (rho - 1) - log rho; its mean estimates the same KL, because
      rho - 1 has mean 0 under behaviour, is never negative and has far less variance;
    - `logprob_abs_diff`: |log rho|, in nats;
    - `tis_truncated_fraction`: tokens with rho > `ratio_cap`.

    `largest_ratio` is the largest rho (QuRL Fig. 3b), at most e^20; 0 without a token.

    Returns:
        Scalars in float64, to add up over micro batches and ranks.
    """
    proximal = masked(loss_mask, proximal_logprobs).double()
    behaviour = masked(loss_mask, behaviour_logprobs).double()
    log_rho = proximal - behaviour
    rho = _ratio(proximal, behaviour)
    return {
        "tokens": loss_mask.sum().double(),
        "kl_behaviour_proximal": -log_rho.sum(),
        "kl_behaviour_proximal_k3": _k3(proximal, behaviour).sum(),
        "logprob_abs_diff": log_rho.abs().sum(),
        "tis_truncated_fraction": (loss_mask & (rho > ratio_cap)).sum().double(),
        "largest_ratio": masked(loss_mask, rho).max(),
    }


def rollout_statistics(sums: Mapping[str, float], suffix: str = "") -> dict[str, float]:
    """Return the means over tokens of `mismatch_sums`, and `ratio_proximal_behaviour_max`.

    `suffix` ends the names of the sums.
    """
    tokens = sums[f"tokens{suffix}"]
    names = (
        "kl_behaviour_proximal",
        "kl_behaviour_proximal_k3",
        "logprob_abs_diff",
        "tis_truncated_fraction",
    )
    return {
        **{name: sums[f"{name}{suffix}"] / tokens for name in names},
        "ratio_proximal_behaviour_max": sums[f"largest_ratio{suffix}"],
    }


def staleness_masks(token_staleness: Tensor) -> dict[str, Tensor]:
    """Return a mask of the tokens in each of `STALENESS_BUCKETS`, of the same shape."""
    return {
        bucket: (token_staleness >= smallest) & (token_staleness <= largest)
        for bucket, (smallest, largest) in STALENESS_BUCKETS.items()
    }


def statistics_by_staleness(sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the statistics of each of `STALENESS_BUCKETS` that has tokens, from `PolicyLoss`.

    They tell the two causes of the mismatch apart. A token of staleness 0 was sampled by the
    proximal policy itself, so only quantization and the engine's rounding separate its log-probs.
    With growing staleness, the drift of the policy over that many updates is added.

    A bucket has its `rollout_statistics`, `clip_fraction`, `acr_widened_fraction`, and
    `token_fraction`, its share of all tokens.
    """
    statistics = {}
    for bucket in STALENESS_BUCKETS:
        tokens = sums[f"tokens/{bucket}"]
        if tokens:
            statistics[bucket] = {
                "token_fraction": tokens / sums["tokens"],
                **rollout_statistics(sums, f"/{bucket}"),
                "clip_fraction": sums[f"clipped/{bucket}"] / tokens,
                "acr_widened_fraction": sums[f"acr_widened/{bucket}"] / tokens,
            }
    return statistics


def masked(counted: Tensor, values: Tensor) -> Tensor:
    """Return `values` where `counted`, and 0 with a gradient of 0 elsewhere."""
    return torch.where(counted, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    return (numerator_logprobs - denominator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return a ratio of two probabilities, either of which could underflow by itself."""
    return _log_ratio(numerator_logprobs, denominator_logprobs).exp()


def _k3(target_logprobs: Tensor, sampled_logprobs: Tensor) -> Tensor:
    """Return k3 = x - 1 - log x, x = target / sampled: an estimate of KL(sampled || target)."""
    log_ratio = _log_ratio(target_logprobs, sampled_logprobs)
    return torch.expm1(log_ratio) - log_ratio
