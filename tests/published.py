"""Shapes and parameter counts of 32B models, as published on Hugging Face."""

from __future__ import annotations

from typing import Any

# The fields of the published config.json files that define the shape.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-32B": QWEN2,
    "DeepSeek-R1-Distill-Qwen-32B": QWEN2,
    "Qwen3-32B": {
        **QWEN2,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
    },
}
# Values in each published checkpoint.
PARAMETERS = {
    "Qwen2.5-32B": 32_763_876_352,
    "DeepSeek-R1-Distill-Qwen-32B": 32_763_876_352,
    "Qwen3-32B": 32_762_123_264,
}
