"""What a run measures: one `StepMetrics` a step, written to metrics.jsonl and shown as it comes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from qurl_megatron.config import Config
from qurl_megatron.files import read_json_lines, write_whole


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Fractions are of sampled tokens unless they say otherwise."""

    step: int  # from 1
    weight_version: int  # published after this step's update
    reward_mean: float
    response_length_mean: float  # tokens
    response_truncated_fraction: float  # of completions, ended by max_response_length
    verifier_failures: int  # completions whose verifier raised or timed out; they score 0
    groups_replaced: int  # by dynamic sampling, their rewards being all equal
    kl_behaviour_proximal: float  # mean of log(behaviour / proximal)
    kl_behaviour_proximal_k3: float  # k3 estimate of the same divergence
    logprob_abs_diff: float  # mean |behaviour - proximal|
    ratio_proximal_behaviour_max: float
    tis_truncated_fraction: float  # proximal / behaviour above the cap C
    acr_widened_fraction: float  # admitted by ACR's bound, clipped by TIS's
    clip_fraction: float  # no gradient because of the clip
    kl_reference: float  # k3 of KL(current, reference), nats; 0 where no reference is kept
    entropy: float  # nats, of the learner's policy before the update
    loss: float  # mean over minibatches
    grad_norm: float  # before clipping, mean over minibatches
    learning_rate: float
    current_proximal_abs_diff: float  # mean over the first minibatch: 0 up to rounding
    weight_update_norm: float  # QuRL Eq. 13, over the quantised weights, since the last publish
    weight_quant_error: float  # QuRL Eq. 14, over the quantised weights
    code_flip_fraction: float  # quantised codes that changed since the last publish
    time_rollout_s: float
    time_proximal_s: float  # and of the reference, where one is kept
    time_critic_s: float  # 0 without a critic
    time_update_s: float
    time_publish_s: float
    publish_bytes: int
    rollout_tokens_per_s: float  # sampled tokens
    value_loss: float | None = None  # of PPO's critic, as the next two: see `critic.py`
    value_clip_fraction: float | None = None
    value_explained_variance: float | None = None
    held_out_accuracy: float | None = None  # on steps that evaluate


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """summary.json: what a run came to."""

    held_out_accuracy_before: float | None  # before the first RL step, in full precision
    held_out_accuracy_after: float | None
    steps: int
    time_s: float  # of RL: without start-up and warm-up
    weight_version: int  # published, to the rollout servers
    time_publish_s_mean: float
    publish_bytes: int


class Clock:
    """Wall-clock seconds of a step's phases, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start


class RunLog:
    """Writes metrics.jsonl and weights.jsonl and draws progress: live on a terminal, else in lines.

    Every learner rank has one; only the one that `writes` does anything.
    """

    def __init__(self, config: Config, *, writes: bool) -> None:
        self._config = config
        self._console = Console(quiet=not writes)
        self._writes = writes
        self._start = time.perf_counter()
        self.held_out_accuracy_before: float | None = None
        self._steps: list[StepMetrics] = []
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left"),
            console=self._console,
        )
        self._task = self._progress.add_task(config.name, total=config.steps, left="")
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """One line outside the display."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def start(self, held_out_accuracy: float | None) -> None:
        """RL begins now, with this accuracy."""
        self._begin(after_step=0, time_s=0.0, held_out_accuracy_before=held_out_accuracy)
        if held_out_accuracy is not None:
            self.say(f"held-out accuracy before RL {held_out_accuracy:.1%}")

    def resume(self, step: int, time_s: float, held_out_accuracy_before: float | None) -> None:
        """RL goes on after `step`, `time_s` into it."""
        self._begin(step, time_s, held_out_accuracy_before)
        self.say(f"going on after step {step}")

    def _begin(
        self, after_step: int, time_s: float, held_out_accuracy_before: float | None
    ) -> None:
        """What an earlier part of the run has logged of later steps is taken back."""
        self.held_out_accuracy_before = held_out_accuracy_before
        self._start = time.perf_counter() - time_s
        if not self._writes:
            return
        run_dir = self._config.run_dir
        lines = read_json_lines(run_dir / "metrics.jsonl")
        lines = [line for line in lines if line["step"] <= after_step]
        self._steps = [StepMetrics(**line) for line in lines]
        version = self._steps[-1].weight_version if self._steps else 0
        publishes = read_json_lines(run_dir / "weights.jsonl")
        self._rewrite("metrics.jsonl", lines)
        self._rewrite(
            "weights.jsonl", [line for line in publishes if line["weight_version"] <= version]
        )
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    @property
    def time_s(self) -> float:
        """Of RL so far, all its parts together."""
        return time.perf_counter() - self._start

    def write(self, metrics: StepMetrics, held_out_accuracy: float | None) -> None:
        if not self._writes:
            return
        metrics = dataclasses.replace(metrics, held_out_accuracy=held_out_accuracy)
        self._steps.append(metrics)
        self._append("metrics.jsonl", dataclasses.asdict(metrics))
        if self._live is None:
            self.say(self._line(metrics))
        else:
            left = f"{self._left_s(metrics.step):.0f} s"
            self._progress.update(self._task, completed=metrics.step, left=left)
            self._live.update(self._panel(metrics))

    def write_weights(self, weight_version: int, weights: dict[str, dict[str, float]]) -> None:
        """One line of weights.jsonl: what a publish showed of each quantised weight, by name."""
        if self._writes:
            line = {"weight_version": weight_version, "weights": weights}
            self._append("weights.jsonl", line)

    def time_is_up(self) -> bool:
        limit_s = self._config.time_limit_s
        return limit_s is not None and self.time_s > limit_s

    def finish(self, held_out_accuracy: float | None) -> None:
        """End the display with what the run came to; summary.json says the same."""
        if not self._writes:
            return
        summary = RunSummary(
            held_out_accuracy_before=self.held_out_accuracy_before,
            held_out_accuracy_after=held_out_accuracy,
            steps=len(self._steps),
            time_s=self.time_s,
            weight_version=self._steps[-1].weight_version,
            time_publish_s_mean=fmean(metrics.time_publish_s for metrics in self._steps),
            publish_bytes=self._steps[-1].publish_bytes,
        )
        path = self._config.run_dir / "summary.json"
        path.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
        self.close()
        self._console.print(self._closing_table(summary))

    def _closing_table(self, summary: RunSummary) -> Table:
        table = Table(title=str(self._config.run_dir), show_header=False)
        before, after = summary.held_out_accuracy_before, summary.held_out_accuracy_after
        if before is not None and after is not None:
            table.add_row("held-out accuracy before RL", f"{before:.1%}")
            table.add_row("held-out accuracy after", f"{after:.1%}")
            table.add_row("gained", f"{100 * (after - before):+.1f} points")
        table.add_row("steps", f"{summary.steps}")
        table.add_row("time of RL", f"{summary.time_s:.0f} s")
        table.add_row("weight versions published", f"{summary.weight_version}")
        table.add_row("mean publish time", f"{summary.time_publish_s_mean:.3f} s")
        table.add_row("bytes a publish", f"{summary.publish_bytes:,}")
        return table

    def close(self) -> None:
        """Leave the display's last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self._config.run_dir / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _rewrite(self, name: str, lines: list[dict[str, Any]]) -> None:
        write_whole(self._config.run_dir / name, "".join(json.dumps(line) + "\n" for line in lines))

    def _left_s(self, step: int) -> float:
        elapsed_s = self.time_s
        left_s = elapsed_s / step * (self._config.steps - step)
        if self._config.time_limit_s is not None:
            left_s = min(left_s, self._config.time_limit_s - elapsed_s)
        return max(left_s, 0.0)

    def _line(self, metrics: StepMetrics) -> str:
        shown = "  ".join(f"{name} {value}" for name, value in self._shown(metrics))
        left_s = self._left_s(metrics.step)
        return f"step {metrics.step}/{self._config.steps}  {shown}  {left_s:.0f} s left"

    def _panel(self, metrics: StepMetrics) -> Group:
        shown = "   ".join(f"{name} [bold]{value}[/]" for name, value in self._shown(metrics))
        return Group(self._progress, shown)

    @staticmethod
    def _shown(metrics: StepMetrics) -> list[tuple[str, str]]:
        return [
            ("reward", f"{metrics.reward_mean:.3f}"),
            ("KL(behaviour, proximal)", f"{metrics.kl_behaviour_proximal_k3:.1e}"),
            ("tokens/s", f"{metrics.rollout_tokens_per_s:.0f}"),
            ("version", f"{metrics.weight_version}"),
        ]
