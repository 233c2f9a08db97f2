"""What the GPUs of a run would hold: bytes by part, of a learner's rank and of a server's GPU.

Everything is arithmetic on an `Architecture` and a `Config`. B is bytes, e the bytes of a value in
the compute dtype, t/p/d the learner's tensor, pipeline and data parallel sizes, h hidden, Q and K
query and key-value channels, F intermediate channels. A micro batch's tokens are rows x time, all
of the greatest length.

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
                 eQ/t                            where query and key are normalized
                 and 4e head_dim a time step for the rotary tables; times the layers of a stage and
                 the micro batches in flight there: p - stage, or with virtual stages v a total of
                 layers x (1 + (p - 1) / (p v)) (Korthikanti et al., arXiv:2205.05198, 4.2.3).
                 Recomputed: eh a layer and token, and for one layer all of it. Without fused
                 kernels (a CPU) norms keep float32 tensors, and SwiGLU 2eF/t more.
    logits       chunks of at most 2^26 (`device.logit_chunk_elements`): 8 B forward; backward 6 B,
                 and 6 B a value of the output layer's shard for its gradient
    backward     e(3F/t + 2h) a token, and the largest weight's gradient before it is added up
    converter    what Eq. 13 is measured against, at most 128 rows of each quantized weight with
                 codes; while publishing two buckets and the largest tensor, which do not coincide
                 with activations
    runtime      `RUNTIME_BYTES`

Memory of a server's GPU: rollout.server.mem_fraction_static of it holds weights (codes and scales
over t; embedding, output layer and norms in BF16) and the KV cache, 4 layers max(1, K heads / t)
head_dim B a token. Slots are the sequences decoded at once: what fits at their mean length, up to
max_running_requests; SGLang admits more than fit at full length, and takes some back where memory
runs out. One sequence of full length must fit.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from qurl_megatron.config.schema import Config, LearnerConfig, WeightFormat
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import HuggingFaceTensor, Rule
from qurl_megatron.quantization import quantize

GIB = 1024**3
GPU_BYTES = int(79.1 * GIB)  # what PyTorch reports of an H100 80GB
# Assumed, not measured: CUDA context, NCCL's and cuBLAS's buffers, what the allocator cannot use.
RUNTIME_BYTES = 4 * GIB

LOGIT_CHUNK_ELEMENTS = 2**26  # `device.logit_chunk_elements` on a GPU
MEASURED_ROWS = 128  # `reshard.MEASURED_ROWS`


@dataclass(frozen=True)
class Savings:
    """What would save learner memory. The learner has none of them yet: all False is what it is."""

    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @property
    def names(self) -> list[str]:
        return [name for name, on in dataclasses.asdict(self).items() if on]


# Counting


def _numel(part: HuggingFaceTensor, architecture: Architecture) -> int:
    return math.prod(weight_map.full_shape(part, architecture))


def num_parameters(architecture: Architecture) -> int:
    return sum(
        _numel(part, architecture) * (architecture.num_layers if rule.layered else 1)
        for rule in weight_map.rules(architecture)
        for part in rule.tensors
    )


@functools.cache
def linear_weights(architecture: Architecture) -> int:
    """Of all layers; the output layer's are apart."""
    return sum(
        _numel(part, architecture) * architecture.num_layers
        for rule in weight_map.rules(architecture)
        if rule.quantized
        for part in rule.tensors
    )


def output_weights(architecture: Architecture) -> int:
    return architecture.vocab_size * architecture.hidden_size


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
        if rule.tensors[0].sizes[0] == "vocabulary":
            embedding = rule.megatron_names[0].startswith("embedding")
            # A tied model's last stage has a copy of the embedding for its output.
            copied = architecture.tie_word_embeddings and last
            if (stage == 0 or copied) if embedding else last:
                yield rule, vocabulary, 1
            continue
        numel = sum(
            _numel(part, architecture)
            // (1 if part.partition_dim is None else learner.tensor_parallel_size)
            for part in rule.tensors
        )
        if rule.layered:
            yield rule, numel, layers[stage]
        elif last:  # the final norm
            yield rule, numel, 1


def rank_parameters(architecture: Architecture, learner: LearnerConfig, stage: int) -> int:
    """Values of all parameters on one rank of a pipeline stage."""
    return sum(n * count for _, n, count in _rank_parameters(architecture, learner, stage))


def _scales(shape: tuple[int, ...], weight_format: str) -> int:
    """Scales of a quantized weight as a server holds them."""
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
    """On one of a server's GPUs: `linear` layers as they are quantized, `unquantized` the rest."""
    found = {"linear": 0, "unquantized": 0}
    for rule in weight_map.rules(architecture):
        count = architecture.num_layers if rule.layered else 1
        for part in rule.tensors:
            shape = weight_map.full_shape(part, architecture)
            share = tensor_parallel_size
            if part.partition_dim is None:
                share = 1
            elif part.sizes[part.partition_dim] == "key_value":  # ranks share heads, not their rows
                share = min(share, architecture.num_key_value_heads)
            if not rule.quantized or weight_format == "bf16":
                kind = "linear" if rule.quantized else "unquantized"
                found[kind] += count * -(-2 * math.prod(shape) // share)
                continue
            # Scales of channels are whole on every rank of a layer that is cut along its input.
            cut = weight_format == "fp8-block" or part.partition_dim == 0
            scales = _scales(shape, weight_format) // (share if cut else 1)
            found["linear"] += count * (math.prod(shape) // share + 4 * scales)
    return found


def kv_bytes_per_token(architecture: Architecture, tensor_parallel_size: int = 1) -> int:
    """Of keys and values in BF16 on one of a server's GPUs."""
    heads = max(1, architecture.num_key_value_heads // tensor_parallel_size)
    return 2 * 2 * architecture.num_layers * heads * architecture.head_dim


# On a GPU


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
    element = element_bytes(learner)
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


def element_bytes(learner: LearnerConfig) -> int:
    return 2 if learner.dtype == "bfloat16" else 4


def micro_batches(config: Config) -> int:
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
    return layers * min(stages - stage, micro_batches(config))


def _measured_bytes(architecture: Architecture, config: Config, stage: int) -> int:
    """What the converter keeps of the last pass: rows of each quantized weight, and their codes."""
    if config.quantization.format == "bf16":
        return 0
    size, element = config.learner.tensor_parallel_size, element_bytes(config.learner)
    total = 0
    for rule in weight_map.rules(architecture):
        if rule.quantized:
            for part in rule.tensors:
                shape = list(weight_map.full_shape(part, architecture))
                if part.partition_dim is not None:
                    shape[part.partition_dim] = -(-shape[part.partition_dim] // size)
                step = -(-shape[0] // MEASURED_ROWS)
                total += len(range(step // 2, shape[0], step)) * shape[1] * (element + 1)
    return total * stage_layers(architecture, config.learner)[stage]


def learner_memory(
    architecture: Architecture, config: Config, stage: int, savings: Savings
) -> dict[str, int]:
    """Bytes by part on one rank of a pipeline stage, without the converter's buckets."""
    learner = config.learner
    element, size = element_bytes(learner), learner.tensor_parallel_size
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
    if learner.recompute_activations:
        kept = element * hidden * tokens // (size if savings.sequence_parallel else 1)
        activations = int((in_flight - 1) * kept) + whole_layer
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


def total_bytes(parts: dict[str, int], bucket_bytes: int) -> int:
    """Of a rank's parts (`learner_memory`) and its buckets (`bucket_memory`), at its fullest."""
    passing = sum(parts[name] for name in _PASSING)
    return sum(parts.values()) - passing + max(passing, bucket_bytes)


def bucket_memory(architecture: Architecture, config: Config) -> int:
    """Two buckets and the largest tensor: what the converter holds at most beside the model."""
    weight_format = config.quantization.format
    largest = max(
        _numel(part, architecture) * (1 if rule.quantized and weight_format != "bf16" else 2)
        for rule in weight_map.rules(architecture)
        for part in rule.tensors
    )
    return (
        2
        * min(
            max(config.quantization.bucket_bytes, largest),
            published_bytes(architecture, weight_format),
        )
        + largest
    )
