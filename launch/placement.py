"""Assign GPUs and nodes to the learner ranks and servers of a run.

On one machine: `plan_here`. On the nodes of a Slurm job: `make_plan`. For a job that is not
submitted yet: `smallest_plan`, which finds how many nodes the run needs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path

from qurl_megatron.config.nodes import (
    ServerSpec,
    deal,
    nodes_of_run,
    server_sizes,
    server_specs,
)
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    LearnerConfig,
)
from qurl_megatron.files import write_whole
from qurl_megatron.machine.network import free_port, make_key
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.memory.estimate import RUNTIME_BYTES, learner_memory, total_bytes
from qurl_megatron.model.architecture import Architecture

Placed = tuple[str, int, int]  # set name, index within the set, and first GPU of a server
LARGEST_SHARE = 0.8  # most of a GPU's memory that servers beside a learner rank may take


def place_servers(config: Config, num_gpus: int) -> list[Placed]:
    """Place the servers of a run on this machine, in the order of `server_specs`.

    Each learner rank gets one GPU, from GPU 0 on. A server gets the least loaded consecutive GPUs:
    free ones, if there are enough. Colocated servers get the learner's GPUs. With `num_gpus` 0 no
    server has a GPU.

    Raises:
        ConfigError: the machine has too few GPUs, or the processes on one of them ask for too
            much of its memory.
    """
    specs = server_specs(config)
    world_size = config.learner.world_size
    ranks = {"learner": world_size}
    ranks |= {
        f"{spec.set_name}.server.tensor_parallel_size": spec.server.tensor_parallel_size
        for spec in specs
    }
    for name, num_ranks in ranks.items():
        if 0 < num_gpus < num_ranks:
            raise ConfigError(
                f"{name}: {num_ranks} ranks need a GPU each (NCCL refuses two "
                f"on one); this machine has {num_gpus}"
            )
    if not num_gpus:
        return [(spec.set_name, spec.index, 0) for spec in specs]
    if config.rollout.placement == "colocated":
        return _place_on_learner(config, specs)
    on_gpu: list[list[str]] = [["learner"][: gpu < world_size] for gpu in range(num_gpus)]
    load = [(1 - LARGEST_SHARE) * len(names) for names in on_gpu]
    placed = []
    for spec in specs:
        fraction, size = spec.server.mem_fraction_static, spec.server.tensor_parallel_size
        starts = range(num_gpus - size + 1)
        first = min(starts, key=lambda start: max(load[start : start + size]))
        placed.append((spec.set_name, spec.index, first))
        for gpu in range(first, first + size):
            on_gpu[gpu].append(spec.set_name)
            load[gpu] += fraction
            if len(on_gpu[gpu]) > 1 and load[gpu] > 1 + 1e-9:  # sums of fractions are rounded
                room = 1 - (1 - LARGEST_SHARE) * on_gpu[gpu].count("learner")
                raise ConfigError(
                    f"{spec.set_name}.server.mem_fraction_static={fraction}: GPU {gpu} is shared "
                    f"by {' and '.join(on_gpu[gpu])}; the servers ask for "
                    f"{load[gpu] - 1 + room:.2f} of its memory; lower their sum to {room:g}, or "
                    "add GPUs"
                )
    return placed


def _place_on_learner(config: Config, specs: Sequence[ServerSpec]) -> list[Placed]:
    """Place colocated servers on the GPUs of the learner, each set from GPU 0 on.

    Raises:
        ConfigError: a server has more ranks than the learner, or two of a set would share a GPU.
    """
    world_size = config.learner.world_size
    for spec in specs:
        size = spec.server.tensor_parallel_size
        if (last := size * (spec.index + 1)) > world_size:
            field = "rollout.servers" if spec.index else f"{spec.set_name}.server"
            raise ConfigError(
                f"{field}: with rollout.placement=colocated, {spec.index + 1} servers of "
                f"tensor_parallel_size={size} take {last} GPUs, and the learner has "
                f"{world_size}; lower one of them"
            )
    return [
        (spec.set_name, spec.index, spec.server.tensor_parallel_size * spec.index) for spec in specs
    ]


def choose_placement(config: Config, given: Collection[str], num_gpus: int) -> str:
    """Colocate learner and servers where this machine has too few GPUs for both.

    Return a line that says so. Return an empty text if both fit, if they cannot be colocated, or
    if the placement is among the fields that are `given`.
    """
    rollout = config.rollout
    if "rollout.placement" in given or rollout.placement == "colocated" or not num_gpus:
        return ""
    if rollout.max_staleness or rollout.servers_at or config.quantization.publish != "full":
        return ""
    specs = server_specs(config)
    world_size = config.learner.world_size
    needed = world_size + sum(spec.server.tensor_parallel_size for spec in specs)
    widest = sum(spec.server.tensor_parallel_size for spec in specs if spec.set_name == "rollout")
    if needed <= num_gpus or max(widest, world_size) > min(world_size, num_gpus):
        return ""
    rollout.placement = "colocated"
    return (
        f"learner and servers would take {needed} GPUs, and this machine has {num_gpus}: they take "
        "turns (rollout.placement=colocated)"
    )


def check_shared_gpus(config: Config, placed: Sequence[Placed], gpu_bytes: int) -> None:
    """Check that a learner rank and the servers on its GPU fit in its memory.

    Args:
        placed: from `place_servers`; learner and servers are not colocated.
        gpu_bytes: the memory of each GPU of this machine.

    Raises:
        ConfigError: they do not, by the plan of the learner's memory.
    """
    learner = config.learner
    architecture = Architecture.from_directory(config.model)
    for gpu in range(learner.world_size):
        shares = {
            spec.set_name: spec.server.mem_fraction_static
            for spec, (_, _, first) in zip(server_specs(config), placed, strict=True)
            if 0 <= gpu - first < spec.server.tensor_parallel_size
        }
        stage = gpu * learner.pipeline_parallel_size // learner.world_size
        own = total_bytes(learner_memory(architecture, config, stage))
        room = (gpu_bytes - own - RUNTIME_BYTES * len(shares)) / gpu_bytes
        if shares and sum(shares.values()) > room:
            name, fraction = next(iter(shares.items()))
            raise ConfigError(
                f"{name}.server.mem_fraction_static={fraction}: learner rank {gpu} is planned to "
                f"take {gigabytes(own)} of the {gigabytes(gpu_bytes)} of GPU {gpu}, and "
                f"{' and '.join(shares)} {gigabytes(RUNTIME_BYTES)} each beside their fractions; "
                f"lower these to {max(math.floor(100 * room), 0) / 100} in all, or add GPUs"
            )


@dataclasses.dataclass(frozen=True)
class NodeGroup:
    """The nodes of an allocation that have one role."""

    nodes: list[str]
    het_group: int | None  # index in a heterogeneous job; None: a job of equal nodes
    cpus: int  # granted on each node
    gpus: int | None = None  # of each node; not known in a heterogeneous job


@dataclasses.dataclass
class NodePlan:
    """The learner ranks and servers of one node, and the number of GPUs they need."""

    name: str
    gpus: int
    ranks: int = 0
    servers: list[Placed] = dataclasses.field(default_factory=list)
    sends: bool = False  # whether one of its ranks sends weights to the servers


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """The plan that all tasks of a Slurm job read: plan.json in the attempt's log directory."""

    api_key: str  # shared by all servers
    attempt: int  # `Attempt.number`
    master_address: str
    master_port: int
    nodes: list[NodePlan]

    def save(self, path: Path) -> None:
        """Write the plan, which holds keys, to a file that only this user can read."""
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n", private=True)

    @staticmethod
    def load(path: Path) -> JobPlan:
        """Read a plan that `save` wrote."""
        tree = json.loads(path.read_text())
        return JobPlan(**{**tree, "nodes": [NodePlan(**node) for node in tree["nodes"]]})


def plan_here(config: Config, num_gpus: int, attempt: int) -> JobPlan:
    """Return the plan of a run whose only node is this machine.

    Raises:
        ConfigError: as `place_servers`.
    """
    servers = place_servers(config, num_gpus)
    node = NodePlan("here", num_gpus, config.learner.world_size, servers, sends=True)
    return JobPlan(make_key(), attempt, "127.0.0.1", free_port(), [node])


def make_plan(
    config: Config,
    attempt: int,
    learner_nodes: list[str],
    rollout_nodes: list[str],
    port: int,
    gpus_per_node: int | None = None,
) -> JobPlan:
    """Spread ranks evenly over the learner nodes, and servers one by one over all nodes.

    A server beside ranks has GPUs of its own there. Colocated servers have those of the ranks, and
    `rollout_nodes` is empty.

    Args:
        gpus_per_node: None for nodes of two kinds; the learner's then have no servers.

    Raises:
        ConfigError: the ranks do not divide evenly, the servers do not fit, a rollout node would
            have none, transport=direct is set for servers on other nodes, or a colocated server
            does not fit on the learner's GPUs of one node.
    """
    is_colocated = config.rollout.placement == "colocated"
    if config.quantization.transport == "direct" and rollout_nodes:
        raise ConfigError(
            "quantization.transport=direct: servers of this job are on other nodes than the "
            "learner; set it to broadcast or auto"
        )
    world_size = config.learner.world_size
    ranks, left = divmod(world_size, len(learner_nodes))
    if left:
        raise ConfigError(
            f"--nodes={len(learner_nodes)} for the learner: its {world_size} ranks do not divide "
            "evenly over that many nodes"
        )
    specs = server_specs(config)
    if not is_colocated and len(specs) < len(rollout_nodes):
        raise ConfigError(
            f"rollout.servers={config.rollout.servers}: {len(rollout_nodes)} rollout nodes need at "
            f"least as many servers; there are {len(specs)}, the evaluation server included"
        )
    senders = {rank // ranks for rank in sending_ranks(config.learner)}
    nodes = [
        NodePlan(name, ranks, ranks, sends=number in senders)
        for number, name in enumerate(learner_nodes)
    ]
    nodes += [NodePlan(name, gpus=0) for name in rollout_nodes]
    if is_colocated:
        for set_name, index, gpu in _place_on_learner(config, specs):
            number, first = divmod(gpu, ranks)
            size = getattr(config, set_name).server.tensor_parallel_size
            if first + size > ranks:
                raise ConfigError(
                    f"{set_name}.server.tensor_parallel_size={size}: with "
                    "rollout.placement=colocated a server is on the GPUs of one node, and the "
                    f"learner has {ranks} ranks on each; set it to a divisor of {ranks}"
                )
            nodes[number].servers.append((set_name, index, first))
        return JobPlan(make_key(), attempt, learner_nodes[0], port, nodes)
    hosts = nodes if gpus_per_node else nodes[len(learner_nodes) :]
    sizes = server_sizes(config)
    places = deal(sizes, [node.gpus for node in hosts])
    for spec, size, (number, first) in zip(specs, sizes, places, strict=True):
        if gpus_per_node and first + size > gpus_per_node:
            raise ConfigError(
                f"--nodes={len(nodes)}: too few; nodes of {gpus_per_node} GPUs do not hold the "
                f"learner's {world_size} ranks and servers of {sum(sizes)} GPUs"
            )
        hosts[number].servers.append((spec.set_name, spec.index, first))
        hosts[number].gpus = max(hosts[number].gpus, first + size)
    return JobPlan(make_key(), attempt, learner_nodes[0], port, nodes)


def sending_ranks(learner: LearnerConfig) -> list[int]:
    """Return the ranks that send weights to the servers: the first of each team (`gather.py`)."""
    stage = learner.world_size // learner.pipeline_parallel_size
    step = learner.expert_tensor_parallel_size
    firsts = range(0, step * learner.expert_parallel_size, step)
    return [start + first for start in range(0, learner.world_size, stage) for first in firsts]


def smallest_plan(
    config: Config, gpus_per_node: int, *, heterogeneous: bool = False
) -> tuple[list[NodePlan], list[NodePlan]]:
    """Return the nodes of the learner and the further ones of `nodes_of_run`, with their parts.

    Raises:
        ConfigError: there is no server, one needs more than a node, or the learner's ranks do not
            divide evenly over nodes.
    """
    if not server_specs(config):
        raise ConfigError(
            "rollout.servers=0: a Slurm job has at least one server of its own; set it to 1, or "
            "evaluate something"
        )
    numbers = nodes_of_run(config, gpus_per_node, heterogeneous=heterogeneous)
    learner, rollout = (
        [f"{side}{number}" for number in range(count)]
        for side, count in zip(("learner", "rollout"), numbers, strict=True)
    )
    of_all = None if heterogeneous else gpus_per_node
    nodes = make_plan(config, 0, learner, rollout, port=0, gpus_per_node=of_all).nodes
    return nodes[: len(learner)], nodes[len(learner) :]
