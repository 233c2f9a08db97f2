"""The transformer layers of the learner: Transformer Engine's on a GPU, torch's elsewhere."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.config.validate import check_fp8
from qurl_megatron.device import accelerator, device
from qurl_megatron.learner.packing import zigzag
from qurl_megatron.learner.recompute import SelectiveLayer

# All of torch's but cuDNN, which makes a plan for every new shape. Packs have ever new shapes.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Megatron's fields for each recipe of Transformer Engine.
_FP8: dict[str | None, dict[str, Any]] = {
    None: {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}

# A tensor-parallel rank's tokens must be a multiple of this: the matrix products take 16, the
# gather of blockwise activations whole blocks.
FP8_TOKENS = {None: 1, "tensorwise": 16, "blockwise": 128}


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm behind Megatron's norm interface."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, device=device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(torch.nn.Module):
    """torch's causal scaled dot product of packed sequences, behind Megatron's interface.

    It computes Transformer Engine's attention where Transformer Engine is not installed. Sequences
    of similar length are computed together, padded to the longest of them. On a GPU torch's flash
    attention takes a pack in BF16 as it is, but not with context parallelism.
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
            packed_seq_params: bounds of the whole sequences.

        Returns:
            [tokens, heads * head_dim].
        """
        group = parallel_state.get_context_parallel_group()
        rank, size = group.rank(), group.size()
        if query.is_cuda and query.dtype == torch.bfloat16 and size == 1:
            return _flash_attention(query, key, value, packed_seq_params).flatten(1)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        if size > 1:
            key, value = _gather_context(key, value, bounds, group)
        if query.is_cuda:  # grouped heads would be computed with the scores of all pairs in memory
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        context = torch.empty_like(query)
        for sequences in _similar_lengths(bounds):
            keys = _Padded([torch.arange(bounds[i], bounds[i + 1]) for i in sequences])
            queries = _Padded(
                [torch.arange(bounds[i] // size, bounds[i + 1] // size) for i in sequences]
            )
            mask = None
            if size > 1:
                lengths = [bounds[i + 1] - bounds[i] for i in sequences]
                own = _Padded([torch.from_numpy(zigzag(n, rank, size)) for n in lengths])
                mask = own.index[:, None, :, None] >= torch.arange(max(lengths))
                mask = mask.to(query.device)
            with sdpa_kernel(_BACKENDS):
                attended = torch.nn.functional.scaled_dot_product_attention(
                    queries.take(query),
                    keys.take(key),
                    keys.take(value),
                    attn_mask=mask,
                    is_causal=mask is None,
                    enable_gqa=key.shape[1] < query.shape[1],
                )
            queries.put(attended, context)
        return context.flatten(1)


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
    )
    assert isinstance(attended, Tensor)  # no log-sum-exp is asked for
    return attended


class _Padded:
    """Runs of tokens laid out as rows, which the last token of a run fills up."""

    def __init__(self, runs: list[Tensor]) -> None:
        longest = max(len(run) for run in runs)
        lengths = torch.tensor([len(run) for run in runs])
        self.index = torch.stack(
            [torch.cat([run, run[-1:].expand(longest - len(run))]) for run in runs]
        )
        self._is_real = torch.arange(longest) < lengths[:, None]

    def take(self, tokens: Tensor) -> Tensor:
        """Return [rows, heads, time, head_dim] of `tokens` [tokens, heads, head_dim]."""
        return tokens[self.index.to(tokens.device)].transpose(1, 2)

    def put(self, rows: Tensor, tokens: Tensor) -> None:
        """Write what `take` would have taken back into `tokens`."""
        is_real = self._is_real.to(tokens.device)
        tokens[self.index.to(tokens.device)[is_real]] = rows.transpose(1, 2)[is_real]


def _similar_lengths(bounds: list[int]) -> list[list[int]]:
    """Group sequences whose lengths have the same number of binary digits."""
    groups: dict[int, list[int]] = {}
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        groups.setdefault((stop - start).bit_length(), []).append(number)
    return list(groups.values())


def _gather_context(
    key: Tensor, value: Tensor, bounds: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return keys and values of all context-parallel ranks, in the order of the sequences."""
    gathered = gather_from_sequence_parallel_region(
        torch.stack([key, value], dim=1), tensor_parallel_output_grad=True, group=group
    )
    order = torch.cat([context_index(bounds, rank, group.size()) for rank in range(group.size())])
    key, value = gathered[order.argsort().to(key.device)].unbind(1)
    return key, value


def context_index(bounds: list[int], rank: int, size: int) -> Tensor:
    """Return the positions of packed sequences that a context-parallel rank holds, in its order.

    `bounds` are the first tokens of the sequences, and the number of all tokens.
    """
    return torch.cat(
        [
            torch.from_numpy(start + zigzag(stop - start, rank, size))
            for start, stop in itertools.pairwise(bounds)
        ]
    )


@functools.cache
def has_transformer_engine() -> bool:
    """Return whether the layers are Transformer Engine's."""
    # Importing it without a GPU raises RuntimeError.
    return accelerator() == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's specification of the layers in one chunk of this pipeline stage.

    The layers are Transformer Engine's if it is installed and there is a GPU. Otherwise they are
    Megatron's own, with torch's RMSNorm and scaled dot product attention.
    """
    norm: type[torch.nn.Module]
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    else:
        norm = RMSNorm
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            normalization="RMSNorm",
        )
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if config.num_moe_experts:
            # Transformer Engine fuses the norm before a dense layer's MLP into it, and checkpoints
            # have its name for it. The norm before experts has a name of its own.
            names = layer.submodules.sharded_state_dict_keys_map
            layer.submodules.sharded_state_dict_keys_map = {
                name: names[name] for name in names if name.startswith("input_layernorm")
            }
    if config.recompute_granularity == "selective" and not config.num_moe_experts:
        layer.module = SelectiveLayer
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, virtual_stage), layer_norm=norm
    )


def transformer_config_fields(learner: LearnerConfig) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that depend on the machine.

    Raises:
        ConfigError: `learner.fp8` is set where the layers are not Transformer Engine's.
    """
    check_fp8(learner, has_transformer_engine())
    return {
        **_FP8[learner.fp8],
        "use_cpu_initialization": accelerator() == "cpu",
        "bias_activation_fusion": accelerator() == "cuda",
        "apply_rope_fusion": has_transformer_engine(),
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "moe_grouped_gemm": has_transformer_engine(),
        "batch_p2p_comm": accelerator() == "cuda",
        "batch_p2p_sync": False,  # old versions of torch needed the whole GPU to wait
    }
