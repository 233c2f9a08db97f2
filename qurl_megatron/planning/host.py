"""The memory that a run needs on a machine without a GPU, where learner and servers share it."""

from qurl_megatron import device
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.files import gigabytes
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import num_parameters
from qurl_megatron.planning.memory import server_weight_bytes


def check_memory(config: Config) -> None:
    """Check that this machine can hold the weights of a run's learner and of its servers.

    Activations, keys and values and the processes themselves are not counted: a run that passes may
    still be too large.

    Raises:
        ConfigError: it cannot.
    """
    learner, servers = learner_bytes(config), server_bytes(config)
    has = device.machine_memory_bytes()
    if learner + servers > has:
        raise ConfigError(
            f"model={config.model}: without a GPU the learner takes {gigabytes(learner)} of memory "
            f"and the servers {gigabytes(servers)}, at least; this machine has {gigabytes(has)}"
        )


def learner_bytes(config: Config) -> int:
    """Return the bytes of weights, gradients and optimizer of all ranks of the learner together.

    Each replica has weights and float32 gradients. Adam's moments, and with bfloat16 the masters,
    are there once.
    """
    parameters = num_parameters(Architecture.from_directory(config.model))
    weight, optimizer = (4, 8) if config.learner.dtype == "float32" else (2, 12)
    reference = weight if config.objective.kl_coefficient else 0
    replicas = config.learner.data_parallel_size
    critics = 1 if config.advantage_estimator == "gae" else 0
    policy = optimizer + replicas * (weight + 4 + reference)
    return parameters * (policy + critics * (optimizer + replicas * (weight + 4)))


def server_bytes(config: Config) -> int:
    """Return the bytes of weights of all servers that the run starts."""
    architecture = Architecture.from_directory(config.model)
    rollout, weights = config.rollout, config.quantization
    each = server_weight_bytes(architecture, weights.format, 1, tuple(weights.keep))
    own = rollout.servers * sum(each.values())
    if config.evaluation.enabled:
        own += sum(server_weight_bytes(architecture, "bf16", 1).values())
    return own
