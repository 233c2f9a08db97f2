"""The quickstart with linear attention: a Qwen3.5 of 1.8M parameters learns to spell backward.

Task, verifier and most settings are those of `quickstart`. Three of its four layers are gated
DeltaNet, one is gated attention. It is shown right answers until two fifths of its greedy answers
are right. At a fifth, after 36 steps, it is so unsure that only one of thirty samples is right.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from qurl_megatron.config.schema import Config
from qurl_megatron.recipes import quickstart

_DIMENSIONS: dict[str, int | bool] = {
    **quickstart.DIMENSIONS,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def recipe() -> Config:
    config = quickstart.recipe()
    config.model_builder = "qurl_megatron.recipes.quickstart_hybrid:build_model"
    return config


def build_model(directory: Path, seed: int) -> Callable[[Config], None]:
    """Write a randomly initialized Qwen3.5 and its tokenizer as a Hugging Face directory.

    Return the function that shows it some right answers.
    """
    quickstart.write_model(directory, seed, "qwen3_5_text", **_DIMENSIONS)
    return partial(quickstart.teach, accuracy=0.4)
