"""`qurl launch`, and what commands that can be Slurm jobs share with it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qurl_megatron.commands.command import Command
from qurl_megatron.commands.runs import Overrides, RecipeName
from qurl_megatron.launch.bad_input import exit_on_bad_input

if TYPE_CHECKING:
    from qurl_megatron.launch.experiment import JobOptions

# Options of `launch` that only Slurm jobs have.
SLURM_OPTIONS = """account partition time gpus_per_node gpu heterogeneous sbatch container_image
    container_mounts setup env max_restarts""".split()
JOB_OPTIONS = (
    "executor dry_run account partition time sbatch setup env".split()
)  # of `launch`, that other commands have


def launch(
    context: typer.Context,
    recipe: RecipeName,
    overrides: Overrides = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE,VALUE",
            help="Start a run for each value; repeat the option for all combinations.",
        ),
    ] = None,
    layouts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Start a run for each layout in a table of `qurl plan --output FILE.csv`.",
        ),
    ] = None,
    executor: Annotated[str, typer.Option(help="Where to run: local or slurm.")] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")
    ] = False,
    account: Annotated[str | None, typer.Option(help="Slurm account of the jobs.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition of the jobs.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit of each job, such as 04:00:00.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, max=128, help="Number of GPUs per node. Default: 8.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Kind of GPU that the plan of the run assumes, as in qurl plan."),
    ] = None,
    heterogeneous: Annotated[
        bool,
        typer.Option(
            "--heterogeneous",
            help="Use a heterogeneous job: learner nodes and rollout nodes of two kinds.",
        ),
    ] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUE",
            help="Any other sbatch option, such as qos=high; false removes it.",
        ),
    ] = None,
    container_image: Annotated[
        str | None, typer.Option(help="Container image (pyxis) that the job steps run in.")
    ] = None,
    container_mounts: Annotated[
        str | None, typer.Option(help="Mounts of the container: HOST:CONTAINER,HOST:CONTAINER.")
    ] = None,
    setup: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lines of shell that a job runs first: modules."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable of the jobs, such as NCCL_DEBUG=INFO."),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, max=10_000, help="How often a job may be requeued; 20 if not given."),
    ] = None,
) -> None:
    """Run a recipe, or a sweep over it, on this machine or as Slurm jobs.

    A Slurm job asks for the nodes that its run needs.

    A job that runs out of time or is preempted is requeued and resumes its run.
    """
    from qurl_megatron.launch import experiment

    options = job_options(context)
    words, sweeps = overrides or [], sweep or []
    sys.exit(
        experiment.launch(recipe, words, sweeps, layouts=layouts, options=options, dry_run=dry_run)
    )


def job_options(context: typer.Context) -> JobOptions | None:
    """Return the job's options from the command line; None: it runs on this machine.

    Raises:
        ConfigError: an option is malformed, or there are some without `--executor slurm`.
    """
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.launch.experiment import JobOptions

    given = {name: value for name, value in context.params.items() if value not in (None, "", [])}
    if given["executor"] not in ("local", "slurm"):
        raise ConfigError(f"--executor {given['executor']}: executors are local and slurm")
    if given["executor"] == "local":
        for name in SLURM_OPTIONS:
            if given.get(name):
                raise ConfigError(f"--{name.replace('_', '-')}: only with --executor slurm")
        return None
    sbatch = _pairs(given, "sbatch", "OPTION=VALUE")
    setup = given.get("setup")
    try:
        setup_lines = setup.read_text() if setup else ""
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--setup {setup}: not a file of shell lines ({error})") from None
    names = ("gpus_per_node", "gpu", "heterogeneous", "container_image", "max_restarts")
    switches: dict[str, object] = {"true": True, "false": False}
    return JobOptions(
        sbatch={name: given.get(name) for name in ("account", "partition", "time")}
        | {name: switches.get(value, value) for name, value in sbatch.items()},
        container_mounts=[mount for mount in given.get("container_mounts", "").split(",") if mount],
        environment=_pairs(given, "env", "NAME=VALUE"),
        setup_lines=setup_lines,
        **{name: given[name] for name in names if name in given},
    )


def _pairs(given: dict[str, Any], option: str, form: str) -> dict[str, str]:
    """Return the names and values of an option that is given once for each pair."""
    from qurl_megatron.config.schema import ConfigError

    pairs = {}
    for word in given.get(option, []):
        name, _, value = word.partition("=")
        if not name or not value:
            raise ConfigError(f"--{option} {word}: not of the form {form}")
        pairs[name] = value
    return pairs


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
