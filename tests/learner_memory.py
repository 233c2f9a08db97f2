"""What a real learner allocates, byte by byte, for the plan to be compared with."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from qurl_megatron.learner.learner import Learner


def allocated(model_dir: Path, config: LearnerConfig, rows: int, time: int) -> dict[str, int]:
    """On this rank: parameters, gradient buffer, optimizer state after a step, and what a forward
    and backward pass of one micro batch of `rows` x `time` tokens keeps at most for the latter.

    Kept is every storage that autograd saves, once, until it is used; parameters are not counted.
    """
    learner = Learner(model_dir, config, OptimizerConfig(learning_rate=1e-3))
    try:
        parameters = [parameter for *_, parameter in learner._parameters()]
        kept = _Kept({parameter.untyped_storage().data_ptr() for parameter in parameters})
        tokens = torch.randint(2, 256, (rows, time + 1), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        nothing = torch.zeros(tokens.shape)
        with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda saved: saved.tensor):
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
            "activations": kept.most_bytes,
        }
    finally:
        learner.close()


class _Saved:
    """What autograd holds in a tensor's place; gone when it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Kept:
    """Counts the bytes of storages that autograd holds, and the most there were at once."""

    def __init__(self, uncounted: set[int]) -> None:
        self._uncounted = uncounted
        self._holders: Counter[int] = Counter()  # saved tensors on each storage
        self._bytes = self.most_bytes = 0

    def save(self, tensor: Tensor) -> _Saved:
        saved, storage = _Saved(tensor), tensor.untyped_storage()
        if storage.data_ptr() not in self._uncounted:
            weakref.finalize(saved, self._release, storage.data_ptr(), storage.nbytes())
            self._holders[storage.data_ptr()] += 1
            if self._holders[storage.data_ptr()] == 1:
                self._bytes += storage.nbytes()
                self.most_bytes = max(self.most_bytes, self._bytes)
        return saved

    def _release(self, pointer: int, num_bytes: int) -> None:
        self._holders[pointer] -= 1
        if not self._holders[pointer]:
            self._bytes -= num_bytes


_bytes: Callable[[Any], int] = lambda tensors: sum(tensor.nbytes for tensor in tensors)  # noqa: E731


def _sum_of_logprobs(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * weights).sum(), {}
