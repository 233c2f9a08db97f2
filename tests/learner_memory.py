"""Measure the bytes that a real learner allocates, to compare with a plan."""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batches import ragged, update
from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig
from qurl_megatron.learner.learner import Learner


def allocated(model_dir: Path, config: LearnerConfig, rows: int, time: int) -> dict[str, int]:
    """Return the bytes of weights, gradients, optimizer state and activations on this rank.

    The optimizer state is that after one step, and "optimizer in passes" what is in memory during
    the passes of a second one. Activations are the most bytes that autograd holds at once for the
    backward pass of a micro batch of `rows` x `time` tokens. Each storage counts once, parameters
    do not.
    """
    learner = Learner(model_dir, config, OptimizerConfig(learning_rate=1e-3))
    try:
        parameters = [parameter for *_, parameter in learner._parameters()]
        saved = _SavedStorages({parameter.untyped_storage().data_ptr() for parameter in parameters})
        tokens = torch.randint(2, 256, (rows, time + 1), generator=torch.Generator().manual_seed(0))
        weights = torch.ones(tokens.numel())
        in_passes: list[int] = []

        def note_state(*_: object) -> None:
            in_passes.append(_resident_bytes(_state(learner, parameters)))

        learner.chunks[0].register_forward_pre_hook(note_state)
        with torch.autograd.graph.saved_tensors_hooks(saved.save, lambda holder: holder.tensor):
            for _ in range(2):
                update(learner, ragged(tokens), weights, _sum_of_logprobs)
        buffers = [
            buffer
            for chunk in learner.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        return {
            "weights": _bytes(buffer.param_data for buffer in buffers),
            "gradients": _bytes(buffer.grad_data for buffer in buffers),
            "optimizer": _bytes(_state(learner, parameters)),
            "optimizer in passes": in_passes[-1],
            "activations": saved.most_bytes,
        }
    finally:
        learner.close()


def activations_of(
    models: list[Path], configs: list[LearnerConfig], rows: int, time: int
) -> list[list[int]]:
    """Return the `allocated` activations on one rank, by model and then by configuration."""
    device.initialize_distributed()
    return [
        [allocated(model, config, rows, time)["activations"] for config in configs]
        for model in models
    ]


class _Holder:
    """The object that autograd holds instead of a tensor, for as long as it needs the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _SavedStorages:
    """The bytes of the storages that autograd holds, and their largest sum so far.

    Megatron empties the storage of what it computes again, so bytes are counted anew each time.
    """

    def __init__(self, uncounted: set[int]) -> None:
        self._uncounted = uncounted
        self._holders: Counter[int] = Counter()  # saved tensors on each storage
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.most_bytes = 0

    def save(self, tensor: Tensor) -> _Holder:
        holder, storage = _Holder(tensor), tensor.untyped_storage()
        if storage.data_ptr() not in self._uncounted:
            weakref.finalize(holder, self._release, storage._cdata)
            self._holders[storage._cdata] += 1
            self._storages[storage._cdata] = storage
            num_bytes = sum(storage.nbytes() for storage in self._storages.values())
            self.most_bytes = max(self.most_bytes, num_bytes)
        return holder

    def _release(self, identity: int) -> None:
        self._holders[identity] -= 1
        if not self._holders[identity]:
            del self._storages[identity]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _state(learner: Learner, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the moments that exist, and the masters that are not the weights themselves."""
    chained = getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])
    states = [state for optimizer in chained for state in optimizer.optimizer.state.values()]
    moments = [v for state in states for v in state.values() if v.dim()]  # not the step count
    masters = [
        master
        for parameter in parameters
        if parameter.dtype == torch.bfloat16
        and (master := learner._optimizer_shards.master(parameter)) is not None
    ]
    return [*moments, *masters]


def _resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes in memory, which are none while a tensor's storage is empty."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _sum_of_logprobs(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, weights: Tensor, *_: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * weights).sum(), {}
