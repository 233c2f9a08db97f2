"""Commands that start runs on this machine, or show what would be started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qurl_megatron.config.schema import Config

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


def config(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="Recipe or file. Default: list all recipes.")
    ] = "",
    overrides: Overrides = None,
) -> None:
    """Print a recipe's configuration as YAML, with the meaning of each field as a comment."""
    from qurl_megatron.config.meanings import commented_yaml
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
