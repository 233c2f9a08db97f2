"""What a real learner allocates, byte by byte, for the plan to be compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.batch import TrainBatch
from qurl_megatron.config import LearnerConfig, OptimizerConfig
from qurl_megatron.learner import Learner


def allocated(model_dir: Path, config: LearnerConfig, rows: int, time: int) -> dict[str, int]:
    """On this rank: parameters, gradient buffer, optimizer state after a step, and what a forward
    pass of one micro batch of `rows` x `time` tokens keeps for its backward pass.

    Kept is every storage that autograd saves, once; parameters are not counted again.
    """
    learner = Learner(model_dir, config, OptimizerConfig(learning_rate=1e-3))
    try:
        parameters = [parameter for *_, parameter in learner._parameters()]
        kept: dict[int, Any] = {
            parameter.untyped_storage().data_ptr(): None for parameter in parameters
        }

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept.setdefault(storage.data_ptr(), storage)  # held, so that no other takes its place
            return tensor

        tokens = torch.randint(2, 256, (rows, time + 1), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        nothing = torch.zeros(tokens.shape)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            learner.update(
                TrainBatch(tokens, mask, nothing, nothing, nothing),
                torch.ones(tokens.shape),
                _sum_of_logprobs,
                temperature=1.0,
            )
        chained = getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])
        states = [state for one in chained for state in one.optimizer.state.values()]
        moments = [v for state in states for v in state.values() if v.dim()]  # not the step count
        masters = [p.main_param for p in parameters if hasattr(p, "main_param")]
        return {
            "weights": _bytes({p.data_ptr(): p for p in parameters}.values()),
            "gradients": _bytes(b.grad_data for chunk in learner.chunks for b in chunk.buffers),
            "optimizer": _bytes({m.data_ptr(): m for m in [*moments, *masters]}.values()),
            "activations": sum(
                storage.nbytes() for storage in kept.values() if storage is not None
            ),
        }
    finally:
        learner.close()


_bytes: Callable[[Any], int] = lambda tensors: sum(tensor.nbytes for tensor in tensors)  # noqa: E731


def _sum_of_logprobs(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * weights).sum(), {}
