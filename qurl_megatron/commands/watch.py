"""Commands that show what runs do."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from qurl_megatron.commands.runs import RunDir


def status(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs: runs/NAME.")
    ],
) -> None:
    """Show how far runs have come, and whether they are running."""
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.launch.status import status

    code = 0
    for run_dir in run_dirs:
        try:
            print(f"{run_dir}: {status(run_dir)}", flush=True)
        except ConfigError as error:  # the others are shown all the same
            print(f"qurl: {error}", file=sys.stderr, flush=True)
            code = 2
    sys.exit(code)


def logs(
    run_dir: RunDir,
    lines: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Number of lines of each log.")
    ] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", help="Then go on with the lines of steps, to the run's end.")
    ] = False,
) -> None:
    """Show the last lines of the newest logs of a run's job, servers and learner ranks.

    With --follow only those of its steps.
    """
    from qurl_megatron.launch import status
    from qurl_megatron.machine.output import tail

    for text in status.follow(run_dir, lines) if follow else ():
        print(text, end="", flush=True)
    for path in [] if follow else status.newest_logs(run_dir):
        print(f"==> {path} <==\n{tail(path, lines)}\n")
