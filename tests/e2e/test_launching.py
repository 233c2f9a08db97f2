"""`qurl launch` on this machine: runs under nemo-run's local executor, one after another."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from e2e.running import SMALL, Start


def test_a_sweep_runs_its_runs_in_order_and_ends_on_sigterm(start: Start, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith("name=")]
    run = start("launch", "quickstart", *words, "name=sweep", "--sweep", "steps=2,100000")
    run.wait_for("run directory .*sweep-100000")  # nemo-run shows the output of each
    summary = json.loads((tmp_path / "runs" / "sweep-2" / "summary.json").read_text())
    assert summary["steps"] == 2
    run.process.send_signal(signal.SIGTERM)
    assert run.exit_code() == 128 + signal.SIGTERM
    assert run.survivors() == []
    assert not (tmp_path / "runs" / "sweep-100000" / "summary.json").exists()
