"""Commands that can be Slurm jobs: `may_be_job` gives them `--executor slurm` and its options."""

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from qurl_megatron.commands.runs import job_options, launch

# The same as those of `qurl launch`.
OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(launch, eval_str=True).parameters.items()
    if name in ("executor", "dry_run", "account", "partition", "time", "sbatch", "setup", "env")
}


def may_be_job(command: Callable[..., Iterator[int]]) -> Callable[..., None]:
    """Give a command the options of a Slurm job, which runs the same command on one node.

    `command` checks its input, yields the number of GPUs that it uses, and then does its work. So
    wrong input is refused before a job is submitted.
    """

    @functools.wraps(command)
    def run(context: typer.Context, **given: Any) -> None:
        options = job_options(context)
        steps = command(**{name: given[name] for name in given.keys() - OPTIONS.keys()})
        gpus = next(steps)
        words = [str(Path(sys.executable).with_name("qurl")), *_words(context)]
        if options:
            from qurl_megatron.launch.experiment import (
                check_sbatch,
                command_script,
                say_defaults,
                submit,
            )

            script = command_script(words, gpus, options)
            say_defaults(options)
            if given["dry_run"]:
                print(script, end="")
            else:
                check_sbatch()
                submit({shlex.join(words[1:]): script})
        elif given["dry_run"]:
            print(shlex.join(words))
        else:
            next(steps, None)  # the rest of the command

    # typer reads the command line's parameters from the signature and the annotations.
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    first = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (first, *parameters, *OPTIONS.values())
    ]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _words(context: typer.Context) -> list[str]:
    """Return the words of this command line, without the options of the job."""
    options, arguments = [], []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in OPTIONS or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        values = value if isinstance(value, (list, tuple)) else [value]
        if parameter.param_type_name == "argument":
            arguments += [str(value) for value in values]
        else:
            options += [f"{parameter.opts[0]}={value}" for value in values]
    return [str(context.info_name), *options, "--", *arguments]
