"""Plan a run without allocating anything: check that it fits, or find the fastest layout that does.

`memory/estimate.py` estimates bytes; `step_time` and `rollout_time` estimate seconds. Runs with a
critic are refused. A plan divides the time of its step into parts, and names the largest:

    decoding            of all servers, beyond the longest completion; divided by the servers
    longest completion  decoded by a server that does nothing else; more GPUs do not shorten it
    passes              forward and backward passes, with the communication of tensor and context
                        parallelism; divided by the learner's GPUs
    pipeline bubble     time in which pipeline stages wait for each other
    gradients           sum of the gradients over replicas, and the optimizer's step
    publish             the weights on their way; grows with the number of servers
    copies              with rollout.placement=colocated: the learner to host memory and back

A synchronous step is their sum. With `rollout.max_staleness` the longest of three paths decides:
the learner's four parts, decoding, or the longest completion followed by the learner's four.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any

from qurl_megatron.config.gpus import DGX_H100, GIB, Node
from qurl_megatron.config.nodes import fit, gpus_of_run, nodes_of_learner, nodes_of_run
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    LearnerConfig,
    RecomputeMode,
    ServerConfig,
)
from qurl_megatron.config.server_options import states_per_request
from qurl_megatron.config.validate import (
    check_base,
    check_layout,
    check_routing,
    check_scales,
)
from qurl_megatron.extensions.colocated.fit import (
    LEFT_BYTES,
    ColocationPlan,
    DoesNotFit,
    check_fields,
    num_sets,
    plan_colocation,
    releases,
)
from qurl_megatron.extensions.planning.lengths import Workload
from qurl_megatron.extensions.planning.rollout_time import (
    ServerLoad,
    SteadyState,
    rollout_s,
    server_load,
    steady_state,
)
from qurl_megatron.extensions.planning.step_time import (
    LearnerTime,
    PublishPlan,
    is_direct,
    learner_time,
    plan_publish,
)
from qurl_megatron.memory.estimate import (
    kv_bytes_per_token,
    kv_value_bytes,
    learner_memory,
    rollout_weights,
    stage_layers,
    state_bytes_per_sequence,
    total_bytes,
)
from qurl_megatron.model.architecture import Architecture, ArchitectureError

STATES_PART = 0.9 / 1.9  # SGLang's mamba_full_memory_ratio, of what weights leave
REMEDIES = {
    "decoding": "more GPUs for servers shorten it",
    "longest completion": "more GPUs do not shorten it, a larger rollout.max_staleness hides it",
    "passes": "more GPUs for the learner shorten them",
    "pipeline bubble": "fewer or virtual pipeline stages and more prompts_per_step shorten it",
    "gradients": "fewer minibatches_per_step or a larger tensor_parallel_size shorten it",
    "publish": "it grows with the number of servers: fewer and larger ones shorten it",
    "copies": "more GPUs shorten them, and separate placement has none",
}
"""What shortens each part."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory of a learner GPU and a server GPU, and the time of a step."""

    architecture: Architecture
    config: Config  # with the number of servers
    workload: Workload
    node: Node
    gpus: int  # GPUs of the learner and all servers together
    learner_bytes: dict[str, int]  # by part, on a rank of the fullest pipeline stage
    server_bytes: dict[str, int]  # by part, on one GPU of a server
    kv_tokens: int  # capacity of a server's KV cache
    load: ServerLoad  # of each server
    publish: PublishPlan
    learner: LearnerTime
    step_s: dict[str, float]  # seconds by phase; rollout as if the servers did nothing else
    asynchronous: SteadyState | None  # None: synchronous
    colocation: ColocationPlan | None  # None: learner and servers have GPUs of their own

    @property
    def total_s(self) -> float:
        """Time of a whole step, in seconds."""
        return self.asynchronous.step_s if self.asynchronous else sum(self.step_s.values())

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Seconds of the parts that decide the time of a step; they add up to `total_s`."""
        step_s, config, state = self.step_s, self.config, self.asynchronous
        longest = self.load.lengths.maximum
        token_s = self.load.token_s(1, longest / 2)
        longest_s = min(step_s["rollout"], longest * token_s)
        learner = {
            "passes": self.learner.total - self.learner.bubble - self.learner.gradients,
            "pipeline bubble": self.learner.bubble,
            "gradients": self.learner.gradients,
            "publish": step_s["publish"],
        }
        if state is None:
            decoding_s = step_s["rollout"] - longest_s
            copies = {"copies": self.colocation.copies_s} if self.colocation else {}
            return {"decoding": decoding_s, "longest completion": longest_s, **learner, **copies}
        if state.limit == "servers":
            return {"decoding": state.step_s}
        if state.limit == "learner":
            return learner
        # The longest completion and the learner's parts after it spread over this many steps.
        batches = config.rollout.max_staleness + 1
        learner = {name: time_s / batches for name, time_s in learner.items()}
        return {"longest completion": state.step_s - sum(learner.values()), **learner}


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
    node: Node = DGX_H100,
) -> Plan:
    """Return the memory and time of the layout of `config` on `gpus` GPUs.

    Rollout servers take all GPUs that the learner and the evaluation server leave. If they are
    colocated, both have all GPUs.

    Args:
        gpus: at most one node's, or those of whole nodes.
        workload: None for what a plan assumes.

    Raises:
        ConfigError: the layout does not fit the model, the number of GPUs or their memory. If it
            is memory, the message names the part that exceeds it.
    """
    _check_layout(architecture, config, gpus, node)
    ranks = config.learner.world_size
    if config.rollout.placement == "colocated" and ranks != gpus:
        raise ConfigError(
            f"learner: with rollout.placement=colocated it has a rank on each of the {gpus} GPUs, "
            f"and this layout has {ranks}; change learner.data_parallel_size"
        )
    servers = most_servers(config, gpus, node)
    if not servers:
        evaluation = " and the evaluation server" if config.evaluation.enabled else ""
        raise ConfigError(
            f"{gpus} GPUs: beside the learner's {config.learner.world_size} there is no room for a "
            f"rollout server of {config.rollout.server.tensor_parallel_size}{evaluation}"
        )
    rollout = dataclasses.replace(config.rollout, servers=servers)
    config = dataclasses.replace(config, rollout=rollout)
    is_colocated = rollout.placement == "colocated"  # then the transport follows from `releases`
    if config.quantization.transport == "direct" and not (is_colocated or is_direct(config, node)):
        raise ConfigError(
            f"quantization.transport=direct: {gpus} GPUs are not all in one node of "
            f"{node.gpus}; set it to broadcast or auto"
        )
    return _planned(architecture, config, gpus, workload or Workload.of(config), node)


def plan_run(architecture: Architecture, config: Config, workload: Workload, node: Node) -> Plan:
    """Return the plan of a run as it is configured, on the GPUs that it takes.

    Raises:
        ConfigError: it does not fit the model or the memory of the GPUs.
    """
    gpus = gpus_of_run(config)
    if gpus > node.gpus:
        gpus = sum(nodes_of_run(config, node.gpus)) * node.gpus
    _check_layout(architecture, config, gpus, node)
    return _planned(architecture, config, gpus, workload, node)


def _planned(
    architecture: Architecture, config: Config, gpus: int, workload: Workload, node: Node
) -> Plan:
    """Return the plan of a configuration that fits the model and the number of GPUs.

    Raises:
        DoesNotFit: it does not fit the memory of a GPU.
    """
    colocation, copies = None, {}
    if config.rollout.placement == "colocated":
        released = releases(architecture, config, node)
        server = dataclasses.replace(config.rollout.server, releases=released)
        rollout = dataclasses.replace(config.rollout, server=server)
        config = dataclasses.replace(config, rollout=rollout)
        colocation = plan_colocation(architecture, config, node)
        copies = {"copies": colocation.copies_s}
    rollout = config.rollout
    learner_bytes = _fullest_stage(architecture, config, node)
    server_bytes, kv_tokens, most = _server_memory(architecture, config, node)
    slots = min(most, int(kv_tokens / workload.mean_length))
    publish = plan_publish(architecture, config, node)
    load = server_load(architecture, config, workload, slots, publish.time_s, node)
    learner = learner_time(architecture, config, workload, node)
    step_s = {
        "rollout": rollout_s(load),
        "proximal": learner.proximal,
        "update": learner.update,
        "publish": publish.time_s,
        **copies,
    }
    asynchronous = None
    if rollout.max_staleness:
        asynchronous = steady_state(load, learner.total + publish.time_s, rollout.max_staleness)
    return Plan(
        architecture=architecture,
        config=config,
        workload=workload,
        node=node,
        gpus=gpus,
        learner_bytes=learner_bytes,
        server_bytes=server_bytes,
        kv_tokens=kv_tokens,
        load=load,
        publish=publish,
        learner=learner,
        step_s=step_s,
        asynchronous=asynchronous,
        colocation=colocation,
    )


def most_servers(config: Config, gpus: int, node: Node = DGX_H100) -> int:
    """Return the largest number of rollout servers that fit beside the learner; 0: none does."""
    ranks = config.learner.world_size
    if config.rollout.placement == "colocated":
        return ranks // config.rollout.server.tensor_parallel_size
    on_learner = nodes_of_learner(ranks, node.gpus)
    used = [-(-ranks // on_learner)] * on_learner + [0] * (gpus // node.gpus - on_learner)
    evaluation = config.evaluation
    last = [evaluation.server.tensor_parallel_size] if evaluation.enabled else []
    size = config.rollout.server.tensor_parallel_size
    for servers in range(max(0, gpus - ranks) // size, 0, -1):
        if fit([size] * servers + last, used, min(gpus, node.gpus)):
            return servers
    return 0


def _divides_nodes(learner: LearnerConfig, node: Node) -> bool:
    """Return whether all nodes get equally many ranks, in whole tensor-parallel groups."""
    nodes = nodes_of_learner(learner.world_size, node.gpus)
    return learner.world_size % (nodes * learner.tensor_parallel_size) == 0


def _check_layout(architecture: Architecture, config: Config, gpus: int, node: Node) -> None:
    """Check that the layout fits the model and the number of GPUs.

    Raises:
        ConfigError: it does not.
    """
    learner, rollout = config.learner, config.rollout
    server_size = rollout.server.tensor_parallel_size
    check_scales(config.quantization.uaq, architecture)
    check_routing(config, architecture)
    check_base(config, architecture)
    if rollout.placement == "colocated":
        check_fields(config)
    if config.objective.advantage_estimator == "gae":
        raise ConfigError(
            "objective.advantage_estimator=gae: plans do not support a critic; set it to grpo"
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
        architecture.check_blocks(config.quantization.weight_format, server_size, groups)
    except ArchitectureError as error:
        raise ConfigError(str(error)) from None
    sizes = {"learner": learner.tensor_parallel_size, "rollout.server": server_size}
    for name, size in sizes.items():
        if size > node.gpus or node.gpus % size:
            raise ConfigError(
                f"{name}.tensor_parallel_size={size}: must divide the {node.gpus} GPUs of a "
                "node, so that all-reduces stay on NVLink"
            )
    rows = rollout.completions_per_step
    parts = config.optimizer.minibatches_per_step * learner.data_parallel_size
    if rows % parts:
        raise ConfigError(
            f"learner.data_parallel_size={learner.data_parallel_size}: a step's {rows} completions "
            f"are not divisible by {parts} (minibatches x data-parallel ranks)"
        )
    if gpus > node.gpus and gpus % node.gpus:
        raise ConfigError(
            f"{gpus} GPUs: a node has {node.gpus}, so several nodes have a multiple of that"
        )
    if not _divides_nodes(learner, node):
        raise ConfigError(
            f"the learner's {learner.world_size} ranks: "
            f"{nodes_of_learner(learner.world_size, node.gpus)} nodes of {node.gpus} GPUs "
            "would not get equally many, in whole tensor-parallel groups of "
            f"{learner.tensor_parallel_size}; take a multiple of {node.gpus}"
        )


def _fullest_stage(architecture: Architecture, config: Config, node: Node) -> dict[str, int]:
    """Return the bytes by part on a rank of the fullest pipeline stage.

    Raises:
        DoesNotFit: a GPU is too small. The message adds the parts up in order, and names the
            first that exceeds the memory.
    """
    learner = config.learner
    stages = range(learner.pipeline_parallel_size)
    by_stage = [learner_memory(architecture, config, stage) for stage in stages]
    parts = max(by_stage, key=total_bytes)
    total, room = total_bytes(parts), node.gpu.memory_bytes
    if total <= room:
        return parts
    sums = itertools.accumulate(parts.values())
    excess = next(name for name, sum_ in zip(parts, sums, strict=True) if sum_ > room)
    verb = "do" if excess.endswith("s") else "does"
    sizes = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
    raise DoesNotFit(
        f"learner of tensor x pipeline x context x data parallel sizes "
        f"{learner.tensor_parallel_size} x {learner.pipeline_parallel_size} x "
        f"{learner.context_parallel_size} x {learner.data_parallel_size}: the {excess} {verb} not "
        f"fit: a rank of stage {by_stage.index(parts)} needs {total / GIB:.1f} of "
        f"{room / GIB:.1f} GiB ({sizes})",
        total / room,
    )


def _server_memory(
    architecture: Architecture, config: Config, node: Node
) -> tuple[dict[str, int], int, int]:
    """Return a server's bytes by part on one GPU, its KV cache's tokens, and its most sequences.

    Raises:
        DoesNotFit: the weights and one sequence of maximum length do not fit.
    """
    server, longest = config.rollout.server, config.rollout.max_length
    size, weights = server.tensor_parallel_size, rollout_weights(architecture, config)
    room = int(node.gpu.memory_bytes * server.mem_fraction_static)
    per_token = kv_bytes_per_token(architecture, size, kv_value_bytes(server))
    free, most = room - sum(weights.values()), server.max_running_requests
    of_states = {}
    if state := state_bytes_per_sequence(architecture, size):
        states = num_states(architecture, server, free)
        most = max(1, min(most, states // states_per_request(server, on_gpu=True)))
        of_states["states of linear attention"] = (states + 1) * state
        free -= (states + 1) * state
    kv_tokens = max(0, free // per_token)
    if server.max_total_tokens is not None:
        kv_tokens = min(kv_tokens, server.max_total_tokens)
    if kv_tokens < longest:
        weights_gib = sum(weights.values()) / GIB
        what = "the weights do" if weights_gib > room / GIB else "the KV cache does"
        raise DoesNotFit(
            f"rollout.server.tensor_parallel_size={size}: {what} not fit: "
            f"mem_fraction_static={server.mem_fraction_static} of a GPU is {room / GIB:.1f} GiB, "
            f"{config.quantization.weight_format} weights take {weights_gib:.1f} GiB"
            + "".join(f", {name} {size / GIB:.1f} GiB" for name, size in of_states.items())
            + f" and one sequence of {longest} tokens {longest * per_token / GIB:.1f} GiB",
            (room - free + longest * per_token) / room,
        )
    unused = {"left for graphs and activations": node.gpu.memory_bytes - room}
    return {**weights, **of_states, "KV cache": kv_tokens * per_token, **unused}, kv_tokens, most


def num_states(architecture: Architecture, server: ServerConfig, free_bytes: int) -> int:
    """Return how many states of linear attention a server has.

    SGLang divides the `free_bytes` that the weights leave of a GPU between states and KV cache.
    Without a prefix cache it has as many states as max_running_requests.
    """
    per_state = state_bytes_per_sequence(architecture, server.tensor_parallel_size)
    if not per_state:
        return 0
    if server.options.get("disable_radix_cache"):
        return server.max_running_requests
    return max(0, int(free_bytes * STATES_PART) // per_state - 1)  # one is padding


def with_cheapest_recomputation(
    architecture: Architecture, config: Config, gpu_bytes: int, kept: Collection[str] = ()
) -> Config:
    """Return `config` with the least recomputation and offloading that every learner rank fits in.

    It tries, in this order: nothing, `selective`, an offloaded optimizer, both, and whole layers,
    as few as possible, with an offloaded optimizer. If not even that fits, all layers are
    recomputed. The learner's fields in `kept` keep their values.
    """
    learner = config.learner
    layers = max(stage_layers(architecture, learner)) // learner.virtual_pipeline_parallel_size

    def changed(recompute: RecomputeMode | None, offload: bool, number: int | None) -> Config:
        changes: dict[str, Any] = {
            "recompute": recompute,
            "recompute_layers": number,
            "offload_optimizer": offload,
        }
        free = {name: value for name, value in changes.items() if name not in kept}
        return dataclasses.replace(config, learner=dataclasses.replace(learner, **free))

    def fits(candidate: Config) -> bool:
        return all(
            total_bytes(learner_memory(architecture, candidate, stage)) <= gpu_bytes
            for stage in range(learner.pipeline_parallel_size)
        )

    for offload in (False, True):
        for candidate in (changed(None, offload, None), changed("selective", offload, None)):
            if fits(candidate):
                return candidate
    number = 1 + bisect.bisect_left(
        range(1, layers), True, key=lambda number: fits(changed("full", True, number))
    )
    return changed("full", True, number if number < layers else None)


def layouts(
    architecture: Architecture,
    config: Config,
    gpus: int,
    node: Node = DGX_H100,
    given: Collection[str] = (),
) -> Iterator[Config]:
    """Yield `config` in every layout that may be the fastest; `plan` refuses some of them.

    Tensor-parallel groups stay within a node, and all nodes have equally many ranks. There are up
    to 16 pipeline stages, equal or with a shorter last one; one, two or four context-parallel ranks
    (one for a hybrid); and as many data-parallel replicas as fit. Experts are not divided, and
    their expert-parallel ranks share a node. A micro batch has the tokens of one longest sequence,
    with the cheapest recomputation that fits. Servers decode up to 256 or 512 sequences at once.
    The fields in `given` keep their values. A colocated learner has a rank on each GPU.
    """
    learner, rollout = config.learner, config.rollout
    is_colocated = rollout.placement == "colocated"
    # Sleeping servers; `releases` lets them keep their weights only where these fit too.
    beside = LEFT_BYTES * num_sets(config) if is_colocated else 0

    def values(field: str, searched: Iterable[int]) -> Iterable[int]:
        return [attrgetter(field)(config)] if field in given else searched

    sizes = [size for size in range(1, node.gpus + 1) if size <= gpus and node.gpus % size == 0]
    num_experts = architecture.num_experts or 1
    expert_sizes = values(
        "learner.expert_parallel_size", [size for size in sizes if num_experts % size == 0]
    )
    kept = {field.removeprefix("learner.") for field in given if field.startswith("learner.")}
    budget = None if "micro_batch_size" in kept else rollout.max_length
    rows = rollout.completions_per_step
    parts = config.optimizer.minibatches_per_step
    for tensor, stages, context in itertools.product(
        values("learner.tensor_parallel_size", sizes),
        values("learner.pipeline_parallel_size", range(1, 17)),
        values("learner.context_parallel_size", (1,) if architecture.delta_net else (1, 2, 4)),
    ):
        searched: dict[str, Any] = {
            "tensor_parallel_size": tensor,
            "pipeline_parallel_size": stages,
            "virtual_pipeline_parallel_size": 1,
            "layers_in_last_pipeline_stage": architecture.shorter_last_stage(stages),
            "context_parallel_size": context,
            "expert_tensor_parallel_size": 1,
            "tokens_per_micro_batch": budget,
        }
        changes = {name: value for name, value in searched.items() if name not in kept}
        stage = dataclasses.replace(learner, **changes)
        try:
            architecture.check_layout(tensor, stages, 1, stage.layers_in_last_pipeline_stage)
        except ArchitectureError:
            continue
        most = gpus // (tensor * stages * context)
        for data, experts in itertools.product(
            values("learner.data_parallel_size", range(1, most + 1)), expert_sizes
        ):
            if rows % (parts * data) or tensor * context * data % experts:
                continue
            if is_colocated and tensor * stages * context * data != gpus:
                continue
            candidate = dataclasses.replace(
                stage, data_parallel_size=data, expert_parallel_size=experts
            )
            if not _divides_nodes(candidate, node):
                continue
            with_learner = with_cheapest_recomputation(
                architecture,
                dataclasses.replace(config, learner=candidate),
                node.gpu.memory_bytes - beside,
                kept,
            )
            for size, slots in itertools.product(
                values("rollout.server.tensor_parallel_size", sizes),
                values("rollout.server.max_running_requests", (256, 512)),
            ):
                server = dataclasses.replace(
                    rollout.server, tensor_parallel_size=size, max_running_requests=slots
                )
                yield dataclasses.replace(
                    with_learner, rollout=dataclasses.replace(rollout, server=server)
                )


def suggest(
    architecture: Architecture,
    config: Config,
    gpus: int,
    workload: Workload | None = None,
    node: Node = DGX_H100,
    given: Collection[str] = (),
) -> Plan:
    """Return the plan with the shortest step over all `layouts`.

    Raises:
        ConfigError: no layout fits; the message says why the closest one does not.
    """
    best: Plan | None = None
    refusals: list[ConfigError] = []
    workload = workload or Workload.of(config)
    candidates = [*layouts(architecture, config, gpus, node, given)]
    # No step is shorter than the learner's part of it, which is cheap to compute.
    learner_s = [learner_time(architecture, each, workload, node).total for each in candidates]
    for least_s, layout in sorted(zip(learner_s, candidates, strict=True), key=itemgetter(0)):
        if best and least_s >= best.total_s:
            break
        try:
            candidate = plan(architecture, layout, gpus, workload, node)
        except ConfigError as error:
            refusals.append(error)
            continue
        if best is None or candidate.total_s < best.total_s:
            best = candidate
    if best:
        return best
    if not refusals:  # the given fields leave nothing to search
        return plan(architecture, config, gpus, workload, node)
    closest = min(refusals, key=lambda refusal: getattr(refusal, "needed_part", math.inf))
    fields = " ".join(f"{field}={attrgetter(field)(config)}" for field in sorted(given))
    advice = "; use more GPUs or shorter completions" if isinstance(closest, DoesNotFit) else ""
    what = f"{gpus} GPU{'s' * (gpus > 1)}{f' with {fields}' if fields else ''}"
    raise ConfigError(
        f"no layout of {what} fits prompts and completions of {config.rollout.max_length} tokens; "
        f"the closest: {closest}{advice}"
    )


def placements(config: Config, given: Collection[str]) -> dict[str, Config]:
    """Return the configuration in each placement that `given` permits, by its name.

    Servers that sample ahead do so by at least one step.
    """
    rollout = config.rollout
    choices = {
        "separate": dataclasses.replace(rollout, placement="separate", max_staleness=0),
        "ahead": dataclasses.replace(
            rollout, placement="separate", max_staleness=max(1, rollout.max_staleness)
        ),
        "colocated": dataclasses.replace(rollout, placement="colocated", max_staleness=0),
    }
    fields = {"rollout.placement": "placement", "rollout.max_staleness": "max_staleness"}
    kept = [field for name, field in fields.items() if name in given]
    return {
        name: dataclasses.replace(config, rollout=choice)
        for name, choice in choices.items()
        if all(getattr(choice, field) == getattr(rollout, field) for field in kept)
    }


def plan_or_suggest(
    architecture: Architecture,
    config: Config,
    gpus: int,
    workload: Workload,
    node: Node = DGX_H100,
) -> Plan:
    """Return the plan of the layout in `config`.

    Raises:
        ConfigError: it does not fit. The message ends with a layout that does, or with why there
            is none.
    """
    try:
        return plan(architecture, config, gpus, workload, node)
    except ConfigError as error:
        refusal = f"{error}; "
    try:
        best = suggest(architecture, config, gpus, workload, node)
    except ConfigError as error:
        raise ConfigError(f"{refusal}{error}") from None
    raise ConfigError(f"{refusal}this layout fits: {' '.join(layout_overrides(best.config))}")


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
        "rollout.server.max_running_requests": rollout.server.max_running_requests,
    }
    if rollout.max_staleness:
        overrides["rollout.max_staleness"] = rollout.max_staleness
    if rollout.placement == "colocated":
        overrides["rollout.placement"] = rollout.placement
    return [f"{name}={value}" for name, value in overrides.items()]
