"""Read what a run's directory holds of its steps."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import load
from qurl_megatron.files import read_json_lines, read_json_object
from qurl_megatron.report.metrics import Evaluation, RunSummary, Sample, StepMetrics, WeightMetrics


@dataclass(frozen=True)
class RunRecord:
    """The files of a run's directory, complete or still training."""

    name: str
    config: Config
    steps: list[dict[str, Any]]  # metrics.jsonl
    weights: dict[str, dict[str, float]]  # last line of weights.jsonl, by weight
    summary: dict[str, Any]  # summary.json; empty until the run is complete
    mismatch: dict[str, dict[str, float]]  # mismatch.json, by server set; empty if there is none
    samples: list[dict[str, Any]]  # samples.jsonl
    # The fields of the `Evaluation` before RL; empty until a checkpoint has them.
    before: dict[str, Any] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)  # changes.jsonl

    @property
    def final_model(self) -> Path:
        """The directory of the trained model, which a complete run has."""
        return self.config.run_dir / "final_model"

    def series(self, metric: str) -> list[float]:
        """Return the values of a metric, one per step; NaN where a step lacks it.

        `reward_parts.words` is an entry of a metric.

        Raises:
            ValueError: no step can have it.
        """
        name, _, part = metric.partition(".")
        found = [step.get(name) for step in self.steps]
        if part:
            found = [of_step.get(part) if isinstance(of_step, dict) else None for of_step in found]
        is_absent = bool(part) and found.count(None) == len(found)
        if found and (is_absent or name not in StepMetrics.__annotations__):
            raise ValueError(f"{metric}: no step has this metric; docs/metrics.md lists them")
        return [math.nan if value is None else value for value in found]

    def early(self, metric: str) -> float:
        """Return the mean of a metric over the first tenth of the steps."""
        return fmean(self.series(metric)[: self._tenth])

    def late(self, metric: str) -> float:
        """Return the mean of a metric over the last tenth of the steps."""
        return fmean(self.series(metric)[-self._tenth :])

    @property
    def late_steps(self) -> list[dict[str, Any]]:
        """The last tenth of the steps."""
        return self.steps[-self._tenth :]

    @property
    def _tenth(self) -> int:
        return -(-len(self.steps) // 10)

    @property
    def has_stale_tokens(self) -> bool:
        """True if any trained token was sampled under older weights."""
        return any(step.get("stale_token_fraction", 0) > 0 for step in self.steps)

    def scores(self) -> dict[tuple[str, str], dict[int, dict[str, float]]]:
        """Return the averages of evaluations, by file and measure, then by step (0: before RL)."""
        by_step = {0: self.before.get("files")}
        by_step |= {step["step"]: step.get("evaluation") for step in self.steps}
        if after := self.summary.get("evaluation_after"):
            by_step[self.steps[-1]["step"]] = after
        scores: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
        for step, files in by_step.items():
            for name, averages in (files or {}).items():
                for measure, average in averages.items():
                    scores.setdefault((name, measure), {})[step] = average
        return scores


@dataclass
class _State:
    """The part of a checkpoint's state.json that a record has."""

    evaluation_before: Evaluation


@dataclass
class _Change:
    """What an object of changes.jsonl has: a field to which a resume gave another value."""

    after_step: int
    field: str
    before: Any
    now: Any


def check_run(run_dir: Path) -> None:
    """Check that a directory is that of a run.

    Raises:
        ConfigError: it is not.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: not a run's directory, it has no config.yaml")


def read_run(directory: Path | str) -> RunRecord:
    """Read a run's directory.

    Raises:
        ConfigError: the directory is not that of a run, or no step is complete.
    """
    run_dir = Path(directory)
    check_run(run_dir)
    steps = read_json_lines(run_dir / "metrics.jsonl", StepMetrics)
    if not steps:
        raise ConfigError(f"{run_dir}: no step is complete yet, metrics.jsonl is empty")
    publishes = read_json_lines(run_dir / "weights.jsonl", WeightMetrics)
    config = load(run_dir / "config.yaml")
    config.output_dir, config.name = str(run_dir.parent), run_dir.name  # it may have moved
    summary = read_json_object(run_dir / "summary.json", RunSummary)
    newest = max(list_checkpoints(run_dir), default=run_dir)
    before = read_json_object(newest / "state.json", _State).get("evaluation_before", {})
    if summary:
        of_held_out = ("held_out_accuracy", "held_out_standard_error")
        before = {name: summary.get(f"{name}_before") for name in of_held_out}
        before["files"] = summary["evaluation_before"]
    return RunRecord(
        name=run_dir.name,
        config=config,
        steps=steps,
        weights=publishes[-1]["weights"] if publishes else {},
        summary=summary,
        mismatch=read_json_object(run_dir / "mismatch.json", dict[str, dict[str, float]]),
        samples=read_json_lines(run_dir / "samples.jsonl", Sample),
        before=before,
        changes=read_json_lines(run_dir / "changes.jsonl", _Change),
    )


def change_line(change: dict[str, Any]) -> str:
    """Return an object of changes.jsonl as a sentence."""
    return "changed after step {after_step}: {field}={now}, {before} before".format_map(change)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the run's complete checkpoints, oldest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted(path for path in found if path.name.removeprefix("step_").isdecimal())
