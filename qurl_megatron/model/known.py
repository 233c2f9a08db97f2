"""Models whose shape is known by name, so that a run can be planned without a file.

Sizes are those of the published config.json files. A model that is loaded is always read from its
own directory.
"""

import dataclasses
from typing import Any

from qurl_megatron.model.architecture import Architecture, Llama3RopeScaling

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


def _small(architecture: Architecture, **sizes: Any) -> Architecture:
    """Return a model whose output layer is its embedding, as small models have it."""
    return dataclasses.replace(architecture, tie_word_embeddings=True, **sizes)


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
    "Llama-3.2-1B": _small(_sized(_LLAMA, 16, 2048, 8192, 32, 8), head_dim=64),
    "Llama-3.2-3B": _small(_sized(_LLAMA, 28, 3072, 8192, 24, 8)),
    "Llama-3.1-8B": _sized(_LLAMA, 32, 4096, 14336, 32, 8),
    "Llama-3.1-70B": _sized(_LLAMA, 80, 8192, 28672, 64, 8),
}
