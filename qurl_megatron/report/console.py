"""What a training run shows: lines on its steps, warnings, and on a terminal a live bar below.

    time     step           s reward   len  cut      KL entropy tok/s  GiB left
    14:02:11 step 12/80   3.2  0.431   6.1   0% 1.3e-04   0.512  2180  1.2 3 min 37 s

The first steps have a line each. Later a step has one if it was evaluated or warns, and so that a
log goes on: every tenth step, and when a minute has passed. Colours follow the terminal and the
variable NO_COLOR.
"""

from __future__ import annotations

import textwrap
import time
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from qurl_megatron.config.schema import Config
from qurl_megatron.report.advice import Watch
from qurl_megatron.report.metrics import Evaluation, StepMetrics

FIRST_STEPS = 10  # of an attempt, each with a line
LINE_EVERY = 10  # steps
LINE_EVERY_S = 60.0
HEADER_EVERY = 25  # lines of steps between two headers
LEGEND = """\
s: seconds of a step   len: mean response length in tokens   cut: share cut off
KL: of behaviour and proximal, k3, in nats   entropy: in nats
tok/s: sampled   GiB: memory of learner rank 0   left: time to the last step"""


class RunConsole:
    """The output of one attempt of a run."""

    def __init__(self, config: Config, *, quiet: bool) -> None:
        self._config = config
        self._console = Console(quiet=quiet, highlight=False)
        self._watch = Watch(config)
        self._steps = self._lines = 0  # of this attempt
        self._step_start = self._line_time = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}this step for"),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=1,
            disable=not self._console.is_interactive,
        )
        self._task = self._bar.add_task(config.name[:20], total=config.steps, state="")

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line, above the live bar if there is one."""
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def start(self, earlier: list[dict[str, Any]]) -> None:
        """Begin to show steps, after those of earlier attempts; repeat the warnings that stand.

        `earlier` has their lines of metrics.jsonl.
        """
        for step in earlier:
            self._watch.update(step)
        self.say(LEGEND)
        self._warn(self._watch.raised)
        self._step_start = time.monotonic()
        self._bar.reset(self._task, completed=len(earlier))
        self._bar.start()

    def step(self, metrics: StepMetrics, evaluation: Evaluation | None, left_s: float) -> None:
        """Show a step that has ended, its evaluation if it has one, and the warnings it raises."""
        now = time.monotonic()
        warnings = self._watch.update(vars(metrics))
        self._steps += 1
        is_due = self._steps <= FIRST_STEPS or metrics.step % LINE_EVERY == 0
        is_late = now - self._line_time >= LINE_EVERY_S or metrics.step == self._config.steps
        if evaluation or warnings or is_due or is_late:
            self._line_time = now
            self._show(metrics, evaluation, now - self._step_start, left_s)
        self._warn(warnings)
        self._step_start = now
        state = f"reward {metrics.reward_mean:.3f}, {duration(left_s)} left, "
        self._bar.reset(self._task, completed=metrics.step, state=state)

    def stop(self) -> None:
        """Leave the last state of the live bar on the screen."""
        self._bar.stop()

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def _warn(self, lines: list[str]) -> None:
        """Print lines of the watch, which are sentences, with line breaks."""
        for line in lines:
            self.say(textwrap.fill(line, 80, subsequent_indent="  "), style="yellow")

    def _show(
        self, metrics: StepMetrics, evaluation: Evaluation | None, seconds: float, left_s: float
    ) -> None:
        """Print the line of a step, below a header if one is due, and its scores."""
        step = f"{datetime.now():%H:%M:%S} step {metrics.step}/{self._config.steps}"
        width = len(f"00:00:00 step {self._config.steps}/{self._config.steps}")
        if self._lines % HEADER_EVERY == 0:
            columns = "    s reward   len  cut      KL entropy tok/s  GiB left"
            self.say(f"{'time     step':{width}} {columns}")
        self._lines += 1
        self.say(
            f"{step:{width}} {_number(seconds)} {metrics.reward_mean:6.3f} "
            f"{_number(metrics.response_length_mean)} {metrics.response_truncated_fraction:4.0%} "
            f"{metrics.kl_behaviour_proximal_k3:7.1e} {metrics.entropy:7.3f} "
            f"{_number(metrics.rollout_tokens_per_s)} {metrics.memory_bytes / 2**30:4.1f} "
            f"{duration(left_s)}"
        )
        for name, value in evaluation.lines() if evaluation else []:
            self.say(f"{step} {name} {value}")


def _number(value: float) -> str:
    """Return a number in five columns, with a digit behind the point if there is room."""
    return f"{value:5.1f}" if value < 1000 else f"{value:5.0f}"


def duration(seconds: float) -> str:
    """Return a duration in words: `12 s`, `3 min 1 s` or `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
