"""Models, batches and checkpoints that local layers and Transformer Engine's have in common."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batches import ragged
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import Config, OptimizerConfig

MODELS: dict[str, dict[str, Any]] = {
    "qwen2, tied": {"architecture": "qwen2", "tied": True},
    "qwen3, untied": {"architecture": "qwen3"},
    "qwen3_moe, untied": {"architecture": "qwen3_moe"},
}
LENGTH = 12  # of a sequence


def config_of(directory: Path) -> Config:
    config = Config(model=str(directory / "model"), output_dir=str(directory), name="run")
    config.optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=3, weight_decay=0.1)
    return config


def checkpoint_of(config: Config) -> Path:
    return config.run_dir / "checkpoints" / "step_000001"


def state_of_step_1() -> Any:
    from qurl_megatron.learner.checkpoint import RunState

    return RunState(1, 2, 0.0, {}, {})


def learner_of(config: Config) -> Any:
    """Return the learner of a configuration, whose masters no BF16 number is equal to."""
    from qurl_megatron.learner.learner import Learner

    return Learner(
        Path(config.model), config.learner, config.optimizer, transform=lambda _, t: t / 3
    )


def masters_of(learner: Any) -> dict[tuple[str, int | None], Tensor]:
    return {(rule.megatron_names[0], layer): t.clone() for rule, layer, t in learner.masters()}


def batch_of(step: int) -> TrainBatch:
    """Return the batch of a step, with loss weights that make its loss a mean over tokens."""
    tokens = torch.randint(2, 90, (4, LENGTH), generator=torch.Generator().manual_seed(step))
    batch = ragged(tokens)
    batch.loss_weights = torch.full((tokens.numel(),), 1 / tokens.numel())
    return batch
