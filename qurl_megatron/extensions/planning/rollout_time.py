"""Estimate the time of rollouts, before the learner trains or while it does.

Before (`rollout_s`), a server decodes `slots` sequences at a time. While sequences wait, the batch
is full and its sequences have their mean age. Then the last batch shrinks until its longest
completion ends; that time is integrated numerically. More servers have fewer sequences each, but no
rollout is shorter than its longest completion.

While it trains (`steady_state`, with `max_staleness` > 0), the prompts of a batch are issued
`max_staleness` publishes before the learner trains on them, so up to `max_staleness` + 1 batches
are in flight. In the steady state a step takes the longest of:

    learner    proximal + update + publish: the learner never waits for the servers
    servers    the time that a server needs to read the prompts and decode the tokens of its part of
               a batch, with as many sequences running as fit; plus the pause of a publish
    longest completion
               (completion + learner) / (`max_staleness` + 1), where `completion` is the time of one
               completion of maximum length: a batch is complete when its longest completion is

The number of running sequences follows from Little's law: a step adds `sequences` of them, and each
runs for its own length. A publish pauses the servers; with `pause_mode=retract` they then read the
context of every running sequence again. So do the next turns of an agent's running episodes.

An agent's observed tokens are read like prompts, each once, and cost no decoding. The time of its
tools is not counted.

docs/findings/planning.md compares this estimate with a simulation of every sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from qurl_megatron.config.gpus import DGX_H100, Node
from qurl_megatron.config.schema import Config
from qurl_megatron.extensions.planning.lengths import CompletionLengths, Workload
from qurl_megatron.extensions.planning.step_time import decode_s, prefill_s
from qurl_megatron.memory.estimate import adapted, kv_value_bytes
from qurl_megatron.model.architecture import Architecture

_HALVINGS = 14  # 2^-14: far below the error of a plan
_INTEGRATION_STEPS = 64  # for the midpoint rule over the last batch


@dataclass(frozen=True)
class ServerLoad:
    """One server's part of a step."""

    token_s: Callable[[float, float], float]  # seconds per token, by sequences and their mean age
    prompts_s: float  # seconds to read the prompts, and what agents observe
    pause_s: Callable[[float], float]  # seconds of a publish, by the number of running sequences
    sequences: float  # completions per step
    slots: int  # sequences decoded at once
    lengths: CompletionLengths


def server_load(
    architecture: Architecture,
    config: Config,
    workload: Workload,
    slots: int,
    publish_s: float,
    node: Node = DGX_H100,
) -> ServerLoad:
    """Return each rollout server's part of a step; a server decodes `slots` sequences at once.

    `publish_s` is the time of a publish, in seconds.
    """
    rollout, architecture = config.rollout, adapted(architecture, config)
    size, weight_format = rollout.server.tensor_parallel_size, config.quantization.weight_format
    lengths, value_bytes = workload.completions(config), kv_value_bytes(rollout.server)
    sequences_per_step = rollout.completions_per_step / rollout.servers

    def token_s(sequences: float, mean_age: float) -> float:
        context = sequences * (workload.mean_prompt + mean_age)
        time_s = decode_s(architecture, weight_format, size, sequences, context, node, value_bytes)
        return (1 - workload.observed) * time_s

    def pause_s(running: float) -> float:
        if rollout.pause_mode != "retract" and not rollout.agent:
            return publish_s
        context = running * (workload.mean_prompt + lengths.mean_age)
        return publish_s + prefill_s(architecture, weight_format, size, context, node)

    caches = not rollout.server.options.get("disable_radix_cache")
    readings = 1 if caches else rollout.completions_per_prompt
    read = rollout.prompts_per_step / rollout.servers * readings * workload.mean_prompt
    read += sequences_per_step * workload.observed * workload.mean_completion
    return ServerLoad(
        token_s=token_s,
        prompts_s=prefill_s(architecture, weight_format, size, read, node),
        pause_s=pause_s,
        sequences=sequences_per_step,
        slots=slots,
        lengths=lengths,
    )


def rollout_s(load: ServerLoad) -> float:
    """Return the seconds in which a server that does nothing else samples all its completions."""
    longest, batch = load.lengths.maximum, min(load.sequences, load.slots)
    time_s = load.prompts_s
    if load.sequences > load.slots:
        tokens = (load.sequences - load.slots) * load.lengths.mean / load.slots
        time_s += tokens * load.token_s(batch, load.lengths.mean_age)
    for step in range(_INTEGRATION_STEPS):
        length = (step + 0.5) / _INTEGRATION_STEPS * longest
        running = batch * load.lengths.fraction_longer(length)
        time_s += longest / _INTEGRATION_STEPS * load.token_s(running, length)
    return time_s


@dataclass(frozen=True)
class SteadyState:
    """The steady state of servers that sample while the learner trains."""

    step_s: float
    limit: Literal["learner", "servers", "longest completion"]  # what determines its time
    running: float  # mean number of sequences that a server decodes at once


def steady_state(load: ServerLoad, learner_s: float, max_staleness: int) -> SteadyState:
    """Return the steady state with `max_staleness` of at least 1.

    `learner_s` is the time of the learner's phases, in seconds, including the publish.
    """
    batches = max_staleness + 1
    most = min(load.slots, batches * load.sequences)
    servers_s = load.prompts_s + _decode_s(load, most) / most + load.pause_s(most)
    step_s = shortest_s = max(learner_s, servers_s)
    # A longer step runs fewer sequences at once, which makes each faster: so go half the way.
    for _ in range(_HALVINGS):
        running = _running(load, step_s, most)
        spread_s = (_longest_s(load, step_s, running) + learner_s) / batches
        step_s = max(shortest_s, (step_s + spread_s) / 2)
    if step_s > shortest_s:
        return SteadyState(step_s, "longest completion", running)
    return SteadyState(step_s, "learner" if learner_s >= servers_s else "servers", running)


def _decode_s(load: ServerLoad, running: float) -> float:
    """Return the seconds to decode a step's tokens one by one, while `running` sequences run."""
    tokens = load.sequences * load.lengths.mean
    return tokens * load.token_s(running, load.lengths.mean_age)


def _longest_s(load: ServerLoad, step_s: float, running: float) -> float:
    """Return the seconds of a completion of maximum length, with its pauses."""
    decoding = (step_s - load.prompts_s - load.pause_s(running)) / step_s
    completion_s = load.lengths.maximum * load.token_s(running, load.lengths.mean_age)
    return completion_s / decoding


def _running(load: ServerLoad, step_s: float, most: float) -> float:
    """Return how many sequences run at once, at most `most`, if a step takes `step_s`."""
    low, high = 0.0, float(most)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        available_s = step_s - load.prompts_s - load.pause_s(middle)
        is_enough = middle * available_s >= _decode_s(load, middle)
        low, high = (low, middle) if is_enough else (middle, high)
    return high
