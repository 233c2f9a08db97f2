"""How long a step would take on H100s, by phase.

Letters as in `memory`: B bytes, e the bytes of a value, t/p/d tensor, pipeline and data parallel
sizes, h hidden, Q query channels, V vocabulary rows.

    decode       one token for b sequences with C tokens of context in all, on one server:
                 max(weight B / (HBM e_w), 2 b weights / (peak e_f)) for linear layers in the
                 format and the output layer in BF16, each over t, + C KV B / (HBM e_kv)
                 + layers x `LAYER_S` + b `SEQUENCE_S` + two all-reduces a layer of 2bh B over
                 NVLink, `ALL_REDUCE_S` each before the first byte
    rollout      a server's sequences are decoded `slots` at a time. Response lengths follow
                 P(length > x) = 1 - (x / max)^k with k = mean / (max - mean): half of the maximum
                 in the mean is an even spread. While sequences wait, the batch is full, of the mean
                 age; then the last batch is integrated over its lengths down to its longest
                 response. Prompts are read once a group at the format's product rate. A server more
                 means fewer sequences each; the longest response is the floor.
    forward      2 FLOPs a weight and token, 2 time^2 Q a layer and sequence for causal attention,
                 2 hV a response token on the last stage, at peak x `LEARNER_MFU`; + two
                 all-reduces a layer of e h B a token over NVLink. The slowest stage counts,
                 x (1 + (p - 1) / (m v)), the pipeline's bubble with m micro batches
    proximal     one forward pass, two with a reference
    update       three (four where recomputed), the output layer four, for its logits are computed
                 twice; + data parallel all-reduces of the gradients, 2 (d - 1) / d of them, over
                 InfiniBand, one a minibatch, not overlapped; + one pass over the optimizer's state
    publish      (t - 1) / t of the bytes over NVLink to each stage's first rank, (p - 1) / p from
                 there to rank 0 (over InfiniBand when the learner has more than a node), all of
                 them to the servers over InfiniBand, one after another: a floor, without pause,
                 loading or checksums. Bytes are counted from the format.

Left out: rewards, evaluation, checkpoints, padding of micro batches, dynamic sampling's retries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qurl_megatron.config.schema import Config, WeightFormat
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.planning.memory import (
    element_bytes,
    kv_bytes_per_token,
    linear_weights,
    micro_batches,
    output_weights,
    published_bytes,
    rank_parameters,
    server_weight_bytes,
    stage_layers,
)

# NVIDIA H100 SXM5 datasheet (nvidia.com/h100), dense: sparsity's doubling taken off.
HBM_BYTES_PER_S = 3.35e12
PEAK_FLOPS = {"bf16": 989e12, "8-bit": 1979e12}  # INT8 and FP8 alike
NVLINK_BYTES_PER_S = 450e9  # a direction, of 900 GB/s in both
INFINIBAND_BYTES_PER_S = 50e9  # NDR 400 Gb/s, one adapter a GPU as in a DGX H100
GPUS_PER_NODE = 8  # DGX H100

# Fitted by `benchmarks/plan.py` to 26 inter-token latencies of Qwen3-8B in BF16 and FP8 on one H100
# (vLLM 0.30, github.com/tgarg01/silybench-data, 24 Sep 2026); INT8 is taken to be as FP8.
HBM_EFFICIENCY = {"weights": 0.93, "kv": 0.84}
PRODUCT_EFFICIENCY = {"bf16": 0.71, "8-bit": 0.575}
LAYER_S = 55.6e-6
SEQUENCE_S = 7.7e-6
# What is left of Llama 3.1 70B on four H100 at 8 sequences, an all-reduce (ML.ENERGY leaderboard,
# github.com/ml-energy/leaderboard, 27 Feb 2026).
ALL_REDUCE_S = 5e-6

# 389 TFLOP/s a GPU: Llama 3 70B, 64 H100, BF16, sequences of 8192, no tensor parallelism (NeMo
# AutoModel, performance summary of April 2026).
LEARNER_MFU = 389e12 / PEAK_FLOPS["bf16"]

_PIECES = 64  # of the last batch's responses, integrated by midpoints


@dataclass(frozen=True)
class Workload:
    """Lengths that come about, in tokens; a configuration has only the greatest."""

    mean_prompt: float
    mean_response: float

    @classmethod
    def half(cls, config: Config) -> Workload:
        """Half of what is allowed."""
        rollout = config.rollout
        return cls(rollout.max_prompt_length / 2, rollout.max_response_length / 2)


def _precision(weight_format: WeightFormat) -> str:
    return "bf16" if weight_format == "bf16" else "8-bit"


def _all_reduce_s(num_bytes: float, ranks: int) -> float:
    """Of a ring over NVLink, without its latency."""
    return 2 * (ranks - 1) / ranks * num_bytes / NVLINK_BYTES_PER_S


def decode_s(
    architecture: Architecture,
    weight_format: WeightFormat,
    tensor_parallel_size: int,
    sequences: float,
    context_tokens: float,
) -> float:
    """One token for each of `sequences`, which have `context_tokens` in all, on one server."""
    size = tensor_parallel_size
    linear, output = linear_weights(architecture), output_weights(architecture)
    linear_bytes = server_weight_bytes(architecture, weight_format, size)["linear"]
    time_s = 0.0
    for precision, num_bytes, weights in (
        (_precision(weight_format), linear_bytes, linear / size),
        ("bf16", 2 * output / size, output / size),
    ):
        time_s += max(
            num_bytes / (HBM_BYTES_PER_S * HBM_EFFICIENCY["weights"]),
            2 * sequences * weights / (PEAK_FLOPS[precision] * PRODUCT_EFFICIENCY[precision]),
        )
    kv_bytes = context_tokens * kv_bytes_per_token(architecture, size)
    time_s += kv_bytes / (HBM_BYTES_PER_S * HBM_EFFICIENCY["kv"])
    time_s += architecture.num_layers * LAYER_S + sequences * SEQUENCE_S
    if size > 1:
        hidden_bytes = 2 * sequences * architecture.hidden_size
        all_reduce_s = ALL_REDUCE_S + _all_reduce_s(hidden_bytes, size)
        time_s += 2 * architecture.num_layers * all_reduce_s
    return time_s


def prefill_s(
    architecture: Architecture,
    weight_format: WeightFormat,
    tensor_parallel_size: int,
    tokens: float,
) -> float:
    """Reading `tokens` of prompts on one server."""
    precision = _precision(weight_format)
    rate = PEAK_FLOPS[precision] * PRODUCT_EFFICIENCY[precision] * tensor_parallel_size
    return 2 * linear_weights(architecture) * tokens / rate


def rollout_s(
    architecture: Architecture,
    weight_format: WeightFormat,
    tensor_parallel_size: int,
    *,
    sequences: float,
    prompts: float,
    slots: int,
    workload: Workload,
    max_response: int,
) -> float:
    """All of one server's `sequences`, `slots` at a time, to the end of the longest."""

    def step_s(alive: float, response_tokens: float) -> float:
        context = alive * (workload.mean_prompt + response_tokens)
        return decode_s(architecture, weight_format, tensor_parallel_size, alive, context)

    mean = workload.mean_response
    spread = mean / (max_response - mean) if mean < max_response else math.inf
    batch = min(sequences, slots)
    time_s = prefill_s(
        architecture, weight_format, tensor_parallel_size, prompts * workload.mean_prompt
    )
    if sequences > slots:
        # E[length^2] / (2 E[length]): how far a sequence is, seen at any time.
        age = max_response / 2
        if spread < math.inf:
            age *= (spread + 1) / (spread + 2)
        time_s += (sequences - slots) * mean / slots * step_s(batch, age)
    for piece in range(_PIECES):
        middle = (piece + 0.5) / _PIECES
        alive = batch * (1 - middle**spread if spread < math.inf else 1)
        time_s += max_response / _PIECES * step_s(alive, middle * max_response)
    return time_s


def _forward_s(
    architecture: Architecture, config: Config, workload: Workload
) -> tuple[float, float]:
    """Of one pass over a step's sequences: all layers on all GPUs, the output layer on its own."""
    learner, rollout = config.learner, config.rollout
    sequences = rollout.prompts_per_step * rollout.completions_per_prompt
    length = workload.mean_prompt + workload.mean_response
    query = architecture.num_attention_heads * architecture.head_dim
    attention = 2 * length**2 * query * architecture.num_layers
    rate = learner.world_size * PEAK_FLOPS["bf16"] * LEARNER_MFU
    layers_s = sequences * (2 * linear_weights(architecture) * length + attention) / rate
    # Each tensor-parallel group has its stage's layers and its share of the sequences.
    tokens = sequences * length / learner.data_parallel_size
    layers = architecture.num_layers / learner.pipeline_parallel_size
    hidden_bytes = element_bytes(learner) * architecture.hidden_size * tokens
    layers_s += 2 * layers * _all_reduce_s(hidden_bytes, learner.tensor_parallel_size)
    output = 2 * output_weights(architecture) * sequences * workload.mean_response
    return layers_s, output / (rate / learner.pipeline_parallel_size)


def learner_s(architecture: Architecture, config: Config, workload: Workload) -> dict[str, float]:
    """The learner's two phases."""
    learner = config.learner
    minibatches = config.optimizer.minibatches_per_step
    layers_s, output_s = _forward_s(architecture, config, workload)
    stages = learner.pipeline_parallel_size
    shares = [
        number * stages / architecture.num_layers for number in stage_layers(architecture, learner)
    ]

    def pass_s(layer_passes: int, output_passes: int, num_micro_batches: int) -> float:
        by_stage = [layer_passes * layers_s * share for share in shares]
        by_stage[-1] += output_passes * output_s
        virtual = learner.virtual_pipeline_parallel_size
        return max(by_stage) * (1 + (stages - 1) / (num_micro_batches * virtual))

    proximal_s = pass_s(1, 1, micro_batches(config) * minibatches)
    if config.objective.kl_coefficient:
        proximal_s *= 2
    update_s = pass_s(4 if learner.recompute_activations else 3, 4, micro_batches(config))
    numel = max(rank_parameters(architecture, learner, stage) for stage in range(stages))
    copies = learner.data_parallel_size
    update_s += minibatches * (
        2 * (copies - 1) / copies * 4 * numel / INFINIBAND_BYTES_PER_S
        + 2 * 16 * numel / HBM_BYTES_PER_S  # gradient, master and moments, read and written
    )
    return {"proximal": proximal_s, "update": update_s}


def publish_s(architecture: Architecture, config: Config) -> float:
    """A floor, from bytes and links."""
    learner = config.learner
    num_bytes = published_bytes(architecture, config.quantization.format)
    size, stages = learner.tensor_parallel_size, learner.pipeline_parallel_size
    between = INFINIBAND_BYTES_PER_S if size * stages > GPUS_PER_NODE else NVLINK_BYTES_PER_S
    # Stages gather at once, and each has its share of the bytes.
    gather_s = (size - 1) / size * num_bytes / stages / NVLINK_BYTES_PER_S
    return (
        gather_s
        + (stages - 1) / stages * num_bytes / between
        + (num_bytes / INFINIBAND_BYTES_PER_S)
    )
