"""A `qurl` command as a user runs it, watched with every process it starts."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

QURL = Path(sys.executable).with_name("qurl")
SMALL = [
    "name=run",
    "steps=2",
    "rollout.prompts_per_step=8",
    "rollout.completions_per_prompt=4",
    "warmup.max_steps=0",
    "evaluation.problems=0",
]
TIMEOUT_S = 240.0


class Command:
    """A `qurl` command in a directory of its own, with every process it ever started."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.run_dir = directory / "runs" / "run"
        self.output = directory / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [QURL, *words], cwd=directory, stdout=output, stderr=subprocess.STDOUT
            )
        self.started: set[psutil.Process] = set()

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str) -> None:
        """Return when the output matches; fail when the run ends before."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.text()):
            assert self.poll() is None, f"ended before {pattern!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} in time:\n{self.text()}"
            time.sleep(0.1)

    def poll(self) -> int | None:
        if self.process.poll() is None:
            main = psutil.Process(self.process.pid)
            self.started.update(main.children(recursive=True))
        return self.process.returncode

    def exit_code(self) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while self.poll() is None:
            assert time.monotonic() < deadline, f"did not end:\n{self.text()}"
            time.sleep(0.1)
        return self.process.returncode

    def survivors(self) -> list[psutil.Process]:
        return [process for process in self.started if process.is_running()]

    def find(self, word: str) -> psutil.Process:
        """A process of this run with `word` in its name or command line."""
        self.poll()
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in process.name() or word in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no process {word!r}")


def metrics_of(run: Command) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def curve_steps(run: Command, tag: str) -> list[int]:
    """The steps at which TensorBoard shows a metric."""
    shown = EventAccumulator(str(run.run_dir / "tensorboard")).Reload()
    return [event.step for event in shown.Scalars(tag)]
