"""The servers of a run, and how they and the learner's ranks are dealt out to nodes.

`qurl plan` and the launchers share these rules, so a plan is of what a job starts.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from qurl_megatron.config.schema import Config, ServerConfig, WeightFormat

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """One of a run's servers, before it is started."""

    set_name: str  # rollout or evaluation
    index: int  # within its set
    server: ServerConfig
    weight_format: WeightFormat
    keep: tuple[str, ...] = ()  # as in `quantization.keep`


def server_specs(config: Config) -> list[ServerSpec]:
    """Return all servers of a run: the rollout servers in order, then the evaluation server."""
    rollout = config.rollout
    weights = config.quantization
    specs = [
        ServerSpec("rollout", index, rollout.server, weights.weight_format, tuple(weights.keep))
        for index in range(rollout.servers)
    ]
    if config.evaluation.enabled:
        specs.append(ServerSpec("evaluation", 0, config.evaluation.server, "bf16"))
    return specs


def nodes_of_learner(ranks: int, gpus_per_node: int) -> int:
    """Return how many nodes give each rank of the learner a GPU of its own."""
    return -(-ranks // gpus_per_node)


def deal(servers: Sequence[T], num_nodes: int) -> list[Sequence[T]]:
    """Return the servers of each rollout node; the nodes take one server each in turn."""
    return [servers[node::num_nodes] for node in range(num_nodes)]


def fit_on_nodes(server_sizes: Sequence[int], num_nodes: int, gpus_per_node: int) -> bool:
    """Return whether servers of these sizes, dealt out to nodes, get a GPU for each rank."""
    return all(sum(sizes) <= gpus_per_node for sizes in deal(server_sizes, num_nodes))
