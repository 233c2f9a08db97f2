"""Estimate the time of a step, by phase; the named functions have the terms.

    decode     `decode_s`: one token for each sequence of a server. The terms are: reading the
               weights, or multiplying by them if that takes longer; reading the KV cache; reading
               and writing the states of linear attention; an overhead for each layer and sequence;
               two all-reduces a layer, over InfiniBand if a server has more GPUs than a node.
               Only experts that some sequence chooses are read; all are assumed to be chosen
               equally often. Grouped products read their many small weights at an efficiency of
               their own, and need further kernels: `EXPERT_DECODE`.
    rollout    `rollout_time.py`. Prompts are read once per group, or once per completion without a
               prefix cache, at the matrix product rate of the weight format.
    forward    `_forward_s`: two operations per weight and token, and those of causal and of linear
               attention, at the peak x `LEARNER_MFU`; experts also x `EXPERT_RATE`. The rate of
               linear attention was never measured. Only completion tokens pass through the output
               layer. A layer has two all-reduces (with sequence parallelism, each a reduce-scatter
               and an all-gather). Context parallelism passes on the keys and values of all ranks,
               not overlapped. Tokens go to their experts and back, sorted by expert both ways. The
               slowest stage counts, and the pipeline bubble multiplies it.
    proximal   One forward pass if there are several minibatches, and one if there is a reference.
               A run leaves the first minibatch out of the former. The published steps to which
               rates are fitted do not, so the plan counts it.
    update     `learner_time`: three forward passes, but only two exchanges with experts, and one
               more pass of the layers that recompute=full computes again. The output layer
               counts four times, because its logits are computed twice. Per minibatch, over
               InfiniBand and not overlapped, the reduce-scatter of gradients and the all-gather of
               weights; a pass over the optimizer's state, and if it is offloaded its copies to the
               host and back.
    publish    `plan_publish`: what the fullest sender sends to all servers, or what a server
               receives if that takes longer, all tensors over InfiniBand. The senders are those of
               `weight_sync`: the first rank of each pipeline stage, and for experts the first of
               each expert-parallel rank. With rollout.placement=colocated it goes over gloo and
               PCIe. Writing into the servers' parameters takes a fraction of a second, and counts
               as none. This is a lower bound, without the pause, the loading and the checksums.

Not included: rewards, evaluation, checkpoints, padding of micro batches, retries of dynamic
sampling, what a delta saves, experts that are chosen more often than others, what
`learner.quantized_forward` rounds, and the time in which the host prepares batches and starts
kernels.
"""

from dataclasses import dataclass

from qurl_megatron.config.gpus import DGX_H100, H100, Node
from qurl_megatron.config.nodes import nodes_of_run
from qurl_megatron.config.schema import Config, LearnerConfig, WeightFormat
from qurl_megatron.extensions.planning.lengths import Workload
from qurl_megatron.memory.estimate import (
    adapted,
    element_bytes,
    kv_bytes_per_token,
    num_micro_batches,
    num_output_weights,
    published_by_stage,
    recomputed_layers,
    server_weight_bytes,
    stage_layers,
    state_bytes,
    state_bytes_per_sequence,
    values_by_copies,
)
from qurl_megatron.model.architecture import Architecture

# Fitted in November 2026 to 26 inter-token latencies of Qwen3-8B in BF16 and FP8 on one H100
# (vLLM 0.30, github.com/tgarg01/silybench-data, 24 Sep 2026). INT8 is assumed to equal FP8.
HBM_EFFICIENCY = {"weights": 0.93, "kv": 0.84}
PRODUCT_EFFICIENCY = {"bf16": 0.71, "8-bit": 0.575}
LAYER_S = 55.6e-6  # overhead per layer and token
SEQUENCE_S = 7.7e-6  # overhead per sequence and token
# The time that the other terms do not explain in the latency of Llama 3.1 70B on four H100 at 8
# sequences, per all-reduce (ML.ENERGY leaderboard, github.com/ml-energy/leaderboard, 27 Feb 2026).
ALL_REDUCE_S = 5e-6
# Overhead of adapters per layer and token: a 7B server with adapters of rank 16 beside one without,
# 64 sequences, one H100, November 2026 (docs/findings/systems.md#h100).
ADAPTERS_S = 52e-6
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


def _precision(weight_format: WeightFormat) -> str:
    # With int4, activations stay in BF16.
    return "bf16" if weight_format in ("bf16", "int4", "int4-g32") else "8-bit"


def _product_flops(weight_format: WeightFormat, node: Node) -> float:
    """Return the FLOP/s that a server GPU reaches in matrix products with this weight format."""
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
    """Return the seconds that one server takes to decode a token for each of its sequences.

    Args:
        sequences: number of sequences that are decoded at once.
        context_tokens: tokens in the KV cache of all sequences together.
    """
    size, hbm = tensor_parallel_size, node.gpu.hbm_bytes_per_s
    weights_per_s = hbm * HBM_EFFICIENCY["weights"]
    linear, output = architecture.num_linear_weights, num_output_weights(architecture)
    of_gpu = server_weight_bytes(architecture, weight_format, size)
    read_s = of_gpu["linear"] / weights_per_s
    if weight_format.startswith("int4"):  # codes are expanded to BF16, written, and read again
        values = server_weight_bytes(architecture, "bf16", size)["linear"]
        read_s += 2 * values / weights_per_s
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
    # A state is read and written.
    kv_bytes += 2 * sequences * state_bytes_per_sequence(architecture, size)
    time_s += kv_bytes / (hbm * HBM_EFFICIENCY["kv"])
    if architecture.adapter_rank:
        layer_s += ADAPTERS_S
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
    """Return the seconds that one server takes to read prompts of `tokens` in all."""
    rate = _product_flops(weight_format, node) * tensor_parallel_size
    return 2 * architecture.num_linear_weights * tokens / rate


def pass_flops(
    architecture: Architecture, config: Config, workload: Workload
) -> tuple[float, float, float]:
    """Return the FLOPs of one forward pass over a step, in three parts.

    They are of the layers without experts, of the experts, and of the output layer, through which
    only completions pass.
    """
    rollout = config.rollout
    sequences = rollout.completions_per_step
    length, square = workload.mean_length, workload.mean_square_length(config)
    layers = sequences * architecture.forward_flops(length, square)
    experts = 0.0
    if architecture.num_experts:
        weights = 3 * architecture.hidden_size * architecture.moe_intermediate_size
        weights *= architecture.experts_per_token
        experts = 2 * sequences * length * architecture.num_layers * weights
    output = 2 * num_output_weights(architecture) * sequences * workload.mean_completion
    return layers - experts, experts, output


def _forward_s(
    architecture: Architecture, config: Config, workload: Workload, node: Node
) -> tuple[float, float, float]:
    """Return the seconds of a forward pass over a step, in three parts.

    They are of one layer's products and collectives, of its exchange of tokens with experts, and of
    the output layer. All GPUs of a pipeline stage divide its layers and the output layer.
    """
    learner, rollout, gpu = config.learner, config.rollout, node.gpu
    stages, num_layers = learner.pipeline_parallel_size, architecture.num_layers
    rate = learner.world_size / stages * gpu.bf16_flops * LEARNER_MFU
    dense, experts, output = pass_flops(architecture, config, workload)
    layer_s = (dense + experts / EXPERT_RATE) / rate / num_layers
    # Each tensor-parallel group has the layers of its stage and the sequences of its replica.
    tokens = rollout.completions_per_step * workload.mean_length
    tokens /= learner.data_parallel_size * learner.context_parallel_size
    hidden_bytes = element_bytes(learner) * architecture.hidden_size * tokens
    # A layer of linear attention gathers its input twice, which is half an all-reduce more.
    collectives = 2 + architecture.num_linear_layers / num_layers / 2
    layer_s += collectives * _all_reduce_s(hidden_bytes, learner.tensor_parallel_size, node)
    # Every context-parallel rank passes on the keys and values of all the others.
    heads = architecture.key_value_heads_on_rank(learner.tensor_parallel_size)
    channels = 2 * heads * architecture.head_dim
    ring_bytes = (learner.context_parallel_size - 1) * element_bytes(learner) * channels * tokens
    ranks = learner.tensor_parallel_size * learner.context_parallel_size
    layer_s += ring_bytes / node.link_bytes_per_s(ranks)
    exchange_s = exchange_with_experts_s(architecture, learner, tokens, node)
    return layer_s, exchange_s, output / rate


def exchange_with_experts_s(
    architecture: Architecture, learner: LearnerConfig, tokens: float, node: Node = DGX_H100
) -> float:
    """Return the seconds that one layer's tokens take to go to their experts and come back.

    `tokens` are those of a tensor-parallel group. All experts are chosen equally often.
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


def dequantizing_s(
    architecture: Architecture, config: Config, workload: Workload, node: Node
) -> float:
    """Return the seconds that a rank takes to dequantize one layer in a pass over a step.

    For each micro batch it reads codes and writes values, which the product reads.
    """
    learner = config.learner
    passes = config.optimizer.minibatches_per_step * num_micro_batches(config, workload.mean_length)
    weights = architecture.num_linear_weights / architecture.num_layers
    num_bytes = (1 + 2 * element_bytes(learner)) * weights / learner.tensor_parallel_size
    return passes * num_bytes / node.gpu.hbm_bytes_per_s


@dataclass(frozen=True)
class LearnerTime:
    """Seconds of the learner in a step."""

    proximal: float
    update: float
    bubble: float  # part of both, while pipeline stages wait for each other
    gradients: float  # part of the update, while gradients are added up and applied

    @property
    def total(self) -> float:
        """Seconds of both phases."""
        return self.proximal + self.update


def learner_time(
    architecture: Architecture, config: Config, workload: Workload, node: Node = DGX_H100
) -> LearnerTime:
    """Return the time of the learner's phases."""
    learner, gpu, architecture = config.learner, node.gpu, adapted(architecture, config)
    minibatches = config.optimizer.minibatches_per_step
    layer_s, exchange_s, output_s = _forward_s(architecture, config, workload, node)
    passes, output_passes = 3, 4
    if architecture.adapter_rank:  # weights have no gradients, but each pass dequantizes them
        passes, output_passes = 2, 3
        layer_s += dequantizing_s(architecture, config, workload, node)
    with_exchange_s = layer_s + exchange_s
    by_stage = stage_layers(architecture, learner)
    # What `selective` computes again, SwiGLU, takes a hundredth of an update.
    again_s = with_exchange_s if learner.recompute == "full" else 0.0
    scored = [layers * with_exchange_s for layers in by_stage]
    update = [
        layers * (passes * layer_s + 2 * exchange_s) + recomputed_layers(learner, layers) * again_s
        for layers in by_stage
    ]
    scored[-1] += output_s
    update[-1] += output_passes * output_s
    proximal_s = max(scored) * ((minibatches > 1) + (config.objective.kl_coefficient > 0))
    micro_batches = num_micro_batches(config, workload.mean_length)
    waiting_stages = learner.pipeline_parallel_size - 1
    bubble = waiting_stages / (micro_batches * learner.virtual_pipeline_parallel_size)
    gradients_s = 0.0
    on_ranks = [values_by_copies(architecture, learner, stage) for stage in range(len(by_stage))]
    for copies, numel in max(on_ranks, key=lambda values: sum(values.values())).items():
        sent_bytes = (copies - 1) / copies * (4 + element_bytes(learner)) * numel
        gradients_s += sent_bytes / gpu.infiniband_bytes_per_s
        # Gradient, master and moments are read and written.
        gradients_s += 2 * 16 * numel / copies / gpu.hbm_bytes_per_s
        if learner.offload_optimizer:
            gradients_s += 2 * state_bytes(learner) * numel / copies / gpu.host_bytes_per_s
    gradients_s *= minibatches
    return LearnerTime(
        proximal=proximal_s * (1 + bubble / minibatches),
        update=max(update) * (1 + bubble) + gradients_s,
        bubble=proximal_s * bubble / minibatches + max(update) * bubble,
        gradients=gradients_s,
    )


@dataclass(frozen=True)
class PublishPlan:
    """One publish of all tensors."""

    num_bytes: int
    is_direct: bool  # ranks write it into the servers' parameters
    time_s: float  # lower bound


def plan_publish(architecture: Architecture, config: Config, node: Node = DGX_H100) -> PublishPlan:
    """Return what a publish to the servers of `config` sends, and a lower bound on its seconds."""
    rollout = config.rollout
    # A server that gives back all its memory needs the base of adapters in every publish.
    loses_base = rollout.placement == "colocated" and rollout.server.releases == "all"
    by_stage = published_by_stage(architecture, config, trained=not loses_base)
    num_bytes = sum(sent.dense + sent.experts for sent in by_stage)
    if is_direct(config, node):
        return PublishPlan(num_bytes, is_direct=True, time_s=0.0)
    # The first sender of a stage is its fullest: the others have equally many experts only.
    of_experts = config.learner.expert_parallel_size
    fullest = max(sent.dense + sent.experts / of_experts for sent in by_stage)
    byte_s = 1 / node.gpu.infiniband_bytes_per_s
    if rollout.placement == "colocated":
        byte_s = 1 / GLOO_BYTES_PER_S + 2 / node.gpu.host_bytes_per_s
    time_s = byte_s * max(num_bytes, rollout.servers * fullest)
    return PublishPlan(num_bytes, is_direct=False, time_s=time_s)


def is_direct(config: Config, node: Node = DGX_H100) -> bool:
    """Return whether ranks write into the servers' parameters: each server's node has ranks."""
    quantization, rollout = config.quantization, config.rollout
    if rollout.placement == "colocated":
        return rollout.server.releases == "cache"
    if quantization.transport == "broadcast" or quantization.publish != "full":
        return False
    _, further_nodes = nodes_of_run(config, node.gpus)
    return not further_nodes
