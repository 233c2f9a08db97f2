"""The quickstart with experts: a Qwen3-MoE of 3.9M parameters learns to spell words backward.

Task, verifier and most settings are those of `quickstart`. A token passes through two of eight
experts in each layer. The learner divides them over two ranks. Update-aware quantization (UAQ)
scales by 2, because a router needs a power of two.
"""

from collections.abc import Callable
from pathlib import Path

from qurl_megatron.config.schema import Config, UaqConfig
from qurl_megatron.recipes import quickstart

_DIMENSIONS: dict[str, int | bool] = {
    **quickstart.DIMENSIONS,  # no layer has its intermediate_size
    "head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def recipe() -> Config:
    config = quickstart.recipe()
    config.model_builder = "qurl_megatron.recipes.quickstart_experts:build_model"
    learner = config.learner
    learner.tensor_parallel_size, learner.data_parallel_size = learner.data_parallel_size, 1
    learner.expert_parallel_size = learner.tensor_parallel_size
    config.quantization.uaq = UaqConfig(scale=2.0)
    config.steps = 80  # it learns more slowly: 40 steps at twice this rate gained 12 points
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1.5e-4, 20
    return config


def build_model(directory: Path, seed: int) -> Callable[[Config], None]:
    """Write a randomly initialized Qwen3-MoE and its tokenizer as a Hugging Face directory.

    Return the function that shows it some right answers.
    """
    quickstart.write_model(directory, seed, "qwen3_moe", **_DIMENSIONS)
    return quickstart.teach
