"""Deal a run out to the nodes of a Slurm job.

`make_plan` is for the nodes of a job. `smallest_plan` is for a job that is not submitted yet: it
finds how many nodes the run needs.
"""

import dataclasses

from qurl_megatron.config.nodes import deal, nodes_of_run, server_sizes
from qurl_megatron.config.schema import Config, ConfigError, LearnerConfig
from qurl_megatron.config.servers import server_specs
from qurl_megatron.launch.placement import JobPlan, NodePlan, place_on_learner
from qurl_megatron.machine.network import make_key


@dataclasses.dataclass(frozen=True)
class NodeGroup:
    """The nodes of an allocation that have one role."""

    nodes: list[str]
    het_group: int | None  # index in a heterogeneous job; None: a job of equal nodes
    cpus: int  # granted on each node
    gpus: int | None = None  # of each node; not known in a heterogeneous job


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
        for set_name, index, gpu in place_on_learner(config, specs):
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
