"""What a run measures: one `StepMetrics` a step, logged and shown as it comes.

    metrics.jsonl     every field of `StepMetrics`, one line a step
    weights.jsonl     what a publish showed of every quantized weight
    evaluation/       what was answered at each evaluation
    tensorboard/      the fields of metrics.jsonl as curves
    wandb/            the same for Weights & Biases, where the run asks for it
    summary.json      `RunSummary`, when the run is complete

Each step is there once, however often the run was stopped: what was logged after the checkpoint a
run goes on from is taken back. Weights & Biases takes nothing back: there each part of a run, from
one start to the next stop, is a run of its own in the group of the run's name.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from qurl_megatron.config.schema import Config
from qurl_megatron.files import read_json_lines, write_whole

if TYPE_CHECKING:
    import wandb
    from torch.utils.tensorboard import SummaryWriter

Averages = dict[str, dict[str, float]]
"""`Avg@1` and, where answers were sampled, `Avg@k sampled` -> `mean` and `standard_error`."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What the policy scores in full precision, at one point of a run."""

    held_out_accuracy: float | None = None  # greedy; None where nothing is held out
    files: dict[str, Averages] = dataclasses.field(default_factory=dict)  # of evaluation.data

    def lines(self) -> list[tuple[str, str]]:
        """What was measured and what it came to, for a person."""
        named = []
        if self.held_out_accuracy is not None:
            named.append(("held-out accuracy", f"{self.held_out_accuracy:.1%}"))
        for name, averages in self.files.items():
            for what, average in averages.items():
                value = f"{average['mean']:.1%} \N{PLUS-MINUS SIGN} {average['standard_error']:.1%}"
                named.append((f"{name} {what}", value))
        return named


def evaluation_directory(run_dir: Path, step: int) -> Path:
    """Where the answers of an evaluation are: a jsonl each of held-out problems and of files."""
    return run_dir / "evaluation" / f"step_{step:06}"


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
    weight_update_norm: float  # QuRL Eq. 13, over the quantized weights, since the last publish
    weight_quant_error: float  # QuRL Eq. 14, over the quantized weights
    code_flip_fraction: float  # quantized codes that changed since the last publish
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
    # On steps that evaluate: `Evaluation`.
    held_out_accuracy: float | None = None
    evaluation: dict[str, Averages] | None = None


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """summary.json: what a run came to."""

    held_out_accuracy_before: float | None  # before the first RL step, in full precision
    held_out_accuracy_after: float | None
    evaluation_before: dict[str, Averages]  # of evaluation.data
    evaluation_after: dict[str, Averages]
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
    """Logs a run and draws its progress: live on a terminal, else in lines.

    Every learner rank has one; only the one that `writes` does anything.
    """

    def __init__(self, config: Config, *, writes: bool) -> None:
        self._config = config
        self._console = Console(quiet=not writes)
        self._writes = writes
        self._start = time.perf_counter()
        self.before = Evaluation()
        self._curves: SummaryWriter | None = None
        self._wandb: wandb.Run | None = None
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

    def start(self, before: Evaluation) -> None:
        """RL begins now, with a policy that scores this."""
        self._begin(after_step=0, time_s=0.0, before=before)
        for what, value in before.lines():
            self.say(f"{what} before RL {value}")
        self._draw(0, {"held_out_accuracy": before.held_out_accuracy, "evaluation": before.files})

    def resume(self, step: int, time_s: float, before: Evaluation) -> None:
        """RL goes on after `step`, `time_s` into it."""
        self._begin(step, time_s, before)
        self.say(f"going on after step {step}")

    def _begin(self, after_step: int, time_s: float, before: Evaluation) -> None:
        """What an earlier part of the run has logged of later steps is taken back."""
        self.before = before
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
        last = evaluation_directory(run_dir, after_step)
        for answers in last.parent.glob("step_*"):
            if answers.name > last.name:
                shutil.rmtree(answers)
        self._open_curves(after_step)
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()

    @property
    def time_s(self) -> float:
        """Of RL so far, all its parts together."""
        return time.perf_counter() - self._start

    def write(self, metrics: StepMetrics, evaluation: Evaluation | None) -> None:
        if not self._writes:
            return
        if evaluation is not None:
            metrics = dataclasses.replace(
                metrics,
                held_out_accuracy=evaluation.held_out_accuracy,
                evaluation=evaluation.files,
            )
        self._steps.append(metrics)
        self._append("metrics.jsonl", dataclasses.asdict(metrics))
        self._draw(metrics.step, dataclasses.asdict(metrics))
        if self._live is None:
            self.say(self._line(metrics))
        else:
            left = f"{self._left_s(metrics.step):.0f} s"
            self._progress.update(self._task, completed=metrics.step, left=left)
            self._live.update(self._panel(metrics))

    def write_weights(self, weight_version: int, weights: dict[str, dict[str, float]]) -> None:
        """One line of weights.jsonl: what a publish showed of each quantized weight, by name."""
        if self._writes:
            line = {"weight_version": weight_version, "weights": weights}
            self._append("weights.jsonl", line)

    def write_noise(self, noise: dict[str, dict[str, float]]) -> None:
        """noise.json: how far each server set was from the learner before any training."""
        if self._writes:
            path = self._config.run_dir / "noise.json"
            write_whole(path, json.dumps(noise, indent=2) + "\n")

    def time_is_up(self) -> bool:
        limit_s = self._config.time_limit_s
        return limit_s is not None and self.time_s > limit_s

    def finish(self, after: Evaluation) -> None:
        """End the display with what the run came to; summary.json says the same."""
        if not self._writes:
            return
        summary = RunSummary(
            held_out_accuracy_before=self.before.held_out_accuracy,
            held_out_accuracy_after=after.held_out_accuracy,
            evaluation_before=self.before.files,
            evaluation_after=after.files,
            steps=len(self._steps),
            time_s=self.time_s,
            weight_version=self._steps[-1].weight_version,
            time_publish_s_mean=fmean(metrics.time_publish_s for metrics in self._steps),
            publish_bytes=self._steps[-1].publish_bytes,
        )
        path = self._config.run_dir / "summary.json"
        path.write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
        self.close()
        self._console.print(self._closing_table(summary, after))

    def _closing_table(self, summary: RunSummary, evaluation: Evaluation) -> Table:
        table = Table(title=str(self._config.run_dir), show_header=False)
        for when, measured in (("before RL", self.before), ("after", evaluation)):
            for what, value in measured.lines():
                table.add_row(f"{what} {when}", value)
        before, after = summary.held_out_accuracy_before, summary.held_out_accuracy_after
        if before is not None and after is not None:
            table.add_row("gained", f"{100 * (after - before):+.1f} points")
        table.add_row("steps", f"{summary.steps}")
        table.add_row("time of RL", f"{summary.time_s:.0f} s")
        table.add_row("weight versions published", f"{summary.weight_version}")
        table.add_row("mean publish time", f"{summary.time_publish_s_mean:.3f} s")
        table.add_row("bytes a publish", f"{summary.publish_bytes:,}")
        return table

    def close(self) -> None:
        """Leave the display's last state on the screen, and end what draws curves."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._curves is not None:
            self._curves.close()
            self._curves = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def _open_curves(self, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard is to forget what an earlier part of the run has written from this step on;
        # step 0 is the evaluation before the first.
        self._curves = SummaryWriter(
            str(self._config.run_dir / "tensorboard"),
            purge_step=after_step + 1 if after_step else 0,
        )
        if self._config.wandb_project:
            import wandb  # no requirement: only those who ask for it need it

            self._wandb = wandb.init(
                project=self._config.wandb_project,
                group=self._config.name,
                name=f"{self._config.name} from step {after_step + 1}",
                dir=self._config.run_dir,
                config=dataclasses.asdict(self._config),
                settings=wandb.Settings(silent=True, console="off"),
            )

    def _draw(self, step: int, measured: dict[str, Any]) -> None:
        """A point of every curve there is a number of."""
        if self._curves is None:
            return
        values = dict(_values(measured))
        for name, value in values.items():
            self._curves.add_scalar(name, value, step)
        self._curves.flush()
        if self._wandb is not None:
            self._wandb.log(values, step=step)

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


def _values(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of nested dicts, but `step`, by its path: `evaluation/NAME/Avg@1/mean`."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _values(value, f"{prefix}{name}/")
        elif value is not None and name != "step":
            yield prefix + name, float(value)
