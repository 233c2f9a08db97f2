"""Assign GPUs and nodes to the learner ranks and servers of a run.

On one machine: `plan_here`. `nodes.py` deals a run out to the nodes of a Slurm job.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.servers import ServerSpec, server_specs
from qurl_megatron.files import write_whole
from qurl_megatron.machine.network import free_port, make_key

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
        return place_on_learner(config, specs)
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


def place_on_learner(config: Config, specs: Sequence[ServerSpec]) -> list[Placed]:
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
