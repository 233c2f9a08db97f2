"""Checks that the fields of a configuration fit each other, the model and its layout."""

import importlib.util
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qurl_megatron.config import extensions
from qurl_megatron.config.keep import kept_layers
from qurl_megatron.config.schema import (
    HELD_OUT,
    WITHOUT_GROUPS,
    Config,
    ConfigError,
    FormatName,
    LearnerConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
    ServerConfig,
    UaqConfig,
    WeightFormat,
    reward_title,
)
from qurl_megatron.config.server_options import CONTEXT_RESERVE, check_options
from qurl_megatron.model.architecture import Architecture, ArchitectureError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# The oldest compute capability that serves each format, and the newest. The servers compute in
# bfloat16, and sgl_kernel is compiled for 8.0 and above. The lower bounds of FP8 are those of its
# matrix products. On GPUs after Hopper sgl_kernel has no INT8 product, and DeepGEMM takes no
# float32 scales of blocks.
CAPABILITIES: dict[FormatName, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "bf16": ((8, 0), None),
    "int8": ((8, 0), (9, 0)),
    "int4": ((8, 0), None),
    "fp8": ((8, 9), None),
    "fp8-tensor": ((8, 9), None),
    "fp8-block": ((9, 0), (9, 0)),
}


def validate(config: Config) -> Architecture:
    """Check that the fields fit each other, the model and its layout; return the model's shape.

    Raises:
        ArchitectureError, ConfigError: the first thing that does not fit: `field=value: what is
            wrong`.
    """
    _refuse_first(_wrong_fields(config))
    architecture = _validate_model(config)
    if config.objective.advantage_estimator == "gae":
        checks = extensions.needed("ppo", "checks", by="objective.advantage_estimator=gae")
        _refuse_first(checks.wrong_critic(config, architecture))
    return architecture


def _refuse_first(wrong: Iterable[str]) -> None:
    """Raise ConfigError with the first text on what is wrong, if there is one."""
    for text in wrong:
        raise ConfigError(text)


def check_context_parallel(learner: LearnerConfig, has_transformer_engine: bool) -> None:
    """Check that a learner on a GPU has Transformer Engine if it divides sequences.

    torch's attention would pad every sequence and copy keys and values for each query head.

    Raises:
        ConfigError: Transformer Engine is missing.
    """
    if learner.context_parallel_size > 1 and not has_transformer_engine:
        raise ConfigError(
            f"learner.context_parallel_size={learner.context_parallel_size}: needs Transformer "
            "Engine on a GPU, which is not installed here; install requirements-gpu.txt, or set it "
            "to 1"
        )


def why_not_served(weight_format: WeightFormat, capability: tuple[int, int]) -> str:
    """Return why a GPU does not serve a format, on one line; an empty string if it does."""
    oldest, newest = CAPABILITIES["int4" if weight_format == "int4-g32" else weight_format]
    if capability < oldest:
        return f"needs compute capability {oldest[0]}.{oldest[1]}"
    if newest and capability > newest:
        return f"needs compute capability {newest[0]}.{newest[1]} or less"
    return ""


def check_weight_format(
    weight_format: WeightFormat,
    capabilities: Iterable[tuple[int, int]],
    whose: str = "a GPU of this machine",
) -> None:
    """Check that GPUs of these compute capabilities serve a format.

    Raises:
        ConfigError: one does not; the message lists the formats that they all serve.
    """
    gpus = set(capabilities)
    for major, minor in sorted(gpus):
        if why := why_not_served(weight_format, (major, minor)):
            served = [
                name for name in CAPABILITIES if not any(why_not_served(name, gpu) for gpu in gpus)
            ]
            raise ConfigError(
                f"weight format {weight_format}: {why}, and {whose} has "
                f"{major}.{minor}, which serves {', '.join(served) or 'none'}"
            )


def check_group_size(name: FormatName, group_size: int, field: str) -> None:
    """Check that a group size is given only for the format that has groups.

    Args:
        field: the error message up to the group size, such as `--group-size `.

    Raises:
        ConfigError: it is given for another format.
    """
    # 128, the default, counts as not given.
    if group_size != 128 and name != "int4":
        raise ConfigError(f"{field}{group_size}: format {name} has no groups; leave it out")


def check_layout(architecture: Architecture, layout: LearnerConfig) -> None:
    """Check that a model divides over the learner's ranks, and can be computed as `layout` says.

    Raises:
        ArchitectureError: it does not, or cannot.
    """
    architecture.check_layout(
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        layout.virtual_pipeline_parallel_size,
        layout.layers_in_last_pipeline_stage,
    )
    architecture.check_expert_layout(
        layout.expert_parallel_size,
        layout.expert_tensor_parallel_size,
        layout.world_size // layout.pipeline_parallel_size,
    )
    if architecture.is_hybrid and layout.context_parallel_size > 1:
        raise ArchitectureError(
            f"learner.context_parallel_size={layout.context_parallel_size}: not supported with "
            "linear attention, whose state goes from token to token; set it to 1, and give "
            "tensor_parallel_size more ranks"
        )


def check_scales(uaq: UaqConfig, architecture: Architecture) -> None:
    """Check that UAQ does not change which experts tokens choose.

    Raises:
        ConfigError: a router would be scaled by a number other than a power of two, or in a
            hybrid, whose norm before a router is rounded whatever the number.
    """
    if not architecture.num_experts:
        return
    of_layers = {f"layer_scales.{layer}": scale for layer, scale in uaq.layer_scales.items()}
    for field, scale in {"scale": uaq.scale, **of_layers}.items():
        if architecture.delta_net and scale != 1:
            raise ConfigError(
                f"quantization.uaq.{field}={scale:g}: a hybrid with experts cannot be scaled: the "
                "norm before a router multiplies by 1 + weight, which is rounded in bfloat16, and "
                "then tokens choose other experts; leave it at 1"
            )
        if math.frexp(scale)[0] != 0.5:  # not a power of two
            raise ConfigError(
                f"quantization.uaq.{field}={scale:g}: a model with experts needs a power of two, "
                "such as 2; a router divided by any other number is rounded in bfloat16, and then "
                "tokens choose other experts"
            )


def check_routing(config: Config, architecture: Architecture) -> None:
    """Check that the model and the layout can do what `rollout.routing` says.

    Raises:
        ConfigError: it cannot.
    """
    routing, learner = config.rollout.routing, config.learner
    if routing != "ignore" and not architecture.num_experts:
        raise ConfigError(
            f"rollout.routing={routing}: the model has no experts; leave it at ignore"
        )
    if routing == "replay" and learner.recompute == "full" and learner.pipeline_parallel_size > 1:
        raise ConfigError(
            "rollout.routing=replay: with pipeline stages, a layer that is computed again would "
            "replay another micro batch; set learner.recompute=selective, or leave it out"
        )


def validate_server(
    name: str,
    server: ServerConfig,
    architecture: Architecture,
    weight_format: WeightFormat,
    max_length: int,
) -> None:
    """Check a server's options, and that it can divide the model in a format and hold a sequence.

    Args:
        name: the server's section in error messages, such as `rollout.server`.
        max_length: largest prompt plus completion length, in tokens.

    Raises:
        ConfigError: it cannot, or an option is refused.
    """
    check_options(name, server)
    try:
        architecture.check_server_layout(server.tensor_parallel_size, server.expert_parallel_size)
        sizes = server.tensor_parallel_size, server.expert_parallel_size
        architecture.check_blocks(weight_format, *sizes)
    except ArchitectureError as error:
        raise ConfigError(f"{name}: {error}") from None
    needed = max_length + CONTEXT_RESERVE
    if server.max_total_tokens is not None and server.max_total_tokens < needed:
        raise ConfigError(
            f"{name}.max_total_tokens={server.max_total_tokens}: one prompt and completion of "
            f"{max_length} tokens need {needed}; give at least that many, or shorter completions"
        )


def validate_lengths(
    architecture: Architecture,
    max_prompt_length: int,
    max_completion_length: int,
    prompt_section: str = "",
    completion_section: str = "",
) -> None:
    """Check that the model has positions for the longest prompt and the longest completion to it.

    The sections stand before the two fields in error messages, such as `rollout.`.

    Raises:
        ConfigError: it has too few; the message names the field to lower, and to what.
    """
    positions = architecture.max_position_embeddings
    prompt = f"{prompt_section}max_prompt_length={max_prompt_length}"
    if max_prompt_length >= positions:
        raise ConfigError(
            f"{prompt}: the model has {positions} positions, and a completion needs some of them; "
            "set it lower"
        )
    if max_prompt_length + max_completion_length > positions:
        raise ConfigError(
            f"{completion_section}max_completion_length={max_completion_length}: with {prompt} "
            f"that is {max_prompt_length + max_completion_length} tokens, and the model has "
            f"{positions} positions; set it to {positions - max_prompt_length} or less"
        )


def check_lengths(rollout: RolloutConfig, architecture: Architecture) -> None:
    """Check that the model has positions for all that a run samples, and an agent's settings.

    Raises:
        ConfigError: it has too few; the message names the field to lower, and to what.
    """
    completions = {"rollout.": rollout.max_completion_length}
    for first, stage in rollout.stages.items():
        completions[f"rollout.stages.{first}."] = stage.max_completion_length
    check_agent(rollout, architecture, "rollout.")
    for section, length in completions.items():
        validate_lengths(architecture, rollout.max_prompt_length, length, "rollout.", section)


def validate_stop_tokens(
    stop_token_ids: Iterable[int], architecture: Architecture, section: str = ""
) -> None:
    """Check that the model has the tokens that end an answer.

    Raises:
        ConfigError: it lacks one.
    """
    for token in stop_token_ids:
        if token >= architecture.vocab_size:
            raise ConfigError(
                f"{section}stop_token_ids: the model has no token {token}; it has "
                f"{architecture.vocab_size}, from 0"
            )


def check_agent(config: SamplingConfig, architecture: Architecture, section: str = "") -> None:
    """Check the settings of an agent, if any is given.

    `section` stands before its fields in error messages, such as `rollout.`.

    Raises:
        ConfigError: one is wrong; the message names the field.
    """
    of_agents = ("agent", "max_turns", "max_episode_tokens", "agent_workers", "agent_episodes")
    if given := next((name for name in of_agents if getattr(config, name)), None):
        field = f"{section}{given}={getattr(config, given)}"
        checks = extensions.needed("agents", "checks", by=field)
        checks.check(config, architecture, section, field)


def check_base(config: Config, architecture: Architecture) -> None:
    """Check that adapters, if a run trains them, fit the model.

    Raises:
        ConfigError: they do not.
    """
    if config.adapters.rank:
        _checks_of_adapters(config).check_base(config, architecture)


def _checks_of_adapters(config: Config) -> Any:
    by = f"adapters.rank={config.adapters.rank}" if config.adapters.rank else "adapters.targets"
    return extensions.needed("adapters", "checks", by)


def _wrong_fields(config: Config) -> Iterator[str]:
    """Yield what is wrong with fields that must fit each other whatever the model is."""
    rollout, quantization = config.rollout, config.quantization
    yield from wrong_schedule(config.optimizer, "optimizer")
    check_rewards_fit(config)
    num_servers = rollout.servers + len(rollout.servers_at)
    if not num_servers:
        yield "rollout.servers=0: no server samples; give some, or rollout.servers_at"
    if rollout.min_servers > num_servers:
        elsewhere = f" plus {len(rollout.servers_at)} elsewhere" if rollout.servers_at else ""
        yield (
            f"rollout.min_servers={rollout.min_servers}: must be at most "
            f"rollout.servers={rollout.servers}{elsewhere}"
        )
    if rollout.servers_at:
        extensions.check("elsewhere", by="rollout.servers_at")
    if len(set(rollout.servers_at)) < len(rollout.servers_at):
        yield "rollout.servers_at: lists a server twice"
    minutes = config.checkpoint.every_minutes
    if minutes and config.checkpoint.every_steps == 0:
        yield (
            f"checkpoint.every_minutes={minutes}: checkpoint.every_steps=0 disables checkpoints; "
            "give it a number of steps too, such as 1000"
        )
    if rollout.placement == "colocated":
        extensions.needed("colocated", "fit", by="rollout.placement=colocated").check_fields(config)
    if config.adapters.rank or config.adapters.targets or config.adapters.init:
        _checks_of_adapters(config).check(config)
    if rollout.max_staleness and config.objective.objective == "on_policy":
        yield (
            f"rollout.max_staleness={rollout.max_staleness}: objective.objective=on_policy treats "
            "every token as sampled by the current policy, so nothing corrects for older weights; "
            "choose acr, tis or decoupled"
        )

    objective = config.objective
    for name in ("eps_low", "eps_high"):
        if objective.objective == "gspo" and (eps := getattr(objective, name)) > 0.1:
            yield (
                f"objective.{name}={eps:g}: objective.objective=gspo clips the mean ratio of a "
                "sequence, which moves by thousandths; set objective.eps_low=3e-4 and "
                "objective.eps_high=4e-4, as in its paper"
            )
    if objective.objective == "cispo" and objective.dual_clip is not None:
        yield (
            f"objective.dual_clip={objective.dual_clip:g}: objective.objective=cispo caps the "
            "ratio of every token and clips none; set it to none"
        )

    check_group_size(quantization.format, quantization.group_size, "quantization.group_size=")
    if quantization.smoothing and quantization.format == "bf16":
        yield (
            f"quantization.smoothing={quantization.smoothing:g}: quantization.format=bf16 is not "
            "quantized, so there is nothing to make easier; set it to 0"
        )
    if config.learner.quantized_forward:
        field = f"learner.quantized_forward={config.learner.quantized_forward}"
        if quantization.format == "bf16":
            yield (
                f"{field}: quantization.format=bf16 quantizes nothing; choose int8, int4 or an fp8 "
                "format, or leave it out"
            )
    if quantization.transport == "direct" and quantization.publish != "full":
        yield (
            f"quantization.publish={quantization.publish}: with quantization.transport=direct all "
            "tensors are written in place, and nothing is sent that a delta could shorten; set it "
            "to full, or the transport to broadcast"
        )
    if quantization.transport == "direct" and rollout.servers_at:
        yield (
            "quantization.transport=direct: the servers of rollout.servers_at are on other "
            "machines; set it to broadcast or auto"
        )

    check_sets(config.evaluation, "evaluation.")
    if HELD_OUT in config.evaluation.data:
        yield (
            f"evaluation.data.{HELD_OUT}: this name is reserved for held-out problems of the run's "
            "own data; choose another"
        )
    if not config.data:
        yield (
            "data=: missing; give a .jsonl or .parquet file, a dataset directory, a dataset of the "
            "Hub such as openai/gsm8k:main, or reasoning_gym:TASK"
        )
    best_by = config.checkpoint.best_by
    if best_by and best_by not in config.evaluation.data:
        yield (
            f"checkpoint.best_by={best_by}: evaluation.data has no such name; it has "
            f"{', '.join(config.evaluation.data) or 'none'}"
        )
    if config.wandb_project and importlib.util.find_spec("wandb") is None:
        yield (
            f"wandb_project={config.wandb_project}: the package wandb is not installed; "
            "pip install wandb, or leave wandb_project empty"
        )
    for first_step in (1, *rollout.stages):
        yield from _wrong_stage(config, first_step)
    if not config.model:
        yield (
            "model=: missing; give a Hugging Face directory (config.json, safetensors), or a name "
            "of the Hub such as Qwen/Qwen3-0.6B"
        )


def _wrong_stage(config: Config, first_step: int) -> Iterator[str]:
    """Yield what is wrong with a stage, given by its first step."""
    rollout, learner, optimizer = config.rollout.at(first_step), config.learner, config.optimizer
    field = f"rollout.stages.{first_step}" if first_step > 1 else "rollout"
    if rollout.soft_overlong_tokens >= rollout.max_completion_length:
        yield (
            f"rollout.soft_overlong_tokens={rollout.soft_overlong_tokens}: must be less than "
            f"{field}.max_completion_length={rollout.max_completion_length}"
        )
    estimator = config.objective.advantage_estimator
    compares = estimator not in WITHOUT_GROUPS
    if compares and rollout.completions_per_prompt == 1:
        yield (
            f"{field}.completions_per_prompt=1: objective.advantage_estimator={estimator} compares "
            "the completions of a prompt and needs at least two; "
            f"{' and '.join(WITHOUT_GROUPS)} take one"
        )
    for name in ("dynamic_sampling_tries", "retire_after"):
        if (value := getattr(rollout, name)) and not compares:
            yield (
                f"rollout.{name}={value}: objective.advantage_estimator={estimator} learns from "
                "groups of equal rewards too, and with one completion every group is one; set it "
                "to 0"
            )
    completions = rollout.completions_per_step
    if completions % (optimizer.minibatches_per_step * learner.data_parallel_size):
        yield (
            f"optimizer.minibatches_per_step={optimizer.minibatches_per_step}: a step's "
            f"{completions} completions (rollout.prompts_per_step x {field}.completions_per_prompt)"
            f" do not divide into minibatches x {learner.data_parallel_size} data-parallel ranks"
        )


def check_rewards_fit(config: Config) -> None:
    """Check that the rewards of an entry have names of their own in metrics, and their weights.

    Raises:
        ConfigError: two have the same name, or there are not as many weights.
    """
    others = [reward_title(each) for each in config.rewards[1:]]
    firsts = {f"reward={config.reward}": config.rewards[0]}
    by_source, weights = config.scoring.by_source, config.scoring.weights
    firsts |= {f"scoring.by_source.{key}={name}": name for key, name in by_source.items()}
    for given, first in firsts.items():
        titles = [reward_title(first), *others]
        if twice := next((each for each in titles if titles.count(each) > 1), None):
            raise ConfigError(
                f"{given}: two rewards of an entry are called {twice}; rename a function, or "
                "leave one out"
            )
    if "accuracy" in others:
        raise ConfigError(
            f"reward={config.reward}: accuracy is that of the first reward; rename the other "
            "function of this name"
        )
    if len(weights) not in (0, len(config.rewards)):
        raise ConfigError(
            f"scoring.weights={weights}: there are {len(config.rewards)} rewards; give one weight "
            "for each"
        )


def check_sets(config: Any, section: str = "") -> None:
    """Check that `k_of` and `reward_of` of an `EvaluationConfig` or `EvalConfig` name its `data`.

    `section` stands before these fields in the error message, such as `evaluation.`.

    Raises:
        ConfigError: they have another name; the message lists those of `data`.
    """
    for field in ("k_of", "reward_of"):
        for name in getattr(config, field):
            if name not in config.data:
                raise ConfigError(
                    f"{section}{field}.{name}: {section}data has no such name; it has "
                    f"{', '.join(config.data) or 'none'}"
                )


def wrong_schedule(optimizer: OptimizerConfig, section: str) -> Iterator[str]:
    """Yield what is wrong with the learning rates of an optimizer."""
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            f"{section}.min_learning_rate={optimizer.min_learning_rate}: is above "
            f"learning_rate={optimizer.learning_rate}; lower it"
        )


def _validate_model(config: Config) -> Architecture:
    directory = Path(config.model)
    architecture = Architecture.from_directory(directory)
    check_layout(architecture, config.learner)
    _refuse_first(_wrong_for_model(config, architecture))
    rollout, evaluation = config.rollout, config.evaluation
    for name, server, quantization in (
        ("rollout.server", rollout.server, config.quantization),
        ("evaluation.server", evaluation.server, config.evaluation_quantization),
    ):
        validate_server(name, server, architecture, quantization.weight_format, rollout.max_length)
    check_lengths(rollout, architecture)
    validate_stop_tokens(rollout.stop_token_ids, architecture, "rollout.")
    check_scales(config.quantization.uaq, architecture)
    kept_layers(config.quantization.keep, architecture)
    check_base(config, architecture)
    check_routing(config, architecture)
    return architecture


def _wrong_for_model(config: Config, architecture: Architecture) -> Iterator[str]:
    """Yield what is wrong with the model's directory, or with fields that name its layers."""
    if not any((Path(config.model) / name).exists() for name in _TOKENIZER_FILES):
        yield f"model={config.model}: has no tokenizer ({', '.join(_TOKENIZER_FILES)})"
    for layer in config.quantization.uaq.layer_scales:
        if not 0 <= layer < architecture.num_layers:
            yield (
                f"quantization.uaq.layer_scales.{layer}: the model's layers are numbered from 0 to "
                f"{architecture.num_layers - 1}"
            )
    learner = config.learner
    if (number := learner.recompute_layers) is None:
        return
    if learner.recompute != "full":
        yield (
            f"learner.recompute_layers={number}: only learner.recompute=full uses it; set that "
            "too, or leave it out"
        )
    stages, last = learner.pipeline_parallel_size, learner.layers_in_last_pipeline_stage
    layers = max(architecture.stage_layers(stages, last)) // learner.virtual_pipeline_parallel_size
    if number > layers:
        yield (
            f"learner.recompute_layers={number}: a pipeline stage has {layers} layers; give at "
            "most that many, or leave it out for all"
        )
