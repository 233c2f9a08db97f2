"""Read what a run's directory holds of its steps."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import load
from qurl_megatron.files import read_json_lines, read_json_object
from qurl_megatron.report.metrics import RunSummary, Sample, StepMetrics, WeightMetrics


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

    @property
    def final_model(self) -> Path:
        """The directory of the trained model, which a complete run has."""
        return self.config.run_dir / "final_model"

    def series(self, metric: str) -> list[float]:
        """Return the values of a metric, one per step; NaN where a step lacks it."""
        return [math.nan if step.get(metric) is None else step[metric] for step in self.steps]

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
        by_step = {0: self.summary.get("evaluation_before")}
        by_step |= {step["step"]: step.get("evaluation") for step in self.steps}
        if after := self.summary.get("evaluation_after"):
            by_step[self.steps[-1]["step"]] = after
        scores: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
        for step, files in by_step.items():
            for name, averages in (files or {}).items():
                for measure, average in averages.items():
                    scores.setdefault((name, measure), {})[step] = average
        return scores


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
    return RunRecord(
        name=run_dir.name,
        config=load(run_dir / "config.yaml"),
        steps=steps,
        weights=publishes[-1]["weights"] if publishes else {},
        summary=read_json_object(run_dir / "summary.json", RunSummary),
        mismatch=read_json_object(run_dir / "mismatch.json", dict[str, dict[str, float]]),
        samples=read_json_lines(run_dir / "samples.jsonl", Sample),
    )


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the run's complete checkpoints, oldest first."""
    found = (run_dir / "checkpoints").glob("step_*")
    return sorted(path for path in found if path.name.removeprefix("step_").isdecimal())
