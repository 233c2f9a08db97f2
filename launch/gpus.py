"""What only a machine with GPUs decides and checks: who takes turns on them, and what fits."""

import dataclasses
import math
from collections.abc import Collection, Sequence

from qurl_megatron.config.gpus import H100, Node
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.servers import server_specs
from qurl_megatron.launch.placement import Placed
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.memory.estimate import RUNTIME_BYTES, learner_memory, total_bytes
from qurl_megatron.model.architecture import Architecture


def this_machine(num_gpus: int) -> Node:
    """Return this machine as a node, whose GPUs are as H100s but for their memory."""
    from qurl_megatron.device import gpu_properties, machine_memory_bytes

    memory_bytes = min(gpu.total_memory for gpu in gpu_properties())
    gpu = dataclasses.replace(H100, memory_bytes=memory_bytes)
    return Node(gpu, num_gpus, machine_memory_bytes())


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
