"""Divide the time of a planned step into parts, and name the part that limits it.

    decoding            of all servers, beyond the longest response; divided by the servers
    longest response    decoded alone, by a server that does nothing else; no GPU shortens it
    passes              forward and backward passes, with the communication of tensor and context
                        parallelism; divided by the learner's GPUs
    pipeline bubble     time in which pipeline stages wait for each other
    gradients           sum of the gradients over replicas, and the optimizer's step
    publish             the weights on their way to the servers; grows with their number

A synchronous step is the sum of them all. With `rollout.max_staleness` it has those that decide:
the learner's four, or decoding, or the longest response and the learner's four that follow it.
"""

from __future__ import annotations

import dataclasses

from qurl_megatron.config.schema import Config
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.planning.rollout_time import ServerLoad, SteadyState
from qurl_megatron.planning.step_time import Workload, learner_s

REMEDIES = {
    "decoding": "more GPUs for servers shorten it",
    "longest response": "more GPUs do not shorten it, a larger rollout.max_staleness hides it",
    "passes": "more GPUs for the learner shorten them",
    "pipeline bubble": "fewer or virtual pipeline stages and more prompts_per_step shorten it",
    "gradients": "fewer minibatches_per_step or a larger tensor_parallel_size shorten it",
    "publish": "it grows with the number of servers: fewer and larger ones shorten it",
}
"""What shortens each part."""

_ENDLESS = 10**9


def time_parts(
    architecture: Architecture,
    config: Config,
    workload: Workload,
    load: ServerLoad,
    step_s: dict[str, float],
    state: SteadyState | None,
) -> dict[str, float]:
    """Return the seconds of each part that decides the time of a step.

    Args:
        load: a server's share of the step.
        step_s: seconds by phase; without `state` the parts add up to them.
        state: that of an asynchronous run; None for a synchronous one.
    """
    token_s = load.token_s(1, load.lengths.maximum / 2)
    longest_s = min(step_s["rollout"], load.lengths.maximum * token_s)
    # Without sequences a learner does nothing but sum gradients and step; with endless virtual
    # stages its pipeline has no bubble.
    without_prompts = dataclasses.replace(config.rollout, prompts_per_step=0)
    empty = dataclasses.replace(config, rollout=without_prompts)
    gradients_s = sum(learner_s(architecture, empty, workload).values())
    endless = dataclasses.replace(config.learner, virtual_pipeline_parallel_size=_ENDLESS)
    without_bubble = dataclasses.replace(config, learner=endless)
    busy_s = sum(learner_s(architecture, without_bubble, workload).values())
    learner_time_s = sum(step_s.values()) - step_s["rollout"] - step_s["publish"]
    learner = {
        "passes": busy_s - gradients_s,
        "pipeline bubble": learner_time_s - busy_s,
        "gradients": gradients_s,
        "publish": step_s["publish"],
    }
    if state is None:
        decoding_s = step_s["rollout"] - longest_s
        return {"decoding": decoding_s, "longest response": longest_s, **learner}
    if state.limit == "servers":
        return {"decoding": state.step_s}
    if state.limit == "learner":
        return learner
    # The longest response and the learner, one after the other, are spread over all these steps.
    batches = config.rollout.max_staleness + 1
    learner = {name: time_s / batches for name, time_s in learner.items()}
    return {"longest response": state.step_s - sum(learner.values()), **learner}


def largest_part(parts: dict[str, float]) -> str:
    """Return the largest part, its share of the step and what shortens it, in one line."""
    name = max(parts, key=lambda part: parts[part])
    share = 100 * parts[name] / sum(parts.values())
    return f"{name}, {share:.0f} % of the step; {REMEDIES[name]}"
