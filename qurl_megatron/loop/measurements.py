"""The measurements of a run: metrics of each step, and evaluations of the policy."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.algorithm.objective import (
    USER,
    add_up,
    rollout_statistics,
    statistics_by_staleness,
)
from qurl_megatron.config.schema import HELD_OUT, Config
from qurl_megatron.data.scoring import StartScoring
from qurl_megatron.evaluation.avg_at_k import (
    ProblemResult,
    averages,
    failures,
    measure,
    write_answers,
)
from qurl_megatron.learner.learner import Update
from qurl_megatron.report.metrics import PHASES, Evaluation, StepMetrics
from qurl_megatron.report.run_log import evaluation_directory
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.weight_sync.conversion import Conversion, WeightDrift
from qurl_megatron.weight_sync.publish import Published, Publisher


@dataclass(frozen=True)
class Evaluator:
    """Measures the learner's policy on a set of servers. Collective over all learner ranks.

    The completion limit is always that of the longest stage, so a run's evaluations are comparable.
    Only global rank 0 uses the client, the scores and the prompts.
    """

    config: Config
    publisher: Publisher
    client: RolloutClient
    score_of: Callable[[str], StartScoring]  # by the names in `evaluation.data`; "": training
    held_out: list[Prompt]
    files: dict[str, list[Prompt]]  # by the names in `evaluation.data`

    def evaluate(self, step: int) -> Evaluation:
        """Evaluate held-out problems and files; write all completions to the run's directory."""
        self.publisher.publish()
        return self.publisher.while_serving(lambda: self._evaluate(step))

    def _evaluate(self, step: int) -> Evaluation:
        directory = evaluation_directory(self.config.run_dir, step)
        directory.mkdir(parents=True, exist_ok=True)
        evaluation = self.config.evaluation
        by_file, everything = {}, list[ProblemResult]()
        for name, prompts in self.files.items():
            results = self._answer(
                name,
                prompts,
                k=evaluation.k_of.get(name, evaluation.k),
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
            )
            write_answers(results, directory / f"{name}.jsonl")
            everything += results
            by_file[name] = {metric: asdict(mean) for metric, mean in averages(results).items()}
        if not self.held_out:
            return Evaluation(None, by_file, failures=failures(everything))
        results = self._answer("", self.held_out)
        write_answers(results, directory / f"{HELD_OUT}.jsonl")
        held_out = averages(results)["Avg@1"]
        failed = failures(everything + results)
        return Evaluation(held_out.mean, by_file, held_out.standard_error, failed)

    def _answer(self, name: str, prompts: list[Prompt], **sampling: Any) -> list[ProblemResult]:
        limit = self.config.rollout.longest_completion
        return measure(self.client, self.score_of(name), prompts, limit, **sampling)


@dataclass(frozen=True)
class StepResults:
    """The results of a step's phases, the same on every rank."""

    step: int
    sampled: dict[str, Any]  # from `Sampler.sample`
    critic: dict[str, float] | None  # from `Critic.step`; None without PPO
    updates: list[Update]  # one for each minibatch
    update_shown: float | None  # from `Learner.update_shown`
    published: Published
    seconds: dict[str, float]  # by phase


def step_metrics(config: Config, results: StepResults) -> StepMetrics:
    """Return the line of metrics.jsonl for a step."""
    sampled = dict(results.sampled)
    published, seconds = results.published, results.seconds
    # With staleness the servers sample in every phase of the step.
    sampling_s = sum(seconds.values()) if config.rollout.max_staleness else seconds["rollout"]
    sums = add_up(update.stats for update in results.updates)
    tokens = sums["tokens"]
    # The routing is compared in the first minibatch alone: its pass comes before any update.
    first = results.updates[0].stats
    phase_times = {f"time_{phase}_s": seconds[phase] for phase in (*PHASES, "evaluation", "proof")}
    return StepMetrics(
        step=results.step,
        weight_version=published.version,
        rollout_tokens_per_s=sampled.pop("sampled_tokens") / sampling_s,
        **sampled,
        **rollout_statistics(sums),  # type: ignore[arg-type]  # only names of floats
        by_staleness=statistics_by_staleness(sums) if config.rollout.max_staleness else None,
        acr_widened_fraction=sums["acr_widened"] / tokens,
        clip_fraction=sums["clipped"] / tokens,
        dual_clip_fraction=sums["dual_clipped"] / tokens,
        logprob_diff_positive=_mean_of_sign(sums, "positive"),
        logprob_diff_negative=_mean_of_sign(sums, "negative"),
        kl_reference=sums["kl_reference"] / tokens,
        entropy=sums["entropy"] / tokens,
        objective_parts={
            name.removeprefix(USER): value / tokens
            for name, value in sums.items()
            if name.startswith(USER)
        },
        loss=fmean(update.loss for update in results.updates),
        grad_norm=fmean(update.grad_norm for update in results.updates),
        learning_rate=results.updates[-1].learning_rate,
        update_shown_fraction=results.update_shown,
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


def _mean_of_sign(sums: dict[str, float], sign: str) -> float | None:
    """Return the mean of log rho over tokens whose advantage has this sign; None without one."""
    tokens = sums[f"tokens/{sign}"]
    return sums[f"log_rho/{sign}"] / tokens if tokens else None


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
