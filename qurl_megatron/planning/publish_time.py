"""Estimate what a publish sends, and how long that takes on H100s.

Symbols are those of `step_time`. The senders are those of `weight_sync`: the first tensor-parallel
rank of each pipeline stage, and of experts the first rank of each expert-parallel one. Each gathers
its own part of the bytes, and sends every server a copy of that.

    gather     (t - 1) / t of a sender's bytes over NVLink; of experts, with their own t
    send       a sender's bytes over InfiniBand, for each server
    receive    all bytes over InfiniBand, into each server at the same time
    publish    the longer of a sender's gather and send, one after the other, and of receive
    direct     a rank's own bytes over NVLink, for each server

This is a lower bound, without the pause, the loading and the checksums. Stages are counted as if
each had its layers in one piece.

With `quantization.publish` set to `delta` or `auto`, the bytes are those of what changes in a step.
How much that is depends on the run; here it is what `benchmarks/delta.py` measures of Qwen2.5-32B,
in proportion to the learning rate.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from qurl_megatron.config.schema import Config, WeightFormat
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.planning.memory import published_tensors, stage_layers
from qurl_megatron.planning.step_time import (
    GPUS_PER_NODE,
    INFINIBAND_BYTES_PER_S,
    NVLINK_BYTES_PER_S,
)

# Bytes of a delta over those of all tensors, by optimizer steps since the last publish, at a
# learning rate of 1e-6: `python -m benchmarks.delta` (docs/findings/systems.md).
_INT8 = {1: 91 / 34341, 4: 298 / 34341, 16: 855 / 34341}
_FP8 = {1: 184 / 34341, 4: 609 / 34341, 16: 1755 / 34341}
DELTA_PARTS: dict[WeightFormat, dict[int, float]] = {
    "int8": _INT8,
    "int4": _INT8,  # the steps of its grid are larger, so this is too much
    "fp8": _FP8,
    "fp8-tensor": _FP8,
    "fp8-block": {1: 182 / 34330, 4: 608 / 34330, 16: 1746 / 34330},
    "bf16": {1: 1905 / 65528, 4: 5734 / 65528, 16: 15192 / 65528},
}
MEASURED_LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class PublishPlan:
    """One publish to servers that hold the version before."""

    sent_bytes: float  # to each server
    full_bytes: float  # of all tensors
    is_direct: bool  # it is written into the servers' parameters
    time_s: float  # lower bound


def stage_bytes(architecture: Architecture, config: Config) -> list[tuple[float, float]]:
    """Return the bytes of each pipeline stage: of all tensors but experts', and of experts."""
    quantization = config.quantization
    sizes = stage_layers(architecture, config.learner)
    stage_of = [stage for stage, layers in enumerate(sizes) for _ in range(layers)]
    dense, experts = [0.0] * len(sizes), [0.0] * len(sizes)
    for rule, layer, num_bytes in published_tensors(
        architecture, quantization.format, keep=tuple(quantization.keep)
    ):
        is_embedding = rule.megatron_names[0].startswith("embedding")
        stage = stage_of[layer] if layer is not None else 0 if is_embedding else -1
        (experts if rule.of_experts else dense)[stage] += num_bytes
    return [*zip(dense, experts, strict=True)]


@functools.cache
def delta_part(weight_format: WeightFormat, steps: int, learning_rate: float) -> float:
    """Return the bytes of a delta over those of all tensors, after so many optimizer steps.

    Between the measured numbers of steps, and beyond them, it grows with a power of the number.
    """
    measured = DELTA_PARTS[weight_format]
    numbers = sorted(measured)
    high = next((n for n in numbers[1:] if steps <= n), numbers[-1])
    low = numbers[numbers.index(high) - 1]
    power = math.log(measured[high] / measured[low]) / math.log(high / low)
    part = measured[low] * (steps / low) ** power
    return min(1.0, part * learning_rate / MEASURED_LEARNING_RATE)


def plan_publish(architecture: Architecture, config: Config) -> PublishPlan:
    """Return what a publish to the servers of `config` sends, and a lower bound on its seconds."""
    learner, quantization, servers = config.learner, config.quantization, config.rollout.servers
    by_stage = stage_bytes(architecture, config)
    full_bytes = sum(dense + experts for dense, experts in by_stage)
    # The first sender of each stage. The others have as many experts, and nothing else.
    sending = [(dense, experts / learner.expert_parallel_size) for dense, experts in by_stage]
    size, expert_size = learner.tensor_parallel_size, learner.expert_tensor_parallel_size
    if is_direct(config):
        rank_bytes = max(dense / size + experts / expert_size for dense, experts in sending)
        time_s = servers * rank_bytes / NVLINK_BYTES_PER_S
        return PublishPlan(full_bytes, full_bytes, is_direct=True, time_s=time_s)
    part = 1.0
    if quantization.publish != "full":
        optimizer = config.optimizer
        part = delta_part(
            quantization.format, optimizer.minibatches_per_step, optimizer.learning_rate
        )

    def seconds(dense: float, experts: float) -> float:
        gathered = (size - 1) / size * dense + (expert_size - 1) / expert_size * experts
        send_s = servers * (dense + experts) / INFINIBAND_BYTES_PER_S
        return gathered / NVLINK_BYTES_PER_S + send_s

    receive_s = full_bytes / INFINIBAND_BYTES_PER_S
    time_s = part * max(receive_s, *itertools.starmap(seconds, sending))
    return PublishPlan(part * full_bytes, full_bytes, is_direct=False, time_s=time_s)


def is_direct(config: Config) -> bool:
    """Return whether ranks write into the servers' parameters: all are in one node."""
    quantization, rollout = config.quantization, config.rollout
    gpus = config.learner.world_size + rollout.servers * rollout.server.tensor_parallel_size
    return (
        quantization.transport != "broadcast"
        and quantization.publish == "full"
        and gpus <= GPUS_PER_NODE
    )
