"""Commands on runs and on the machine that they run on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from qurl_megatron.config.schema import Config
    from qurl_megatron.launch.experiment import JobOptions

RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe, such as quickstart, or a file of your own: FILE.yaml or FILE.py:NAME. "
        "-: YAML on stdin.",
    ),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: runs/NAME.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE",
        help="Fields to change, or further FILE.yaml; `qurl config RECIPE` lists the fields.",
    ),
]
# Options of `qurl launch` that only Slurm jobs have.
SLURM_OPTIONS = """account partition time gpus_per_node gpu heterogeneous sbatch container_image
    container_mounts setup env max_restarts""".split()


def doctor() -> None:
    """Check this machine: packages, GPUs, shared memory and Slurm.

    Exit with code 1 if something that a run needs is missing or wrong.
    """
    from qurl_megatron.commands import doctor

    results = doctor.check_machine()
    print(doctor.page(results))
    sys.exit(1 if any(status == "!!" for status, _, _ in results) else 0)


def config(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="Recipe or file. Default: list all recipes.")
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Print a recipe's configuration as YAML, with the meaning of each field as a comment."""
    from qurl_megatron.config.text import commented_yaml
    from qurl_megatron.launch.recipe import load_recipe, recipe_meanings

    if not recipe:
        for name, meaning in recipe_meanings().items():
            print(f"{name:20} {meaning}")
        return
    loaded = load_recipe(recipe, overrides or [])
    if loaded.package:
        print(f"# Recipe that gives the fields left out here.\nrecipe: {loaded.package}")
    print(commented_yaml(loaded.config), end="")


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the run and print a summary of its data. Start and write nothing.",
        ),
    ] = False,
) -> None:
    """Run a recipe on this machine: start its servers and learner ranks, and watch them.

    A summary of the data is printed before anything starts.
    """
    from qurl_megatron.device import num_gpus
    from qurl_megatron.launch.prepare import prepare_new

    config, data_summary = prepare_new(recipe, overrides or [], num_gpus(), writes=not dry_run)
    if dry_run:
        print(data_summary, end="")
    else:
        _run_here(config, data_summary)


def resume(
    run_dir: RunDir,
    overrides: Overrides = None,
    here: Annotated[
        bool, typer.Option("--here", help="Resume even a run of Slurm jobs on this machine.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the run. Start and write nothing.")
    ] = False,
) -> None:
    """Resume a run from its newest checkpoint, or start it again if it has none.

    The learner's layout may differ from that of the checkpoint.
    """
    from qurl_megatron.device import num_gpus
    from qurl_megatron.launch.resume import check_not_of_slurm, prepare_resume, warn_of_pickles

    if not here:
        check_not_of_slurm(run_dir)
    warn_of_pickles(run_dir)
    config, data_summary = prepare_resume(run_dir, overrides or [], num_gpus(), writes=not dry_run)
    if dry_run:
        print(data_summary, end="")
    else:
        _run_here(config, data_summary)


def _run_here(config: Config, data_summary: str) -> None:
    """Run a prepared run; exit with its code."""
    from qurl_megatron.launch import local
    from qurl_megatron.machine.output import outlive_output
    from qurl_megatron.memory.disk import check_disk

    outlive_output(config.run_dir)
    print(f"the run {check_disk(config)}", flush=True)
    print(data_summary, end="", flush=True)
    sys.exit(local.run(config))


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
