"""Estimate the memory of a run's GPUs, in bytes by part, for a learner rank and a server GPU.

All figures follow from an `Architecture` and a `Config`. A plan shows a learner rank of the fullest
pipeline stage, whose parts are:

    weights      in the compute dtype
    gradients    float32
    optimizer    Adam's two moments, and a float32 master if the weights are bfloat16, divided by
                 the ranks that hold the same parameters. With learner.offload_optimizer it is in
                 host memory while activations, backward and logits are on the GPU.
    served codes with learner.quantized_forward, during passes: what linear layers multiply
    reference    a copy of the weights if objective.kl_coefficient is not 0
    activations  `layer_activation_bytes` of a layer, times the layers of a stage and its micro
                 batches in flight (for the first of several virtual stages, Korthikanti et al.,
                 arXiv:2205.05198, Section 4.2.3). If a stage recomputes every layer, one of them
                 also holds all that it recomputes. All experts are assumed to get equally many
                 tokens. What recompute=selective saves without Transformer Engine's fused norms is
                 not counted.
    logits       computed in chunks (`device.logit_tile`), and the gradient of the output layer
    gathered     a layer's input, gathered from all tensor-parallel ranks. Without Transformer
                 Engine, Megatron keeps this memory between passes.
    workspaces   of Transformer Engine's matrix products, and of the products of experts. It adds
                 gradients to Megatron's buffers itself, and gives autograd a placeholder of the
                 shape of each linear weight of a layer, which it keeps.
    backward     gradients of a layer's activations, and of the largest weight before they are
                 accumulated; with learner.quantized_forward the values of that weight, too
    exchange     with experts, in a layer's forward pass: a copy of a token for each chosen expert,
                 sorted, received, sorted by local expert, and multiplied. Ranks that share an
                 expert each have all its copies, and add up their products in float32. Only one of
                 backward, exchange and logits is in memory.
    converter    what the rank sent last, unless quantization.publish is full
    buckets      while publishing, on the sender, in place of activations, logits and backward: a
                 bucket, and the parts of all ranks that make it up; with one rank, a bucket on its
                 way and the next one. A tensor larger than a bucket has one of its own. With
                 transport=direct, a rank's own part of a bucket.
    runtime      `RUNTIME_BYTES`

With adapters, the weights are the base as codes and scales, other frozen parameters in the compute
dtype, and the adapters. Only adapters have gradients and optimizer states; the buckets are those of
the first publish, which sends everything. There is no reference, and no gradient of the output
layer. In place of the largest weight's gradient, `backward` has the dequantized values of the
largest quantized weight.

On a server GPU, the fraction rollout.server.mem_fraction_static holds weights (codes and scales,
divided by the GPUs of a server; embedding, output layer and norms in BF16) and the KV cache. One
sequence of maximum length must fit. The server decodes as many sequences at once as fit at their
mean length, and at most max_running_requests. SGLang admits more than fit at full length and
retracts some if memory runs out.

In a hybrid only the layers with attention have keys and values. The others have one state per
sequence, of the same size at any length.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from qurl_megatron.config.keep import kept_layers
from qurl_megatron.config.schema import (
    Config,
    LearnerConfig,
    RecomputeMode,
    ServerConfig,
    WeightFormat,
)
from qurl_megatron.device import LOGIT_CHUNK_ELEMENTS
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import HuggingFaceTensor, Rule, num_values
from qurl_megatron.quantization import quantize

# Assumed, not measured: CUDA context, NCCL and cuBLAS buffers, allocator fragmentation. It includes
# the rows of weights that measure QuRL Eq. 13, less than a hundredth of a GPU.
RUNTIME_BYTES = 4 * 2**30
SCORED_LOGIT_BYTES = 12  # per logit, in a forward pass
_ADAPTERS = 7  # per layer: q, k, v, o, gate, up, down; each keeps x A^T of all tokens
WORKSPACE_BYTES = 2**25  # of Transformer Engine per kind of matrix product, since Hopper


def adapted(architecture: Architecture, config: Config) -> Architecture:
    """Return the architecture with the adapters that a run trains."""
    rank = config.adapters.rank
    return dataclasses.replace(architecture, adapter_rank=rank) if rank else architecture


def is_trained(rule: Rule, architecture: Architecture) -> bool:
    """Return whether a learner trains a parameter: only adapters, if the model has any."""
    return rule.is_adapter == (architecture.adapter_rank > 0)


@functools.cache
def _rules(architecture: Architecture) -> list[Rule]:
    """Return the rules of this architecture; those of one expert stand for all."""
    return [rule for rule in weight_map.rules(architecture) if rule.expert in (None, 0)]


def num_output_weights(architecture: Architecture) -> int:
    """Return the number of weights in the output layer."""
    return architecture.vocab_size * architecture.hidden_size


def stage_layers(architecture: Architecture, learner: LearnerConfig) -> list[int]:
    """Return the number of layers in each of the learner's pipeline stages."""
    return architecture.stage_layers(
        learner.pipeline_parallel_size, learner.layers_in_last_pipeline_stage
    )


def _layers_of_stage(
    architecture: Architecture, learner: LearnerConfig, stage: int
) -> Iterator[int]:
    """Yield the numbers of a stage's layers; those of a virtual stage are consecutive."""
    virtual = learner.virtual_pipeline_parallel_size
    sizes = [layers // virtual for layers in stage_layers(architecture, learner)]
    for chunk in range(virtual):
        first = chunk * sum(sizes) + sum(sizes[:stage])
        yield from range(first, first + sizes[stage])


def _rank_parameters(
    architecture: Architecture, learner: LearnerConfig, stage: int
) -> list[tuple[Rule, int, int]]:
    """Return each rule, the values of its parameter on one rank, and the number of such parameters.

    `stage` is the rank's pipeline stage.
    """
    return _parameters_of_layers(
        architecture,
        frozenset(_layers_of_stage(architecture, learner, stage)),
        stage == 0,
        stage == learner.pipeline_parallel_size - 1,
        learner.tensor_parallel_size,
        learner.expert_tensor_parallel_size,
        learner.expert_parallel_size,
    )


@functools.cache  # a search of layouts asks a hundred thousand times
def _parameters_of_layers(
    architecture: Architecture,
    layers: frozenset[int],
    first: bool,
    last: bool,
    tensor_parallel_size: int,
    expert_tensor_parallel_size: int,
    expert_parallel_size: int,
) -> list[tuple[Rule, int, int]]:
    parameters = []
    for rule in _rules(architecture):
        of_experts = rule.of_experts
        ranks = expert_tensor_parallel_size if of_experts else tensor_parallel_size
        of_layer = architecture.num_experts // expert_parallel_size if of_experts else 1
        if rule.tensors[0].sizes[0] == "vocabulary":
            embedding = rule.megatron_names[0].startswith("embedding")
            # The last stage of a tied model has a copy of the embedding as its output layer.
            has_copy = architecture.tie_word_embeddings and last
            if (first or has_copy) if embedding else last:
                rows = architecture.padded_vocab_size(ranks) // ranks
                parameters.append((rule, rows * architecture.hidden_size, 1))
            continue
        numel = sum(
            num_values(part, architecture) // (1 if part.partition_dim is None else ranks)
            for part in rule.tensors
        )
        if rule.layered:
            number = len(layers.intersection(rule.layers(architecture.linear_layers)))
            parameters.append((rule, numel, number * of_layer))
        elif last:  # the final norm
            parameters.append((rule, numel, 1))
    return parameters


def values_by_copies(
    architecture: Architecture, learner: LearnerConfig, stage: int
) -> dict[int, int]:
    """Return how many values a rank of a stage trains, by the number of their copies.

    The copies of a shard are on several ranks, which divide its optimizer state.
    """
    dense_copies = learner.data_parallel_size * learner.context_parallel_size
    values: Counter[int] = Counter()
    for rule, numel, count in _rank_parameters(architecture, learner, stage):
        if not is_trained(rule, architecture):
            continue
        copies = learner.expert_data_parallel_size if rule.of_experts else dense_copies
        values[copies] += numel * count
    return values


def _scale_bytes(shape: tuple[int, ...], weight_format: str) -> int:
    """Return the bytes of the scales that a server holds for a quantized weight."""
    scale_bytes = quantize.scale_dtype(weight_format).itemsize
    if weight_format == "fp8-tensor":
        return scale_bytes * shape[0]  # one per row, see `quantize.engine_scale`
    return scale_bytes * math.prod(
        1 if block is None else -(-size // block)
        for size, block in zip(shape, quantize.block_shape(weight_format), strict=True)
    )


@functools.cache
def _kept_in(
    hf_tensor: HuggingFaceTensor, architecture: Architecture, keep: tuple[str, ...]
) -> list[int]:
    """Return the layers of the model in which `quantization.keep` keeps this weight in BF16."""
    kept = set(kept_layers(keep, architecture))
    names = (hf_tensor.name.format(layer=layer) for layer in range(architecture.num_layers))
    return [layer for layer, name in enumerate(names) if name.removesuffix(".weight") in kept]


def published_bytes(
    architecture: Architecture, weight_format: WeightFormat, keep: tuple[str, ...] = ()
) -> int:
    """Return the bytes of a published policy: codes, scales, and the rest in BF16.

    `keep` is the run's `quantization.keep`.
    """
    return sum(server_weight_bytes(architecture, weight_format, 1, keep).values())


@functools.cache
def published_tensors(
    architecture: Architecture,
    weight_format: WeightFormat,
    tensor_parallel_size: int = 1,
    keep: tuple[str, ...] = (),
) -> list[tuple[Rule, int | None, int]]:
    """Return the rule, the layer and the bytes of each tensor of a policy on one GPU of a server.

    A quantized tensor is in `weight_format`, with its scales, or in BF16 if `keep` names it; all
    others are in BF16. One expert's tensor stands for all experts, with the bytes of all. The layer
    is None for tensors outside the layers.
    """
    tensors = []
    for rule in _rules(architecture):
        count = architecture.num_experts if rule.of_experts else 1
        for part in rule.tensors:
            shape, dim = weight_map.full_shape(part, architecture), part.partition_dim
            ranks = 1 if dim is None else tensor_parallel_size  # that hold shards of it
            if dim is not None and part.sizes[dim] == "key_value":
                # Beyond one rank per key-value head, SGLang copies whole heads.
                ranks = min(ranks, architecture.num_key_value_heads)
            in_bf16 = in_format = -(-2 * math.prod(shape) // ranks)
            if rule.quantized and weight_format != "bf16":
                # A row-parallel layer has all of its per-channel scales on every rank.
                is_divided = dim == 0 or quantize.block_shape(weight_format)[1] is not None
                scales = _scale_bytes(shape, weight_format) // (ranks if is_divided else 1)
                codes = math.prod(shape) // quantize.packing(weight_format)
                in_format = codes // ranks + scales
            kept = _kept_in(part, architecture, keep)
            for layer in rule.layers(architecture.linear_layers):
                tensors.append((rule, layer, count * (in_bf16 if layer in kept else in_format)))
    return tensors


class StageBytes(NamedTuple):
    """Bytes of the tensors of a pipeline stage, as they are published."""

    dense: int  # of all but experts
    experts: int
    largest: int  # of one tensor


def published_by_stage(
    architecture: Architecture, config: Config, *, trained: bool = False
) -> list[StageBytes]:
    """Return what each pipeline stage of the learner publishes.

    With `trained`, it counts what a server gets that already holds the base of the adapters.
    """
    quantization, sizes = config.quantization, stage_layers(architecture, config.learner)
    return _published_by_stage(
        adapted(architecture, config),
        tuple(sizes),
        quantization.weight_format,
        tuple(quantization.keep),
        trained,
    )


@functools.cache
def _published_by_stage(
    architecture: Architecture,
    sizes: tuple[int, ...],
    weight_format: WeightFormat,
    keep: tuple[str, ...],
    trained: bool,
) -> list[StageBytes]:
    stage_of = [stage for stage, layers in enumerate(sizes) for _ in range(layers)]
    dense, experts, largest = ([0] * len(sizes) for _ in range(3))
    for rule, layer, num_bytes in published_tensors(architecture, weight_format, keep=keep):
        if trained and not is_trained(rule, architecture):
            continue
        is_embedding = rule.megatron_names[0].startswith("embedding")
        stage = stage_of[layer] if layer is not None else 0 if is_embedding else -1
        (experts if rule.of_experts else dense)[stage] += num_bytes
        of_one = num_bytes // (architecture.num_experts if rule.of_experts else 1)
        largest[stage] = max(largest[stage], of_one)
    return [StageBytes(*of_stage) for of_stage in zip(dense, experts, largest, strict=True)]


@functools.cache
def server_weight_bytes(
    architecture: Architecture,
    weight_format: WeightFormat,
    tensor_parallel_size: int,
    keep: tuple[str, ...] = (),
) -> dict[str, int]:
    """Return the bytes of weights on one GPU of a server, see `published_tensors`.

    `linear` counts the linear layers of all blocks but experts; `experts` counts those, if the
    model has any; `unquantized` counts the rest.
    """
    num_bytes = {"linear": 0, "unquantized": 0}
    if architecture.num_experts:
        num_bytes["experts"] = 0
    for rule, _, of_tensor in published_tensors(
        architecture, weight_format, tensor_parallel_size, keep
    ):
        linear = "experts" if rule.of_experts else "linear"
        num_bytes[linear if rule.quantized else "unquantized"] += of_tensor
    return num_bytes


def rollout_weights(architecture: Architecture, config: Config) -> dict[str, int]:
    """Return the bytes of weights on each GPU of a rollout server, as `server_weight_bytes`."""
    weights, size = config.quantization, config.rollout.server.tensor_parallel_size
    with_adapters = adapted(architecture, config)
    return server_weight_bytes(with_adapters, weights.weight_format, size, tuple(weights.keep))


def kv_value_bytes(server: ServerConfig) -> int:
    """Return the bytes of a value in a server's KV cache."""
    return 1 if "fp8" in str(server.options.get("kv_cache_dtype")) else 2


def kv_bytes_per_token(
    architecture: Architecture, tensor_parallel_size: int = 1, value_bytes: int = 2
) -> int:
    """Return the bytes of a token's keys and values on one GPU of a server."""
    heads = architecture.key_value_heads_on_rank(tensor_parallel_size)
    return 2 * value_bytes * architecture.num_attention_layers * heads * architecture.head_dim


def state_bytes_per_sequence(architecture: Architecture, tensor_parallel_size: int = 1) -> int:
    """Return the bytes of a sequence's states on one GPU of a server; 0 without linear attention.

    The gated delta rule has float32 states; the convolution keeps its last inputs in BF16.
    """
    linear = architecture.delta_net
    if linear is None:
        return 0
    rule = 4 * linear.value_heads * linear.key_dim * linear.value_dim
    convolution = 2 * (linear.conv_width - 1) * (2 * linear.keys + linear.values)
    return architecture.num_linear_layers * (rule + convolution) // tensor_parallel_size


def layer_activation_bytes(
    architecture: Architecture,
    learner: LearnerConfig,
    tokens: int,
    time: int,
    *,
    recompute: RecomputeMode | None = None,
    fused: bool = True,
    linear: bool = False,
) -> int:
    """Return the bytes that one layer keeps for the backward pass of a micro batch.

    Args:
        tokens: tokens on this context-parallel rank.
        time: length of the longest sequence, in tokens.
        recompute: what this layer computes again; None for nothing.
        fused: True for a GPU, where a norm, SwiGLU and the gated delta rule are one kernel each,
            and False for a CPU.
        linear: True for a layer of a hybrid with linear attention.
    """
    size = learner.tensor_parallel_size
    if recompute == "full":
        return tokens * element_bytes(learner) * architecture.hidden_size // size
    element = element_bytes(learner)
    hidden, intermediate = architecture.hidden_size, architecture.active_intermediate_size
    selective, hybrid = recompute == "selective", architecture.delta_net
    # Of a norm: its input, in float32 if 1 + weight multiplies it; a float32 factor; its output.
    norm = (8 if not fused else 4 if hybrid else element) * hidden + 4 + element * hidden
    per_token = 2 * (element * hidden if selective and (hybrid or not fused) else norm)
    if linear and hybrid:
        from qurl_megatron.memory.linear_attention import linear_attention_bytes

        per_token += linear_attention_bytes(hybrid, element, time, fused=fused)
    else:
        per_token += _attention_bytes(architecture, element, fused=fused)
    per_token += element * intermediate * (2 if selective else 3 if fused else 5)
    # Each chosen expert's input; for every expert, float32 logit and probability, and a choice.
    copies = architecture.experts_per_token * learner.expert_tensor_parallel_size
    per_token += element * copies * hidden + 9 * architecture.num_experts
    return tokens * per_token // size + 4 * element * architecture.head_dim * time


def _attention_bytes(architecture: Architecture, element: int, *, fused: bool) -> int:
    """Return the bytes that a layer's attention keeps per token, without the norm before it."""
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    query, key = heads * architecture.head_dim, kv_heads * architecture.head_dim
    kept = element * (3 * query + 3 * key) + 4 * heads
    if architecture.delta_net:
        # The projections, whose gates and values stay; queries and keys with their positions, and
        # a copy of the values; the output, before and after the gate, which is in float32.
        kept = element * (5 * query + 4 * key) + 4 * query + 4 * heads
        # The norms keep float32 tensors.
        return kept + (4 if fused else 8) * (query + key) + 4 * (heads + kv_heads)
    if architecture.qk_norm:
        # The norm's input is a view of the qkv output for key, and a copy of it for query. On a
        # CPU the norm keeps float32 tensors of both.
        kept += 4 * (heads + kv_heads)
        kept += element * query if fused else 8 * query + (8 if element == 2 else 4) * key
    return kept


def recomputed_layers(learner: LearnerConfig, layers: int) -> int:
    """Return how many of a pipeline stage's `layers` compute something again."""
    if learner.recompute != "full" or learner.recompute_layers is None:
        return layers if learner.recompute else 0
    virtual = learner.virtual_pipeline_parallel_size
    return virtual * min(learner.recompute_layers, layers // virtual)


def state_bytes(learner: LearnerConfig) -> int:
    """Return the bytes of a parameter's moments and master, over all ranks that divide them."""
    return 12 if learner.dtype == "bfloat16" else 8


def element_bytes(learner: LearnerConfig) -> int:
    """Return the bytes of a value in the learner's compute dtype."""
    return 2 if learner.dtype == "bfloat16" else 4


def num_micro_batches(config: Config, mean_length: float) -> int:
    """Return the micro batches of one minibatch on one data-parallel rank.

    `mean_length` is that of prompt plus completion, in tokens.
    """
    learner, rollout = config.learner, config.rollout
    rows = rollout.completions_per_step
    rows //= config.optimizer.minibatches_per_step * learner.data_parallel_size
    budget, needed = float(learner.micro_batch_size), float(rows)
    if learner.tokens_per_micro_batch:
        budget, needed = learner.tokens_per_micro_batch, rows * mean_length
    return max(1, math.ceil(needed / budget))


def micro_batch_tokens(config: Config) -> int:
    """Return the most tokens of a micro batch on one context-parallel rank."""
    learner = config.learner
    longest = config.rollout.max_length
    budget = learner.tokens_per_micro_batch or learner.micro_batch_size * longest
    return -(-max(budget, longest) // learner.context_parallel_size)


def _kept_bytes(architecture: Architecture, config: Config, stage: int) -> int:
    """Return the bytes of what a rank of a stage sent last, which a delta needs."""
    if config.quantization.publish == "full":
        return 0
    learner, sent = config.learner, published_by_stage(architecture, config)[stage]
    of_experts = sent.experts // learner.expert_parallel_size // learner.expert_tensor_parallel_size
    return sent.dense // learner.tensor_parallel_size + of_experts


def learner_memory(
    architecture: Architecture, config: Config, stage: int, *, fused: bool = True
) -> dict[str, int]:
    """Return the bytes by part on one rank of a pipeline stage; not all are there at once.

    `fused` is as for `layer_activation_bytes`.
    """
    learner, architecture = config.learner, adapted(architecture, config)
    element, size = element_bytes(learner), learner.tensor_parallel_size
    parameters = _rank_parameters(architecture, learner, stage)
    by_copies = values_by_copies(architecture, learner, stage)
    numel = sum(by_copies.values())

    tokens = micro_batch_tokens(config)
    layers = stage_layers(architecture, learner)
    longest = config.rollout.max_length  # the case that takes most memory
    in_flight = _layers_in_flight(config, layers[stage], stage)
    hidden = architecture.hidden_size
    of_layer = functools.partial(
        layer_activation_bytes, architecture, learner, tokens, longest, fused=fused
    )
    is_linear = architecture.linear_layers
    kinds = Counter(is_linear[layer] for layer in _layers_of_stage(architecture, learner, stage))
    recomputed = recomputed_layers(learner, layers[stage])
    activations, again = 0.0, 0
    for kind, number in kinds.items():
        whole, kept = of_layer(linear=kind), of_layer(recompute=learner.recompute, linear=kind)
        part = in_flight * number / layers[stage]
        activations += part * (whole - recomputed / layers[stage] * (whole - kept))
        again = max(again, whole - kept)
    if recomputed == layers[stage]:  # else layers that are not recomputed have been freed by then
        activations += again
    logits = 0
    if stage == len(layers) - 1:
        activations += tokens * (2 * element * hidden + 4) // size  # final norm and its output
        vocabulary_rows = architecture.padded_vocab_size(size) // size
        chunk = min(LOGIT_CHUNK_ELEMENTS, tokens * vocabulary_rows)
        logits = SCORED_LOGIT_BYTES * chunk
        if not architecture.adapter_rank:
            per_logit = 10 if config.objective.entropy_coefficient else 6
            logits = max(logits, per_logit * chunk + 6 * vocabulary_rows * hidden)
    intermediate = architecture.active_intermediate_size
    gathered = element * tokens * hidden if size > 1 else 0
    backward = element * tokens * (3 * intermediate // size + 2 * hidden) - gathered
    experts = architecture.num_experts > 0
    weights, largest = element * numel, max(n for _, n, _ in parameters)
    if architecture.adapter_rank:
        format_ = config.quantization.weight_format
        weights += sum(_frozen_bytes(r, n, format_, element) * count for r, n, count in parameters)
        largest = max(n for rule, n, _ in parameters if rule.quantized)
        activations += in_flight * element * tokens * _ADAPTERS * architecture.adapter_rank
    served = 0  # codes that a pass multiplies, beside the values of one layer
    if learner.quantized_forward and not architecture.adapter_rank:
        format_ = config.quantization.weight_format
        served = sum(
            _frozen_bytes(r, n * count, format_, element)
            for r, n, count in parameters
            if r.quantized
        )
        # Values are made in float32, and then rounded.
        backward += (4 + element) * max(n for r, n, _ in parameters if r.quantized)
    has_reference = config.objective.kl_coefficient > 0 and not architecture.adapter_rank
    return {
        "weights": weights,
        "gradients": 4 * numel,
        (OFFLOADED if learner.offload_optimizer else "optimizer"): (
            sum(state_bytes(learner) * values // copies for copies, values in by_copies.items())
        ),
        "reference": element * numel if has_reference else 0,
        "converter": _kept_bytes(architecture, config, stage),
        "gathered": gathered,
        "workspaces": WORKSPACE_BYTES * (2 if experts else 1)
        + element * sum(n for r, n, _ in parameters if r.quantized and is_trained(r, architecture)),
        "runtime": RUNTIME_BYTES,
        "activations": int(activations),
        "backward": backward + element * largest,
        "logits": logits,
        **({"exchange": _exchange_bytes(architecture, learner, tokens)} if experts else {}),
        **({"served codes": served} if served else {}),
        "buckets": bucket_bytes(architecture, config, stage),
    }


OFFLOADED = "optimizer, between passes"


def _frozen_bytes(rule: Rule, numel: int, weight_format: WeightFormat, element: int) -> int:
    """Return the bytes of a frozen parameter under adapters: codes and scales, or values."""
    if rule.is_adapter:
        return 0
    if not rule.quantized:
        return element * numel
    group = quantize.block_shape(weight_format)[1]
    # Scales of whole channels are a thousandth of the codes.
    scales = numel // group * quantize.scale_dtype(weight_format).itemsize if group else 0
    return numel // quantize.packing(weight_format) + scales


def _exchange_bytes(architecture: Architecture, learner: LearnerConfig, tokens: int) -> int:
    """Return the bytes that a layer holds while it sends tokens to experts and back."""
    hidden, shared_by = architecture.hidden_size, learner.expert_tensor_parallel_size
    copy = architecture.experts_per_token * hidden
    per_token = 4 * hidden + 4 * copy + 3 * architecture.active_intermediate_size
    if shared_by > 1:
        per_token = 4 * hidden + (2 + 6 * shared_by) * copy
    return element_bytes(learner) * tokens * per_token // learner.tensor_parallel_size


def _layers_in_flight(config: Config, layers: int, stage: int) -> int:
    """Return how many layers' activations a stage keeps, counting each micro batch."""
    learner = config.learner
    stages, virtual = learner.pipeline_parallel_size, learner.virtual_pipeline_parallel_size
    micro_batches = num_micro_batches(config, config.rollout.max_length)
    if virtual == 1:
        return layers * min(stages - stage, micro_batches)
    micro_batches = -(-micro_batches // stages) * stages  # Megatron needs whole groups
    passes = min(2 * (stages - 1 - stage) + (virtual - 1) * stages + 1, virtual * micro_batches)
    return layers // virtual * passes


def peaks(parts: dict[str, int]) -> dict[str, int]:
    """Return the bytes that a rank keeps between phases, and its peak in each phase.

    `parts` are from `learner_memory`.
    """
    in_layer = max(parts["backward"], parts.get("exchange", 0))
    # A forward pass has no gradient of the output layer, which `logits` may contain.
    scored = min(parts["logits"], SCORED_LOGIT_BYTES * LOGIT_CHUNK_ELEMENTS)
    # The logits' gradients are freed before the last layer's are computed.
    served = parts.get("served codes", 0)
    in_passes = served + parts["activations"] + max(in_layer, parts["logits"])
    buckets, between = parts["buckets"], parts.get(OFFLOADED, 0)
    in_turns = (
        "activations",
        "backward",
        "exchange",
        "logits",
        "buckets",
        "served codes",
        OFFLOADED,
    )
    static = sum(num_bytes for name, num_bytes in parts.items() if name not in in_turns)
    return {
        "kept": static + between,
        # An offloaded optimizer is still on the GPU.
        "score": static + between + served + max(in_layer, scored),
        "update": static + max(in_passes, between),
        "publish": static + between + buckets,
    }


def total_bytes(parts: dict[str, int]) -> int:
    """Return the largest of the `peaks` of a rank."""
    return max(peaks(parts).values())


def bucket_bytes(architecture: Architecture, config: Config, stage: int) -> int:
    """Return the most bytes that the sender of a pipeline stage has in buckets."""
    learner, limit = config.learner, config.quantization.bucket_bytes
    sent = published_by_stage(architecture, config)[stage]
    total = sent.dense + sent.experts // learner.expert_parallel_size
    largest = min(total, max(limit, sent.largest))
    ranks = learner.tensor_parallel_size
    if config.quantization.transport == "direct":
        return largest // ranks
    return 2 * largest if ranks > 1 else min(total, largest + limit)
