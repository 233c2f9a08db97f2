"""The transformer layers of the learner: Transformer Engine's on a GPU, torch's elsewhere."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor

from qurl_megatron.device import accelerator, device


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm behind Megatron's norm interface."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, device=device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(torch.nn.Module):
    """torch's causal scaled dot product behind Megatron's core attention interface."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.repeats = config.num_attention_heads // config.num_query_groups

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any
    ) -> Tensor:
        """Attend to the tokens before and including each token.

        Args:
            query: [time, batch, heads, head_dim].
            key: [time, batch, key_value_heads, head_dim].
            value: [time, batch, key_value_heads, head_dim].

        Returns:
            [time, batch, heads * head_dim].
        """
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.repeats > 1
        )
        return context.permute(2, 0, 1, 3).flatten(2)


@functools.cache
def _has_transformer_engine() -> bool:
    # Importing it without a GPU raises RuntimeError.
    return accelerator() == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """Return Megatron's specification of the layers in one chunk of this pipeline stage.

    The layers are Transformer Engine's if it is installed and there is a GPU. Otherwise they are
    Megatron's own, with torch's RMSNorm and scaled dot product attention.
    """
    norm: type[torch.nn.Module]
    if _has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm
        )
    else:
        norm = RMSNorm
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
        )
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = CausalAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, virtual_stage), layer_norm=norm
    )


def transformer_config_fields() -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that depend on the machine."""
    return {
        "use_cpu_initialization": accelerator() == "cpu",
        "bias_activation_fusion": accelerator() == "cuda",
        "apply_rope_fusion": _has_transformer_engine(),
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "batch_p2p_comm": accelerator() == "cuda",
    }
