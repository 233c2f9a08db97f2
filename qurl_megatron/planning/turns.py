"""Estimate memory and time of learner and servers that take turns on the same GPUs.

It is for `rollout.placement=shared`. The parts are those of `memory`. On each GPU there are:

    sample     a server's weights and KV cache with its runtime, and what the learner and the
               evaluation server leave there
    train      the learner at its peak, and what the servers that sleep leave there: with
               releases=cache the rollout server's weights too
    publish    the learner, its buckets, and the weights of the server that gets them

What a process leaves on a GPU beside tensors is `LEFT_BYTES`. In the servers' turn the learner's
weights, optimizer and reference wait in the host's memory; gradients are dropped, and 0 when it is
back. The turns of a step take the time of these copies, there and back over PCIe, each GPU over its
own. Memory that a server takes again is mapped, not copied.
"""

import dataclasses

from qurl_megatron.config.schema import Config, Transport
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.planning.gpus import DGX_H100, GIB, Node
from qurl_megatron.planning.memory import (
    OFFLOADED,
    RUNTIME_BYTES,
    learner_memory,
    peaks,
    server_weight_bytes,
)

# Assumed, not measured: CUDA context, NCCL and cuBLAS buffers of a process whose tensors are gone.
LEFT_BYTES = 3 * GIB


def num_sets(config: Config) -> int:
    """Return how many servers a GPU has at most: one of each set."""
    return 2 if config.evaluation.enabled else 1


def rollout_weights(architecture: Architecture, config: Config) -> int:
    """Return the bytes of weights on each GPU of a rollout server."""
    weights, size = config.quantization, config.rollout.server.tensor_parallel_size
    parts = server_weight_bytes(architecture, weights.weight_format, size, tuple(weights.keep))
    return sum(parts.values())


def beside_servers(config: Config) -> int:
    """Return the bytes of a GPU that a server which is awake must leave, beside its fraction."""
    return RUNTIME_BYTES + LEFT_BYTES * num_sets(config)


def learner_turn(
    architecture: Architecture, config: Config, stage: int, releases: str
) -> dict[str, int]:
    """Return the bytes of a GPU in the learner's turn, on a rank of a pipeline stage.

    They are those while it trains and while it publishes. `releases`: what the rollout server gives
    back, cache or all.
    """
    transport: Transport = "direct" if releases == "cache" else "broadcast"
    quantization = dataclasses.replace(config.quantization, transport=transport)
    config = dataclasses.replace(config, quantization=quantization)
    of_learner = peaks(learner_memory(architecture, config, stage))
    publish = of_learner.pop("publish")
    own = rollout_weights(architecture, config)
    sleeping = LEFT_BYTES * num_sets(config) + (own if releases == "cache" else 0)
    loading = 0 if releases == "cache" else own
    if config.evaluation.enabled:
        size = config.evaluation.server.tensor_parallel_size
        loading = max(loading, sum(server_weight_bytes(architecture, "bf16", size).values()))
    return {
        "train": max(of_learner.values()) + sleeping,
        "publish": publish + sleeping + loading,
    }


def waiting_bytes(architecture: Architecture, config: Config, stage: int) -> int:
    """Return the bytes that a rank of a pipeline stage has in the host's memory while it is away.

    With a critic, as many again: it has its own, of the same architecture, and no reference.
    """
    parts = learner_memory(architecture, config, stage)
    own = parts["weights"] + parts.get("optimizer", 0) + parts.get(OFFLOADED, 0)
    critics = 1 if config.advantage_estimator == "gae" else 0
    return own * (1 + critics) + parts["reference"]


def node_bytes(architecture: Architecture, config: Config, gpus_per_node: int) -> int:
    """Return the most bytes that the ranks of one node have in the host's memory while away."""
    learner = config.learner
    ranks_of_stage = learner.world_size // learner.pipeline_parallel_size
    waiting = [
        waiting_bytes(architecture, config, stage)
        for stage in range(learner.pipeline_parallel_size)
        for _ in range(ranks_of_stage)
    ]
    firsts = range(0, len(waiting), gpus_per_node)
    return max(sum(waiting[first : first + gpus_per_node]) for first in firsts)


def turns_s(architecture: Architecture, config: Config, node: Node = DGX_H100) -> float:
    """Return the seconds in which the learner leaves and comes back, once a step."""
    stages = range(config.learner.pipeline_parallel_size)
    most = max(waiting_bytes(architecture, config, stage) for stage in stages)
    return 2 * most / node.gpu.host_bytes_per_s
