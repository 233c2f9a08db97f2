"""The command that plans a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qurl_megatron.commands.runs import Overrides

if TYPE_CHECKING:
    from qurl_megatron.config.schema import Config
    from qurl_megatron.model.architecture import Architecture


def plan(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RECIPE",
            help="Directory with config.json, a known model such as Qwen2.5-32B, or a recipe.",
        ),
    ],
    overrides: Overrides = None,
    gpus: Annotated[
        int,
        typer.Option(
            min=2,
            max=16_384,
            help="Number of H100s of learner and servers together, eight in a node.",
        ),
    ] = 64,
    mean_prompt: Annotated[
        float | None,
        typer.Option(help="Mean prompt length, in tokens. Default: half of max_prompt_length."),
    ] = None,
    mean_response: Annotated[
        float | None,
        typer.Option(help="Mean response length, in tokens. Default: half of max_response_length."),
    ] = None,
    log_deviation: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of log(response length), for lognormal lengths; around 1 for "
            "reasoning. Default: a power law, without long tails."
        ),
    ] = None,
) -> None:
    """Estimate the memory and time that a run needs on H100s; nothing is allocated.

    For a model, choose the layout with the shortest step, unless a field sets the layout.

    For a recipe, keep its own layout.

    If something does not fit, the error names the part that is too large.
    """
    from qurl_megatron.commands.plan_page import print_plan
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.planning.plan import plan_or_suggest
    from qurl_megatron.planning.step_time import Workload

    architecture, config, has_layout = _plan_input(subject, overrides or [])
    half = Workload.half(config)
    for name, mean in {"prompt": mean_prompt, "response": mean_response}.items():
        longest = getattr(config.rollout, f"max_{name}_length")
        if mean is not None and not 1 <= mean <= longest:
            raise ConfigError(
                f"--mean-{name} {mean}: must be from 1 to rollout.max_{name}_length={longest}"
            )
    if log_deviation is not None and not 0 < log_deviation <= 10:
        raise ConfigError(
            f"--log-deviation {log_deviation}: must be above 0 and at most 10; around 1 for "
            "reasoning"
        )
    workload = Workload(
        half.mean_prompt if mean_prompt is None else mean_prompt,
        half.mean_response if mean_response is None else mean_response,
        log_deviation,
    )
    chosen = plan_or_suggest(architecture, config, gpus, workload, has_layout=has_layout)
    print_plan(chosen)


def _plan_input(subject: str, overrides: list[str]) -> tuple[Architecture, Config, bool]:
    """Return the model's shape, the configuration, and whether the configuration sets a layout.

    A recipe has its own configuration; a model gets that of recipes/scaling_32b.py, or with experts
    of recipes/qwen3_moe.py.

    Raises:
        ArchitectureError, ConfigError: one line.
    """
    from qurl_megatron.config.overrides import with_overrides
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.launch.prepare import load_recipe, recipe_names
    from qurl_megatron.model.architecture import Architecture
    from qurl_megatron.recipes import qwen3_moe, scaling_32b

    known = scaling_32b.ARCHITECTURES | qwen3_moe.ARCHITECTURES
    is_model = subject in known or Path(subject).is_dir()
    if is_model:
        overrides = [f"model={subject}", *overrides]
        architecture = known.get(subject) or Architecture.from_directory(subject)
        subject = "qwen3_moe" if architecture.num_experts else "scaling_32b"
    elif subject not in recipe_names():
        raise ConfigError(
            f"{subject}: no such directory, model ({', '.join(known)}) or recipe "
            f"({', '.join(recipe_names())})"
        )
    config = with_overrides(load_recipe(subject).recipe(), overrides)
    if not config.model:
        raise ConfigError(
            f"model=: missing; give a directory with config.json, or {' or '.join(known)}"
        )
    architecture = known.get(config.model) or Architecture.from_directory(config.model)
    layout_fields = ("learner.", "rollout.server.tensor_parallel_size")
    has_layout = not is_model or any(word.startswith(layout_fields) for word in overrides)
    return architecture, config, has_layout
