"""Collect the metrics of a step from the results of its phases."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean

from qurl_megatron import device
from qurl_megatron.algorithm.objective import add_up, rollout_statistics, statistics_by_lag
from qurl_megatron.config.schema import Config
from qurl_megatron.learner.critic import CriticMetrics
from qurl_megatron.learner.learner import Update
from qurl_megatron.loop.sampling import SampleSummary
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.weight_sync.conversion import Conversion
from qurl_megatron.weight_sync.publish import Published


@dataclass(frozen=True)
class StepResults:
    """What the phases of a step returned, the same on every rank."""

    step: int
    sampled: SampleSummary
    critic: CriticMetrics | None  # None without PPO
    updates: list[Update]  # one for each minibatch
    published: Published
    seconds: dict[str, float]  # by phase


def step_metrics(config: Config, results: StepResults) -> StepMetrics:
    """Return the line of metrics.jsonl for a step."""
    summary, published, seconds = results.sampled, results.published, results.seconds
    updates, drift = results.updates, results.published.conversion.total_drift
    sampling_s = sum(seconds.values()) if config.rollout.max_staleness else seconds["rollout"]
    sums = add_up(update.stats for update in updates)
    tokens = sums["tokens"]
    first = updates[0].stats
    return StepMetrics(
        step=results.step,
        weight_version=published.version,
        reward_mean=summary.reward_mean,
        response_length_mean=summary.response_length_mean,
        response_truncated_fraction=summary.response_truncated_fraction,
        reward_parts=summary.reward_parts,
        verifier_failures=summary.verifier_failures,
        verifier_timeouts=summary.verifier_timeouts,
        verifier_failure=summary.verifier_failure,
        groups_replaced=summary.groups_replaced,
        **rollout_statistics(sums),  # type: ignore[arg-type]  # only names of floats
        acr_widened_fraction=sums["acr_widened"] / tokens,
        clip_fraction=sums["clipped"] / tokens,
        kl_reference=sums["kl_reference"] / tokens,
        entropy=sums["entropy"] / tokens,
        loss=fmean(update.loss for update in updates),
        grad_norm=fmean(update.grad_norm for update in updates),
        learning_rate=updates[-1].learning_rate,
        current_proximal_abs_diff=first["current_proximal_abs_diff"] / first["tokens"],
        weight_update_norm=drift.update_norm,
        weight_quant_error=drift.quant_error,
        code_flip_fraction=drift.code_flip_fraction,
        time_rollout_s=seconds["rollout"],
        time_proximal_s=seconds["proximal"],
        time_critic_s=seconds["critic"],
        time_update_s=seconds["update"],
        time_publish_s=seconds["publish"],
        time_evaluation_s=seconds["evaluation"],
        publish_bytes=published.sent_bytes,
        servers_serving=published.num_servers,
        rollout_tokens_per_s=summary.sampled_tokens / sampling_s,
        token_lag_mean=summary.token_lag_mean,
        token_lag_max=summary.token_lag_max,
        stale_token_fraction=summary.stale_token_fraction,
        by_lag=statistics_by_lag(sums) if config.rollout.max_staleness else None,
        time_waited_s=summary.waited_s,
        time_scoring_s=summary.scoring_s,
        groups_in_flight=summary.groups_in_flight,
        groups_dropped=summary.groups_dropped,
        equal_reward_fraction=summary.equal_reward_fraction,
        reward_counts=summary.reward_counts,
        memory_bytes=device.memory_bytes(),
        **(asdict(results.critic) if results.critic else {}),
        dual_clip_fraction=sums["dual_clipped"] / tokens,
        publish_full_bytes=published.conversion.num_bytes,
        routing_changed_fraction=first["routing_changed"] / first["routing_known"]
        if first.get("routing_known")
        else None,
    )


def weight_metrics(conversion: Conversion) -> dict[str, dict[str, float]]:
    """Return the metrics of each quantized weight, by name.

    The update norm (QuRL Eq. 13) and the code flips are relative to the last publish. The
    quantization error is QuRL Eq. 14.
    """
    return {
        name: {
            "weight_update_norm": drift.update_norm,
            "weight_quant_error": drift.quant_error,
            "code_flip_fraction": drift.code_flip_fraction,
        }
        for name, drift in conversion.drift.items()
    }
