"""What a run would need and take, before anything is allocated: memory by part, a step by phase.

Everything is arithmetic on an `Architecture` and a `Config`. B is bytes, e the bytes of a value in
the compute dtype, t/p/d the learner's tensor, pipeline and data parallel sizes, T the tokens of a
micro batch (rows x time, all of the greatest length), h hidden, Q and K query and key-value
channels, F intermediate channels, V vocabulary rows.

Memory of a learner rank (the largest over pipeline stages counts):

    weights      e B a parameter of the rank: layers over t and p, vocabulary over t, norms whole
    gradients    4 B a parameter: Megatron's float32 buffer
    optimizer    Adam's two moments, 8 B, and with bfloat16 a float32 master, 4 B; the learner keeps
                 all of it on every data-parallel copy (a distributed optimizer: a d-th)
    reference    e B a parameter where objective.kl_coefficient keeps the first policy
    activations  of a layer and token, kept for the backward pass:
                 4eh + 8                         two norms, inputs of qkv and fc1 (over t where
                                                 sequences are parallel)
                 e(3Q + 3K)/t + 4 heads/t        qkv, rotated q and k, attention's output, log-sums
                 3eF/t                           fc1's output and fc2's input
                 eQ/t                            where query and key are normalised
                 and 4e head_dim a time step for the rotary tables; times the layers of a stage and
                 the micro batches in flight there: p - stage, or with virtual stages v a total of
                 layers x (1 + (p - 1) / (p v)) (Korthikanti et al., arXiv:2205.05198, 4.2.3).
                 Recomputed: eh a layer and token, and one layer whole. Without fused kernels (a
                 CPU) norms keep float32 tensors, and SwiGLU 2eF/t more.
    logits       chunks of at most 2^26 (`device.logit_chunk_elements`): 8 B forward; backward 6 B,
                 and 6 B a value of the output layer's shard for its gradient
    backward     e(3F/t + 2h) a token, and the largest weight's gradient before it is added up
    converter    what Eq. 13 is measured against, at most 128 rows of each quantised weight with
                 codes; while publishing two buckets and the largest tensor, which do not coincide
                 with activations
    runtime      `RUNTIME_BYTES`

Memory of a server's GPU: rollout.server.mem_fraction_static of it holds weights (codes and scales
over t; embedding, output layer and norms in BF16) and the KV cache, 4 layers max(1, K heads / t)
head_dim B a token. Slots are the sequences decoded at once: what fits at their mean length, up to
max_running_requests; SGLang admits more than fit at full length, and takes some back where memory
runs out. One sequence of full length must fit.

Time of a step:

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

Left out: rewards, evaluation, checkpoints, padding of micro batches, dynamic sampling's retries. A
critic is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from qurl_megatron import quantize, weight_map
from qurl_megatron.architecture import Architecture, ArchitectureError
from qurl_megatron.config import Config, ConfigError, LearnerConfig, WeightFormat
from qurl_megatron.weight_map import HuggingFaceTensor, Rule

GIB = 1024**3

# NVIDIA H100 SXM5 datasheet (nvidia.com/h100), dense: sparsity's doubling taken off.
HBM_BYTES_PER_S = 3.35e12
PEAK_FLOPS = {"bf16": 989e12, "8-bit": 1979e12}  # INT8 and FP8 alike
NVLINK_BYTES_PER_S = 450e9  # a direction, of 900 GB/s in both
INFINIBAND_BYTES_PER_S = 50e9  # NDR 400 Gb/s, one adapter a GPU as in a DGX H100
GPUS_PER_NODE = 8  # DGX H100
GPU_BYTES = int(79.1 * GIB)  # what PyTorch reports of an H100 80GB

# Assumed, not measured: CUDA context, NCCL's and cuBLAS's buffers, what the allocator cannot use.
RUNTIME_BYTES = 4 * GIB

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

LOGIT_CHUNK_ELEMENTS = 2**26  # `device.logit_chunk_elements` on a GPU
MEASURED_ROWS = 128  # `reshard.MEASURED_ROWS`
_PIECES = 64  # of the last batch's responses, integrated by midpoints


@dataclass(frozen=True)
class Savings:
    """What would save learner memory. The learner has none of them yet: all False is what it is."""

    recompute: bool = False  # every layer's activations, from its input
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @property
    def names(self) -> list[str]:
        return [name for name, on in dataclasses.asdict(self).items() if on]


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


@dataclass(frozen=True)
class Plan:
    """Bytes by part of the fullest GPU of each kind, and seconds by phase of a step."""

    config: Config
    gpus: int
    servers: int
    learner_bytes: dict[str, int]
    converter_bucket_bytes: int  # in place of activations, logits and backward
    server_bytes: dict[str, int]
    kv_tokens: int  # that a server holds
    slots: int  # sequences that a server decodes at once
    publish_bytes: int
    step_s: dict[str, float]
    savings: Savings

    @property
    def total_s(self) -> float:
        return sum(self.step_s.values())

    @property
    def learner_total_bytes(self) -> int:
        return _total(self.learner_bytes, self.converter_bucket_bytes)


# Counting


def _numel(part: HuggingFaceTensor, architecture: Architecture) -> int:
    return math.prod(weight_map.full_shape(part, architecture))


def num_parameters(architecture: Architecture) -> int:
    return sum(
        _numel(part, architecture) * (architecture.num_layers if rule.layered else 1)
        for rule in weight_map.rules(architecture)
        for part in rule.parts
    )


def stage_layers(architecture: Architecture, learner: LearnerConfig) -> list[int]:
    """Layers of each pipeline stage."""
    stages, in_last = learner.pipeline_parallel_size, learner.layers_in_last_pipeline_stage
    if in_last is None:
        return [architecture.num_layers // stages] * stages
    return [(architecture.num_layers - in_last) // (stages - 1)] * (stages - 1) + [in_last]


def _rank_parameters(
    architecture: Architecture, learner: LearnerConfig, stage: int
) -> Iterator[tuple[Rule, int, int]]:
    """Rule, values on one rank of a stage, and how many such parameters it has."""
    layers = stage_layers(architecture, learner)
    last = stage == len(layers) - 1
    tensor_parallel_size = learner.tensor_parallel_size
    padded = architecture.padded_vocab_size(tensor_parallel_size) // tensor_parallel_size
    vocabulary = padded * architecture.hidden_size
    for rule in weight_map.rules(architecture):
        if rule.parts[0].sizes[0] == "vocabulary":
            embedding = rule.megatron[0].startswith("embedding")
            # A tied model's last stage has a copy of the embedding for its output.
            copied = architecture.tie_word_embeddings and last
            if (stage == 0 or copied) if embedding else last:
                yield rule, vocabulary, 1
            continue
        numel = sum(
            _numel(part, architecture)
            // (1 if part.shared_dim is None else learner.tensor_parallel_size)
            for part in rule.parts
        )
        if rule.layered:
            yield rule, numel, layers[stage]
        elif last:  # the final norm
            yield rule, numel, 1


def rank_parameters(architecture: Architecture, learner: LearnerConfig, stage: int) -> int:
    """Values of all parameters on one rank of a pipeline stage."""
    return sum(n * count for _, n, count in _rank_parameters(architecture, learner, stage))


def _scales(shape: tuple[int, ...], weight_format: str) -> int:
    """Scales of a quantised weight as a server holds them."""
    if weight_format == "fp8-tensor":
        return shape[0]  # as `quantize.engine_scale`
    return math.prod(
        1 if block is None else -(-size // block)
        for size, block in zip(shape, quantize.block_shape(weight_format), strict=True)
    )


def published_bytes(architecture: Architecture, weight_format: WeightFormat) -> int:
    """Of a whole policy in a format: codes and float32 scales, the rest in BF16."""
    return sum(server_weight_bytes(architecture, weight_format, 1).values())


@functools.cache
def server_weight_bytes(
    architecture: Architecture, weight_format: WeightFormat, tensor_parallel_size: int
) -> dict[str, int]:
    """On one of a server's GPUs: `linear` layers as they are quantised, `unquantised` the rest."""
    found = {"linear": 0, "unquantised": 0}
    for rule in weight_map.rules(architecture):
        count = architecture.num_layers if rule.layered else 1
        for part in rule.parts:
            shape = weight_map.full_shape(part, architecture)
            share = tensor_parallel_size
            if part.shared_dim is None:
                share = 1
            elif part.sizes[part.shared_dim] == "key_value":  # ranks share heads, not their rows
                share = min(share, architecture.num_key_value_heads)
            if not rule.quantised or weight_format == "bf16":
                kind = "linear" if rule.quantised else "unquantised"
                found[kind] += count * -(-2 * math.prod(shape) // share)
                continue
            # Scales of channels are whole on every rank of a layer that is cut along its input.
            cut = weight_format == "fp8-block" or part.shared_dim == 0
            scales = _scales(shape, weight_format) // (share if cut else 1)
            found["linear"] += count * (math.prod(shape) // share + 4 * scales)
    return found


def kv_bytes_per_token(architecture: Architecture, tensor_parallel_size: int = 1) -> int:
    """Of keys and values in BF16 on one of a server's GPUs."""
    heads = max(1, architecture.num_key_value_heads // tensor_parallel_size)
    return 2 * 2 * architecture.num_layers * heads * architecture.head_dim


# Memory


def layer_activation_bytes(
    architecture: Architecture,
    learner: LearnerConfig,
    rows: int,
    time: int,
    *,
    sequence_parallel: bool = False,
    fused: bool = True,
) -> int:
    """What one layer keeps of `rows` sequences of `time` tokens for its backward pass.

    `fused` is a GPU, where a norm and SwiGLU are a kernel each; on a CPU they are several.
    """
    size = learner.tensor_parallel_size
    element = _element_bytes(learner)
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    query, key = heads * architecture.head_dim, kv_heads * architecture.head_dim
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    norm = (element if fused else 8) * hidden + 4  # and the float32 factor of a token
    whole = 2 * norm + 2 * element * hidden
    shared = element * (3 * query + 3 * key) + 4 * heads
    if architecture.qk_norm:
        # Key is a view of qkv's output, query a copy of its part; so in float32 on a CPU.
        shared += 4 * (heads + kv_heads)
        shared += element * query if fused else 8 * query + (8 if element == 2 else 4) * key
    shared += element * intermediate * (3 if fused else 5)
    per_token = whole / (size if sequence_parallel else 1) + shared / size
    return int(rows * time * per_token) + 4 * element * architecture.head_dim * time


def _element_bytes(learner: LearnerConfig) -> int:
    return 2 if learner.dtype == "bfloat16" else 4


def _micro_batches(config: Config) -> int:
    """In one minibatch of one data-parallel rank."""
    rows = config.rollout.prompts_per_step * config.rollout.completions_per_prompt
    rows //= config.optimizer.minibatches_per_step * config.learner.data_parallel_size
    return -(-rows // config.learner.micro_batch_size)


def _layers_in_flight(layers: int, stage: int, config: Config) -> float:
    """Layers of a stage times the micro batches whose activations it keeps at most."""
    stages, virtual = (
        config.learner.pipeline_parallel_size,
        config.learner.virtual_pipeline_parallel_size,
    )
    if virtual > 1:
        return layers * stages * (1 + (stages - 1) / (stages * virtual))
    return layers * min(stages - stage, _micro_batches(config))


def _measured_bytes(architecture: Architecture, config: Config, stage: int) -> int:
    """What the converter keeps of the last pass: rows of each quantised weight, and their codes."""
    if config.quantization.format == "bf16":
        return 0
    size, element = config.learner.tensor_parallel_size, _element_bytes(config.learner)
    total = 0
    for rule in weight_map.rules(architecture):
        if rule.quantised:
            for part in rule.parts:
                shape = list(weight_map.full_shape(part, architecture))
                if part.shared_dim is not None:
                    shape[part.shared_dim] = -(-shape[part.shared_dim] // size)
                step = -(-shape[0] // MEASURED_ROWS)
                total += len(range(step // 2, shape[0], step)) * shape[1] * (element + 1)
    return total * stage_layers(architecture, config.learner)[stage]


def learner_memory(
    architecture: Architecture, config: Config, stage: int, savings: Savings
) -> dict[str, int]:
    """Bytes by part on one rank of a pipeline stage, without the converter's buckets."""
    learner = config.learner
    element, size = _element_bytes(learner), learner.tensor_parallel_size
    parameters = list(_rank_parameters(architecture, learner, stage))
    numel = sum(n * count for _, n, count in parameters)
    masters_and_moments = (12 if element == 2 else 8) * numel
    if savings.distributed_optimizer:
        masters_and_moments //= learner.data_parallel_size

    rows, time = learner.micro_batch_size, config.rollout.max_length
    tokens = rows * time
    layers = stage_layers(architecture, learner)
    in_flight = _layers_in_flight(layers[stage], stage, config)
    hidden = architecture.hidden_size
    whole_layer = layer_activation_bytes(
        architecture, learner, rows, time, sequence_parallel=savings.sequence_parallel
    )
    if savings.recompute:
        kept = element * hidden * tokens // (size if savings.sequence_parallel else 1)
        activations = int(in_flight * kept) + whole_layer
    else:
        activations = int(in_flight * whole_layer)
    logits = 0
    if stage == len(layers) - 1:
        activations += tokens * (2 * element * hidden + 4)  # final norm, scored positions
        vocabulary_rows = architecture.padded_vocab_size(size) // size
        chunk = min(LOGIT_CHUNK_ELEMENTS, tokens * vocabulary_rows)
        logits = max(8 * chunk, 6 * chunk + 6 * vocabulary_rows * hidden)
    backward = element * tokens * (3 * architecture.intermediate_size // size + 2 * hidden)
    return {
        "weights": element * numel,
        "gradients": 4 * numel,
        "optimizer": masters_and_moments,
        "reference": element * numel if config.objective.kl_coefficient else 0,
        "converter": _measured_bytes(architecture, config, stage),
        "runtime": RUNTIME_BYTES,
        "activations": activations,
        "backward": backward + element * max(n for _, n, _ in parameters),
        "logits": logits,
    }


_PASSING = ("activations", "backward", "logits")  # gone while a policy is published


def _total(parts: dict[str, int], bucket_bytes: int) -> int:
    passing = sum(parts[name] for name in _PASSING)
    return sum(parts.values()) - passing + max(passing, bucket_bytes)


def bucket_memory(architecture: Architecture, config: Config) -> int:
    """Two buckets and the largest tensor: what the converter holds at most beside the model."""
    weight_format = config.quantization.format
    largest = max(
        _numel(part, architecture) * (1 if rule.quantised and weight_format != "bf16" else 2)
        for rule in weight_map.rules(architecture)
        for part in rule.parts
    )
    return (
        2
        * min(
            max(config.quantization.bucket_bytes, largest),
            published_bytes(architecture, weight_format),
        )
        + largest
    )


# Time


def _precision(weight_format: WeightFormat) -> str:
    return "bf16" if weight_format == "bf16" else "8-bit"


@functools.cache
def _linear_weights(architecture: Architecture) -> int:
    """Of all layers; the output layer's are apart."""
    return sum(
        _numel(part, architecture) * architecture.num_layers
        for rule in weight_map.rules(architecture)
        if rule.quantised
        for part in rule.parts
    )


def _output_weights(architecture: Architecture) -> int:
    return architecture.vocab_size * architecture.hidden_size


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
    linear, output = _linear_weights(architecture), _output_weights(architecture)
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
    return 2 * _linear_weights(architecture) * tokens / rate


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
    layers_s = sequences * (2 * _linear_weights(architecture) * length + attention) / rate
    # Each tensor-parallel group has its stage's layers and its share of the sequences.
    tokens = sequences * length / learner.data_parallel_size
    layers = architecture.num_layers / learner.pipeline_parallel_size
    hidden_bytes = _element_bytes(learner) * architecture.hidden_size * tokens
    layers_s += 2 * layers * _all_reduce_s(hidden_bytes, learner.tensor_parallel_size)
    output = 2 * _output_weights(architecture) * sequences * workload.mean_response
    return layers_s, output / (rate / learner.pipeline_parallel_size)


def learner_s(
    architecture: Architecture, config: Config, workload: Workload, savings: Savings
) -> dict[str, float]:
    """The learner's two phases."""
    learner = config.learner
    minibatches = config.optimizer.minibatches_per_step
    layers_s, output_s = _forward_s(architecture, config, workload)
    stages = learner.pipeline_parallel_size
    shares = [
        number * stages / architecture.num_layers for number in stage_layers(architecture, learner)
    ]

    def pass_s(layer_passes: int, output_passes: int, micro_batches: int) -> float:
        by_stage = [layer_passes * layers_s * share for share in shares]
        by_stage[-1] += output_passes * output_s
        virtual = learner.virtual_pipeline_parallel_size
        return max(by_stage) * (1 + (stages - 1) / (micro_batches * virtual))

    proximal_s = pass_s(1, 1, _micro_batches(config) * minibatches)
    if config.objective.kl_coefficient:
        proximal_s *= 2
    update_s = pass_s(4 if savings.recompute else 3, 4, _micro_batches(config))
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


# Planning


def plan(
    architecture: Architecture,
    config: Config,
    gpus: int,
    savings: Savings = Savings(),  # noqa: B008 (frozen)
    workload: Workload | None = None,
) -> Plan:
    """What `config`'s layout needs and takes on `gpus` H100 in all.

    Servers take the GPUs that the learner leaves, the evaluation server's taken off.

    Raises:
        ConfigError: the layout does not fit the model, the GPUs or their memory; one line that
            names the part that breaks it.
    """
    workload = workload or Workload.half(config)
    learner, server, rollout = config.learner, config.rollout.server, config.rollout
    _check_layout(architecture, config, gpus, workload)
    server_size = server.tensor_parallel_size
    servers = _free_gpus(config, gpus) // server_size

    buckets = bucket_memory(architecture, config)
    by_stage = [
        learner_memory(architecture, config, stage, savings)
        for stage in range(learner.pipeline_parallel_size)
    ]
    fullest = max(by_stage, key=lambda parts: _total(parts, buckets))
    _refuse_learner(config, fullest, buckets, by_stage.index(fullest))

    weight_format = config.quantization.format
    weights = server_weight_bytes(architecture, weight_format, server_size)
    room = int(GPU_BYTES * server.mem_fraction_static)
    per_token = kv_bytes_per_token(architecture, server_size)
    kv_tokens = max(0, (room - sum(weights.values())) // per_token)
    if server.max_total_tokens is not None:
        kv_tokens = min(kv_tokens, server.max_total_tokens)
    if kv_tokens < rollout.max_length:
        held = sum(weights.values()) / GIB
        part = "weights" if held > room / GIB else "the KV cache"
        raise ConfigError(
            f"rollout.server.tensor_parallel_size={server_size}: {part} break it: a GPU holds "
            f"{held:.1f} GiB of {weight_format} weights, and mem_fraction_static="
            f"{server.mem_fraction_static} of it is {room / GIB:.1f} GiB; one sequence of "
            f"{rollout.max_length} tokens needs {rollout.max_length * per_token / GIB:.1f} more"
        )
    length = workload.mean_prompt + workload.mean_response
    slots = min(server.max_running_requests, int(kv_tokens / length))
    server_bytes = {
        **weights,
        "KV cache": kv_tokens * per_token,
        "left for graphs and activations": GPU_BYTES - room,
    }
    step_s = {
        "rollout": rollout_s(
            architecture,
            weight_format,
            server_size,
            sequences=rollout.prompts_per_step * rollout.completions_per_prompt / servers,
            prompts=rollout.prompts_per_step / servers,
            slots=slots,
            workload=workload,
            max_response=rollout.max_response_length,
        ),
        **learner_s(architecture, config, workload, savings),
        "publish": publish_s(architecture, config),
    }
    return Plan(
        config=config,
        gpus=gpus,
        servers=servers,
        learner_bytes=fullest,
        converter_bucket_bytes=buckets,
        server_bytes=server_bytes,
        kv_tokens=kv_tokens,
        slots=slots,
        publish_bytes=published_bytes(architecture, weight_format),
        step_s=step_s,
        savings=savings,
    )


def _free_gpus(config: Config, gpus: int) -> int:
    evaluation = config.evaluation
    taken = evaluation.server.tensor_parallel_size if evaluation.wanted else 0
    return gpus - config.learner.world_size - taken


def _check_layout(
    architecture: Architecture, config: Config, gpus: int, workload: Workload
) -> None:
    """Raises ConfigError."""
    learner, rollout = config.learner, config.rollout
    if config.advantage_estimator == "gae":
        raise ConfigError("advantage_estimator=gae: a critic is not planned for; plan grpo")
    try:
        architecture.check_layout(
            learner.tensor_parallel_size,
            learner.pipeline_parallel_size,
            learner.virtual_pipeline_parallel_size,
            learner.layers_in_last_pipeline_stage,
        )
        if config.quantization.format == "fp8-block":
            architecture.check_blocks(rollout.server.tensor_parallel_size)
    except ArchitectureError as error:
        raise ConfigError(str(error)) from None
    for name, size in (
        ("learner", learner.tensor_parallel_size),
        ("rollout.server", rollout.server.tensor_parallel_size),
    ):
        if size > GPUS_PER_NODE or GPUS_PER_NODE % size:
            raise ConfigError(
                f"{name}.tensor_parallel_size={size}: must divide the {GPUS_PER_NODE} GPUs of a "
                "node, or its all-reduces leave NVLink"
            )
    if architecture.num_attention_heads % rollout.server.tensor_parallel_size:
        raise ConfigError(
            f"rollout.server.tensor_parallel_size={rollout.server.tensor_parallel_size}: must "
            f"divide the model's {architecture.num_attention_heads} attention heads"
        )
    rows = rollout.prompts_per_step * rollout.completions_per_prompt
    parts = config.optimizer.minibatches_per_step * learner.data_parallel_size
    if rows % parts:
        raise ConfigError(
            f"learner.data_parallel_size={learner.data_parallel_size}: a step's {rows} completions "
            f"do not divide into {parts} (minibatches x data-parallel ranks)"
        )
    if not 0 < workload.mean_response <= rollout.max_response_length:
        raise ConfigError(
            f"mean response of {workload.mean_response:g} tokens: must be above 0 and at most "
            f"rollout.max_response_length={rollout.max_response_length}"
        )
    if _free_gpus(config, gpus) < rollout.server.tensor_parallel_size:
        evaluation = " and the evaluation server" if config.evaluation.wanted else ""
        raise ConfigError(
            f"{gpus} GPUs: the learner's {learner.world_size}{evaluation} leave "
            f"{max(0, _free_gpus(config, gpus))}, and a rollout server takes "
            f"{rollout.server.tensor_parallel_size}"
        )


def _refuse_learner(config: Config, parts: dict[str, int], buckets: int, stage: int) -> None:
    """Raises ConfigError where a rank's parts do not fit; names the one that goes over."""
    total = _total(parts, buckets)
    if total <= GPU_BYTES:
        return
    running = itertools.accumulate(parts.values())
    breaking = next(
        (name for name, sum_ in zip(parts, running, strict=True) if sum_ > GPU_BYTES), "buckets"
    )
    learner = config.learner
    sizes = ", ".join(f"{name} {num_bytes / GIB:.1f}" for name, num_bytes in parts.items())
    raise ConfigError(
        f"learner of tensor x pipeline x data parallel sizes {learner.tensor_parallel_size} x "
        f"{learner.pipeline_parallel_size} x {learner.data_parallel_size}: {breaking} break it: a "
        f"rank of stage {stage} needs {total / GIB:.1f} of {GPU_BYTES / GIB:.1f} GiB ({sizes})"
    )


def layouts(architecture: Architecture, config: Config, gpus: int) -> Iterator[Config]:
    """`config` in every layout worth looking at: micro batches of one, all stages alike or nearly.

    Tensor parallelism within a node, up to 16 pipeline stages, any number of copies.
    """
    sizes = [size for size in (1, 2, 4, 8) if size <= gpus]
    for tensor, stages, server_size in itertools.product(sizes, range(1, 17), sizes):
        in_last = _last_stage(architecture.num_layers, stages)
        if in_last is None and architecture.num_layers % stages:
            continue
        for copies in range(1, gpus // (tensor * stages) + 1):
            yield dataclasses.replace(
                config,
                learner=dataclasses.replace(
                    config.learner,
                    tensor_parallel_size=tensor,
                    pipeline_parallel_size=stages,
                    data_parallel_size=copies,
                    virtual_pipeline_parallel_size=1,
                    layers_in_last_pipeline_stage=in_last,
                    micro_batch_size=1,
                ),
                rollout=dataclasses.replace(
                    config.rollout,
                    server=dataclasses.replace(
                        config.rollout.server, tensor_parallel_size=server_size
                    ),
                ),
            )


def _last_stage(num_layers: int, stages: int) -> int | None:
    """Layers of a last stage that is shorter than the others; None where they divide, or cannot."""
    in_last = num_layers - -(-num_layers // stages) * (stages - 1)
    return in_last if num_layers % stages and in_last > 0 else None


def suggest(
    architecture: Architecture,
    config: Config,
    gpus: int,
    savings: Savings = Savings(),  # noqa: B008 (frozen)
    workload: Workload | None = None,
) -> Plan | None:
    """The layout of `gpus` with the shortest step; None where none fits."""
    best: Plan | None = None
    for layout in layouts(architecture, config, gpus):
        try:
            found = plan(architecture, layout, gpus, savings, workload)
        except ConfigError:
            continue
        if best is None or found.total_s < best.total_s:
            best = found
    return best


def plan_or_suggest(
    architecture: Architecture,
    config: Config,
    gpus: int,
    savings: Savings,
    workload: Workload,
    *,
    has_layout: bool,
) -> Plan:
    """The plan of `config`'s own layout, or of the best one where it is not to keep its own.

    Raises:
        ConfigError: it does not fit; the line ends with a layout that does, or says what would
            help where none does.
    """
    if has_layout:
        try:
            return plan(architecture, config, gpus, savings, workload)
        except ConfigError as error:
            refusal = f"{error}; "
    else:
        refusal = ""
    best = suggest(architecture, config, gpus, savings, workload)
    if best is not None and not has_layout:
        return best
    if best is not None:
        raise ConfigError(f"{refusal}what fits: {' '.join(layout_words(best.config))}")
    everything = Savings(True, True, True)
    helped = suggest(architecture, config, gpus, everything, workload)
    raise ConfigError(
        f"{refusal}no layout of {gpus} GPUs fits prompts and responses of "
        f"{config.rollout.max_length} tokens; "
        + (
            "a learner with recomputation, sequence parallelism and a distributed optimizer "
            f"would: {' '.join(layout_words(helped.config))}"
            if helped
            else "not even with recomputation, sequence parallelism and a distributed optimizer: "
            "take more GPUs or shorter responses"
        )
    )


def layout_words(config: Config) -> list[str]:
    """The `field=value` words that give a configuration this layout."""
    learner = config.learner
    words = {
        "learner.tensor_parallel_size": learner.tensor_parallel_size,
        "learner.pipeline_parallel_size": learner.pipeline_parallel_size,
        "learner.data_parallel_size": learner.data_parallel_size,
        "learner.layers_in_last_pipeline_stage": learner.layers_in_last_pipeline_stage,
        "learner.micro_batch_size": learner.micro_batch_size,
        "rollout.server.tensor_parallel_size": config.rollout.server.tensor_parallel_size,
    }
    return [f"{name}={value}" for name, value in words.items() if value is not None]
