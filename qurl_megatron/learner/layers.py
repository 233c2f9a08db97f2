"""The transformer layers of the learner: Transformer Engine's on a GPU, torch's elsewhere."""

import functools
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    CheckpointWithoutOutput,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig, TransformerLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.utils.rnn import pad_sequence

from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.config.validate import check_context_parallel
from qurl_megatron.device import accelerator, device
from qurl_megatron.learner.packing import zigzag
from qurl_megatron.learner.sequences import PackedSequences
from qurl_megatron.model.architecture import Architecture

# All of torch's but cuDNN, which makes a plan for every new shape: packs rarely repeat one.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm behind Megatron's norm interface."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, device=device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _OfWholeSequences:
    """Lets an attention see whole sequences, though they share prompts."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **keywords: Any,
    ) -> Tensor:
        def attend(query: Tensor, key: Tensor, value: Tensor, whole: PackedSeqParams) -> Tensor:
            attended: Tensor = super(_OfWholeSequences, self).forward(  # type: ignore[misc]
                query, key, value, attention_mask, packed_seq_params=whole, **keywords
            )
            return attended

        return packed_seq_params.mix(attend, query, key, value)


class CausalAttention(torch.nn.Module):
    """torch's causal scaled dot product of packed sequences, behind Megatron's interface.

    It replaces Transformer Engine's attention in all other layers. Sequences of similar length are
    computed together, padded to the longest of them. On a GPU torch's flash attention takes a pack
    in BF16 as it is, but not with context parallelism.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> Tensor:
        """Attend to the tokens of the same sequence, before and including each token.

        Args:
            query: [tokens, heads, head_dim], this context-parallel rank's tokens.
            key: [tokens, key_value_heads, head_dim].
            value: [tokens, key_value_heads, head_dim].
            packed_seq_params: bounds of the whole sequences; the padded ones are on the host.

        Returns:
            [tokens, heads * head_dim].
        """
        group = parallel_state.get_context_parallel_group()
        rank, size = group.rank(), group.size()
        if query.is_cuda and query.dtype == torch.bfloat16 and size == 1:
            return _flash_attention(query, key, value, packed_seq_params).flatten(1)
        bounds = tuple(packed_seq_params.cu_seqlens_q_padded.tolist())  # on the host
        plan = _attention_plan(bounds, rank, size, query.device)
        if plan.order is not None:
            key, value = _gather_context(key, value, plan.order, group)
        if query.is_cuda:  # with grouped heads, torch would hold the scores of all pairs in memory
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        context = []
        for group in plan.similar:
            with sdpa_kernel(_BACKENDS):
                attended = torch.nn.functional.scaled_dot_product_attention(
                    _rows(query, group.queries),
                    _rows(key, group.keys),
                    _rows(value, group.keys),
                    attn_mask=group.mask,
                    is_causal=group.mask is None,
                    enable_gqa=key.shape[1] < query.shape[1],
                )
            context.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(context).index_select(0, plan.places).flatten(1)


@dataclass(frozen=True)
class _SimilarSequences:
    """Sequences of similar length, computed together as rows of a padded batch."""

    queries: Tensor  # [sequences, time on this rank] int64, places among the queries; padding is 0
    keys: Tensor  # [sequences, time] int64, places among the keys; padding is 0
    # [sequences, 1, time on this rank, time] bool, which keys a query attends to; None: causal
    mask: Tensor | None


@dataclass(frozen=True)
class _AttentionPlan:
    """What the layers of a pass share of the sequences in a pack."""

    similar: list[_SimilarSequences]
    places: Tensor  # [queries] int64, their places among the rows of all groups, with padding
    # With context parallelism: [tokens] int64, the sequences' places among all ranks' tokens.
    order: Tensor | None


@functools.lru_cache(maxsize=1)  # masks are large, and all layers of a pass ask for the same
def _attention_plan(
    bounds: tuple[int, ...], rank: int, size: int, device: torch.device
) -> _AttentionPlan:
    """Plan the attention of packed sequences on a context-parallel rank."""

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    similar: dict[int, list[int]] = {}  # by the number of binary digits of the length
    for number, length in enumerate(lengths):
        similar.setdefault(length.bit_length(), []).append(number)
    groups = []
    places = torch.empty(bounds[-1] // size, dtype=torch.int64)
    num_rows = 0  # of all groups, with padding
    for numbers in similar.values():
        starts, whole = (torch.tensor([v[n] for n in numbers]) for v in (bounds, lengths))
        keys, _ = _pad(starts, whole)
        queries, is_real = _pad(starts // size, whole // size)
        places[queries[is_real]] = num_rows + is_real.flatten().nonzero().squeeze(1)
        num_rows += is_real.numel()
        mask = None
        if size > 1:
            own = [torch.from_numpy(zigzag(lengths[n], rank, size)) for n in numbers]
            rows = pad_sequence(own, batch_first=True)[:, None, :, None]
            mask = to_device(rows) >= to_device(torch.arange(keys.shape[1]))
        groups.append(_SimilarSequences(to_device(queries), to_device(keys), mask))
    order = None
    if size > 1:
        order = torch.cat([context_index(bounds, rank, size) for rank in range(size)]).argsort()
        order = to_device(order)
    return _AttentionPlan(groups, to_device(places), order)


def _pad(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return places [sequences, time] int64, 0 for padding, and which of them are real."""
    time = torch.arange(int(lengths.max()))
    is_real = time < lengths[:, None]
    return torch.where(is_real, starts[:, None] + time, 0), is_real


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSeqParams
) -> Tensor:
    """Return causal attention [tokens, heads, head_dim] of a pack; torch has it for CUDA only."""
    attended = varlen_attn(
        query,
        key,
        value,
        sequences.cu_seqlens_q,
        sequences.cu_seqlens_kv,
        sequences.max_seqlen_q,
        sequences.max_seqlen_kv,
        window_size=(-1, 0),  # causal
        enable_gqa=key.shape[1] < query.shape[1],
    )
    assert isinstance(attended, Tensor)  # no log-sum-exp is asked for
    return attended


def _rows(tokens: Tensor, places: Tensor) -> Tensor:
    """Return tokens [tokens, heads, head_dim] at [rows, time] as [rows, heads, time, head_dim]."""
    return tokens.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)


def _gather_context(
    key: Tensor, value: Tensor, order: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return keys and values of all context-parallel ranks, in the order of the sequences."""
    gathered = gather_from_sequence_parallel_region(
        torch.stack([key, value], dim=1), tensor_parallel_output_grad=True, group=group
    )
    key, value = gathered[order].unbind(1)
    return key, value


def context_index(bounds: Sequence[int], rank: int, size: int) -> Tensor:
    """Return the positions of packed sequences that a context-parallel rank holds, in its order.

    `bounds` are the positions at which sequences begin, followed by the number of all tokens.
    """
    return torch.cat(
        [
            torch.from_numpy(start + zigzag(stop - start, rank, size))
            for start, stop in itertools.pairwise(bounds)
        ]
    )


class SelectiveLayer(TransformerLayer):
    """A dense layer that recomputes the output of SwiGLU too, not only the outputs of its norms."""

    def _forward_mlp(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        gate_and_up, _ = self.mlp.linear_fc1(self._forward_pre_mlp_layernorm(hidden_states))
        checkpoint = CheckpointWithoutOutput()
        output, bias = self.mlp.linear_fc2(checkpoint.checkpoint(self._swiglu, gate_and_up))
        checkpoint.discard_output_and_register_recompute(output)
        return self._forward_post_mlp((output, bias), residual=hidden_states)

    def _swiglu(self, gate_and_up: Tensor) -> Tensor:
        if self.config.bias_activation_fusion:
            return bias_swiglu_impl(gate_and_up, None)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return self.config.activation_func(gate) * up


@functools.cache
def has_transformer_engine() -> bool:
    """Return whether the layers are Transformer Engine's."""
    # Importing it without a GPU raises RuntimeError.
    return accelerator() == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def uses_transformer_engine(architecture: Architecture) -> bool:
    """Return whether a model's layers are Transformer Engine's; those of hybrids never are.

    It fuses the norm before attention into one product, but two products of linear attention read
    that norm.
    """
    return has_transformer_engine() and not architecture.is_hybrid


def block_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's specification of the layers in one chunk of this pipeline stage.

    The layers are Transformer Engine's if it is installed and there is a GPU. Otherwise they are
    those of `local_layer`.
    """
    norm: type[torch.nn.Module] = RMSNorm
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
        complete_layer(layer, config)
    else:
        layer = local_layer(config, norm)
        # Transformer Engine fuses norms into the products behind them, and checkpoints use its
        # names. The norm before experts is not fused, and keeps its own.
        names = layer.submodules.sharded_state_dict_keys_map
        if config.num_moe_experts:
            names = {name: names[name] for name in names if name.startswith("input_layernorm")}
        layer.submodules.sharded_state_dict_keys_map = names
    layers = [layer] * get_num_layers_to_build(config, virtual_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def local_layer(config: TransformerConfig, norm: type[torch.nn.Module]) -> ModuleSpec:
    """Return Megatron's own layer, with these norms and torch's scaled dot product attention."""
    layer: ModuleSpec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = norm
    layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    complete_layer(layer, config)
    return layer


def complete_layer(layer: ModuleSpec, config: TransformerConfig) -> None:
    """Let a layer see whole sequences, and recompute what is cheap if `config` says so."""
    attention = layer.submodules.self_attention.submodules
    core = attention.core_attention
    attention.core_attention = type(core.__name__, (_OfWholeSequences, core), {})
    if config.recompute_granularity == "selective" and not config.num_moe_experts:
        layer.module = SelectiveLayer


def fuse_gradients(model: torch.nn.Module) -> None:
    """Let Transformer Engine's products add gradients of weights to Megatron's float32 buffer.

    Otherwise a gradient is written in the compute dtype and then added. Megatron's field for this
    also requires Apex, for Megatron's output layer, which is not used.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def transformer_config_fields(learner: LearnerConfig, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that depend on the layers' implementation.

    Raises:
        ConfigError: `learner` needs Transformer Engine, which is not there.
    """
    if accelerator() == "cuda":
        check_context_parallel(learner, has_transformer_engine())
    return {
        **_recompute_fields(learner, architecture),
        "use_cpu_initialization": accelerator() == "cpu",
        "bias_activation_fusion": accelerator() == "cuda",
        "apply_rope_fusion": uses_transformer_engine(architecture),
        "moe_grouped_gemm": _has_grouped_experts(architecture),
        "batch_p2p_comm": accelerator() == "cuda",
        "batch_p2p_sync": False,  # old versions of torch needed the whole GPU to wait
    }


def _has_grouped_experts(architecture: Architecture) -> bool:
    """Return whether one operation computes all experts; a frozen base has a layer for each."""
    return uses_transformer_engine(architecture) and not architecture.adapter_rank


def _recompute_fields(learner: LearnerConfig, architecture: Architecture) -> dict[str, Any]:
    """Return Megatron's fields for what a layer recomputes in the backward pass and does not keep.

        selective  The outputs of norms and of SwiGLU, whose operations only read and write memory.
                   The attention kernels keep no scores and recompute them in every mode.
                   Transformer Engine's norms are part of the linear layers behind them, and kept.
        full       Whole layers, of which only the input is kept. Results are bit for bit the same.

    With selective, torch's RMSNorm on a CPU adds up the gradient of its input in another order, so
    results are equal up to float32 rounding. Megatron recomputes the SwiGLU of experts only where
    one operation computes all of them.
    """
    if learner.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": learner.recompute_layers or architecture.num_layers,
        }
    if learner.recompute == "selective":
        of_experts = architecture.num_experts and _has_grouped_experts(architecture)
        modules = ["layernorm", "moe_act"] if of_experts else ["layernorm"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}
