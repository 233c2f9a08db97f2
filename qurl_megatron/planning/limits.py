"""A plan, with the time of its step divided into parts, and the part that limits it.

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
from dataclasses import dataclass
from functools import cached_property

from qurl_megatron.config.schema import Config
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.planning.rollout_time import ServerLoad, SteadyState
from qurl_megatron.planning.step_time import PublishPlan, Workload, learner_s

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


@dataclass(frozen=True)
class Plan:
    """Memory of a learner GPU and a server GPU, and the time of a step."""

    architecture: Architecture
    config: Config  # with the number of servers
    workload: Workload
    gpus: int  # GPUs of the learner and all servers together
    learner_bytes: dict[str, int]  # by part, on a rank of the fullest pipeline stage
    converter_bucket_bytes: int  # while publishing, instead of activations, logits and backward
    server_bytes: dict[str, int]  # by part, on one GPU of a server
    kv_tokens: int  # capacity of a server's KV cache
    load: ServerLoad  # of each server
    publish: PublishPlan
    step_s: dict[str, float]  # seconds by phase; rollout as if the servers did nothing else
    asynchronous: SteadyState | None  # None: synchronous

    @property
    def total_s(self) -> float:
        """Time of a whole step, in seconds."""
        return self.asynchronous.step_s if self.asynchronous else sum(self.step_s.values())

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Seconds of each part that decides the time of a step; they add up to `total_s`."""
        step_s, config, state = self.step_s, self.config, self.asynchronous
        longest = self.load.lengths.maximum
        token_s = self.load.token_s(1, longest / 2)
        longest_s = min(step_s["rollout"], longest * token_s)
        # Without sequences a learner does nothing but sum gradients and step; with endless virtual
        # stages its pipeline has no bubble.
        without_prompts = dataclasses.replace(config.rollout, prompts_per_step=0)
        empty = dataclasses.replace(config, rollout=without_prompts)
        gradients_s = sum(learner_s(self.architecture, empty, self.workload).values())
        endless = dataclasses.replace(config.learner, virtual_pipeline_parallel_size=_ENDLESS)
        without_bubble = dataclasses.replace(config, learner=endless)
        busy_s = sum(learner_s(self.architecture, without_bubble, self.workload).values())
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
        # The longest response, and then the learner, are spread over all these steps.
        batches = config.rollout.max_staleness + 1
        learner = {name: time_s / batches for name, time_s in learner.items()}
        return {"longest response": state.step_s - sum(learner.values()), **learner}


def largest_part(parts: dict[str, float]) -> str:
    """Return the largest part, its share of the step and what shortens it, in one line."""
    name = max(parts, key=lambda part: parts[part])
    share = 100 * parts[name] / sum(parts.values())
    return f"{name}, {share:.0f} % of the step; {REMEDIES[name]}"
