"""Write a run's measurements to its directory, and show its progress.

    metrics.jsonl     every field of `StepMetrics`, one line per step
    weights.jsonl     measures of every quantized weight, one line per publish
    samples.jsonl     some completions of each step, each a `Sample`
    mismatch.json     train-inference mismatch before training, by server set; as `new_servers` that
                      of the servers that were compared last, after a resume or a restart
    evaluation/       every answer of each evaluation
    tensorboard/      the numbers of metrics.jsonl as curves, and samples as tables
    wandb/            the same for Weights & Biases, if `wandb_project` is set
    summary.json      `RunSummary`, written when the run is complete

Each step is logged once, however often the run is resumed: resuming from a checkpoint first drops
the lines that were logged after it. Weights & Biases cannot drop steps, so each attempt is a
W&B run of its own, in a group named after the run.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import shlex
import shutil
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from qurl_megatron.config.schema import OF_COPY, OF_SCORES, Config
from qurl_megatron.config.text import leaf_values
from qurl_megatron.files import append_lines, read_json_lines, read_json_object, write_whole
from qurl_megatron.machine.output import qurl_command
from qurl_megatron.report.console import RunConsole, duration
from qurl_megatron.report.metrics import (
    Evaluation,
    RunSummary,
    Sample,
    StepMetrics,
    WeightMetrics,
)

if TYPE_CHECKING:
    from qurl_megatron.report.event_file import EventFile
    from qurl_megatron.report.weights_and_biases import WandbCurves

PACE_STEPS = 20  # last steps, from which the time left is estimated
# Fields by which `qurl eval` reads data, scores answers and plays agents as the run did.
OF_ANSWERS = (
    *(field for field in OF_SCORES if field != "reward"),
    *("scoring.timeout_s", "scoring.import_timeout_s", "evaluation.reward_of"),
    *("rollout.agent_timeout_s", "rollout.agent_turn_timeout_s"),
    *("prompts.options", "prompts.question_key"),
    *("prompts.answer_key", "prompts.incomplete", "prompts.ignore_media", "prompts.system_prompt"),
    *("prompts.chat_template_options", "rollout.stop_token_ids"),
)
# Of a table of samples.
COLUMNS = ("step", "kind", "reward", "length", "truncated", "weight_versions", "prompt", "text")


def evaluation_directory(run_dir: Path, step: int) -> Path:
    """Return the directory of an evaluation's answers: one jsonl for each set of problems."""
    return run_dir / "evaluation" / f"step_{step:06}"


class Clock:
    """Wall-clock time of each phase of a step: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = time.perf_counter() - start


class RunLog:
    """The files and curves of a run, and its console.

    Every learner rank has a log, but only the log with `writes` writes files and prints.
    """

    def __init__(self, config: Config, *, writes: bool) -> None:
        self._config = config
        self._console = RunConsole(config, quiet=not writes)
        self.say = self._console.say
        self._writes = writes
        self._start = time.perf_counter()
        self.before = Evaluation()
        self.steps_done = 0  # the last step that was logged, by any attempt of the run
        self._tensorboard: EventFile | None = None
        self._wandb: WandbCurves | None = None
        self._steps: list[dict[str, Any]] = []  # lines of metrics.jsonl
        # `time_s` after last steps, without the time of proofs, of which few steps have one.
        self._ends_s: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self._proofs_s = 0.0
        self._reached: dict[str, float] = {}  # metrics of the last step above `Config.stop_above`

    def start(self, before: Evaluation) -> None:
        """Begin the log of RL; `before` is the evaluation before its first step."""
        self._begin(after_step=0, time_s=0.0, before=before)
        for name, value in before.lines():
            self.say(f"{name} before RL {value}")
        self._write_curves(0, _scores(before))

    def resume(self, step: int, time_s: float, before: Evaluation) -> None:
        """Continue the log after `step`; RL had taken `time_s` seconds by then."""
        self._begin(step, time_s, before)
        self.say(f"resuming after step {step}")

    def begin_steps(self) -> None:
        """Begin to measure the pace of steps, of which what came before is none."""
        if self._writes:
            self._ends_s[-1] = self.time_s
            self._console.begin_step()

    def _begin(self, after_step: int, time_s: float, before: Evaluation) -> None:
        """Drop the lines that earlier attempts logged after `after_step`, then open the log."""
        self.before, self.steps_done = before, after_step
        self._start = time.perf_counter() - time_s
        if not self._writes:
            return
        run_dir = self._config.run_dir
        (run_dir / "summary.json").unlink(missing_ok=True)  # of a run that is extended
        self._steps = self._keep("metrics.jsonl", StepMetrics, "step", after_step)
        version = self._steps[-1]["weight_version"] if self._steps else 0
        self._keep("weights.jsonl", WeightMetrics, "weight_version", version)
        self._keep("samples.jsonl", Sample, "step", after_step)
        last = evaluation_directory(run_dir, after_step)
        for answers in last.parent.glob("step_*"):
            if answers.name > last.name:
                shutil.rmtree(answers)
        self._open_curves(after_step)
        self._ends_s.append(self.time_s)
        self._console.start(self._steps)
        if self._steps:
            self._note_reached(self._steps[-1])

    @property
    def time_s(self) -> float:
        """Seconds of RL so far, over all attempts of the run."""
        return time.perf_counter() - self._start

    def write(self, metrics: StepMetrics, evaluation: Evaluation | None) -> None:
        """Log one step, with its evaluation if it has one, and update the display."""
        self.steps_done = metrics.step
        if not self._writes:
            return
        line = dataclasses.asdict(metrics)
        if evaluation is not None:
            line |= _scores(evaluation)
        if metrics.verifier_failure and not any(s.get("verifier_failure") for s in self._steps):
            self.say(f"a verifier failed: {metrics.verifier_failure}")
        self._steps.append(line)
        self._append("metrics.jsonl", line)
        self._write_curves(metrics.step, line)
        self._proofs_s += metrics.time_proof_s
        self._ends_s.append(self.time_s - self._proofs_s)
        self._console.step(metrics, evaluation, self._left_s(metrics.step))
        self._note_reached(line)

    def write_weights(self, weight_version: int, weights: dict[str, dict[str, float]]) -> None:
        """Append one publish to weights.jsonl: the measures of each quantized weight, by name."""
        self._append("weights.jsonl", {"weight_version": weight_version, "weights": weights})

    def write_samples(self, samples: list[Sample]) -> None:
        """Append completions of the last step to samples.jsonl, and show them beside the curves."""
        if not samples or self._tensorboard is None:
            return
        from torch.utils.tensorboard import summary

        self._append("samples.jsonl", *map(dataclasses.asdict, samples))
        text = summary.text("samples", markdown_table(samples))
        self._tensorboard.add(samples[0].step, [text])
        if self._wandb is not None:
            self._wandb.write_table(samples[0].step, list(COLUMNS), table_rows(samples))

    def write_mismatch(self, mismatch: dict[str, dict[str, float]]) -> None:
        """Write the mismatch of server sets to mismatch.json, which keeps that of others."""
        known = read_json_object(self._config.run_dir / "mismatch.json") if self._writes else {}
        self._write("mismatch.json", known | mismatch)

    def time_is_up(self) -> bool:
        """Return whether RL has taken longer than `Config.time_limit_s`."""
        limit_s = self._config.time_limit_s
        return limit_s is not None and self.time_s > limit_s

    def has_reached(self) -> bool:
        """Return whether a metric of the last step is above its value in `Config.stop_above`."""
        return bool(self._reached)

    def finish(self, after: Evaluation) -> None:
        """Write summary.json, close the log and print the summary as a table."""
        if not self._writes:
            return
        summary = RunSummary(
            held_out_accuracy_before=self.before.held_out_accuracy,
            held_out_accuracy_after=after.held_out_accuracy,
            evaluation_before=self.before.files,
            evaluation_after=after.files,
            steps=len(self._steps),
            time_s=self.time_s,
            weight_version=self._steps[-1]["weight_version"],
            time_publish_s_mean=fmean(step["time_publish_s"] for step in self._steps),
            publish_bytes=self._steps[-1]["publish_bytes"],
            publish_full_bytes=self._steps[-1].get("publish_full_bytes", 0),
            held_out_standard_error_before=self.before.held_out_standard_error,
            held_out_standard_error_after=after.held_out_standard_error,
            reached=self._reached,
        )
        self._write("summary.json", dataclasses.asdict(summary))
        self.close()
        table = Table(title=str(self._config.run_dir), show_header=False)
        for when, scores in (("before RL", self.before), ("after RL", after)):
            for name, value in scores.lines():
                table.add_row(f"{name} {when}", value)
        before, accuracy = self.before.held_out_accuracy, after.held_out_accuracy
        if before is not None and accuracy is not None:
            errors = (self.before.held_out_standard_error, after.held_out_standard_error)
            error = 100 * math.hypot(*(error or 0.0 for error in errors))
            gain = f"{100 * (accuracy - before):+.1f}"
            table.add_row("gain", f"{gain} \N{PLUS-MINUS SIGN} {error:.1f} points")
        table.add_row("steps", f"{summary.steps}")
        table.add_row("RL time", duration(summary.time_s))
        table.add_row("weight versions published", f"{summary.weight_version}")
        table.add_row("mean publish time", f"{summary.time_publish_s_mean:.3f} s")
        sent, full = summary.publish_bytes, summary.publish_full_bytes
        table.add_row("bytes of last publish", f"{sent:,} of {full:,}")
        self._console.show(table)

    def say_results(self) -> None:
        """Print where curves, report and model are, and how to see answers of the model."""
        config, model = self._config, self._config.run_dir / "final_model"
        files = config.evaluation.data
        words = [f"data.{name}={data}" for name, data in files.items()] or [config.data]
        words += [f"reward={config.reward}", f"output={config.run_dir / 'answers'}"]
        words += [f"max_prompt_length={config.rollout.max_prompt_length}"]
        words += [f"max_completion_length={config.rollout.longest_completion}"]
        defaults, values = leaf_values(Config()), leaf_values(config)
        for field in OF_ANSWERS:
            if files and field == "prompts.options":  # they are for training data alone
                continue
            if (value := values[field]) != defaults[field]:
                text = json.dumps(value) if isinstance(value, dict) else value
                name = field.removeprefix("rollout.").removeprefix("evaluation.")
                words.append(f"{name}={text}")
        if config.learner.quantized_forward:  # of the copy that was trained
            words += [f"{field.removeprefix('quantization.')}={values[field]}" for field in OF_COPY]
        curves = shlex.quote(str(config.run_dir / "tensorboard"))
        self.say(f"curves: tensorboard --logdir {curves}")
        if (page := config.run_dir / "report" / "index.html").exists():
            self.say(f"report: {page}")
        self.say(f"model: {model}; its answers: {qurl_command('eval', model, *words)}")

    def close(self) -> None:
        """Stop the display, leaving its last state on the screen, and finish the run of W&B."""
        self._console.stop()
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None

    def _open_curves(self, after_step: int) -> None:
        from qurl_megatron.report.event_file import EventFile  # imports TensorBoard

        # Step 0 is the evaluation before the first step.
        purge_step = after_step + 1 if after_step else 0
        self._tensorboard = EventFile(self._config.run_dir / "tensorboard", purge_step)
        if self._config.wandb_project:  # only runs that ask for it need it installed
            from qurl_megatron.report.weights_and_biases import WandbCurves

            self._wandb = WandbCurves(self._config, self.say)

    def _write_curves(self, step: int, measured: dict[str, Any]) -> None:
        """Add a point at `step` to the curve of every number in `measured`."""
        if self._tensorboard is None:
            return
        from torch.utils.tensorboard import summary

        values = dict(_numbers(measured))
        summaries = [summary.scalar(name, value) for name, value in values.items()]
        counts = measured.get("reward_counts") or []
        rewards = [reward for reward, count in counts for _ in range(count)]
        if rewards:
            summaries.append(summary.histogram("rewards", np.array(rewards), bins=30))
        self._tensorboard.add(step, summaries)
        if self._wandb is not None:
            self._wandb.write(step, values, rewards)

    def _append(self, name: str, *lines: dict[str, Any]) -> None:
        if self._writes:
            append_lines(self._config.run_dir / name, lines)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        if self._writes:
            write_whole(self._config.run_dir / name, json.dumps(content, indent=2) + "\n")

    def _keep(self, name: str, kind: type, number: str, last: int) -> list[dict[str, Any]]:
        """Drop the lines of a file whose `number` is above `last`, and return the others.

        Lines of another kind are dropped too.
        """
        path = self._config.run_dir / name
        lines = [line for line in read_json_lines(path, kind, self.say) if line[number] <= last]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
        return lines

    def _note_reached(self, line: dict[str, Any]) -> None:
        """Keep, and say, which metrics of a step are above their values in `Config.stop_above`."""
        values = dict(_numbers(line))
        for name, limit in self._config.stop_above.items():
            if name in values and values[name] > limit:
                self._reached[name] = values[name]
                self.say(f"{name} is {values[name]:.3g}, above stop_above of {limit:g}")

    def _left_s(self, step: int) -> float:
        """Estimate the seconds of RL left after `step`, at the pace of the last steps.

        Evaluations and saves between these steps count.
        """
        pace_s = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        left_s = pace_s * (self._config.steps - step)
        if self._config.time_limit_s is not None:
            left_s = min(left_s, self._config.time_limit_s - self.time_s)
        return max(left_s, 0.0)


def _scores(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as fields of `StepMetrics`."""
    return {
        "held_out_accuracy": evaluation.held_out_accuracy,
        "held_out_standard_error": evaluation.held_out_standard_error,
        "evaluation": evaluation.files,
    }


def _numbers(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of nested dicts by its path: `evaluation/NAME/Avg@1/mean`.

    The step and the distribution of rewards are left out.
    """
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "step":
            yield prefix + name, float(value)


def table_rows(samples: list[Sample]) -> list[list[object]]:
    """Return the rows of a table of samples, with `COLUMNS`."""
    rows = []
    for sample in samples:
        row: dict[str, object] = dataclasses.asdict(sample)
        row["weight_versions"] = ", ".join(map(str, sample.weight_versions))
        rows.append([row[column] for column in COLUMNS])
    return rows


def markdown_table(samples: list[Sample]) -> str:
    """Return a table of samples for TensorBoard, which renders Markdown and HTML."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *table_rows(samples)]
    return "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)


def _markdown_cell(value: object) -> str:
    """Return a value as one cell, in which no character acts as Markdown or HTML."""
    text = html.escape(f"{value:.3g}" if isinstance(value, float) else str(value))
    marks = {ord(mark): f"&#{ord(mark)};" for mark in "|\\`*_{}[]()#+!~$"}
    return text.translate(marks).replace("\n", "<br>")
