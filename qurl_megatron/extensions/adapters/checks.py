"""Checks of `adapters`: that they fit the other fields of a run, and the model."""

from collections.abc import Sequence

from qurl_megatron.config.keep import fused_layers, matching
from qurl_megatron.config.schema import Config, ConfigError, UaqConfig
from qurl_megatron.model.architecture import Architecture, ArchitectureError


def check(config: Config) -> None:
    """Check that a learner of adapters can do what a run asks for.

    Raises:
        ConfigError: it cannot.
    """
    if not config.adapters.rank:
        field = "init" if config.adapters.init else "targets"
        raise ConfigError(
            f"adapters.{field}: with adapters.rank=0 the whole model is trained; give a rank, or "
            f"leave out adapters.{field}"
        )
    rank, quantization = f"adapters.rank={config.adapters.rank}", config.quantization
    if quantization.format not in ("int8", "int4", "fp8"):
        raise ConfigError(
            f"quantization.format={quantization.format}: the base under adapters ({rank}) is "
            "quantized with scales per channel or group; choose int8, int4 or fp8"
        )
    if quantization.uaq != UaqConfig():
        raise ConfigError(
            f"quantization.uaq: {rank} trains no quantized weight, so there is no update to make "
            "visible; set quantization.uaq.scale=1 and leave the others out"
        )
    if quantization.keep:
        raise ConfigError(
            f"quantization.keep: all linear layers of the base are quantized with {rank}; leave it "
            "empty"
        )
    if quantization.smoothing:
        raise ConfigError(
            f"quantization.smoothing={quantization.smoothing:g}: the base under adapters ({rank}) "
            "is quantized as it is; set it to 0"
        )
    if quantization.publish != "full":
        raise ConfigError(
            f"quantization.publish={quantization.publish}: {rank} sends nothing but adapters to "
            "servers that hold the base; leave it at full"
        )
    if config.objective.advantage_estimator == "gae":
        raise ConfigError(
            "objective.advantage_estimator=gae: PPO's critic is a whole model, which "
            f"{rank} has no room for; choose grpo"
        )
    if config.adapters.init and config.objective.kl_coefficient:
        raise ConfigError(
            f"objective.kl_coefficient={config.objective.kl_coefficient:g}: the reference of "
            f"adapters is the base without those of adapters.init; set it to 0, or merge them into "
            "the model"
        )
    if config.rollout.servers_at:
        raise ConfigError(
            f"rollout.servers_at: servers elsewhere hold no adapters ({rank}); use rollout.servers"
        )


def check_base(config: Config, architecture: Architecture) -> None:
    """Check that a learner of adapters can hold its part of the base, and that targets exist.

    Raises:
        ConfigError: a group of INT4 would lie on two ranks, a target matches no layer, the rank is
            above the hidden size, or the base has linear attention.
    """
    rank = f"adapters.rank={config.adapters.rank}"
    if architecture.delta_net:
        raise ConfigError(
            f"{rank}: adapters over linear attention are not supported; set it to 0, or give "
            "another model"
        )
    adapted_layers(config.adapters.targets, architecture)
    if config.adapters.rank > architecture.hidden_size:
        raise ConfigError(
            f"{rank}: the model's hidden size is {architecture.hidden_size}, and no rank above it "
            "adds anything; use 8 to 64"
        )
    size = config.learner.tensor_parallel_size
    try:
        architecture.check_blocks(config.quantization.weight_format, size)
    except ArchitectureError as error:
        raise ConfigError(
            f"learner.tensor_parallel_size={size}: with {rank} the learner divides the base as "
            f"servers do: {error}"
        ) from None


def adapted_layers(targets: Sequence[str], architecture: Architecture) -> set[str]:
    """Return the names of the linear layers that have adapters, by `adapters.targets`.

    Raises:
        ConfigError: a pattern matches no linear layer.
    """
    names = [
        name for group in fused_layers(architecture) for name in group if ".experts" not in name
    ]
    why = "embeddings, norms, lm_head and experts have no adapters"
    return matching(targets, names, "adapters.targets=", why) if targets else set(names)
