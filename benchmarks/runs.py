"""What runs of `qurl` begin with and leave, and runs that a second call does not repeat."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from qurl_megatron.files import read_json_lines
from qurl_megatron.recipes import quickstart
from qurl_megatron.report.metrics import PHASES

QURL = (sys.executable, "-c", "from qurl_megatron.cli import main; main()")


def write_tiny_model(directory: Path) -> None:
    """Write a random model of two layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    quickstart.build_model(directory, seed=0, **sizes, **heads)


def write_sums(file: Path, number: int) -> None:
    """Write so many problems."""
    problems = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(number)]
    file.write_text("\n".join(map(json.dumps, problems)) + "\n")


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Return the processes that run with a value of a variable of the environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            if process.environ().get(variable) == value and not is_zombie:
                found.append(process)
    return found


def middle_s(step: dict[str, float], phase: str) -> float:
    """Return the seconds from a step's end to the middle of a phase of the next, if it is alike."""
    before = sum(step[f"time_{name}_s"] for name in PHASES[: PHASES.index(phase)])
    return before + step[f"time_{phase}_s"] / 2


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
