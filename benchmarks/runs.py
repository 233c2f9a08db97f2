"""Runs of `qurl train` that a second call does not repeat."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qurl_megatron.files import read_json_lines

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
