"""What a colocated run may ask for, and estimates of its memory and time.

The parts are those of `memory`. On each GPU there are:

    sample     a server's weights, KV cache and runtime, and what the learner and the evaluation
               server leave behind
    train      the learner at its peak, and what the sleeping servers leave behind: with
               releases=cache also the rollout server's weights
    publish    the learner, its buckets, and the weights of the server that receives them

A process whose tensors have left a GPU still holds `LEFT_BYTES` there. In the servers' turn the
learner's weights, optimizer and reference wait in host memory. Its gradients are dropped, and are
zero when it returns. Each step copies these tensors out and back once, each GPU over its own PCIe
link. A server's memory is mapped again, not copied.
"""

import dataclasses
import math

from qurl_megatron.config.gpus import GIB, Node
from qurl_megatron.config.schema import Config, ConfigError, Releases, Transport
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.memory.estimate import (
    OFFLOADED,
    RUNTIME_BYTES,
    learner_memory,
    peaks,
    rollout_weights,
    server_weight_bytes,
)
from qurl_megatron.model.architecture import Architecture

# Assumed, not measured: CUDA context, NCCL and cuBLAS buffers of a process whose tensors are gone.
LEFT_BYTES = 3 * GIB


class DoesNotFit(ConfigError):
    """A layout needs more memory than a GPU, or the host of a node, has."""

    def __init__(self, message: str, needed_part: float) -> None:
        """`needed_part` is the needed memory over the available one."""
        super().__init__(message)
        self.needed_part = needed_part


@dataclasses.dataclass(frozen=True)
class ColocationPlan:
    """What a GPU and its node hold in the turns of learner and servers."""

    gpu_bytes: dict[str, int]  # by phase, on a rank of the fullest pipeline stage
    waiting_bytes: int  # most that a rank keeps in host memory while the servers sample
    node_bytes: int  # the same of all ranks of a node
    copies_s: float  # per step, for the learner to leave and come back


def check_fields(config: Config) -> None:
    """Check that colocated learner and servers can do what a run asks for.

    Raises:
        ConfigError: they cannot.
    """
    rollout = config.rollout
    if rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness={rollout.max_staleness}: with rollout.placement=colocated the "
            "servers sleep while the learner trains; set it to 0, or use separate"
        )
    if rollout.servers_at or not rollout.servers:
        raise ConfigError(
            "rollout.servers_at: with rollout.placement=colocated all servers are on the learner's "
            "GPUs; leave it empty and set rollout.servers, or use separate"
        )
    if config.quantization.publish != "full":
        raise ConfigError(
            f"quantization.publish={config.quantization.publish}: with rollout.placement=colocated "
            "nothing is sent, but written where it lies; set it to full, or use separate"
        )


def num_sets(config: Config) -> int:
    """Return the most servers on one GPU: one of each set."""
    return 2 if config.evaluation.enabled else 1


def learner_turn(
    architecture: Architecture, config: Config, stage: int, released: Releases
) -> dict[str, int]:
    """Return the bytes on a GPU of a pipeline stage while the learner trains and publishes.

    `released` says what the rollout server gives back: cache or all.
    """
    # Ranks write into weights that a server has kept; released weights must be sent.
    transport: Transport = "direct" if released == "cache" else "broadcast"
    quantization = dataclasses.replace(config.quantization, transport=transport)
    config = dataclasses.replace(config, quantization=quantization)
    of_learner = peaks(learner_memory(architecture, config, stage))
    publish = of_learner.pop("publish")
    own = sum(rollout_weights(architecture, config).values())
    sleeping = LEFT_BYTES * num_sets(config) + (own if released == "cache" else 0)
    loading = 0 if released == "cache" else own
    if config.evaluation.enabled:
        size, held = config.evaluation.server.tensor_parallel_size, config.evaluation_quantization
        weights = server_weight_bytes(architecture, held.weight_format, size, tuple(held.keep))
        loading = max(loading, sum(weights.values()))
    return {
        "train": max(of_learner.values()) + sleeping,
        "publish": publish + sleeping + loading,
    }


def waiting_bytes(architecture: Architecture, config: Config) -> int:
    """Return the most bytes that a rank has in host memory while it is away.

    A critic counts as much again: it has the same architecture, but no reference.
    """
    critics = 1 if config.objective.advantage_estimator == "gae" else 0
    most = 0
    for stage in range(config.learner.pipeline_parallel_size):
        parts = learner_memory(architecture, config, stage)
        own = parts["weights"] + parts.get("optimizer", 0) + parts.get(OFFLOADED, 0)
        most = max(most, own * (1 + critics) + parts["reference"])
    return most


def releases(architecture: Architecture, config: Config, node: Node | None) -> Releases:
    """Return what rollout servers give back in the learner's turn; `auto` becomes what fits.

    Args:
        node: one of the learner's nodes; None: they have no GPUs.
    """
    if config.rollout.server.releases != "auto":
        return config.rollout.server.releases
    stages = range(config.learner.pipeline_parallel_size)
    most = max(max(learner_turn(architecture, config, each, "cache").values()) for each in stages)
    return "all" if node and most > node.gpu.memory_bytes else "cache"


def plan_colocation(architecture: Architecture, config: Config, node: Node) -> ColocationPlan:
    """Return what a GPU and its node hold in each turn.

    Raises:
        DoesNotFit: more than they have.
    """
    learner, room = config.learner, node.gpu.memory_bytes
    stages = range(learner.pipeline_parallel_size)
    released = config.rollout.server.releases
    by_stage = [learner_turn(architecture, config, stage, released) for stage in stages]
    for stage, phases in enumerate(by_stage):
        for phase, needed in phases.items():
            if needed > room:
                rank = stage * learner.world_size // learner.pipeline_parallel_size
                doing = {"train": "trains", "publish": "publishes"}[phase]
                raise DoesNotFit(
                    f"rollout.placement=colocated: while learner rank {rank} {doing}, it and the "
                    f"sleeping servers are planned to take {gigabytes(needed)} of the "
                    f"{gigabytes(room)} of its GPU; divide the learner over more GPUs, or set "
                    "learner.offload_optimizer or rollout.server.releases=all",
                    needed / room,
                )
    # What an awake server must leave free on a GPU, beside its fraction.
    beside = RUNTIME_BYTES + LEFT_BYTES * num_sets(config)
    for name in ("rollout", "evaluation")[: num_sets(config)]:
        fraction = getattr(config, name).server.mem_fraction_static
        if fraction * room + beside > room:
            most = math.floor(100 * (1 - beside / room)) / 100
            raise DoesNotFit(
                f"{name}.server.mem_fraction_static={fraction}: beside it the server, the learner "
                f"and sleeping servers are planned to take {gigabytes(beside)} of a GPU; set it to "
                f"at most {most}",
                fraction + beside / room,
            )
    waiting = waiting_bytes(architecture, config)
    of_node = min(node.gpus, learner.world_size) * waiting
    if of_node > node.host_bytes:
        raise DoesNotFit(
            f"rollout.placement=colocated: the learner would wait in {gigabytes(of_node)} of host "
            f"memory, and a node has {gigabytes(node.host_bytes)}; use separate, or more nodes",
            of_node / node.host_bytes,
        )
    sample = {"sample": int(room * config.rollout.server.mem_fraction_static) + beside}
    fullest = max(stages, key=lambda stage: max(by_stage[stage].values()))
    return ColocationPlan(
        gpu_bytes={**sample, **by_stage[fullest]},
        waiting_bytes=waiting,
        node_bytes=of_node,
        copies_s=2 * waiting / node.gpu.host_bytes_per_s,
    )


def settle(architecture: Architecture, config: Config, node: Node | None) -> None:
    """Set what servers give back while they sleep, where the run says auto.

    Args:
        node: one of the learner's nodes; None: they have no GPUs.

    Raises:
        DoesNotFit: the run needs more memory than the node has.
    """
    config.rollout.server.releases = releases(architecture, config, node)
    if config.evaluation.server.releases == "auto":
        config.evaluation.server.releases = "all"
    if node:
        plan_colocation(architecture, config, node)
