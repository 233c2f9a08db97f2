"""Settle and check a run, then create or update its directory.

`prepare_new` is for a new run; those of `resume.py` are for one that exists. They return the run's
configuration and the summary of its data. They raise ArchitectureError, ConfigError or DataError,
whose text is one line: what is wrong, where, and what would be right. What the fields leave open is
decided in `settle`.

With `writes=False` they only check. With `asks_servers=False` the run starts later or elsewhere:
they neither ask the servers of `rollout.servers_at` nor compare the base under adapters.
"""

from __future__ import annotations

import dataclasses
import difflib
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import OBJECTIVES, Config, ConfigError
from qurl_megatron.config.text import save
from qurl_megatron.config.validate import check_weight_format, validate
from qurl_megatron.files import PARTIAL, read_json_object, write_whole
from qurl_megatron.launch.placement import place_servers
from qurl_megatron.launch.recipe import Recipe, default_name, load_recipe, run_function
from qurl_megatron.launch.settle import choose_scale, settle, settle_steps
from qurl_megatron.launch.sources import find_sources, make_paths_absolute
from qurl_megatron.machine.output import qurl_command
from qurl_megatron.memory.disk import check_disk
from qurl_megatron.memory.host import check_host, check_shared_memory, check_workers
from qurl_megatron.model import hub
from qurl_megatron.report.metrics import OF_EVALUATION, StepMetrics, measures

if TYPE_CHECKING:
    from qurl_megatron.config.gpus import Node


def prepare_new(
    recipe: str | Recipe,
    overrides: Iterable[str] = (),
    num_gpus: int | None = None,
    *,
    node: Node | None = None,
    writes: bool = True,
    asks_servers: bool = True,
) -> tuple[Config, str]:
    """Create a new run's directory: its config.yaml, data.txt, and a model that the recipe builds.

    Nothing is written before all checks have passed. `num_gpus` is the number of GPUs of this
    machine if the whole run is to fit on it; None skips that check. `node` describes the nodes of a
    job that runs it instead.
    """
    read = load_recipe(recipe, overrides)
    config = read.config
    config.recipe_file = dict(read.files) or config.recipe_file
    config.name = config.name or default_name(read.name)
    output = Path(config.output_dir)
    if file := next((each for each in (output, *output.parents) if each.is_file()), None):
        raise ConfigError(f"output_dir={output}: {file} is a file; choose another directory")
    if config.run_dir.exists():
        raise ConfigError(
            f"name={config.name}: {config.run_dir} exists; choose another name, or resume that "
            f"run: {qurl_command('resume', config.run_dir)}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "model"
        train = find_or_build(read, built)
        data_summary = check_and_settle(config, read.given, num_gpus, node, asks_servers)
        if writes:
            if num_gpus == 0:
                check_host(config)
            if train:
                train(config)
            output.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(PARTIAL, config.name[:50], output) as place:
                (unfinished := Path(place) / "run").mkdir()
                if built.exists():
                    config.model = str(config.run_dir / "model")
                    for path in built.iterdir():  # safetensors' files are for this user only
                        shutil.copymode(built / "config.json", path)
                    shutil.move(built, unfinished / "model")
                make_paths_absolute(config)
                write_files(config, data_summary, unfinished)
                unfinished.rename(config.run_dir)  # whole: a job that is killed before starts again
    return config, data_summary


def find_or_build(read: Recipe, built: Path) -> Any:
    """Find what a new run reads, with its model built at `built` if the recipe builds one.

    Return what teaches a built model, if it must be taught. UAQ's scale is chosen by the model.
    """
    config = read.config
    find_sources(config, Config())
    if said := choose_scale(config, read.given):
        print(f"qurl: {said}", file=sys.stderr)
    if config.model or not config.model_builder:
        return None
    config.model = str(built)
    return run_function(config.model_builder, built, config.seed)


def write_files(config: Config, data_summary: str, run_dir: Path) -> None:
    """Write a run's config.yaml and data.txt."""
    save(config, run_dir / "config.yaml")
    write_whole(run_dir / "data.txt", data_summary)


def check_and_settle(
    config: Config,
    given: Collection[str],
    num_gpus: int | None,
    node: Node | None,
    asks_servers: bool,
    *,
    resumes: bool = False,
    newest: Path | None = None,
) -> str:
    """Check the fields, settle what they leave open, then check the rest, what costs least first.

    `newest` is the run's newest checkpoint, if it has one. Return the summary of the data.
    """
    from qurl_megatron.data.prompts import check_saved, load_prompts, summarize
    from qurl_megatron.data.scoring import check_rewards
    from qurl_megatron.model.huggingface import check_model

    architecture = validate(config)
    if num_gpus:
        from qurl_megatron.launch.gpus import this_machine

        node = this_machine(num_gpus)
    tokenizer = settle(config, architecture, given, num_gpus, node, resumes=resumes)
    if num_gpus is not None:
        _check_machine(config, num_gpus, node)
    _check_ends(config, given)
    columns = check_rewards(config)
    if config.objective.objective not in OBJECTIVES:
        field = f"objective.objective={config.objective.objective}"
        needed("user_objective", "user_objective", by=field).check_objective(config)
    check_model(Path(hub.local_model(config.model)))
    if config.adapters.init:
        needed("adapters", "files", by="adapters.init").check_start(config, architecture)
    of_agent = ""
    if config.rollout.agent:
        checks = needed("agents", "checks", by="rollout.agent")
        of_agent = checks.load(config.rollout, config.model, tokenizer, "rollout.")
    if config.objective.advantage_estimator == "gae" and config.critic.model:
        check_model(Path(hub.local_model(config.critic.model)))
    check_disk(config)
    if asks_servers and config.rollout.servers_at:
        needed("elsewhere", "claims", by="rollout.servers_at").check(config, resumes=resumes)
    prompts = load_prompts(config, tokenizer, columns)
    state = read_json_object(newest / "state.json").get("prompts") if newest else None
    if isinstance(state, dict) and "prompts" in state:
        check_saved(prompts.train, state)
    of_part = config.prompts.weights
    weights = [of_part[each.part] if of_part else 1.0 for each in prompts.train]
    available = min(sum(map(bool, weights)), int(sum(weights)))
    if config.rollout.prompts_per_step > available:
        raise ConfigError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step}: {config.data} has "
            f"{available} problems to train on; a step must not repeat a prompt"
        )
    settle_steps(config, sum(weights))
    return summarize(config, prompts, tokenizer) + of_agent


def _check_machine(config: Config, num_gpus: int, node: Node | None) -> None:
    """Check that this machine, with so many GPUs, can hold and compute the run.

    `node` describes it if it has GPUs.
    """
    from qurl_megatron.device import capabilities, unusable_gpus

    placed = place_servers(config, num_gpus)
    if node:
        check_weight_format(config.quantization.format, capabilities())
        from qurl_megatron.rollout import toolkit

        toolkit.environment()
        if config.rollout.placement != "colocated":
            from qurl_megatron.launch.gpus import check_shared_gpus

            check_shared_gpus(config, placed, node.gpu.memory_bytes)
    elif problem := unusable_gpus():
        raise ConfigError(problem)
    check_workers(config)
    check_shared_memory(config)


def _check_ends(config: Config, given: Collection[str]) -> None:
    """Check what ends a run beside its steps."""
    if config.epochs and "steps" in given:
        raise ConfigError(
            f"steps={config.steps}: epochs={config.epochs:g} sets it; leave it out, or give "
            "epochs=0 too"
        )
    evaluation = config.evaluation
    of_files = [
        f"evaluation/{name}/{measure}/{number}"
        for name in evaluation.data
        for measure in measures(evaluation.k_of.get(name, evaluation.k))
        for number in ("mean", "standard_error")
    ]
    others = {field.name for field in dataclasses.fields(StepMetrics)} - {"evaluation"}
    for name in config.stop_above:
        measure = name.partition("/")[0]
        if name not in of_files and measure not in others:
            close = difflib.get_close_matches(name, [*others, *of_files], n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"stop_above.{name}: no such metric{meant}")
        if measure in OF_EVALUATION and not evaluation.every_steps:
            raise ConfigError(
                f"stop_above.{name}: evaluation.every_steps=0 measures it after the last step "
                "only; give a number of steps"
            )
        if measure.startswith("held_out") and not evaluation.held_out:
            raise ConfigError(
                f"stop_above.{name}: no problem is held out; set evaluation.held_out_fraction and "
                "evaluation.problems"
            )
