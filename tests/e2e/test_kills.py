"""A run that is killed in every phase, one after the other, leaves no process and completes.

One run directory is resumed again and again. Its servers sample one step ahead, so whatever ends it
finds groups in flight. What the run has written tells its phase: a line, files that appear, or
seconds of a phase that the last step measured.
"""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from e2e.running import PER_STEP, QUICK, Command, Start, metrics_of, middle_s, prompts_trained
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.files import PARTIAL
from qurl_megatron.report.record import list_checkpoints

STEPS = 16  # a phase may take a few of them, where the machine is busy
WORDS = ["checkpoint.every_steps=1", "evaluation.problems=8"]
WORDS += ["rollout.max_staleness=1", f"steps={STEPS}"]


def says(run: Command, text: str) -> Callable[[], bool]:
    """Return a function that is true once the command has printed a text."""
    return lambda: text in run.text()


def in_next_step(run: Command, phase: str) -> Callable[[], bool]:
    """Return a function that is true in the middle of a phase of the step after the next."""
    path = run.run_dir / "metrics.jsonl"
    known = len(path.read_text().splitlines()) if path.exists() else 0
    comes_at: list[float] = []

    def is_reached() -> bool:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) <= known:
            return False
        if not comes_at:
            comes_at.append(time.monotonic() + middle_s(json.loads(lines[-1]), phase))
        return time.monotonic() >= comes_at[0]

    return is_reached


def exists(run: Command, pattern: str) -> Callable[[], bool]:
    """Return a function that is true once a file or directory that is new matches."""
    begin = time.time()

    def is_reached() -> bool:
        with contextlib.suppress(FileNotFoundError):  # it was renamed or removed meanwhile
            return any(path.stat().st_mtime > begin for path in run.run_dir.glob(pattern))
        return False

    return is_reached


@dataclass(frozen=True)
class Kill:
    """A phase, how to know it, and the signal that ends the run in it or after its step."""

    phase: str
    reached: Callable[[Command], Callable[[], bool]]
    signal: signal.Signals
    to_rank: bool = False  # the signal is for a learner rank; otherwise for the launcher

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.to_rank:
            return 1
        if self.signal == signal.SIGUSR1:
            return STOPPED_EARLY
        return -self.signal if self.signal == signal.SIGKILL else 128 + self.signal


TABLE = [
    Kill("preparing", lambda run: lambda: True, signal.SIGKILL),
    Kill("before it starts", lambda run: says(run, "run directory"), signal.SIGUSR1),
    Kill("first publish", lambda run: exists(run, "evaluation/*/*"), signal.SIGINT),
    Kill("sampling", lambda run: in_next_step(run, "rollout"), signal.SIGKILL, to_rank=True),
    Kill("update", lambda run: in_next_step(run, "update"), signal.SIGUSR1),
    Kill(
        "checkpoint being written",
        lambda run: exists(run, f"checkpoints/*{PARTIAL}"),
        signal.SIGKILL,
    ),
    # In the midst of the export or right after it: it lasts milliseconds.
    Kill("export", lambda run: exists(run, "final_model*"), signal.SIGKILL),
    # No step is left, so this is the last evaluation.
    Kill("last evaluation", lambda run: says(run, "server evaluation_0 serves"), signal.SIGTERM),
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


def send(kill: Kill, run: Command) -> None:
    """Send the signal to the launcher or to rank 0 of the learner."""
    if kill.to_rank:
        run.first_rank().send_signal(kill.signal)
    else:
        run.process.send_signal(kill.signal)


def assert_says_why_it_ended(kill: Kill, run: Command) -> None:
    text = run.text()
    assert "Traceback" not in text
    if kill.to_rank:
        attempts = len([*run.run_dir.glob("logs/resumed_*")])
        assert "learner rank 0 ended (killed by signal 9)" in text
        assert f"logs/resumed_{attempts}/learner_rank0.log" in text
    elif kill.signal in (signal.SIGINT, signal.SIGTERM):
        assert f"interrupted by {kill.signal.name}" in text


def steps_saved(run: Command) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    names = [checkpoint.name for checkpoint in list_checkpoints(run.run_dir)]
    return int(max(names, default="step_0").removeprefix("step_"))


def test_a_run_that_is_killed_in_every_phase_leaves_no_process_and_completes(
    start: Start, tmp_path: Path, listening: set[tuple[str, int]]
) -> None:
    def begin() -> Command:
        if (tmp_path / "runs" / "run" / "config.yaml").exists():
            return start("resume", "runs/run")
        return start("train", *QUICK, *WORDS)

    first_steps = set()  # of an attempt
    for kill in TABLE:
        run = begin()
        saved = steps_saved(run)
        first_steps.add(saved + 1)
        is_reached = kill.reached(run)
        if kill.phase == "preparing":
            time.sleep(0.3)  # it checks and prepares
        run.wait_until(is_reached)
        listening |= listened(run)
        if (
            kill.phase == "checkpoint being written"
        ):  # the kernel has processes of every kind to end
            assert run.first_rank() and run.find("sglang::scheduler")
        saved = steps_saved(run)
        send(kill, run)
        assert run.exit_code() == kill.exit_code, (kill.phase, run.text())
        _, alive = psutil.wait_procs(run.survivors(), timeout=30)
        assert alive == [], kill.phase
        assert_says_why_it_ended(kill, run)
        # No whole checkpoint is lost, but for the ones that newer ones replaced.
        assert steps_saved(run) >= saved, kill.phase

    run = begin()
    first_steps.add(steps_saved(run) + 1)
    assert run.exit_code() == 0, run.text()
    assert run.survivors() == []
    steps = metrics_of(run)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["weight_version"] for step in steps] == list(range(2, STEPS + 2))
    # What was in flight at the end of an attempt was sampled again, with the checkpoint's weights.
    assert {step["step"] for step in steps if step["token_staleness_max"] == 0} == {
        step for step in first_steps if step <= STEPS
    }
    assert max(step["token_staleness_max"] for step in steps) <= 1
    assert prompts_trained(run) == STEPS * PER_STEP
    assert list(run.run_dir.rglob(f"*{PARTIAL}")) == []
    assert {path.name for path in run.run_dir.iterdir()} >= {"summary.json", "final_model"}
    assert (run.run_dir / "report" / "index.html").exists()
