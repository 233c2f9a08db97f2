"""How a run's servers and the learner's ranks are dealt out to nodes.

`qurl plan` and the launchers share these rules, so a plan is of what a job starts.
"""

from collections.abc import Sequence

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.servers import server_specs


def server_sizes(config: Config) -> list[int]:
    """Return the number of GPUs of each server of a run, in the order of `server_specs`."""
    return [spec.server.tensor_parallel_size for spec in server_specs(config)]


def gpus_of_run(config: Config) -> int:
    """Return how many GPUs the learner and the servers of a run need together."""
    is_colocated = config.rollout.placement == "colocated"
    return config.learner.world_size + (0 if is_colocated else sum(server_sizes(config)))


def nodes_of_learner(ranks: int, gpus_per_node: int) -> int:
    """Return how many nodes give each rank of the learner a GPU of its own."""
    return -(-ranks // gpus_per_node)


def deal(sizes: Sequence[int], used: Sequence[int]) -> list[tuple[int, int]]:
    """Return the node of each server, and its first GPU there.

    The largest goes first. Each takes the node with the fewest used GPUs, the first of several.

    Args:
        sizes: the number of GPUs of each server.
        used: how many GPUs, from 0 on, ranks of the learner have on each node.
    """
    taken, places = [*used], {}
    for server in sorted(range(len(sizes)), key=lambda server: -sizes[server]):
        node = taken.index(min(taken))
        places[server] = node, taken[node]
        taken[node] += sizes[server]
    return [places[server] for server in range(len(sizes))]


def fit(sizes: Sequence[int], used: Sequence[int], gpus_per_node: int) -> bool:
    """Return whether servers, dealt out to nodes with some used GPUs, have a GPU for each rank."""
    firsts = [first for _, first in deal(sizes, used)] if used else []
    return len(firsts) == len(sizes) and all(
        first + size <= gpus_per_node for first, size in zip(firsts, sizes, strict=True)
    )


def nodes_of_run(
    config: Config, gpus_per_node: int, *, heterogeneous: bool = False
) -> tuple[int, int]:
    """Return the fewest nodes of the learner, and the fewest further ones, for servers only.

    Servers are on GPUs that the learner leaves free on its nodes, and on further nodes. In a
    heterogeneous job they are on further nodes only, and if colocated, on none.

    Raises:
        ConfigError: a server needs more than a node.
    """
    ranks = config.learner.world_size
    learner = nodes_of_learner(ranks, gpus_per_node)
    if config.rollout.placement == "colocated":
        return learner, 0
    for spec in server_specs(config):
        if (size := spec.server.tensor_parallel_size) > gpus_per_node:
            raise ConfigError(
                f"{spec.set_name}.server.tensor_parallel_size={size}: a server must fit on one "
                f"node, which has --gpus-per-node={gpus_per_node}"
            )
    beside = [] if heterogeneous else [-(-ranks // learner)] * learner
    further = 0
    while not fit(server_sizes(config), beside + [0] * further, gpus_per_node):
        further += 1
    return learner, further
