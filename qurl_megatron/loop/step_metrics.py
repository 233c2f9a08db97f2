"""Collect the metrics of a step from the results of its phases."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from qurl_megatron import device
from qurl_megatron.algorithm.objective import add_up, rollout_statistics, statistics_by_lag
from qurl_megatron.config.schema import Config
from qurl_megatron.learner.learner import Update
from qurl_megatron.report.metrics import PHASES, StepMetrics
from qurl_megatron.weight_sync.conversion import Conversion, WeightDrift
from qurl_megatron.weight_sync.publish import Published


@dataclass(frozen=True)
class StepResults:
    """What the phases of a step returned, the same on every rank."""

    step: int
    sampled: dict[str, Any]  # from `Sampler.sample`
    critic: dict[str, float] | None  # from `Critic.step`; None without PPO
    updates: list[Update]  # one for each minibatch
    published: Published
    seconds: dict[str, float]  # by phase


def step_metrics(config: Config, results: StepResults) -> StepMetrics:
    """Return the line of metrics.jsonl for a step."""
    sampled = dict(results.sampled)
    published, seconds = results.published, results.seconds
    sampling_s = sum(seconds.values()) if config.rollout.max_staleness else seconds["rollout"]
    sums = add_up(update.stats for update in results.updates)
    tokens = sums["tokens"]
    first = results.updates[0].stats
    phase_times = {f"time_{phase}_s": seconds[phase] for phase in (*PHASES, "evaluation")}
    return StepMetrics(
        step=results.step,
        weight_version=published.version,
        rollout_tokens_per_s=sampled.pop("sampled_tokens") / sampling_s,
        **sampled,
        **rollout_statistics(sums),  # type: ignore[arg-type]  # only names of floats
        by_lag=statistics_by_lag(sums) if config.rollout.max_staleness else None,
        acr_widened_fraction=sums["acr_widened"] / tokens,
        clip_fraction=sums["clipped"] / tokens,
        dual_clip_fraction=sums["dual_clipped"] / tokens,
        kl_reference=sums["kl_reference"] / tokens,
        entropy=sums["entropy"] / tokens,
        loss=fmean(update.loss for update in results.updates),
        grad_norm=fmean(update.grad_norm for update in results.updates),
        learning_rate=results.updates[-1].learning_rate,
        current_proximal_abs_diff=first["current_proximal_abs_diff"] / first["tokens"],
        routing_changed_fraction=first["routing_changed"] / first["routing_known"]
        if first.get("routing_known")
        else None,
        **(results.critic or {}),  # type: ignore[arg-type]
        **_drift_metrics(published.conversion.total_drift),  # type: ignore[arg-type]
        publish_bytes=published.sent_bytes,
        publish_full_bytes=published.conversion.num_bytes,
        servers_serving=published.num_servers,
        memory_bytes=device.memory_bytes(),
        **phase_times,  # type: ignore[arg-type]
    )


def weight_metrics(conversion: Conversion) -> dict[str, dict[str, float]]:
    """Return the metrics of each quantized weight, by name.

    The update norm (QuRL Eq. 13) and the code flips are relative to the last publish. The
    quantization error is QuRL Eq. 14.
    """
    return {name: _drift_metrics(drift) for name, drift in conversion.drift.items()}


def _drift_metrics(drift: WeightDrift) -> dict[str, float]:
    return {
        "weight_update_norm": drift.update_norm,
        "weight_quant_error": drift.quant_error,
        "code_flip_fraction": drift.code_flip_fraction,
    }
