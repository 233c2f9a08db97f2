"""A run that is killed in every phase, one after the other, leaves no process and completes.

One run directory is resumed again and again. What the run has written tells its phase: files that
appear, or seconds of a phase that the last step measured.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from e2e.running import SMALL, TIMEOUT_S, Command, Start, metrics_of
from qurl_megatron.files import PARTIAL
from qurl_megatron.learner.checkpoint import list_checkpoints

STEPS = 5
POLL_S = 0.005
WORDS = ["checkpoint.every_steps=1", "evaluation.held_out_fraction=0.01"]


def wait_until(run: Command, is_reached: Callable[[], bool]) -> None:
    """Wait until a phase is reached; fail if the command ends first."""
    deadline, looked_at = time.monotonic() + TIMEOUT_S, 0.0
    while not is_reached():
        assert run.process.poll() is None, f"ended before the phase:\n{run.text()}"
        assert time.monotonic() < deadline, f"the phase did not come:\n{run.text()}"
        if time.monotonic() > looked_at + 0.5:  # to know every process, at a low cost
            run.poll()
            looked_at = time.monotonic()
        time.sleep(POLL_S)
    run.poll()


def newest_log(run: Command, name: str) -> str:
    """Return a log of the newest attempt that has it; empty if there is none."""
    paths = sorted(run.run_dir.glob(f"logs/**/{name}"), key=lambda path: path.stat().st_mtime)
    return paths[-1].read_text(errors="replace") if paths else ""


def in_next_step(run: Command, phase: str) -> Callable[[], bool]:
    """Return a function that is true in the middle of a phase of the step after the next."""
    path = run.run_dir / "metrics.jsonl"
    phases = ["rollout", "proximal", "critic", "update", "publish"]
    known = len(path.read_text().splitlines()) if path.exists() else 0
    begins_at: list[float] = []

    def is_reached() -> bool:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) <= known:
            return False
        if not begins_at:
            step = json.loads(lines[-1])
            before = sum(step[f"time_{name}_s"] for name in phases[: phases.index(phase)])
            begins_at.append(time.monotonic() + before + step[f"time_{phase}_s"] / 2)
        return time.monotonic() >= begins_at[0]

    return is_reached


def exists(run: Command, pattern: str) -> Callable[[], bool]:
    """Return a function that is true once a file or directory that is new matches."""
    begin = time.time()

    def is_reached() -> bool:
        with contextlib.suppress(FileNotFoundError):  # it was renamed or removed meanwhile
            return any(path.stat().st_mtime > begin for path in run.run_dir.glob(pattern))
        return False

    return is_reached


Phase = Callable[[Command], Callable[[], bool]]
# (phase, how to know it, signal to the launcher)
TABLE: list[tuple[str, Phase, signal.Signals]] = [
    ("preparing", lambda run: lambda: True, signal.SIGKILL),
    ("servers starting", lambda run: exists(run, "logs/**/preload.log"), signal.SIGTERM),
    (
        "evaluation",
        lambda run: lambda: "batch" in newest_log(run, "server_evaluation_0.log"),
        signal.SIGKILL,
    ),
    ("first publish", lambda run: exists(run, "evaluation/*/*"), signal.SIGKILL),
    ("sampling", lambda run: in_next_step(run, "rollout"), signal.SIGKILL),
    ("update", lambda run: in_next_step(run, "update"), signal.SIGTERM),
    (
        "checkpoint being written",
        lambda run: exists(run, f"checkpoints/*{PARTIAL}"),
        signal.SIGKILL,
    ),
    ("export", lambda run: exists(run, f"final_model{PARTIAL}"), signal.SIGKILL),
    ("last evaluation and report", lambda run: exists(run, "final_model"), signal.SIGTERM),
]


@pytest.fixture
def listening() -> Iterator[set[tuple[str, int]]]:
    """Yield a set for the addresses at which processes of the run were seen to listen."""
    seen: set[tuple[str, int]] = set()
    yield seen
    assert seen and {address for address, _ in seen} == {"127.0.0.1"}, seen


def listened(run: Command) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes of the run listen now."""
    found = set()
    for process in run.started:
        try:
            connections = process.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        found |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == "LISTEN"}
    return found


def test_a_run_that_is_killed_in_every_phase_leaves_no_process_and_completes(
    start: Start, tmp_path: Path, listening: set[tuple[str, int]]
) -> None:
    def begin() -> Command:
        if (tmp_path / "runs" / "run" / "config.yaml").exists():
            return start("resume", "runs/run")
        words = [*SMALL, *WORDS, f"steps={STEPS}", "evaluation.problems=8"]
        return start("train", "quickstart", *words)

    for phase, reached, number in TABLE:
        run = begin()
        is_reached = reached(run)
        if phase == "preparing":
            time.sleep(0.3)  # it checks and prepares
        wait_until(run, is_reached)
        listening |= listened(run)
        whole = list_checkpoints(run.run_dir)
        run.process.send_signal(number)
        code = run.process.wait(TIMEOUT_S)
        assert code == (-number if number == signal.SIGKILL else 128 + number), (phase, run.text())
        _, alive = psutil.wait_procs(run.survivors(), timeout=30)
        assert alive == [], phase
        assert "Traceback" not in run.text(), (phase, run.text())
        # No checkpoint that was whole is lost, but those that newer ones replaced.
        assert not whole or max(list_checkpoints(run.run_dir)) >= max(whole), phase

    run = begin()
    assert run.exit_code() == 0, run.text()
    assert run.survivors() == []
    assert [step["step"] for step in metrics_of(run)] == list(range(1, STEPS + 1))
    assert list(run.run_dir.rglob(f"*{PARTIAL}")) == []
    assert {path.name for path in run.run_dir.iterdir()} >= {"summary.json", "final_model"}
    assert (run.run_dir / "report" / "index.html").exists()
