"""Decide what a run's fields leave open. What changes a recipe's value is said in a line.

`settle` decides what depends on the model and the machine, once `validate` has accepted the fields;
`settle_steps` what depends on the data.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import Config, UaqConfig
from qurl_megatron.memory.host import use_cores
from qurl_megatron.model.architecture import Architecture, ArchitectureError

if TYPE_CHECKING:
    from qurl_megatron.config.gpus import Node

# Fields that are decided here where a recipe has these values, and what says where a run is.
SETTLED = {
    "rollout.stop_token_ids": [],
    "rollout.server.releases": "auto",
    "evaluation.server.releases": "auto",
    "learner.data_parallel_size": 1,
    "rollout.servers": 1,
}


def choose_scale(config: Config, given: Collection[str]) -> str:
    """Give a recipe's UAQ the scale that suits format and model, unless one is `given`.

    Return a line that says so, where a recipe's scale becomes another one.
    """
    uaq = config.quantization.uaq
    if uaq == UaqConfig() or any(field.startswith("quantization.uaq.") for field in given):
        return ""
    if config.quantization.format == "bf16" or config.adapters.rank > 0:
        config.quantization.uaq = UaqConfig()  # there is no quantized update to scale
        return ""
    try:
        architecture = Architecture.from_directory(config.model)
    except ArchitectureError:  # which is refused later
        return ""
    if not architecture.num_experts:
        return ""
    scale = 1 if architecture.delta_net else 2  # `check_scales` has the reason
    config.quantization.uaq = UaqConfig(scale=scale)
    return f"quantization.uaq.scale={scale} for a model with experts, not {uaq.scale:g}"


def settle(
    config: Config,
    architecture: Architecture,
    given: Collection[str],
    num_gpus: int | None,
    node: Node | None,
    *,
    resumes: bool,
) -> Any:
    """Decide layout, placement, ends of completions and memory; return the model's tokenizer.

    `given` are the fields that the user has chosen; a placement among them is not changed. `node`
    is one of the learner's.
    """
    from qurl_megatron.model.tokenizer import load_tokenizer, stop_token_ids

    cores = use_cores(config, given) if num_gpus == 0 and not resumes else ""
    placement = ""
    if num_gpus:
        from qurl_megatron.launch.gpus import choose_placement

        placement = choose_placement(config, given, num_gpus)
    for said in filter(None, (cores, placement, what_is_measured(config))):
        print(f"qurl: {said}", file=sys.stderr)
    config.prompts.template_date = config.prompts.template_date or date.today().isoformat()
    tokenizer = load_tokenizer(Path(config.model), *config.prompts.template)
    stops = config.rollout.stop_token_ids
    config.rollout.stop_token_ids = stops or stop_token_ids(architecture, tokenizer)
    if config.rollout.placement == "colocated":
        colocated = needed("colocated", "fit", by="rollout.placement=colocated")
        colocated.settle(architecture, config, node)
    return tokenizer


def what_is_measured(config: Config) -> str:
    """Return a line if a run trains the quantized policy and measures another; else nothing."""
    evaluation = config.evaluation
    if not (config.learner.quantized_forward and evaluation.enabled) or evaluation.quantized:
        return ""
    return (
        "learner.quantized_forward trains what servers compute, and evaluations measure the "
        "unquantized model; evaluation.quantized=true measures the quantized one"
    )


def settle_steps(config: Config, prompts_per_epoch: float) -> None:
    """Give a run of epochs its number of steps."""
    if config.epochs:
        steps = config.epochs * prompts_per_epoch / config.rollout.prompts_per_step
        config.steps = max(1, math.ceil(steps - 1e-6))  # 1.1 x 100 is a little more than 110
