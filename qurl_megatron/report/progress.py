"""What commands other than a run show: tables, and a bar while they work."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qurl_megatron.report.console import LINE_EVERY_S, duration

PIPE_COLUMNS = 120  # of a table; fewer would cut its numbers


class _TableConsole(Console):
    def on_broken_pipe(self) -> None:
        """Print nothing more, and let the command go on; rich would end it."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table_console() -> Console:
    """Return a console for tables. In a pipe, which rich takes for 80 columns, it is wider."""
    console = _TableConsole(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPE_COLUMNS)
    return console


@contextlib.contextmanager
def show_progress(
    title: str, number: int, unit: str, console: Console
) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `number` units; it shows how many are done.

    A terminal gets a bar, anything else a line for each tenth, and one after a minute without.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{unit},"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    done, start = 0, time.monotonic()
    line_time = start
    with Progress(*columns, console=console, disable=not console.is_interactive) as bar:
        task = bar.add_task(title, total=number)

        def advance() -> None:
            nonlocal done, line_time
            done += 1
            bar.advance(task)
            now = time.monotonic()
            is_due = 10 * done // number > 10 * (done - 1) // number
            if not console.is_interactive and (is_due or now - line_time >= LINE_EVERY_S):
                line_time = now
                left_s = (now - start) / done * (number - done)
                line = f"{title}: {done} of {number} {unit}, {duration(left_s)} left"
                console.print(line, markup=False, soft_wrap=True)

        yield advance
