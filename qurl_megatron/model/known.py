"""Models whose shape is known by name, so that a run can be planned without a file.

Sizes are those of the published config.json files. A model that is loaded is always read from its
own directory.
"""

import dataclasses
from typing import Any

from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.delta_net import DeltaNet
from qurl_megatron.model.rope_scaling import Llama3RopeScaling

_QWEN2 = Architecture(
    family="qwen2",
    num_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=152064,
    tie_word_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    rope_scaling=None,
    max_position_embeddings=131072,
    eos_token_ids=(151643,),
)
_QWEN3 = dataclasses.replace(
    _QWEN2,
    family="qwen3",
    intermediate_size=25600,
    num_attention_heads=64,
    vocab_size=151936,
    qkv_bias=False,
    qk_norm=True,
    rms_norm_eps=1e-6,
    max_position_embeddings=40960,
    eos_token_ids=(151645, 151643),
)
_QWEN3_MOE = dataclasses.replace(
    _QWEN3,
    family="qwen3_moe",
    num_key_value_heads=4,
    num_experts=128,
    experts_per_token=8,
    normalize_topk=True,
)
_QWEN3_5 = dataclasses.replace(
    _QWEN3,
    family="qwen3_5_text",
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=248320,
    rope_theta=1e7,
    max_position_embeddings=262144,
    eos_token_ids=(248046, 248044),
)
_QWEN3_5_MOE = dataclasses.replace(
    _QWEN3_5,
    family="qwen3_5_moe_text",
    num_experts=256,
    experts_per_token=8,
    normalize_topk=True,
)
_LLAMA = dataclasses.replace(
    _QWEN2,
    family="llama",
    vocab_size=128256,
    qkv_bias=False,
    rope_theta=5e5,
    rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
    eos_token_ids=(128001, 128008, 128009),
)


def _sized(
    base: Architecture, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int
) -> Architecture:
    return dataclasses.replace(
        base,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
    )


def _hybrid(architecture: Architecture, value_heads: int, **sizes: Any) -> Architecture:
    """Return a hybrid in which every fourth layer has attention."""
    layers = tuple((layer + 1) % 4 > 0 for layer in range(architecture.num_layers))
    linear = DeltaNet(layers, 16, value_heads, 128, 128, conv_width=4, rotary_factor=0.25)
    return dataclasses.replace(architecture, delta_net=linear, **sizes)


def _small(architecture: Architecture, **sizes: Any) -> Architecture:
    """Return a model whose output layer is its embedding, as in small models."""
    return dataclasses.replace(architecture, tie_word_embeddings=True, **sizes)


_QWEN3_5_27B = _hybrid(_sized(_QWEN3_5, 64, 5120, 17408, 24, 4), 48)
_QWEN3_5_35B = _hybrid(
    _sized(_QWEN3_5_MOE, 40, 2048, 512, 16, 2),
    32,
    moe_intermediate_size=512,
    shared_intermediate_size=512,
)
KNOWN_MODELS = {
    "Qwen2.5-0.5B": _small(_sized(_QWEN2, 24, 896, 4864, 14, 2), head_dim=64, vocab_size=151936),
    "Qwen2.5-1.5B": _small(_sized(_QWEN2, 28, 1536, 8960, 12, 2), vocab_size=151936),
    "Qwen2.5-3B": _small(_sized(_QWEN2, 36, 2048, 11008, 16, 2), vocab_size=151936),
    "Qwen2.5-7B": _sized(_QWEN2, 28, 3584, 18944, 28, 4),
    "Qwen2.5-14B": _sized(_QWEN2, 48, 5120, 13824, 40, 8),
    "Qwen2.5-32B": _QWEN2,
    "Qwen2.5-72B": _sized(_QWEN2, 80, 8192, 29568, 64, 8),
    "Qwen3-0.6B": _small(_sized(_QWEN3, 28, 1024, 3072, 16, 8)),
    "Qwen3-1.7B": _small(_sized(_QWEN3, 28, 2048, 6144, 16, 8)),
    "Qwen3-4B": _small(_sized(_QWEN3, 36, 2560, 9728, 32, 8)),
    "Qwen3-8B": _sized(_QWEN3, 36, 4096, 12288, 32, 8),
    "Qwen3-14B": _sized(_QWEN3, 40, 5120, 17408, 40, 8),
    "Qwen3-32B": _QWEN3,
    "Qwen3-30B-A3B": dataclasses.replace(
        _sized(_QWEN3_MOE, 48, 2048, 6144, 32, 4), moe_intermediate_size=768
    ),
    "Qwen3-235B-A22B": dataclasses.replace(
        _sized(_QWEN3_MOE, 94, 4096, 12288, 64, 4), moe_intermediate_size=1536
    ),
    "Qwen3.5-0.8B": _small(_hybrid(_sized(_QWEN3_5, 24, 1024, 3584, 8, 2), 16)),
    "Qwen3.5-2B": _small(_hybrid(_sized(_QWEN3_5, 24, 2048, 6144, 8, 2), 16)),
    "Qwen3.5-4B": _small(_hybrid(_sized(_QWEN3_5, 32, 2560, 9216, 16, 4), 32)),
    "Qwen3.5-9B": _hybrid(_sized(_QWEN3_5, 32, 4096, 12288, 16, 4), 32),
    "Qwen3.5-27B": _QWEN3_5_27B,
    "Qwen3.6-27B": _QWEN3_5_27B,
    "Qwen3.5-35B-A3B": _QWEN3_5_35B,
    "Qwen3.6-35B-A3B": _QWEN3_5_35B,
    "Qwen3.5-122B-A10B": _hybrid(
        _sized(_QWEN3_5_MOE, 48, 3072, 1024, 32, 2),
        64,
        moe_intermediate_size=1024,
        shared_intermediate_size=1024,
    ),
    "Qwen3.5-397B-A17B": _hybrid(
        _sized(_QWEN3_5_MOE, 60, 4096, 1024, 32, 2),
        64,
        num_experts=512,
        experts_per_token=10,
        moe_intermediate_size=1024,
        shared_intermediate_size=1024,
    ),
    "Llama-3.2-1B": _small(_sized(_LLAMA, 16, 2048, 8192, 32, 8), head_dim=64),
    "Llama-3.2-3B": _small(_sized(_LLAMA, 28, 3072, 8192, 24, 8)),
    "Llama-3.1-8B": _sized(_LLAMA, 32, 4096, 14336, 32, 8),
    "Llama-3.1-70B": _sized(_LLAMA, 80, 8192, 28672, 64, 8),
}
