"""Runs of `qurl train` that a second call does not repeat, and the plot of their rewards."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qurl_megatron.files import read_json_lines
from qurl_megatron.report.record import read_run

INK = "#808080"  # text and axes of a plot, legible on light and on dark paper
QURL = (sys.executable, "-c", "from qurl_megatron.cli import main; main()")


def complete_run(run_dir: Path, words: Sequence[str]) -> tuple[dict[str, Any], list[Any]]:
    """Start a run with `words` after `qurl train`; return its summary and its steps' metrics.

    A run that was interrupted is resumed, and one that has ended is not started again.

    Raises:
        RuntimeError: the run failed; the message names its log, which is beside its directory.
    """
    summary = run_dir / "summary.json"
    if not summary.exists():
        command = ["resume", str(run_dir)]
        if not run_dir.exists():
            command = ["train", *words, f"name={run_dir.name}", f"output_dir={run_dir.parent}"]
        log = run_dir.parent / f"{run_dir.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as output:
            ended = subprocess.run([*QURL, *command], stdout=output, stderr=subprocess.STDOUT)
        if ended.returncode:
            raise RuntimeError(f"qurl {' '.join(command)} ended with {ended.returncode}; see {log}")
    return json.loads(summary.read_text()), read_json_lines(run_dir / "metrics.jsonl")


def plot_rewards(file: Path, run_dirs: dict[str, Path]) -> None:
    """Write an SVG with the reward of each step and the held-out accuracy, as `qurl report` does.

    `run_dirs` has the runs, complete or not, by their names in the legend.
    """
    from qurl_megatron.extensions.report import plots

    runs = [dataclasses.replace(read_run(path), name=name) for name, path in run_dirs.items()]
    plot = plots.svg("Reward and held-out accuracy", plots.reward, runs)
    file.write_text(plot.replace("currentColor", INK))
