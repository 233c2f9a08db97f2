"""What all commands are; `jobs.py` has the kind that can be a Slurm job."""

from typing import Any

import typer
from typer.core import TyperCommand

from qurl_megatron.launch.bad_input import exit_on_bad_input


class Command(TyperCommand):
    """A command that ends with one line and exit code 2 on wrong input."""

    @exit_on_bad_input()
    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        return super().invoke(ctx)  # type: ignore[arg-type]
