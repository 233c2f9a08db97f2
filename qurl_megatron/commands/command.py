"""The kinds of commands: all end on wrong input with one line, and some can be a Slurm job."""

import shlex
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from qurl_megatron.commands.runs import job_options, launch
from qurl_megatron.launch.bad_input import exit_on_bad_input

JOB_OPTIONS = "executor dry_run account partition time sbatch setup env".split()  # of `launch`


class Command(TyperCommand):
    """A command that ends with one line and exit code 2 on wrong input."""

    @exit_on_bad_input()
    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        return super().invoke(ctx)  # type: ignore[arg-type]


class JobCommand(Command):
    """A command with the options of a Slurm job, which runs the same command on one node.

    Its function checks its input, yields the number of GPUs that it uses, and then does its work.
    So wrong input is refused before a job is submitted.
    """

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        app = typer.Typer()
        app.command()(launch)
        self.params += [
            option for option in typer.main.get_command(app).params if option.name in JOB_OPTIONS
        ]

    @exit_on_bad_input()
    def invoke(self, ctx: typer.Context) -> None:  # type: ignore[override]
        options, dry_run = job_options(ctx), ctx.params["dry_run"]
        words = [str(Path(sys.executable).with_name("qurl")), *self._words(ctx)]
        for name in JOB_OPTIONS:
            del ctx.params[name]
        steps = super().invoke(ctx)
        gpus = next(steps)
        if options:
            from qurl_megatron.launch.experiment import (
                check_sbatch,
                command_script,
                say_defaults,
                submit,
            )

            script = command_script(words, gpus, options)
            say_defaults(options)
            if dry_run:
                print(script, end="")
            else:
                check_sbatch()
                submit({shlex.join(words[1:]): script})
        elif dry_run:
            print(shlex.join(words))
        else:
            next(steps, None)  # the rest of the command

    def _words(self, ctx: typer.Context) -> list[str]:
        """Return the words of this command line, without the options of the job."""
        options, arguments = [], []
        for parameter in self.params:
            name = parameter.name or ""
            source = ctx.get_parameter_source(name)
            if name in JOB_OPTIONS or source is None or source.name != "COMMANDLINE":
                continue
            value = ctx.params[name]
            values = value if isinstance(value, (list, tuple)) else [value]
            if parameter.param_type_name == "argument":
                arguments += [str(value) for value in values]
            else:
                options += [f"{parameter.opts[0]}={value}" for value in values]
        return [str(ctx.info_name), *options, "--", *arguments]
