"""The command that writes a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of the runs to compare.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write. Default: in the first run report/index.html, or "
            "report/comparison.html for several."
        ),
    ] = None,
) -> None:
    """Write an HTML page about one run, or about several side by side."""
    from qurl_megatron.extensions.report.page import write_report

    name = "index.html" if len(run_dirs) == 1 else "comparison.html"
    output = output or run_dirs[0] / "report" / name
    write_report(run_dirs, output)
    print(f"{output} is ready")
