"""Which GPUs, nodes and ranks each process of a run gets."""

from __future__ import annotations

from qurl_megatron.config.schema import Config, ConfigError

LARGEST_SHARE = 0.8  # of a GPU's memory, to servers that share it with a learner rank


def place_servers(config: Config, num_gpus: int) -> dict[str, list[list[int]]]:
    """The GPUs of each server of each set on a machine with `num_gpus`; no GPU, empty lists.

    Learner ranks have the first GPUs, one each, and servers those that follow. A server for which
    none are left shares the first ones with the learner.

    Raises:
        ConfigError: there are too few GPUs, or servers that share one ask for nearly all its
            memory.
    """
    rollout, evaluation = config.rollout, config.evaluation
    sets = {"rollout": [rollout.server] * rollout.servers}
    if evaluation.wanted:
        sets["evaluation"] = [evaluation.server]
    if num_gpus == 0:
        return {name: [[] for _ in servers] for name, servers in sets.items()}
    wanted = {"learner": config.learner.world_size}
    wanted |= {f"{name}.server": some[0].tensor_parallel_size for name, some in sets.items()}
    for name, ranks in wanted.items():
        if ranks > num_gpus:
            raise ConfigError(
                f"{name}.tensor_parallel_size: {ranks} ranks want a GPU each, NCCL allows no two "
                f"on one; this machine has {num_gpus}"
            )
    placed: dict[str, list[list[int]]] = {name: [] for name in sets}
    shares: dict[int, dict[str, float]] = {}  # of a learner's GPU, by the servers on it
    free = config.learner.world_size
    for name, servers in sets.items():
        for server in servers:
            fits = free + server.tensor_parallel_size <= num_gpus
            first = free if fits else 0
            gpus = list(range(first, first + server.tensor_parallel_size))
            placed[name].append(gpus)
            free += len(gpus) if fits else 0
            for gpu in set(gpus) & set(range(config.learner.world_size)):
                here = shares.setdefault(gpu, {})
                here[name] = here.get(name, 0.0) + server.mem_fraction_static
    for gpu, here in sorted(shares.items()):
        if sum(here.values()) > LARGEST_SHARE:
            first_set = next(iter(here))
            raise ConfigError(
                f"{first_set}.server.mem_fraction_static="
                f"{sets[first_set][0].mem_fraction_static}: the learner shares GPU {gpu} with "
                f"{' and '.join(here)}, which ask for {sum(here.values()):.2f} of it; give them "
                f"{LARGEST_SHARE} at most together, or add GPUs"
            )
    return placed
