"""What a run would need and take, before anything is allocated, and which layout fits best.

`memory` says what GPUs hold, `step_time` how long a step takes; a critic is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.planning.memory import (
    GIB,
    GPU_BYTES,
    Savings,
    bucket_memory,
    kv_bytes_per_token,
    learner_memory,
    published_bytes,
    server_weight_bytes,
    total_bytes,
)
from qurl_megatron.planning.step_time import (
    GPUS_PER_NODE,
    Workload,
    learner_s,
    publish_s,
    rollout_s,
)


@dataclass(frozen=True)
class Plan:
    """Bytes by part of the fullest GPU of each kind, and seconds by phase of a step."""

    config: Config
    gpus: int
    servers: int
    learner_bytes: dict[str, int]
    converter_bucket_bytes: int  # in place of activations, logits and backward
    server_bytes: dict[str, int]
    kv_tokens: int  # that a server holds
    slots: int  # sequences that a server decodes at once
    publish_bytes: int
    step_s: dict[str, float]
    savings: Savings

    @property
    def total_s(self) -> float:
        return sum(self.step_s.values())

    @property
    def learner_total_bytes(self) -> int:
        return total_bytes(self.learner_bytes, self.converter_bucket_bytes)


def plan(
    architecture: Architecture,
    config: Config,
    gpus: int,
    savings: Savings = Savings(),  # noqa: B008 (frozen)
    workload: Workload | None = None,
) -> Plan:
    """What `config`'s layout needs and takes on `gpus` H100 in all.

    Servers take the GPUs that the learner leaves, the evaluation server's taken off.

    Raises:
        ConfigError: the layout does not fit the model, the GPUs or their memory; one line that
            names the part that breaks it.
    """
    workload = workload or Workload.half(config)
    learner, server, rollout = config.learner, config.rollout.server, config.rollout
    _check_layout(architecture, config, gpus, workload)
    server_size = server.tensor_parallel_size
    servers = _free_gpus(config, gpus) // server_size

    buckets = bucket_memory(architecture, config)
    by_stage = [
        learner_memory(architecture, config, stage, savings)
        for stage in range(learner.pipeline_parallel_size)
    ]
    fullest = max(by_stage, key=lambda parts: total_bytes(parts, buckets))
    _refuse_learner(config, fullest, buckets, by_stage.index(fullest))

    weight_format = config.quantization.format
    weights = server_weight_bytes(architecture, weight_format, server_size)
    room = int(GPU_BYTES * server.mem_fraction_static)
    per_token = kv_bytes_per_token(architecture, server_size)
    kv_tokens = max(0, (room - sum(weights.values())) // per_token)
    if server.max_total_tokens is not None:
        kv_tokens = min(kv_tokens, server.max_total_tokens)
    if kv_tokens < rollout.max_length:
        held = sum(weights.values()) / GIB
        part = "weights" if held > room / GIB else "the KV cache"
        raise ConfigError(
            f"rollout.server.tensor_parallel_size={server_size}: {part} break it: a GPU holds "
            f"{held:.1f} GiB of {weight_format} weights, and mem_fraction_static="
            f"{server.mem_fraction_static} of it is {room / GIB:.1f} GiB; one sequence of "
            f"{rollout.max_length} tokens needs {rollout.max_length * per_token / GIB:.1f} more"
        )
    length = workload.mean_prompt + workload.mean_response
    slots = min(server.max_running_requests, int(kv_tokens / length))
    server_bytes = {
        **weights,
        "KV cache": kv_tokens * per_token,
        "left for graphs and activations": GPU_BYTES - room,
    }
    step_s = {
        "rollout": rollout_s(
            architecture,
            weight_format,
            server_size,
            sequences=rollout.prompts_per_step * rollout.completions_per_prompt / servers,
            prompts=rollout.prompts_per_step / servers,
            slots=slots,
            workload=workload,
            max_response=rollout.max_response_length,
        ),
        **learner_s(architecture, config, workload),
        "publish": publish_s(architecture, config),
    }
    return Plan(
        config=config,
        gpus=gpus,
        servers=servers,
        learner_bytes=fullest,
        converter_bucket_bytes=buckets,
        server_bytes=server_bytes,
        kv_tokens=kv_tokens,
        slots=slots,
        publish_bytes=published_bytes(architecture, weight_format),
        step_s=step_s,
        savings=savings,
    )


def _free_gpus(config: Config, gpus: int) -> int:
    evaluation = config.evaluation
    taken = evaluation.server.tensor_parallel_size if evaluation.wanted else 0
    return gpus - config.learner.world_size - taken


def _check_layout(
    architecture: Architecture, config: Config, gpus: int, workload: Workload
) -> None:
    """Raises ConfigError."""
    learner, rollout = config.learner, config.rollout
    if config.advantage_estimator == "gae":
        raise ConfigError("advantage_estimator=gae: a critic is not planned for; plan grpo")
    try:
        architecture.check_layout(
            learner.tensor_parallel_size,
            learner.pipeline_parallel_size,
            learner.virtual_pipeline_parallel_size,
            learner.layers_in_last_pipeline_stage,
        )
        if config.quantization.format == "fp8-block":
            architecture.check_blocks(rollout.server.tensor_parallel_size)
    except ArchitectureError as error:
        raise ConfigError(str(error)) from None
    for name, size in (
        ("learner", learner.tensor_parallel_size),
        ("rollout.server", rollout.server.tensor_parallel_size),
    ):
        if size > GPUS_PER_NODE or GPUS_PER_NODE % size:
            raise ConfigError(
                f"{name}.tensor_parallel_size={size}: must divide the {GPUS_PER_NODE} GPUs of a "
                "node, or its all-reduces leave NVLink"
            )
    if architecture.num_attention_heads % rollout.server.tensor_parallel_size:
        raise ConfigError(
            f"rollout.server.tensor_parallel_size={rollout.server.tensor_parallel_size}: must "
            f"divide the model's {architecture.num_attention_heads} attention heads"
        )
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    parts = config.optimizer.minibatches_per_step * learner.data_parallel_size
    if rows % parts:
        raise ConfigError(
            f"learner.data_parallel_size={learner.data_parallel_size}: a step's {rows} completions "
            f"do not divide into {parts} (minibatches x data-parallel ranks)"
        )
    if not 0 < workload.mean_response <= rollout.max_response_length:
        raise ConfigError(
            f"mean response of {workload.mean_response:g} tokens: must be above 0 and at most "
            f"rollout.max_response_length={rollout.max_response_length}"
        )
    if _free_gpus(config, gpus) < rollout.server.tensor_parallel_size:
        evaluation = " and the evaluation server" if config.evaluation.wanted else ""
        raise ConfigError(
            f"{gpus} GPUs: the learner's {learner.world_size}{evaluation} leave "
            f"{max(0, _free_gpus(config, gpus))}, and a rollout server takes "
            f"{rollout.server.tensor_parallel_size}"
        )


def _refuse_learner(config: Config, parts: dict[str, int], buckets: int, stage: int) -> None:
    """Raises ConfigError where a rank's parts do not fit; names the one that goes over."""
    total = total_bytes(parts, buckets)
    if total <= GPU_BYTES:
        return
    running = itertools.accumulate(parts.values())
    breaking = next(
        (name for name, sum_ in zip(parts, running, strict=True) if sum_ > GPU_BYTES), "buckets"
    )
    learner = config.learner
    sizes = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
    raise ConfigError(
        f"learner of tensor x pipeline x data parallel sizes {learner.tensor_parallel_size} x "
        f"{learner.pipeline_parallel_size} x {learner.data_parallel_size}: {breaking} break it: a "
        f"rank of stage {stage} needs {total / GIB:.1f} of {GPU_BYTES / GIB:.1f} GiB ({sizes})"
    )


def layouts(architecture: Architecture, config: Config, gpus: int) -> Iterator[Config]:
    """`config` in every layout worth looking at: micro batches of one, all stages alike or nearly.

    Tensor parallelism within a node, up to 16 pipeline stages, any number of copies, activations
    kept or recomputed.
    """
    sizes = [size for size in (1, 2, 4, 8) if size <= gpus]
    for tensor, stages, server_size in itertools.product(sizes, range(1, 17), sizes):
        in_last = _last_stage(architecture.num_layers, stages)
        if in_last is None and architecture.num_layers % stages:
            continue
        copies = range(1, gpus // (tensor * stages) + 1)
        for data, recompute in itertools.product(copies, (False, True)):
            yield dataclasses.replace(
                config,
                learner=dataclasses.replace(
                    config.learner,
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=stages,
                    data_parallel_size=data,
                    virtual_pipeline_parallel_size=1,
                    layers_in_last_pipeline_stage=in_last,
                    micro_batch_size=1,
                    recompute_activations=recompute,
                ),
                rollout=dataclasses.replace(
                    config.rollout,
                    server=dataclasses.replace(
                        config.rollout.server, tensor_parallel_size=server_size
                    ),
                ),
            )


def _last_stage(num_layers: int, stages: int) -> int | None:
    """Layers of a last stage that is shorter than the others; None where they divide, or cannot."""
    in_last = num_layers - -(-num_layers // stages) * (stages - 1)
    return in_last if num_layers % stages and in_last > 0 else None


def suggest(
    architecture: Architecture,
    config: Config,
    gpus: int,
    savings: Savings = Savings(),  # noqa: B008 (frozen)
    workload: Workload | None = None,
) -> Plan | None:
    """The layout of `gpus` with the shortest step; None where none fits."""
    best: Plan | None = None
    for layout in layouts(architecture, config, gpus):
        try:
            found = plan(architecture, layout, gpus, savings, workload)
        except ConfigError:
            continue
        if best is None or found.total_s < best.total_s:
            best = found
    return best


def plan_or_suggest(
    architecture: Architecture,
    config: Config,
    gpus: int,
    savings: Savings,
    workload: Workload,
    *,
    has_layout: bool,
) -> Plan:
    """The plan of `config`'s own layout, or of the best one where it is not to keep its own.

    Raises:
        ConfigError: it does not fit; the line ends with a layout that does, or says what would
            help where none does.
    """
    if has_layout:
        try:
            return plan(architecture, config, gpus, savings, workload)
        except ConfigError as error:
            refusal = f"{error}; "
    else:
        refusal = ""
    best = suggest(architecture, config, gpus, savings, workload)
    if best is not None and not has_layout:
        return best
    if best is not None:
        raise ConfigError(f"{refusal}what fits: {' '.join(layout_words(best.config))}")
    everything = Savings(True, True)
    helped = suggest(architecture, config, gpus, everything, workload)
    raise ConfigError(
        f"{refusal}no layout of {gpus} GPUs fits prompts and responses of "
        f"{config.rollout.max_length} tokens; "
        + (
            "a learner with sequence parallelism and a distributed optimizer would: "
            f"{' '.join(layout_words(helped.config))}"
            if helped
            else "not even with sequence parallelism and a distributed optimizer: take more GPUs "
            "or shorter responses"
        )
    )


def layout_words(config: Config) -> list[str]:
    """The `field=value` words that give a configuration this layout."""
    learner = config.learner
    words = {
        "learner.tensor_parallel_size": learner.tensor_parallel_size,
        "learner.pipeline_parallel_size": learner.pipeline_parallel_size,
        "learner.data_parallel_size": learner.data_parallel_size,
        "learner.layers_in_last_pipeline_stage": learner.layers_in_last_pipeline_stage,
        "learner.micro_batch_size": learner.micro_batch_size,
        "learner.recompute_activations": str(learner.recompute_activations).lower(),
        "rollout.server.tensor_parallel_size": config.rollout.server.tensor_parallel_size,
    }
    return [f"{name}={value}" for name, value in words.items() if value is not None]
