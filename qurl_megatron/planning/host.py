"""What a run needs of a machine without a GPU, where learner and servers share memory and cores."""

import os

from qurl_megatron import device
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.files import gigabytes
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import num_parameters
from qurl_megatron.planning.memory import server_weight_bytes

# What a process takes beside weights, without the pages that it shares with others: learner and
# server on a model of 2 layers, a worker with math-verify.
RANK_BYTES = 200_000_000
SERVER_BYTES = 300_000_000  # with its scheduler and its detokenizer
WORKER_BYTES = 50_000_000
MAX_PROCESSES_PER_CORE = 16  # that compute; more wait for each other longer than they compute


def check_host(config: Config) -> None:
    """Check that this machine can hold a run's processes and their weights, and compute with them.

    Activations, keys and values are not counted: a run that passes may still be too large.

    Raises:
        ConfigError: it cannot; the message has the estimate.
    """
    ranks, servers = config.learner.world_size, config.rollout.servers
    evaluates = config.evaluation.enabled
    learner = learner_bytes(config) + ranks * RANK_BYTES
    serving = server_bytes(config) + (servers + evaluates) * SERVER_BYTES
    has = device.machine_memory_bytes()
    if learner + serving > has:
        raise ConfigError(
            f"model={config.model}: without a GPU the learner takes {gigabytes(learner)} of memory "
            f"({ranks} ranks) and the servers {gigabytes(serving)} (rollout.servers={servers}), at "
            f"least; this machine has {gigabytes(has)}"
        )
    own = servers * config.rollout.server.tensor_parallel_size
    own += evaluates * config.evaluation.server.tensor_parallel_size
    cores = len(os.sched_getaffinity(0))
    if ranks + own > MAX_PROCESSES_PER_CORE * cores:
        raise ConfigError(
            f"learner: without a GPU, {ranks} learner ranks and {own} of servers compute on "
            f"{cores} cores; give at most {MAX_PROCESSES_PER_CORE} a core"
        )


def check_workers(scoring_workers: int) -> None:
    """Check that this machine can hold so many processes that score.

    Raises:
        ConfigError: it cannot.
    """
    scoring, has = scoring_workers * WORKER_BYTES, device.machine_memory_bytes()
    if scoring > has:
        raise ConfigError(
            f"scoring_workers={scoring_workers}: they take {gigabytes(scoring)} of memory, at "
            f"least; this machine has {gigabytes(has)}"
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
    each = server_weight_bytes(architecture, weights.weight_format, 1, tuple(weights.keep))
    own = rollout.servers * sum(each.values())
    if config.evaluation.enabled:
        own += sum(server_weight_bytes(architecture, "bf16", 1).values())
    return own
