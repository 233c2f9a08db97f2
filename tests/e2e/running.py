"""A `qurl` command as a user runs it, and every process that it starts."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from e2e import forked
from qurl_megatron import device
from qurl_megatron.launch.owner import logs_of, newest_attempt
from qurl_megatron.launch.supervisor import LEARNER
from qurl_megatron.learner.checkpoint import read_state
from qurl_megatron.report.metrics import PHASES
from qurl_megatron.report.record import list_checkpoints
from qurl_megatron.rollout import preload
from qurl_megatron.rollout.roster import read_roster

QURL = Path(sys.executable).with_name("qurl")
PER_STEP, COMPLETIONS = 8, 4
SMALL = [
    "name=run",
    "steps=2",
    f"rollout.prompts_per_step={PER_STEP}",
    f"rollout.completions_per_prompt={COMPLETIONS}",
    "model_builder=qurl_megatron.recipes.quickstart:build_model",  # shown no answers
    "evaluation.problems=0",
    "rollout.servers=1",
    "learner.data_parallel_size=1",  # shards of tensors are more to test than copies
    "learner.tensor_parallel_size=2",
]
# A quickstart with few problems, and a verifier that its processes need not import.
QUICK = ["quickstart", *SMALL, "prompts.options.size=1000", "reward=exact"]
# Many of these answers run while weights are published: a few at a time, or long ones.
LONG_ANSWERS = ["rollout.max_completion_length=64", "rollout.server.max_running_requests=8"]
TIMEOUT_S = 480.0
Start = Callable[..., "Command"]
"""Type of the fixture `start`: starts `qurl` with the given arguments."""


class Command:
    """A `qurl` command in its own directory, with every process that it has started.

    Without a GPU it is a fork, else the installed program in a session of its own.
    """

    def __init__(
        self, directory: Path, *words: object, is_fork: bool = device.accelerator() == "cpu"
    ) -> None:
        self.run_dir = directory / "runs" / "run"
        self.output = directory / "output"
        arguments = [str(word) for word in words]
        self.process: preload.Started | subprocess.Popen[bytes]
        if is_fork:
            program = preload.Program(
                forked.__name__, [str(directory), *arguments], title="qurl", log_file=self.output
            )
            self.process = preload.start(program)
        else:
            with self.output.open("wb") as output:
                self.process = subprocess.Popen(
                    [QURL, *arguments],
                    cwd=directory,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        self.started: set[psutil.Process] = set()

    def text(self) -> str:
        """Return what the command has printed."""
        return self.output.read_text()

    def says_how_to_resume(self, step: int, run_dir: object) -> bool:
        """Tell whether it said how; how it names the program depends on its directory."""
        line = rf"to resume after step {step}: \S*qurl resume {run_dir}\n"
        return re.search(line, self.text()) is not None

    def wait_for(self, pattern: str) -> None:
        """Wait until the output matches; fail if the command ends first."""
        self.wait_until(lambda: re.search(pattern, self.text()) is not None, 0.1)

    def wait_until(self, is_reached: Callable[[], bool], poll_s: float = 0.005) -> None:
        """Wait until a phase is reached; fail if the command ends first."""
        deadline, looked_at = time.monotonic() + TIMEOUT_S, 0.0
        while not is_reached():
            assert self.process.poll() is None, f"ended before the phase:\n{self.text()}"
            assert time.monotonic() < deadline, f"the phase did not come:\n{self.text()}"
            if time.monotonic() > looked_at + 0.5:  # to know every process, at a low cost
                self.poll()
                looked_at = time.monotonic()
            time.sleep(poll_s)
        self.poll()

    def poll(self) -> int | None:
        """Record the running processes; return the exit code, or None while the command runs."""
        code = self.process.poll()
        if code is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                main = psutil.Process(self.process.pid)
                self.started.update(main.children(recursive=True))
        return code

    def exit_code(self) -> int:
        """Wait until the command ends and return its exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"did not end:\n{self.text()}"
            time.sleep(0.1)
        return code

    def end(self) -> None:
        """Ask the command to end if it still runs."""
        if self.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.exit_code()

    def survivors(self) -> list[psutil.Process]:
        """Return the processes of the command that still run."""
        running = []
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and process.is_running():
                    running.append(process)
        return running

    def find(self, word: str) -> psutil.Process:
        """Return the oldest process of this command with `word` in its name or command line."""
        self.poll()
        for process in sorted(self.started, key=psutil.Process.create_time):
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in process.name() or word in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no process {word!r}")

    def first_rank(self) -> psutil.Process:
        """Return rank 0 of the learner, which is older than the processes that ranks start."""
        return self.find(f"{LEARNER} runs/")

    def server_pid(self, set_name: str, index: int) -> int:
        """Return the main process of a server."""
        logs = logs_of(self.run_dir, newest_attempt(self.run_dir))
        return read_roster(logs / "servers_here.json")[set_name][index].pid


def metrics_of(run: Command) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def middle_s(step: dict[str, float], phase: str) -> float:
    """Return the seconds from a step's end to the middle of a phase of the next, if it is alike."""
    before = sum(step[f"time_{name}_s"] for name in PHASES[: PHASES.index(phase)])
    return before + step[f"time_{phase}_s"] / 2


def prompts_trained(run: Command) -> int:
    """Return how many prompts the newest checkpoint counts as trained, and no others as taken."""
    state = read_state(list_checkpoints(run.run_dir)[-1]).prompts
    assert state["epoch"] == 0
    return state["position"]


def curve_steps(run_dir: Path, tag: str) -> list[int]:
    """Return the steps at which TensorBoard shows a metric."""
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [event.step for event in shown.Scalars(tag)]
