"""Measure the bytes that a real learner allocates, to compare with a plan."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from batches import ragged, update
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from qurl_megatron.learner.learner import Learner


def allocated(model_dir: Path, config: LearnerConfig, rows: int, time: int) -> dict[str, int]:
    """Return the bytes of weights, gradients, optimizer state and activations on this rank.

    The optimizer state is that after one step. Activations are the most bytes that autograd holds
    at once for the backward pass of a micro batch of `rows` x `time` tokens. Each storage counts
    once, parameters do not.
    """
    learner = Learner(model_dir, config, OptimizerConfig(learning_rate=1e-3))
    try:
        parameters = [parameter for *_, parameter in learner._parameters()]
        saved = _SavedStorages({parameter.untyped_storage().data_ptr() for parameter in parameters})
        tokens = torch.randint(2, 256, (rows, time + 1), generator=torch.Generator().manual_seed(0))
        weights = torch.ones(tokens.numel())
        with torch.autograd.graph.saved_tensors_hooks(saved.save, lambda holder: holder.tensor):
            update(learner, ragged(tokens), weights, _sum_of_logprobs)
        chained = getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])
        states = [state for optimizer in chained for state in optimizer.optimizer.state.values()]
        moments = [v for state in states for v in state.values() if v.dim()]  # not the step count
        masters = [
            master
            for master in map(learner._optimizer_shards.master, parameters)
            if master is not None and config.dtype == "bfloat16"
        ]
        return {
            "weights": _bytes(b.param_data for chunk in learner.chunks for b in chunk.buffers),
            "gradients": _bytes(b.grad_data for chunk in learner.chunks for b in chunk.buffers),
            "optimizer": _bytes({m.data_ptr(): m for m in [*moments, *masters]}.values()),
            "activations": saved.most_bytes,
        }
    finally:
        learner.close()


class _Holder:
    """The object that autograd holds instead of a tensor, for as long as it needs the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _SavedStorages:
    """The bytes of the storages that autograd holds, and their largest sum so far."""

    def __init__(self, uncounted: set[int]) -> None:
        self._uncounted = uncounted
        self._holders: Counter[int] = Counter()  # saved tensors on each storage
        self._bytes = self.most_bytes = 0

    def save(self, tensor: Tensor) -> _Holder:
        holder, storage = _Holder(tensor), tensor.untyped_storage()
        if storage.data_ptr() not in self._uncounted:
            weakref.finalize(holder, self._release, storage.data_ptr(), storage.nbytes())
            self._holders[storage.data_ptr()] += 1
            if self._holders[storage.data_ptr()] == 1:
                self._bytes += storage.nbytes()
                self.most_bytes = max(self.most_bytes, self._bytes)
        return holder

    def _release(self, pointer: int, num_bytes: int) -> None:
        self._holders[pointer] -= 1
        if not self._holders[pointer]:
            self._bytes -= num_bytes


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _sum_of_logprobs(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * weights).sum(), {}
