"""Estimate the time of a step, by phase. The terms of each are in the function that is named.

    decode     `decode_s`: one token for each of the sequences of a server. It reads the weights, or
               multiplies by them if that takes longer; reads the KV cache; has an overhead for each
               layer and sequence, and two all-reduces a layer, over InfiniBand if a server has more
               GPUs than a node. Of experts those are read that at least one sequence chooses, if
               all are chosen equally often. Grouped products read their many small weights at an
               efficiency of their own, and need further kernels: `EXPERT_DECODE`.
    rollout    `rollout_time.py`. Prompts are read once per group, at the matrix product rate of the
               weight format.
    forward    `_forward_s`: two operations per weight and token and those of causal attention, at
               the peak x `LEARNER_MFU`, those of experts x `EXPERT_RATE`; the output layer for
               tokens of responses. Two all-reduces a layer (with sequence parallelism, a
               reduce-scatter and an all-gather each), and with context parallelism the keys and
               values of all ranks, not overlapped. Tokens go to their experts and back, sorted by
               expert on both ways, and ranks wait for the one with the most. The slowest stage
               counts, and the pipeline bubble multiplies it.
    proximal   One forward pass if there are several minibatches, and one with a reference. A run
               leaves the first minibatch out of the former, which published steps do not: rates
               are fitted to these, so the plan counts it.
    update     `learner_s`: three forward passes, but two of the tokens' ways to experts, and one
               more of the layers that recompute=full computes again. The output layer counts four
               times, because its logits are computed twice. Per minibatch, over InfiniBand and not
               overlapped, the scattered sum of the gradients and the gathered weights; a pass over
               the optimizer's state, and if it is offloaded its copies to the host and back.
    publish    `plan_publish`: the longer of a sender's gather and send, one after the other, and of
               what a server receives. The senders are those of `weight_sync`: the first rank of
               each pipeline stage, and of experts of each expert-parallel rank. Within a node, a
               rank instead writes its own bytes for each server over NVLink; before, what no rank
               of a node holds comes over InfiniBand, once. With rollout.placement=shared, where it
               is not direct, it goes over gloo and PCIe. This is a lower bound, without the pause,
               the loading and the checksums. With `quantization.publish` set to `delta` or `auto`,
               the bytes are those of what changes in a step (`delta_part`), which depends on the
               run.

Not included: rewards, evaluation, checkpoints, padding of micro batches, retries of dynamic
sampling, and the host: the time in which it prepares batches and starts kernels.
"""

import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist

from qurl_megatron.config.schema import Config, LearnerConfig, WeightFormat
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.planning.gpus import DGX_H100, H100, Node
from qurl_megatron.planning.lengths import Workload
from qurl_megatron.planning.memory import (
    element_bytes,
    kv_bytes_per_token,
    num_micro_batches,
    num_output_weights,
    published_tensors,
    recomputed_layers,
    server_weight_bytes,
    stage_layers,
    state_bytes,
    values_by_copies,
)
from qurl_megatron.planning.nodes import nodes_of_learner

# Fitted in November 2026 to 26 inter-token latencies of Qwen3-8B in BF16 and FP8 on one H100
# (vLLM 0.30, github.com/tgarg01/silybench-data, 24 Sep 2026). INT8 is assumed to equal FP8.
HBM_EFFICIENCY = {"weights": 0.93, "kv": 0.84}
PRODUCT_EFFICIENCY = {"bf16": 0.71, "8-bit": 0.575}
LAYER_S = 55.6e-6  # overhead per layer and token
SEQUENCE_S = 7.7e-6  # overhead per sequence and token
# The time that the other terms do not explain in the latency of Llama 3.1 70B on four H100 at 8
# sequences, per all-reduce (ML.ENERGY leaderboard, github.com/ml-energy/leaderboard, 27 Feb 2026).
ALL_REDUCE_S = 5e-6


# Assumed, not measured: one connection of gloo over TCP.
GLOO_BYTES_PER_S = 2e9


@dataclass(frozen=True)
class ExpertDecode:
    """What a layer of experts adds to the time of a token."""

    hbm_efficiency: float  # of grouped products
    layer_s: float  # overhead per layer and token, beyond `LAYER_S`


# Fitted in November 2026 to 20 latencies of Qwen3-30B-A3B and 235B-A22B on 1 to 8 H100, 8 to
# 64 sequences of the chat task (the same leaderboard). INT8 is assumed to equal FP8.
EXPERT_DECODE = {
    "bf16": ExpertDecode(hbm_efficiency=0.87, layer_s=50e-6),
    "8-bit": ExpertDecode(hbm_efficiency=0.62, layer_s=132e-6),
}

# 389 TFLOP/s per GPU: Llama 3 70B on 64 H100 in BF16, sequences of 8192 tokens, no tensor
# parallelism (NeMo AutoModel, performance summary of April 2026).
LEARNER_MFU = 389e12 / H100.bf16_flops
# The rate of grouped products over that of large ones: with it a step of Qwen3-30B-A3B on 8 H100,
# 512 sequences of 4096 tokens and experts chosen equally often, takes the 21.77 s of the same
# summary.
EXPERT_RATE = 0.84
# Standard deviation of the tokens of an expert over their mean. The Gini coefficient of five models
# is 0.105 to 0.24 and more on real text, and that of Qwen3-30B-A3B in between (arXiv:2605.20982);
# 0.2 is taken, which is that of a normal distribution with this deviation.
EXPERT_LOAD_DEVIATION = 0.2 * math.sqrt(math.pi)

# Bytes of a delta over those of all tensors, after one optimizer step at a learning rate of 1e-6,
# and the power of the number of steps with which they grow, within a fifth of what was measured up
# to 16 steps (docs/findings/systems.md). INT4 is taken to change as INT8 does, which is too much:
# the steps of its grid are larger.
DELTA_PARTS: dict[WeightFormat, float] = {
    "int8": 91 / 34341,
    "int4": 91 / 34341,
    "int4-g32": 91 / 34341,
    "fp8": 184 / 34341,
    "fp8-tensor": 184 / 34341,
    "fp8-block": 182 / 34330,
    "bf16": 1905 / 65528,
}
DELTA_POWER = 0.8
MEASURED_LEARNING_RATE = 1e-6


def _precision(weight_format: WeightFormat) -> str:
    # With int4 activations stay in BF16.
    return "bf16" if weight_format in ("bf16", "int4", "int4-g32") else "8-bit"


def _product_flops(weight_format: WeightFormat, node: Node) -> float:
    """Return the FLOP/s that a GPU of a server reaches in products with weights of this format."""
    precision = _precision(weight_format)
    flops = node.gpu.bf16_flops if precision == "bf16" else node.gpu.eight_bit_flops
    return flops * PRODUCT_EFFICIENCY[precision]


def _all_reduce_s(num_bytes: float, ranks: int, node: Node) -> float:
    """Return the seconds of a ring all-reduce, without its latency."""
    return 2 * (ranks - 1) / ranks * num_bytes / node.link_bytes_per_s(ranks)


def decode_s(
    architecture: Architecture,
    weight_format: WeightFormat,
    tensor_parallel_size: int,
    sequences: float,
    context_tokens: float,
    node: Node = DGX_H100,
    kv_value_bytes: int = 2,
) -> float:
    """Return the seconds in which one server decodes a token for each of its sequences.

    Args:
        sequences: number of sequences that are decoded at once.
        context_tokens: tokens in the KV cache of all sequences together.
    """
    size, hbm = tensor_parallel_size, node.gpu.hbm_bytes_per_s
    weights_per_s = hbm * HBM_EFFICIENCY["weights"]
    linear, output = architecture.num_linear_weights, num_output_weights(architecture)
    of_gpu = server_weight_bytes(architecture, weight_format, size)
    read_s = of_gpu["linear"] / weights_per_s
    layer_s = LAYER_S
    if architecture.num_experts:
        experts = EXPERT_DECODE[_precision(weight_format)]
        unchosen = 1 - architecture.experts_per_token / architecture.num_experts
        chosen_bytes = of_gpu["experts"] * (1 - unchosen**sequences)
        read_s += chosen_bytes / (hbm * experts.hbm_efficiency)
        layer_s += experts.layer_s

    def multiply_s(weights: float, weight_format: WeightFormat) -> float:
        return 2 * sequences * weights / _product_flops(weight_format, node)

    time_s = max(read_s, multiply_s(linear / size, weight_format))
    time_s += max(2 * output / size / weights_per_s, multiply_s(output / size, "bf16"))
    kv_bytes = context_tokens * kv_bytes_per_token(architecture, size, kv_value_bytes)
    time_s += kv_bytes / (hbm * HBM_EFFICIENCY["kv"])
    time_s += architecture.num_layers * layer_s + sequences * SEQUENCE_S
    if size > 1:
        hidden_bytes = 2 * sequences * architecture.hidden_size
        all_reduce_s = ALL_REDUCE_S + _all_reduce_s(hidden_bytes, size, node)
        time_s += 2 * architecture.num_layers * all_reduce_s
    return time_s


def prefill_s(
    architecture: Architecture,
    weight_format: WeightFormat,
    tensor_parallel_size: int,
    tokens: float,
    node: Node = DGX_H100,
) -> float:
    """Return the seconds in which one server reads prompts of `tokens` in all."""
    rate = _product_flops(weight_format, node) * tensor_parallel_size
    return 2 * architecture.num_linear_weights * tokens / rate


def expert_imbalance(architecture: Architecture, ranks: int) -> float:
    """Return the tokens of the rank with the most over the mean, of ranks that share the experts.

    Loads of experts are taken to be independent and normal; Blom's formula gives the largest of
    `ranks` of them.
    """
    if ranks == 1:
        return 1.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + largest * EXPERT_LOAD_DEVIATION / math.sqrt(architecture.num_experts / ranks)


def pass_flops(
    architecture: Architecture, config: Config, workload: Workload
) -> tuple[float, float, float]:
    """Return the FLOPs of one forward pass over a step.

    They are those of the layers without experts, of the experts, and of the output layer, which
    only responses pass through.
    """
    rollout = config.rollout
    sequences = rollout.prompts_per_step * rollout.completions_per_prompt
    length, square = workload.mean_length, workload.mean_square_length(config)
    layers = sequences * architecture.forward_flops(length, square)
    experts = 0.0
    if architecture.num_experts:
        weights = 3 * architecture.hidden_size * architecture.active_intermediate_size
        experts = 2 * sequences * length * architecture.num_layers * weights
    output = 2 * num_output_weights(architecture) * sequences * workload.mean_response
    return layers - experts, experts, output


@dataclass(frozen=True)
class _Pass:
    """Seconds of one forward pass over a step, of a layer and of the output layer."""

    layer_s: float  # products, and the communication of tensor and context parallelism
    exchange_s: float  # of a layer's tokens with its experts
    output_s: float


def _forward_s(architecture: Architecture, config: Config, workload: Workload, node: Node) -> _Pass:
    """Return the seconds of a forward pass over a step.

    A layer is divided over all GPUs of its pipeline stage, and so is the output layer.
    """
    learner, rollout, gpu = config.learner, config.rollout, node.gpu
    stages, num_layers = learner.pipeline_parallel_size, architecture.num_layers
    rate = learner.world_size / stages * gpu.bf16_flops * LEARNER_MFU
    imbalance = expert_imbalance(architecture, learner.expert_parallel_size)
    dense, experts, output = pass_flops(architecture, config, workload)
    layer_s = (dense + experts * imbalance / EXPERT_RATE) / rate / num_layers
    # Each tensor-parallel group has the layers of its stage and the sequences of its replica.
    sequences = rollout.prompts_per_step * rollout.completions_per_prompt
    tokens = sequences * workload.mean_length
    tokens /= learner.data_parallel_size * learner.context_parallel_size
    hidden_bytes = element_bytes(learner) * architecture.hidden_size * tokens
    layer_s += 2 * _all_reduce_s(hidden_bytes, learner.tensor_parallel_size, node)
    # Every context-parallel rank passes on the keys and values of all the others.
    heads = architecture.key_value_heads_on_rank(learner.tensor_parallel_size)
    channels = 2 * heads * architecture.head_dim
    ring_bytes = (learner.context_parallel_size - 1) * element_bytes(learner) * channels * tokens
    ranks = learner.tensor_parallel_size * learner.context_parallel_size
    layer_s += ring_bytes / node.link_bytes_per_s(ranks)
    exchange_s = imbalance * exchange_with_experts_s(architecture, learner, tokens, node)
    return _Pass(layer_s, exchange_s, output / rate)


def exchange_with_experts_s(
    architecture: Architecture, learner: LearnerConfig, tokens: float, node: Node = DGX_H100
) -> float:
    """Return the seconds in which one layer's tokens go to their experts and come back.

    `tokens` are those of a tensor-parallel group, chosen experts all equally often.
    """
    gpu, size = node.gpu, learner.expert_parallel_size
    copies = architecture.experts_per_token * tokens / learner.tensor_parallel_size
    num_bytes = 2 * copies * element_bytes(learner) * architecture.hidden_size
    in_node = min(size, max(1, node.gpus // learner.expert_tensor_parallel_size))
    sent_s = num_bytes * max(
        (in_node - 1) / size / gpu.nvlink_bytes_per_s,
        (size - in_node) / size / gpu.infiniband_bytes_per_s,
    )
    return sent_s + 2 * num_bytes / gpu.hbm_bytes_per_s


def learner_s(
    architecture: Architecture, config: Config, workload: Workload, node: Node = DGX_H100
) -> dict[str, float]:
    """Return the seconds of the learner's phases, `proximal` and `update`."""
    learner, gpu = config.learner, node.gpu
    minibatches = config.optimizer.minibatches_per_step
    forward = _forward_s(architecture, config, workload, node)
    layer_s = forward.layer_s + forward.exchange_s
    stages = learner.pipeline_parallel_size
    by_stage = stage_layers(architecture, learner)
    # What `selective` computes again, SwiGLU, takes a hundredth of an update.
    again_s = layer_s if learner.recompute == "full" else 0.0

    def passes_s(by_stage: list[float], micro_batches: int) -> float:
        virtual = learner.virtual_pipeline_parallel_size
        return max(by_stage) * (1 + (stages - 1) / (micro_batches * virtual))

    micro_batches = num_micro_batches(config, workload.mean_length)
    scored = [layers * layer_s for layers in by_stage]
    update = [
        layers * (3 * forward.layer_s + 2 * forward.exchange_s)
        + recomputed_layers(learner, layers) * again_s
        for layers in by_stage
    ]
    scored[-1] += forward.output_s
    update[-1] += 4 * forward.output_s
    proximal_s = passes_s(scored, micro_batches * minibatches)
    proximal_s *= (minibatches > 1) + (config.objective.kl_coefficient > 0)
    update_s = passes_s(update, micro_batches)
    on_ranks = [values_by_copies(architecture, learner, stage) for stage in range(stages)]
    for copies, numel in max(on_ranks, key=lambda values: sum(values.values())).items():
        sent_bytes = (copies - 1) / copies * (4 + element_bytes(learner)) * numel
        update_s += minibatches * (
            sent_bytes / gpu.infiniband_bytes_per_s
            # gradient, master and moments, read and written
            + 2 * 16 * numel / copies / gpu.hbm_bytes_per_s
        )
        if learner.offload_optimizer:
            copied_bytes = 2 * state_bytes(learner) * numel / copies
            update_s += minibatches * copied_bytes / gpu.host_bytes_per_s
    return {"proximal": proximal_s, "update": update_s}


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
        architecture, quantization.weight_format, keep=tuple(quantization.keep)
    ):
        is_embedding = rule.megatron_names[0].startswith("embedding")
        stage = stage_of[layer] if layer is not None else 0 if is_embedding else -1
        (experts if rule.of_experts else dense)[stage] += num_bytes
    return [*zip(dense, experts, strict=True)]


def delta_part(weight_format: WeightFormat, steps: int, learning_rate: float) -> float:
    """Return the bytes of a delta over those of all tensors, after so many optimizer steps."""
    part = DELTA_PARTS[weight_format] * steps**DELTA_POWER
    return min(1.0, part * learning_rate / MEASURED_LEARNING_RATE)


def plan_publish(architecture: Architecture, config: Config, node: Node = DGX_H100) -> PublishPlan:
    """Return what a publish to the servers of `config` sends, and a lower bound on its seconds."""
    learner, quantization, servers = config.learner, config.quantization, config.rollout.servers
    gpu, by_stage = node.gpu, stage_bytes(architecture, config)
    full_bytes = sum(dense + experts for dense, experts in by_stage)
    # The first sender of each stage. The others have as many experts, and nothing else.
    sending = [(dense, experts / learner.expert_parallel_size) for dense, experts in by_stage]
    size, expert_size = learner.tensor_parallel_size, learner.expert_tensor_parallel_size
    if is_direct(config, node):
        rank_bytes = max(dense / size + experts / expert_size for dense, experts in sending)
        nodes = nodes_of_learner(learner.world_size, node.gpus)
        # Ranks are in the order of stages, so a node has consecutive ones.
        held = sorted(map(sum, by_stage))[: -(-len(by_stage) // nodes)]
        crossing = (full_bytes - sum(held)) / min(learner.world_size, node.gpus)
        own_s = servers / nodes * (rank_bytes + crossing) / gpu.nvlink_bytes_per_s
        time_s = own_s + crossing / gpu.infiniband_bytes_per_s
        return PublishPlan(full_bytes, full_bytes, is_direct=True, time_s=time_s)
    if config.rollout.placement == "shared":
        byte_s = 1 / GLOO_BYTES_PER_S + 2 / gpu.host_bytes_per_s
        time_s = byte_s * max(full_bytes, *(servers * sum(of_stage) for of_stage in sending))
        return PublishPlan(full_bytes, full_bytes, is_direct=False, time_s=time_s)
    part = 1.0
    if quantization.publish != "full":
        optimizer = config.optimizer
        part = delta_part(
            quantization.weight_format, optimizer.minibatches_per_step, optimizer.learning_rate
        )

    def seconds(dense: float, experts: float) -> float:
        gathered = (size - 1) / size * dense + (expert_size - 1) / expert_size * experts
        send_s = servers * (dense + experts) / gpu.infiniband_bytes_per_s
        return gathered / gpu.nvlink_bytes_per_s + send_s

    receive_s = full_bytes / gpu.infiniband_bytes_per_s
    time_s = part * max(receive_s, *itertools.starmap(seconds, sending))
    return PublishPlan(part * full_bytes, full_bytes, is_direct=False, time_s=time_s)


def is_direct(config: Config, node: Node = DGX_H100) -> bool:
    """Return whether ranks write into the servers' parameters: all are in one node."""
    quantization, rollout = config.quantization, config.rollout
    if rollout.placement == "shared":
        return rollout.server.releases == "cache"
    gpus = config.learner.world_size + rollout.servers * rollout.server.tensor_parallel_size
    return (
        quantization.transport != "broadcast"
        and quantization.publish == "full"
        and gpus <= node.gpus
    )
