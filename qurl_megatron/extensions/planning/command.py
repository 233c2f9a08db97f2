"""The command that plans a run, or the same run on several numbers of GPUs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qurl_megatron.commands.runs import Overrides

if TYPE_CHECKING:
    from qurl_megatron.config.schema import Config
    from qurl_megatron.extensions.planning.lengths import Workload
    from qurl_megatron.model.architecture import Architecture

Subject = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RECIPE",
        help="A config.json or its directory, a known model such as Qwen2.5-32B, one of the "
        "Hub, or a recipe: a name, FILE.yaml or FILE.py:NAME.",
    ),
]
GpuName = Annotated[str, typer.Option(help="A100, H100, H200 or B200.")]
GpusOfNode = Annotated[int, typer.Option(min=1, max=72, help="GPUs of a node.")]
LAYOUT_FIELDS = (
    "learner.",
    "rollout.placement",
    "rollout.max_staleness",
    "rollout.server.tensor_parallel_size",
    "rollout.server.max_running_requests",
)
"""Fields that a search of layouts decides, unless they are given."""


def plan(
    subject: Subject,
    overrides: Overrides = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Number of GPUs of learner and servers together. Several, such as 24,32,64, give "
            "a table. Default: 64 for a model, and what it takes for a recipe.",
        ),
    ] = None,
    gpu: GpuName = "H100",
    gpus_per_node: GpusOfNode = 8,
    mean_prompt: Annotated[
        float | None,
        typer.Option(help="Mean prompt length, in tokens. Default: half of max_prompt_length."),
    ] = None,
    mean_completion: Annotated[
        float | None,
        typer.Option(
            help="Mean completion length, in tokens, with observed ones for an agent. Default: a "
            "quarter of max_completion_length, or of the room of an episode."
        ),
    ] = None,
    log_deviation: Annotated[
        float,
        typer.Option(
            help="Standard deviation of log(completion length): lengths are lognormal, and cut off "
            "at the maximum. Around 1 for reasoning."
        ),
    ] = 1.0,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="Directory of a run of this model, to set beside its plan; repeat the option for "
            "several.",
        ),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Then play its ranks, as `qurl rehearse` does."),
    ] = False,
    time: Annotated[
        str | None,
        typer.Option(help="Time limit of a job, such as 04:00:00; warn if it is too short."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, max=10_000, help="How often the job may be requeued.")
    ] = 20,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="File to write: FILE.csv, or a picture, FILE.svg or FILE.png; repeat the option "
            "for several.",
        ),
    ] = None,
) -> None:
    """Estimate the memory and time that a run needs; nothing is allocated.

    For a model, choose the layout with the shortest step, and whether learner and servers are
    colocated. The time with servers that sample ahead is shown too, but that is chosen only if
    rollout.max_staleness is given. Given fields keep their values.

    For a recipe, keep its own layout. With --gpus, servers get all GPUs that the learner leaves.

    If something does not fit, the error names the part that is too large.
    """
    from qurl_megatron.config.extensions import needed
    from qurl_megatron.config.gpus import node_of
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.config.validate import check_weight_format
    from qurl_megatron.extensions.planning import page, scaling
    from qurl_megatron.extensions.planning.job import idle_gpus, objections_to_limit
    from qurl_megatron.extensions.planning.plan import plan_run
    from qurl_megatron.launch.slurm import time_limit_s

    rehearsal = needed("rehearsal", "page", by="--rehearse") if rehearse else None
    scaling.check_outputs(output or [])
    limit_s = time_limit_s(time or "unlimited")
    node = node_of(gpu, gpus_per_node)
    architecture, config, given = plan_input(subject, overrides or [])
    if config.epochs:
        raise ConfigError(
            f"epochs={config.epochs:g}: a plan reads no data and counts no prompts; give epochs=0 "
            "and steps"
        )
    takes_own = not gpus and given is None  # a recipe says how many servers there are
    if not takes_own and any(word.startswith("rollout.servers=") for word in overrides or []):
        raise ConfigError(
            "rollout.servers: servers get all of --gpus that the learner leaves; leave out one of "
            "the two"
        )
    check_weight_format(config.quantization.format, [node.gpu.capability], f"--gpu {gpu}")
    workload = _workload(config, mean_prompt, mean_completion, log_deviation)
    rows, refusals = [], {}
    if takes_own:
        rows.append(scaling.Row(plan_run(architecture, config, workload, node)))
    else:
        for number in _numbers(gpus or "64"):
            try:
                row = scaling.planned_row(architecture, config, number, workload, node, given)
                rows.append(row)
            except ConfigError as error:
                refusals[number] = error
    if refusals and not rows:
        raise refusals[max(refusals)]
    rows += [scaling.measured_row(run, architecture, workload, node) for run in measured or []]
    for file in output or []:  # first, in case nobody reads to the end
        scaling.write(rows, file)
    if len(rows) == 1 and not refusals:
        page.print_plan(rows[0].plan, rows[0].placements_s)
    else:
        scaling.print_rows(rows, refusals)
    if given is not None:
        say_recipe(subject, architecture)
    for row in rows:
        idle = [] if row.run else idle_gpus(row.plan.config, node)
        for objection in (*idle, *objections_to_limit(row.plan, limit_s, max_restarts + 1)):
            print(f"Warning, {row.plan.gpus} GPUs: {objection}.")
    for file in output or []:
        print(f"{file} is ready")
    if rehearsal:
        sys.exit(max(rehearsal.rehearse_plan(row.plan) for row in rows))


def _numbers(gpus: str) -> list[int]:
    """Return the numbers of GPUs of `--gpus`, in their order.

    Raises:
        ConfigError: one of them is not a number of GPUs.
    """
    from qurl_megatron.config.schema import ConfigError

    words = gpus.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= 16_384 for word in words):
        raise ConfigError(f"--gpus {gpus}: must be numbers from 1 to 16384, such as 24,32,64")
    return sorted({int(word) for word in words})


def _workload(
    config: Config,
    mean_prompt: float | None,
    mean_completion: float | None,
    log_deviation: float,
) -> Workload:
    """Return the lengths that are given, and a plan's own assumptions for the others.

    Raises:
        ConfigError: a length is above its maximum in `config`, or a number is out of range.
    """
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.extensions.planning.lengths import Workload, longest_completion

    rollout = config.rollout
    longest = {"prompt": rollout.max_prompt_length, "completion": longest_completion(config)}
    for name, mean in {"prompt": mean_prompt, "completion": mean_completion}.items():
        if mean is not None and not 1 <= mean <= longest[name]:
            limit = f"rollout.max_{name}_length={longest[name]}"
            if name == "completion" and rollout.agent:
                limit = f"{longest[name]}, the room of an episode behind its prompt"
            raise ConfigError(f"--mean-{name} {mean}: must be from 1 to {limit}")
    if not 0.01 <= log_deviation <= 10:
        raise ConfigError(
            f"--log-deviation {log_deviation}: must be from 0.01 to 10; around 1 for reasoning"
        )
    given = {"mean_prompt": mean_prompt, "mean_completion": mean_completion}
    means = {name: mean for name, mean in given.items() if mean is not None}
    return dataclasses.replace(Workload.of(config), log_deviation=log_deviation, **means)


def recipe_of(architecture: Architecture) -> str:
    """Return the recipe with whose settings a model is planned that comes without one."""
    if architecture.delta_net:
        return "qwen3_5"
    return "qwen3_moe" if architecture.num_experts else "scaling_32b"


def say_recipe(subject: str, architecture: Architecture) -> None:
    """Print whose settings a model has that was given without a recipe."""
    print(
        f"{subject} has the settings of the recipe {recipe_of(architecture)} here; give a recipe "
        "and model=... for others."
    )


def plan_input(subject: str, overrides: list[str]) -> tuple[Architecture, Config, set[str] | None]:
    """Return the model's shape, the configuration, and the fields of its layout that are given.

    A model gets the configuration of `recipe_of` it. A recipe has a configuration and layout of its
    own; its fields are None. Lengths that nobody gave are shortened to the model's positions, and a
    line says so.

    Raises:
        ArchitectureError, ConfigError: one line.
    """
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.config.validate import check_lengths
    from qurl_megatron.launch.recipe import USER_RECIPE, is_file, load_recipe, recipe_names
    from qurl_megatron.model import hub
    from qurl_megatron.model.architecture import trainable
    from qurl_megatron.model.known import KNOWN_MODELS
    from qurl_megatron.model.repository import repository_of

    def shape(model: str) -> Architecture:
        known = KNOWN_MODELS.get(model)
        return known or trainable(Path(hub.local_model(model, files=hub.CONFIG)))

    if Path(subject).name == "config.json":
        subject = str(Path(subject).parent)
    names = recipe_names()
    is_recipe = subject in names or is_file(subject)
    is_model = subject in KNOWN_MODELS or (
        not is_recipe and (Path(subject).is_dir() or repository_of(subject) is not None)
    )
    if is_model:
        overrides = [f"model={subject}", *overrides]
        architecture = shape(subject)
        subject = recipe_of(architecture)
        if architecture.delta_net and architecture.num_experts:  # such a hybrid has no UAQ
            overrides = ["quantization.uaq.scale=1", *overrides]
    elif not is_recipe:
        raise ConfigError(
            f"{subject}: no such directory, model ({', '.join(KNOWN_MODELS)}) or recipe "
            f"({', '.join(names)}); {USER_RECIPE}"
        )
    recipe = load_recipe(subject, overrides)
    config = recipe.config
    if not config.model:
        raise ConfigError(
            "model=: missing; give a directory with config.json, or a name such as Qwen/Qwen3-0.6B"
        )
    architecture = architecture if is_model else shape(config.model)
    _shorten(config, architecture.max_position_embeddings, recipe.given)
    check_lengths(config.rollout, architecture)
    given = {field for field in recipe.given if field.startswith(LAYOUT_FIELDS)}
    return architecture, config, given if is_model else None


def _shorten(config: Config, positions: int, given: frozenset[str]) -> None:
    """Shorten the lengths that a model lacks positions for, but none of the `given` fields."""
    rollout = config.rollout
    needed = max(rollout.max_episode_tokens, rollout.max_prompt_length + rollout.longest_completion)
    if needed <= positions:
        return

    def shorten(field: str, section: Any, most: int) -> None:
        name = field.rpartition(".")[2]
        before = getattr(section, name)
        if before > most > 0 and not given & {field, "rollout.stages"}:
            setattr(section, name, most)
            reason = f"not the recipe's {before}: the model has {positions} positions"
            print(f"qurl: {field}={most}, {reason}", file=sys.stderr)

    completions: dict[str, Any] = {"rollout.max_completion_length": rollout}
    for first, stage in rollout.stages.items():
        completions[f"rollout.stages.{first}.max_completion_length"] = stage
    kept = [each.max_completion_length for field, each in completions.items() if field in given]
    prompt = "rollout.max_prompt_length"
    shorten(prompt, rollout, positions - max(kept, default=positions // 2))
    for field, section in completions.items():
        shorten(field, section, positions - rollout.max_prompt_length)
    shorten("rollout.max_episode_tokens", rollout, positions)
