"""What a training run shows: a table of its steps, warnings, and on a terminal a live last line.

    time     step         s reward   len  cut     KL entropy tok/s  GiB  left
    14:02:11 step 12/80 3.2  0.431   6.1   0% 1.3e-4   0.512  2180  1.2  0:04

Each step is one line of at most 80 columns, wherever it is shown, so the log of a job and the
scrollback of a terminal read alike. Colours follow the terminal and the variable NO_COLOR.
"""

from __future__ import annotations

import math
import textwrap
import time
from datetime import datetime

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from qurl_megatron.config.schema import Config
from qurl_megatron.report.metrics import Evaluation, StepMetrics
from qurl_megatron.report.watch import Watch

WIDTH = 80
HEADER_EVERY = 25  # lines of steps between two headers
LEGEND = """\
s: seconds of a step   len: mean response length in tokens   cut: share cut off
KL: of behaviour and proximal, k3, in nats   entropy: in nats
tok/s: sampled   GiB: memory of learner rank 0   left: hours:minutes"""


class RunConsole:
    """The output of one attempt of a run."""

    def __init__(self, config: Config, *, quiet: bool) -> None:
        self._config = config
        self._console = Console(quiet=quiet, highlight=False)
        self._watch = Watch(config)
        self._lines = 0  # of steps
        self._step_start = time.monotonic()
        self._widths = {
            "time": 8,
            "step": len(f"step {config.steps}/{config.steps}"),
            "s": 5,
            "reward": 6,
            "len": 5,
            "cut": 4,
            "KL": 6,
            "entropy": 7,
            "tok/s": 5,
            "GiB": 4,
            "left": 5,
        }
        self._progress = Progress(
            TextColumn("[bold]{task.description}", markup=True),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left, this step for {task.fields[elapsed]}"),
        )
        self._task = self._progress.add_task(
            config.name[:20], total=config.steps, left="", elapsed=""
        )
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """Print a line, above the live one if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def start(self, earlier: list[StepMetrics]) -> None:
        """Begin to show steps, after those of earlier attempts; repeat the warnings that stand."""
        for step in earlier:
            self._watch.update(step)
        self.say(LEGEND)
        self._warn(self._watch.raised)
        self._step_start = time.monotonic()
        if self._console.is_interactive:
            self._progress.update(self._task, completed=len(earlier))
            self._live = Live(
                console=self._console, refresh_per_second=1, get_renderable=self._last_line
            )
            self._live.start()

    def step(self, metrics: StepMetrics, evaluation: Evaluation | None, left_s: float) -> None:
        """Show a step that has ended, its evaluation if it has one, and the warnings it raises."""
        now = time.monotonic()
        cells = self._cells(metrics, now - self._step_start, left_s)
        self._step_start = now
        if self._lines % HEADER_EVERY == 0:
            self.say(self._row({name: name for name in self._widths}))
        self._lines += 1
        self.say(self._row(cells))
        for name, value in evaluation.lines() if evaluation else []:
            self.say(f"{cells['time']} {cells['step']} {name} {value}")
        self._warn(self._watch.update(metrics))
        self._progress.update(self._task, completed=metrics.step, left=cells["left"])

    def stop(self) -> None:
        """Leave the last state of the live line on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def _warn(self, lines: list[str]) -> None:
        """Print lines of the watch, which are sentences, with line breaks."""
        for line in lines:
            text = textwrap.fill(line, WIDTH, subsequent_indent="  ")
            self._console.print(text, style="yellow", markup=False, soft_wrap=True)

    def _cells(self, metrics: StepMetrics, seconds: float, left_s: float) -> dict[str, str]:
        length = metrics.response_length_mean
        rate = metrics.rollout_tokens_per_s
        return {
            "time": f"{datetime.now():%H:%M:%S}",
            "step": f"step {metrics.step}/{self._config.steps}",
            "s": f"{seconds:.1f}" if seconds < 1000 else f"{seconds:.0f}",
            "reward": f"{metrics.reward_mean:.3f}",
            "len": f"{length:.1f}" if length < 1000 else f"{length:.0f}",
            "cut": f"{metrics.response_truncated_fraction:.0%}",
            "KL": f"{metrics.kl_behaviour_proximal_k3:.1e}".replace("e-0", "e-").replace(
                "e+0", "e+"
            ),
            "entropy": f"{metrics.entropy:.3f}",
            "tok/s": f"{rate:.0f}" if rate < 99_999 else f"{rate / 1000:.0f}k",
            "GiB": f"{metrics.memory_bytes / 2**30:.1f}",
            "left": hours_minutes(left_s),
        }

    def _row(self, cells: dict[str, str]) -> str:
        """Return the cells as a line: time and step to the left, numbers to the right."""
        return " ".join(
            cells[name].ljust(width) if name in ("time", "step") else cells[name].rjust(width)
            for name, width in self._widths.items()
        )

    def _last_line(self) -> Progress:
        elapsed_s = time.monotonic() - self._step_start
        self._progress.update(self._task, elapsed=f"{elapsed_s // 60:.0f}:{elapsed_s % 60:02.0f}")
        return self._progress


def hours_minutes(seconds: float) -> str:
    """Return a duration as `h:mm`, rounded up to minutes."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02}"
