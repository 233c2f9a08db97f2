"""Prepare a run that exists to go on, or to begin again if it has no checkpoint.

`prepare_resume` is for a run's directory, `prepare_resume_or_new` for a job that may have to create
it. Both return and raise what `prepare_new` does.
"""

import glob
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from qurl_megatron.config.extensions import needed
from qurl_megatron.config.gpus import Node
from qurl_megatron.config.resume import validate_resume
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import Given, leaf_values, load, with_overrides
from qurl_megatron.data.entries import REASONING_GYM, parts_of
from qurl_megatron.files import append_lines
from qurl_megatron.launch.owner import JOB_SCRIPT, claim, how_to_resume
from qurl_megatron.launch.prepare import check_and_settle, prepare_new, write_files
from qurl_megatron.launch.recipe import BASIS, Recipe, load_recipe
from qurl_megatron.launch.settle import SETTLED, choose_scale
from qurl_megatron.launch.sources import change_sources, find_sources, make_paths_absolute, sources
from qurl_megatron.memory.host import check_host
from qurl_megatron.report.record import change_line, check_run, list_checkpoints

OF_DIRECTORY = ("name", "output_dir", "recipe_file")


def prepare_resume(
    run_dir: Path,
    overrides: Sequence[str | Given],
    num_gpus: int | None = None,
    *,
    node: Node | None = None,
    writes: bool = True,
    asks_servers: bool = True,
) -> tuple[Config, str]:
    """Apply overrides to an existing run, and write its config.yaml and data.txt.

    The run's directory may have been moved or renamed. An override may give the new place of a
    model or of data that is no longer where it was. `num_gpus` and `node` are as for
    `prepare_new`.

    Fields that differ from those of the run so far are appended to changes.jsonl, and begin the
    summary.

    If a file of the base under a checkpoint's adapters was touched since, the base is read and
    quantized whole, to compare its hash: on one core 1.5 s per GB of a BF16 model for INT8, and 6 s
    for INT4.
    """
    check_run(run_dir)
    if run_dir.name in ("", ".."):  # the directory's name becomes the run's
        run_dir = run_dir.resolve()
    with claim(run_dir) if writes else nullcontext():
        saved = load(run_dir / "config.yaml")
        was_built = Path(saved.model).parts[-2:] == (saved.name, "model")
        if was_built and (run_dir / "model").is_dir():
            saved.model = str(run_dir / "model")  # the recipe built it in the run's directory
        saved.output_dir, saved.name = str(run_dir.parent), run_dir.name
        config = with_overrides(saved, overrides)
        find_sources(config, saved)
        for each in (saved, config):
            make_paths_absolute(each)
        accept_new_places(saved, config)
        validate_resume(saved, config)
        newest = max(list_checkpoints(run_dir), default=None)
        given = [
            each.partition("=")[0] if isinstance(each, str) else each.path for each in overrides
        ]
        data_summary = check_and_settle(
            config, given, num_gpus, node, asks_servers, resumes=True, newest=newest
        )
        done = int(newest.name.removeprefix("step_")) if newest else 0
        if config.steps < done:
            raise ConfigError(f"steps={config.steps}: the run has done {done}; give more")
        if newest and config.adapters.rank and asks_servers:
            files = needed("adapters", "files", by=f"adapters.rank={config.adapters.rank}")
            files.check_base(config, newest, saved.model)
        if writes:
            if num_gpus == 0:
                check_host(config)
            write_files(config, data_summary, config.run_dir)
        changes = _changes(saved, config, done)
        if writes and changes:
            append_lines(config.run_dir / "changes.jsonl", changes)
    lines = [f"{change_line(change)}\n" for change in changes]
    return config, "".join(lines) + data_summary


def _changes(saved: Config, config: Config, done: int) -> list[dict[str, Any]]:
    """Return an object of changes.jsonl for each field that a resume after step `done` changes."""
    before, now = (
        json.loads(json.dumps(leaf_values(each), default=vars)) for each in (saved, config)
    )
    return [
        {"after_step": done, "field": field, "before": before[field], "now": value}
        for field, value in now.items()
        if value != before[field]
    ]


def prepare_resume_or_new(
    recipe: str | Recipe, node: Node, script: str = "", **how: bool
) -> tuple[Config, str]:
    """Resume the named run, or create it, for a job on such nodes; `how` has both's options.

    The fields that the recipe's user has given change a run that exists, as those of
    `prepare_resume` do. The rest of the recipe must be as the run has it, unless `script` is that
    of the run's last job, which has nothing new to say.
    """
    read = load_recipe(recipe)
    if not read.config.name:
        raise ConfigError("name=: missing; a job needs it to find its run after a restart")
    run_dir = read.config.run_dir
    if (run_dir / "config.yaml").is_file():
        values = leaf_values(read.config)
        given = [Given(field, values[field]) for field in read.given - {"name", "output_dir"}]
        last = run_dir / JOB_SCRIPT
        try:
            if not (script and last.exists() and last.read_text() == script):
                check_as_saved(read, load(run_dir / "config.yaml"))
            return prepare_resume(run_dir, given, node=node, **how)
        except ConfigError as error:
            raise ConfigError(
                f"name={run_dir.name}: {run_dir} exists: {error}; choose another name; "
                f"{how_to_resume(run_dir)}"
            ) from None
    if run_dir.exists():
        raise ConfigError(f"name={run_dir.name}: {run_dir} exists and is not a run")
    return prepare_new(read, [], node=node, **how)


def check_as_saved(recipe: Recipe, saved: Config) -> None:
    """Check that a recipe has the values of an existing run in the fields that are not given.

    Raises:
        ConfigError: it has not; the message names the first field.
    """
    config = with_overrides(recipe.config, [])
    choose_scale(config, recipe.given)
    before = leaf_values(saved)
    for field, value in leaf_values(config).items():
        is_open = value == "" or (field in SETTLED and value == SETTLED[field])
        is_open |= field == "steps" and config.epochs > 0
        if field not in {*recipe.given, *OF_DIRECTORY} and not is_open and value != before[field]:
            package = recipe.package or BASIS
            raise ConfigError(f"it has {field}={before[field]}, and {package} {value}")


def accept_new_places(saved: Config, config: Config) -> None:
    """Take over from `config` the place of each model and data source that is gone in `saved`."""
    new = sources(config)
    change_sources(
        saved, lambda field, source: source if _exists(source) else new.get(field, source)
    )


def _exists(source: str) -> bool:
    """Return whether a model or data source is there; DIR of DIR:SPLIT counts."""
    return all(
        part.startswith(REASONING_GYM)
        or any(glob.glob(path) for path in (part, part.partition(":")[0]))
        or Path(part).exists()
        for part in parts_of(source)
    )


def check_not_of_slurm(run_dir: Path) -> None:
    """Check that a run is not one of Slurm jobs, or that this is one.

    Raises:
        ConfigError: it is; this machine, such as a login node, may not be made for it.
    """
    if (run_dir / JOB_SCRIPT).exists() and "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            f"{run_dir}: Slurm jobs train this run; {how_to_resume(run_dir)}; to run it on this "
            "machine, add --here"
        )


def warn_of_pickles(directory: Path) -> None:
    """Print a line if a run or a checkpoint belongs to another user, whose code it may hold."""
    user = directory.stat().st_uid if directory.exists() else 0
    if user not in (0, os.getuid()):
        print(
            f"qurl: {directory} belongs to user {user}: its checkpoints hold pickles, which can "
            "run any program when they are read; go on only if you trust that user",
            file=sys.stderr,
        )
