"""Plan a run without allocating anything: check that it fits, or find the fastest layout that does.

`memory` estimates bytes; `step_time` and `rollout_time` estimate seconds. Runs with a critic are
refused. A plan divides the time of its step into parts, and names the part that limits it:

    decoding            of all servers, beyond the longest response; divided by the servers
    longest response    decoded alone, by a server that does nothing else; no GPU shortens it
    passes              forward and backward passes, with the communication of tensor and context
                        parallelism; divided by the learner's GPUs
    pipeline bubble     time in which pipeline stages wait for each other
    gradients           sum of the gradients over replicas, and the optimizer's step
    publish             the weights on their way to the servers; grows with their number

A synchronous step is the sum of them all. With `rollout.max_staleness` it has those that decide:
the learner's four, or decoding, or the longest response and the learner's four that follow it.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from functools import cached_property

from qurl_megatron.config.schema import Config, ConfigError, LearnerConfig
from qurl_megatron.config.validate import check_layout, check_routing, check_scales
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.planning.memory import (
    GIB,
    GPU_BYTES,
    bucket_memory,
    kv_bytes_per_token,
    learner_memory,
    server_weight_bytes,
    total_bytes,
    with_cheapest_recomputation,
)
from qurl_megatron.planning.nodes import fit_on_nodes, nodes_of_learner
from qurl_megatron.planning.rollout_time import (
    ServerLoad,
    SteadyState,
    rollout_s,
    server_load,
    steady_state,
)
from qurl_megatron.planning.step_time import (
    GPUS_PER_NODE,
    PublishPlan,
    Workload,
    is_direct,
    learner_s,
    plan_publish,
)

REMEDIES = {
    "decoding": "more GPUs for servers shorten it",
    "longest response": "more GPUs do not shorten it, a larger rollout.max_staleness hides it",
    "passes": "more GPUs for the learner shorten them",
    "pipeline bubble": "fewer or virtual pipeline stages and more prompts_per_step shorten it",
    "gradients": "fewer minibatches_per_step or a larger tensor_parallel_size shorten it",
    "publish": "it grows with the number of servers: fewer and larger ones shorten it",
}
"""What shortens each part."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory of a learner GPU and a server GPU, and the time of a step."""

    architecture: Architecture
    config: Config  # with the number of servers
    workload: Workload
    gpus: int  # GPUs of the learner and all servers together
    learner_bytes: dict[str, int]  # by part, on a rank of the fullest pipeline stage
    converter_bucket_bytes: int  # while publishing, instead of activations, logits and backward
    server_bytes: dict[str, int]  # by part, on one GPU of a server
    kv_tokens: int  # capacity of a server's KV cache
    load: ServerLoad  # of each server
    publish: PublishPlan
    step_s: dict[str, float]  # seconds by phase; rollout as if the servers did nothing else
    asynchronous: SteadyState | None  # None: synchronous

    @property
    def total_s(self) -> float:
        """Time of a whole step, in seconds."""
        return self.asynchronous.step_s if self.asynchronous else sum(self.step_s.values())

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Seconds of each part that decides the time of a step; they add up to `total_s`."""
        step_s, config, state = self.step_s, self.config, self.asynchronous
        longest = self.load.lengths.maximum
        token_s = self.load.token_s(1, longest / 2)
        longest_s = min(step_s["rollout"], longest * token_s)
        # Without sequences a learner does nothing but sum gradients and step; with endless virtual
        # stages its pipeline has no bubble.
        without_prompts = dataclasses.replace(config.rollout, prompts_per_step=0)
        empty = dataclasses.replace(config, rollout=without_prompts)
        gradients_s = sum(learner_s(self.architecture, empty, self.workload).values())
        endless = dataclasses.replace(config.learner, virtual_pipeline_parallel_size=10**9)
        without_bubble = dataclasses.replace(config, learner=endless)
        busy_s = sum(learner_s(self.architecture, without_bubble, self.workload).values())
        learner_time_s = sum(step_s.values()) - step_s["rollout"] - step_s["publish"]
        learner = {
            "passes": busy_s - gradients_s,
            "pipeline bubble": learner_time_s - busy_s,
            "gradients": gradients_s,
            "publish": step_s["publish"],
        }
        if state is None:
            decoding_s = step_s["rollout"] - longest_s
            return {"decoding": decoding_s, "longest response": longest_s, **learner}
        if state.limit == "servers":
            return {"decoding": state.step_s}
        if state.limit == "learner":
            return learner
        # The longest response, and then the learner, are spread over all these steps.
        batches = config.rollout.max_staleness + 1
        learner = {name: time_s / batches for name, time_s in learner.items()}
        return {"longest response": state.step_s - sum(learner.values()), **learner}


def largest_part(parts: dict[str, float]) -> str:
    """Return the largest part, its share of the step and what shortens it, in one line."""
    name = max(parts, key=lambda part: parts[part])
    share = 100 * parts[name] / sum(parts.values())
    return f"{name}, {share:.0f} % of the step; {REMEDIES[name]}"


def plan(
    architecture: Architecture,
    config: Config,
    gpus: int,
    workload: Workload | None = None,
) -> Plan:
    """Return the memory and time of the layout of `config` on `gpus` H100s.

    Rollout servers take all GPUs that the learner and the evaluation server leave. On more than
    one node the learner and the servers have nodes of their own, as in a Slurm job.

    Args:
        gpus: up to those of one node, or those of whole nodes.
        workload: mean lengths; None for half the maximum.

    Raises:
        ConfigError: the layout does not fit the model, the number of GPUs or their memory. If it
            is memory, the message names the part that exceeds it.
    """
    workload = workload or Workload.half(config)
    _check_layout(architecture, config, gpus)
    servers = most_servers(config, gpus)
    if not servers:
        evaluation = " and the evaluation server" if config.evaluation.enabled else ""
        nodes = " on nodes of their own" if gpus > GPUS_PER_NODE else ""
        raise ConfigError(
            f"{gpus} GPUs: beside the learner's {config.learner.world_size}{nodes} there is no "
            f"room for a rollout server of {config.rollout.server.tensor_parallel_size}{evaluation}"
        )
    rollout = dataclasses.replace(config.rollout, servers=servers)
    config = dataclasses.replace(config, rollout=rollout)
    if config.quantization.transport == "direct" and not is_direct(config):
        raise ConfigError(
            f"quantization.transport=direct: {gpus} GPUs are not all in one node of "
            f"{GPUS_PER_NODE}; set it to broadcast or auto"
        )
    buckets = bucket_memory(architecture, config)
    learner_bytes = _fullest_stage(architecture, config, buckets)
    server_bytes, kv_tokens = _server_memory(architecture, config)
    length = workload.mean_prompt + workload.mean_response
    slots = min(rollout.server.max_running_requests, int(kv_tokens / length))
    publish = plan_publish(architecture, config)
    load = server_load(architecture, config, workload, slots, publish.time_s)
    step_s = {
        "rollout": rollout_s(load),
        **learner_s(architecture, config, workload),
        "publish": publish.time_s,
    }
    asynchronous = None
    if rollout.max_staleness:
        learner_time_s = sum(time_s for phase, time_s in step_s.items() if phase != "rollout")
        asynchronous = steady_state(load, learner_time_s, rollout.max_staleness)
    return Plan(
        architecture=architecture,
        config=config,
        workload=workload,
        gpus=gpus,
        learner_bytes=learner_bytes,
        converter_bucket_bytes=buckets,
        server_bytes=server_bytes,
        kv_tokens=kv_tokens,
        load=load,
        publish=publish,
        step_s=step_s,
        asynchronous=asynchronous,
    )


def most_servers(config: Config, gpus: int) -> int:
    """Return the largest number of rollout servers that fit beside the learner; 0: none does."""
    ranks = config.learner.world_size
    if gpus <= GPUS_PER_NODE:
        nodes, gpus_per_node = 1, gpus - ranks
    else:
        nodes = gpus // GPUS_PER_NODE - nodes_of_learner(ranks, GPUS_PER_NODE)
        gpus_per_node = GPUS_PER_NODE
    evaluation = config.evaluation
    last = [evaluation.server.tensor_parallel_size] if evaluation.enabled else []
    size = config.rollout.server.tensor_parallel_size
    for servers in range(max(0, nodes * gpus_per_node) // size, 0, -1):
        if fit_on_nodes([size] * servers + last, nodes, gpus_per_node):
            return servers
    return 0


def _divides_nodes(learner: LearnerConfig) -> bool:
    """Return True if each node has as many ranks, and whole tensor-parallel groups."""
    nodes = nodes_of_learner(learner.world_size, GPUS_PER_NODE)
    return learner.world_size % (nodes * learner.tensor_parallel_size) == 0


def _check_layout(architecture: Architecture, config: Config, gpus: int) -> None:
    """Check that the layout fits the model and the number of GPUs.

    Raises:
        ConfigError: it does not.
    """
    learner, rollout = config.learner, config.rollout
    server_size = rollout.server.tensor_parallel_size
    check_scales(config.quantization.uaq, architecture)
    check_routing(config, architecture)
    if config.advantage_estimator == "gae":
        raise ConfigError(
            "advantage_estimator=gae: plans do not support a critic; set advantage_estimator=grpo"
        )
    if rollout.servers_at:
        raise ConfigError(
            f"rollout.servers_at={rollout.servers_at}: plans do not support servers elsewhere, "
            "whose GPUs and network are unknown; leave it out"
        )
    try:
        check_layout(architecture, learner)
        groups = rollout.server.expert_parallel_size
        architecture.check_server_layout(server_size, groups)
        if config.quantization.format == "fp8-block":
            architecture.check_blocks(server_size, groups)
    except ArchitectureError as error:
        raise ConfigError(str(error)) from None
    sizes = {"learner": learner.tensor_parallel_size, "rollout.server": server_size}
    for name, size in sizes.items():
        if size > GPUS_PER_NODE or GPUS_PER_NODE % size:
            raise ConfigError(
                f"{name}.tensor_parallel_size={size}: must divide the {GPUS_PER_NODE} GPUs of a "
                "node, so that all-reduces stay on NVLink"
            )
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    parts = config.optimizer.minibatches_per_step * learner.data_parallel_size
    if rows % parts:
        raise ConfigError(
            f"learner.data_parallel_size={learner.data_parallel_size}: a step's {rows} completions "
            f"are not divisible by {parts} (minibatches x data-parallel ranks)"
        )
    if gpus > GPUS_PER_NODE and gpus % GPUS_PER_NODE:
        raise ConfigError(
            f"{gpus} GPUs: a node has {GPUS_PER_NODE}, so more than one node have a multiple of it"
        )
    if not _divides_nodes(learner):
        raise ConfigError(
            f"the learner's {learner.world_size} ranks: "
            f"{nodes_of_learner(learner.world_size, GPUS_PER_NODE)} nodes of {GPUS_PER_NODE} GPUs "
            "would not have as many each, in whole tensor-parallel groups of "
            f"{learner.tensor_parallel_size}; take a multiple of {GPUS_PER_NODE}"
        )


def _fullest_stage(architecture: Architecture, config: Config, buckets: int) -> dict[str, int]:
    """Return the bytes by part on a rank of the fullest pipeline stage.

    Raises:
        ConfigError: it does not fit on a GPU. The message names the first part that exceeds the
            memory, with the parts added up in their order.
    """
    learner = config.learner
    stages = range(learner.pipeline_parallel_size)
    by_stage = [learner_memory(architecture, config, stage) for stage in stages]
    parts = max(by_stage, key=lambda parts: total_bytes(parts, buckets))
    total = total_bytes(parts, buckets)
    if total <= GPU_BYTES:
        return parts
    sums = itertools.accumulate(parts.values())
    excess = next(
        (name for name, sum_ in zip(parts, sums, strict=True) if sum_ > GPU_BYTES), "buckets"
    )
    verb = "do" if excess.endswith("s") else "does"
    sizes = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
    raise ConfigError(
        f"learner of tensor x pipeline x context x data parallel sizes "
        f"{learner.tensor_parallel_size} x {learner.pipeline_parallel_size} x "
        f"{learner.context_parallel_size} x {learner.data_parallel_size}: the {excess} {verb} not "
        f"fit: a rank of stage {by_stage.index(parts)} needs {total / GIB:.1f} of "
        f"{GPU_BYTES / GIB:.1f} GiB ({sizes})"
    )


def _server_memory(architecture: Architecture, config: Config) -> tuple[dict[str, int], int]:
    """Return the bytes by part on one GPU of a server, and the tokens in its KV cache.

    Raises:
        ConfigError: the weights and one sequence of maximum length do not fit.
    """
    server, longest = config.rollout.server, config.rollout.max_length
    size, weight_format = server.tensor_parallel_size, config.quantization.format
    weights = server_weight_bytes(
        architecture, weight_format, size, tuple(config.quantization.keep)
    )
    room = int(GPU_BYTES * server.mem_fraction_static)
    per_token = kv_bytes_per_token(architecture, size)
    kv_tokens = max(0, (room - sum(weights.values())) // per_token)
    if server.max_total_tokens is not None:
        kv_tokens = min(kv_tokens, server.max_total_tokens)
    if kv_tokens < longest:
        weights_gib = sum(weights.values()) / GIB
        what = "the weights do" if weights_gib > room / GIB else "the KV cache does"
        raise ConfigError(
            f"rollout.server.tensor_parallel_size={size}: {what} not fit: "
            f"mem_fraction_static={server.mem_fraction_static} of a GPU is {room / GIB:.1f} GiB, "
            f"{weight_format} weights take {weights_gib:.1f} GiB and one sequence of "
            f"{longest} tokens {longest * per_token / GIB:.1f} GiB"
        )
    unused = {"left for graphs and activations": GPU_BYTES - room}
    return {**weights, "KV cache": kv_tokens * per_token, **unused}, kv_tokens


def layouts(architecture: Architecture, config: Config, gpus: int) -> Iterator[Config]:
    """Yield `config` in every layout that may be the fastest; `plan` refuses some of them.

    Tensor-parallel groups stay within a node, and each node has as many ranks. There are up to 16
    pipeline stages, all equal or with a shorter last one, one, two or four context-parallel ranks,
    and as many data-parallel replicas as fit. Experts are whole, on expert-parallel ranks of one
    node. Micro batches have the tokens of one longest sequence, and the cheapest recomputation that
    fits is taken.
    """
    sizes = [size for size in (1, 2, 4, 8) if size <= gpus]
    num_experts = architecture.num_experts or 1
    expert_sizes = [size for size in sizes if num_experts % size == 0]
    rows = config.rollout.prompts_per_step * config.rollout.completions_per_prompt
    parts = config.optimizer.minibatches_per_step
    for tensor, stages, context in itertools.product(sizes, range(1, 17), (1, 2, 4)):
        in_last = architecture.shorter_last_stage(stages)
        try:
            architecture.check_layout(tensor, stages, 1, in_last)
        except ArchitectureError:
            continue
        most = gpus // (tensor * stages * context)
        for data, experts in itertools.product(range(1, most + 1), expert_sizes):
            if rows % (parts * data) or tensor * context * data % experts:
                continue
            learner = dataclasses.replace(
                config.learner,
                tensor_parallel_size=tensor,
                pipeline_parallel_size=stages,
                data_parallel_size=data,
                virtual_pipeline_parallel_size=1,
                layers_in_last_pipeline_stage=in_last,
                context_parallel_size=context,
                expert_parallel_size=experts,
                expert_tensor_parallel_size=1,
                tokens_per_micro_batch=config.rollout.max_length,
            )
            if not _divides_nodes(learner):
                continue
            candidate = with_cheapest_recomputation(
                architecture, dataclasses.replace(config, learner=learner)
            )
            for size in sizes:
                server = dataclasses.replace(config.rollout.server, tensor_parallel_size=size)
                rollout = dataclasses.replace(config.rollout, server=server)
                yield dataclasses.replace(candidate, rollout=rollout)


def suggest(
    architecture: Architecture,
    config: Config,
    gpus: int,
    workload: Workload | None = None,
) -> Plan | None:
    """Return the plan with the shortest step over all `layouts`, or None if none fits."""
    best: Plan | None = None
    workload = workload or Workload.half(config)
    for layout in layouts(architecture, config, gpus):
        # No step is shorter than the learner's part of it, which is quickly computed.
        if best and sum(learner_s(architecture, layout, workload).values()) >= best.total_s:
            continue
        try:
            candidate = plan(architecture, layout, gpus, workload)
        except ConfigError:
            continue
        if best is None or candidate.total_s < best.total_s:
            best = candidate
    return best


def plan_or_suggest(
    architecture: Architecture,
    config: Config,
    gpus: int,
    workload: Workload,
    *,
    has_layout: bool,
) -> Plan:
    """Return the plan of the layout in `config` if `has_layout`, else of the fastest layout.

    Raises:
        ConfigError: it does not fit. The message ends with a layout that does, or if there is
            none with what would help.
    """
    refusal = ""
    if has_layout:
        try:
            return plan(architecture, config, gpus, workload)
        except ConfigError as error:
            refusal = f"{error}; "
    best = suggest(architecture, config, gpus, workload)
    if best is None:
        raise ConfigError(
            f"{refusal}no layout of {gpus} GPUs fits prompts and responses of "
            f"{config.rollout.max_length} tokens: use more GPUs or shorter responses"
        )
    if has_layout:
        raise ConfigError(f"{refusal}this layout fits: {' '.join(layout_overrides(best.config))}")
    return best


def layout_overrides(config: Config) -> list[str]:
    """Return the layout of `config` as `field=value` overrides."""
    learner, rollout = config.learner, config.rollout
    names = [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "layers_in_last_pipeline_stage",
        "context_parallel_size",
    ]
    if learner.expert_parallel_size * learner.expert_tensor_parallel_size > 1:
        names += ["expert_parallel_size", "expert_tensor_parallel_size"]
    names.append("tokens_per_micro_batch" if learner.tokens_per_micro_batch else "micro_batch_size")
    names.append("recompute")
    if learner.recompute == "full":
        names.append("recompute_layers")
    overrides = {f"learner.{name}": getattr(learner, name) or "none" for name in names}
    overrides |= {
        "learner.offload_optimizer": str(learner.offload_optimizer).lower(),
        "rollout.servers": rollout.servers,
        "rollout.server.tensor_parallel_size": rollout.server.tensor_parallel_size,
    }
    return [f"{name}={value}" for name, value in overrides.items()]
