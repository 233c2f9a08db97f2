"""What a run needs from a machine without a GPU: the memory and cores of learner and servers."""

import copy
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from qurl_megatron import device
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.server_options import states_per_request, tokens_of_requests
from qurl_megatron.config.servers import ServerSpec, server_specs
from qurl_megatron.config.validate import validate
from qurl_megatron.machine.memory import LEAST_SHARED_BYTES, lack_of_shared_memory
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.memory.estimate import (
    kv_bytes_per_token,
    kv_value_bytes,
    learner_memory,
    peaks,
    server_weight_bytes,
    state_bytes_per_sequence,
    total_bytes,
)
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import num_parameters

# Memory of a process beside weights, without pages that it shares with others: a learner rank and
# a server on a model of 2 layers, a worker with math-verify.
RANK_BYTES = 200_000_000
SERVER_BYTES = 300_000_000  # with its scheduler and its detokenizer
WORKER_BYTES = 50_000_000
KEPT_BYTES = 4  # per weight at most, in the form that a server's matrix products read
LOGIT_BYTES = 12  # per logit from which a server samples a token
SHARE = 0.8  # fraction of the free memory that caches may fill up
MOST_BY_DEFAULT = 4  # learner ranks and rollout servers; each needs memory of its own
LAYOUT = ("learner.threads_per_rank", "rollout.servers", "rollout.server.threads")
REAL_WEIGHTS = 20_000_000  # in linear layers; the time of smaller models is Python's
MAX_PROCESSES_PER_CORE = 16  # more would wait for each other longer than they compute


def settle_caches(
    specs: Sequence[ServerSpec],
    learner: Mapping[str, int] | None = None,
    *,
    length_field: str = "max_completion_length",
) -> list[str]:
    """Set the size of each KV cache that is left open, on a machine without a GPU.

    A cache holds all requests that its server decodes at once, or fewer if they exceed its part.
    The caches divide equally what learner and servers leave of `SHARE` of the free memory.

    Args:
        specs: all servers of this machine; their `server.max_total_tokens` are set.
        learner: the bytes of its processes here, by the field that shrinks them.
        length_field: the field that shrinks their `context_length`.

    Returns:
        A line for the user on each cache that holds fewer requests.

    Raises:
        ConfigError: the learner, the servers, the given caches and one sequence in each other
            cache do not fit.
    """
    if device.num_gpus():
        return []  # a GPU has memory of its own
    numbers = Counter(spec.set_name for spec in specs)
    sets = {spec.set_name: spec for spec in specs}.values()  # the servers of a set are identical
    parts = Counter(learner or {})
    for spec in sets:
        parts.update(_least_bytes(spec, numbers[spec.set_name], length_field))
    free = device.free_memory_bytes()
    if parts.total() > free:
        most = ", ".join(f"{field} ({gigabytes(size)})" for field, size in parts.most_common(3))
        raise ConfigError(
            f"memory: without a GPU this needs {gigabytes(parts.total())}, and {gigabytes(free)} "
            f"are free here; lower what takes most: {most}"
        )
    are_open = [spec for spec in sets if spec.server.max_total_tokens is None]
    lines = []
    for spec in are_open:
        more = max(0, int(SHARE * free) - parts.total())
        one, wanted = _tokens(spec, 1), spec.server.max_running_requests
        room = one + more // sum(numbers[x.set_name] for x in are_open) // _token_bytes(spec)
        spec.server.max_total_tokens = min(_tokens(spec, wanted), room)
        if (fitting := room // one) < wanted:
            lines.append(
                f"{_section(spec)}.max_running_requests={wanted}: the memory that is free here "
                f"holds {fitting} of them at the maximum length; others wait"
            )
    return lines


def _section(spec: ServerSpec) -> str:
    return f"{spec.set_name}.server" if spec.set_name else "server"


def _token_bytes(spec: ServerSpec) -> int:
    """Return the bytes of a token's keys and values on all ranks of a server."""
    ranks, value_bytes = spec.server.tensor_parallel_size, kv_value_bytes(spec.server)
    return ranks * kv_bytes_per_token(spec.architecture, ranks, value_bytes)


def _tokens(spec: ServerSpec, requests: int) -> int:
    """Return the tokens in a KV cache for this many requests."""
    return tokens_of_requests(spec.server, spec.context_length, requests)


def _least_bytes(spec: ServerSpec, number: int, length_field: str) -> dict[str, int]:
    """Return the least bytes that this many servers take, by the field that shrinks them."""
    server, architecture, ranks = spec.server, spec.architecture, spec.server.tensor_parallel_size
    by_part = server_weight_bytes(architecture, spec.weight_format, ranks, tuple(spec.keep))
    weights = sum(by_part.values()) + KEPT_BYTES * num_parameters(architecture) // ranks
    logits = LOGIT_BYTES * server.max_running_requests * architecture.vocab_size
    states = states_per_request(server, on_gpu=False) * server.max_running_requests
    of_states = (states + 1) * state_bytes_per_sequence(architecture, ranks)
    given, section = server.max_total_tokens, _section(spec)
    fewer = {"rollout": "rollout.servers", "evaluation": "evaluation.server"}
    cache = f"{section}.max_total_tokens" if given else length_field
    return {
        fewer.get(spec.set_name, "model"): number * ranks * (SERVER_BYTES + weights),
        f"{section}.max_running_requests": number * ranks * (logits + of_states),
        cache: number * _token_bytes(spec) * (given or _tokens(spec, 1)),
    }


def settle_run(config: Config, servers: Iterable[str], ranks: int) -> list[str]:
    """Set the sizes of the KV caches of a run's servers on this machine, as `settle_caches` does.

    Args:
        config: the run's configuration, which is changed.
        servers: the set name of each server here, rollout or evaluation.
        ranks: the number of learner ranks here.
    """
    learner = learner_bytes(config, Architecture.from_directory(config.model), ranks)
    specs = {spec.set_name: spec for spec in server_specs(config)}
    length_field = "rollout.max_completion_length"
    return settle_caches([specs[name] for name in servers], learner, length_field=length_field)


def use_cores(config: Config, given: Collection[str]) -> str:
    """Let a real model on a machine without a GPU have a learner rank and a server on each core.

    Return a line that says so. Return an empty text if a `given` field says otherwise, the
    machine has no memory for them, or the settings do not divide.

    More threads would take no memory. But on a busy machine they wait for each other: products of
    two threads took five times as long as those of one, or more.
    """
    is_given = any(field.endswith("_parallel_size") or field in LAYOUT for field in given)
    if is_given or config.learner.world_size > 1 or config.rollout.servers != 1:
        return ""
    if Architecture.from_directory(config.model).num_linear_weights < REAL_WEIGHTS:
        return ""
    for number in range(min(MOST_BY_DEFAULT, len(os.sched_getaffinity(0))), 1, -1):
        tried = copy.deepcopy(config)
        tried.learner.data_parallel_size = tried.rollout.servers = number
        try:
            validate(tried)
            check_host(tried)
        except ConfigError:
            continue
        config.learner.data_parallel_size = config.rollout.servers = number
        return (
            f"learner.data_parallel_size={number} rollout.servers={number}, to use {number} cores"
        )
    return ""


def check_host(config: Config) -> None:
    """Check that this machine can hold a run's processes, and compute with them.

    Raises:
        ConfigError: it cannot; the message has the estimate.
    """
    ranks, specs = config.learner.world_size, server_specs(config)
    settle_run(copy.deepcopy(config), [spec.set_name for spec in specs], ranks)
    own = sum(spec.server.tensor_parallel_size for spec in specs)
    cores = len(os.sched_getaffinity(0))
    if ranks + own > MAX_PROCESSES_PER_CORE * cores:
        raise ConfigError(
            f"learner: without a GPU, {ranks} learner ranks and {own} server ranks compute on "
            f"{cores} cores; give at most {MAX_PROCESSES_PER_CORE} a core"
        )


def check_shared_memory(config: Config) -> None:
    """Check that /dev/shm has room for a run's semaphores, and for weights that are shared there.

    Raises:
        ConfigError: it has too little.
    """
    needed = LEAST_SHARED_BYTES
    if config.quantization.transport == "direct" and not device.num_gpus():
        architecture = Architecture.from_directory(config.model)
        for spec in server_specs(config):
            ranks = spec.server.tensor_parallel_size
            parts = server_weight_bytes(architecture, spec.weight_format, ranks, tuple(spec.keep))
            needed += ranks * sum(parts.values()) if spec.set_name == "rollout" else 0
    if problem := lack_of_shared_memory(needed):
        raise ConfigError(problem)


def check_workers(config: Config) -> None:
    """Check that this machine can hold the scoring processes of each reward.

    Raises:
        ConfigError: it cannot.
    """
    of_training = {*config.rewards, *config.scoring.by_source.values()}
    of_sets = {*config.evaluation.reward_of.values()}  # `scoring` has processes of their own
    workers = config.scoring.workers * (len(of_training) + len(of_sets))
    scoring, has = workers * WORKER_BYTES, device.machine_memory_bytes()
    if scoring > has:
        raise ConfigError(
            f"scoring.workers={config.scoring.workers}: they take {gigabytes(scoring)} of memory, "
            f"at least; this machine has {gigabytes(has)}"
        )


def learner_bytes(config: Config, architecture: Architecture, ranks: int) -> dict[str, int]:
    """Return the bytes of this many learner ranks, by the field that shrinks them.

    All count as ranks of the fullest stage. A critic takes as much as the policy.
    """
    learner, static, most = config.learner, 0, 0
    for stage in range(learner.pipeline_parallel_size):
        parts = learner_memory(architecture, config, stage, fused=False)
        parts |= {"runtime": RANK_BYTES, "workspaces": 0}  # in place of a GPU's
        # Logits are computed in pieces; what counts is the gradient of the output layer.
        if parts["logits"]:
            rows = -(-architecture.vocab_size // learner.tensor_parallel_size)
            parts["logits"] = 6 * rows * architecture.hidden_size
        static, most = max(static, peaks(parts)["kept"]), max(most, total_bytes(parts))
    batch = "tokens_per_micro_batch" if learner.tokens_per_micro_batch else "micro_batch_size"
    models = ranks * (2 if config.objective.advantage_estimator == "gae" else 1)
    return {"model": models * static, f"learner.{batch}": models * (most - static)}
