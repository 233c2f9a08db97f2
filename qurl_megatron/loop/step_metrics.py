"""Collect the metrics of a step from the results of its phases."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean

from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import rollout_statistics, statistics_by_lag
from qurl_megatron.config.schema import Config
from qurl_megatron.learner.critic import CriticMetrics
from qurl_megatron.learner.learner import Update
from qurl_megatron.loop.sampling import SampleSummary
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.report.run_log import Clock
from qurl_megatron.weight_sync.publish import Published
from qurl_megatron.weight_sync.reshard import Conversion


def step_metrics(
    config: Config,
    step: int,
    batch: TrainBatch,
    summary: SampleSummary,
    entropy: Tensor,
    critic_metrics: CriticMetrics | None,
    updates: list[Update],
    published: Published,
    clock: Clock,
) -> StepMetrics:
    """Return the line of metrics.jsonl for a step."""
    assert batch.proximal_logprobs is not None and batch.token_lags is not None
    sampling_s = sum(clock.seconds.values())
    if config.rollout.max_staleness == 0:
        sampling_s = clock.seconds["rollout"]
    tokens = sum(update.stats["tokens"] for update in updates)
    first = updates[0].stats
    lags = batch.token_lags[batch.loss_mask]
    return StepMetrics(
        step=step,
        weight_version=published.version,
        reward_mean=summary.reward_mean,
        response_length_mean=summary.response_length_mean,
        response_truncated_fraction=summary.response_truncated_fraction,
        reward_parts=summary.reward_parts,
        verifier_failures=summary.verifier_failures,
        verifier_timeouts=summary.verifier_timeouts,
        verifier_failure=summary.verifier_failure,
        groups_replaced=summary.groups_replaced,
        **rollout_statistics(  # type: ignore[arg-type]  # only names of floats
            batch.proximal_logprobs,
            batch.behaviour_logprobs,
            batch.loss_mask,
            config.objective.ratio_cap,
        ),
        acr_widened_fraction=sum(update.stats["acr_widened"] for update in updates) / tokens,
        clip_fraction=sum(update.stats["clipped"] for update in updates) / tokens,
        kl_reference=sum(update.stats["kl_reference"] for update in updates) / tokens,
        entropy=float(entropy[batch.loss_mask].mean()),
        loss=fmean(update.loss for update in updates),
        grad_norm=fmean(update.grad_norm for update in updates),
        learning_rate=updates[-1].learning_rate,
        current_proximal_abs_diff=first["current_proximal_abs_diff"] / first["tokens"],
        weight_update_norm=published.conversion.total_drift.update_norm,
        weight_quant_error=published.conversion.total_drift.quant_error,
        code_flip_fraction=published.conversion.total_drift.code_flip_fraction,
        time_rollout_s=clock.seconds["rollout"],
        time_proximal_s=clock.seconds["proximal"],
        time_critic_s=clock.seconds["critic"],
        time_update_s=clock.seconds["update"],
        time_publish_s=clock.seconds["publish"],
        publish_bytes=published.sent_bytes,
        servers_serving=published.num_servers,
        rollout_tokens_per_s=summary.sampled_tokens / sampling_s,
        token_lag_mean=lags.double().mean().item(),
        token_lag_max=int(lags.max()),
        stale_token_fraction=(lags > 0).double().mean().item(),
        by_lag=_by_lag(config, batch, updates) if config.rollout.max_staleness else None,
        time_waited_s=summary.waited_s,
        time_scoring_s=summary.scoring_s,
        groups_in_flight=summary.groups_in_flight,
        groups_dropped=summary.groups_dropped,
        equal_reward_fraction=summary.equal_reward_fraction,
        reward_counts=summary.reward_counts,
        memory_bytes=device.memory_bytes(),
        **(asdict(critic_metrics) if critic_metrics else {}),
        dual_clip_fraction=sum(update.stats["dual_clipped"] for update in updates) / tokens,
        publish_full_bytes=published.conversion.num_bytes,
    )


def _by_lag(
    config: Config, batch: TrainBatch, updates: list[Update]
) -> dict[str, dict[str, float]]:
    """Return `StepMetrics.by_lag`: statistics before the updates, and sums over their stats."""
    assert batch.proximal_logprobs is not None and batch.token_lags is not None
    statistics = statistics_by_lag(
        batch.proximal_logprobs,
        batch.behaviour_logprobs,
        batch.loss_mask,
        batch.token_lags,
        config.objective.ratio_cap,
    )

    def total(count: str) -> float:
        return sum(update.stats[count] for update in updates)

    for bucket, measured in statistics.items():
        tokens = total(f"tokens/{bucket}") or 1.0  # a lag can have tokens of weight 0 only
        measured["clip_fraction"] = total(f"clipped/{bucket}") / tokens
        measured["acr_widened_fraction"] = total(f"acr_widened/{bucket}") / tokens
    return statistics


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
