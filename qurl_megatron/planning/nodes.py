"""How the learner's ranks and the servers of a run are dealt out to nodes.

`qurl plan` and the launcher of Slurm jobs both ask here.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def nodes_of_learner(ranks: int, gpus_per_node: int) -> int:
    """Return how many nodes give each rank of the learner a GPU of its own."""
    return -(-ranks // gpus_per_node)


def deal(servers: Sequence[T], num_nodes: int) -> list[Sequence[T]]:
    """Return the servers of each rollout node: nodes take one after the other."""
    return [servers[node::num_nodes] for node in range(num_nodes)]


def fit_on_nodes(server_sizes: Sequence[int], num_nodes: int, gpus_per_node: int) -> bool:
    """Return whether each node has a GPU for each rank of its servers, which have these sizes."""
    return all(sum(sizes) <= gpus_per_node for sizes in deal(server_sizes, num_nodes))
