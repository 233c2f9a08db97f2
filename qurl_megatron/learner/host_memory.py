"""Keep tensors of a learner in the host's memory while something else needs the device's.

The tensors stay the same objects, and so do all views of them; meanwhile their values cannot be
read. Their copies lie one behind another in one buffer, as large as the most that has waited. On a
GPU its pages are pinned, so that copies run at the speed of PCIe. The buffer does not come from
torch's allocator of pinned memory, which rounds up to powers of two.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from qurl_megatron import device

ALIGNMENT = 512  # bytes; each copy begins at a multiple of it


class HostMemory:
    """One buffer in the host's memory, and the tensors that wait there."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._waiting: list[tuple[Tensor, Tensor]] = []  # a tensor of the device, and its copy
        self._dropped: list[Tensor] = []

    def take(self, tensors: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Copy tensors to the host, and free their memory and that of the `dropped` ones.

        Each tensor covers the whole of a storage of its own.
        """
        taken = [tensor.detach() for tensor in tensors]
        ends = [0]
        for tensor in taken:
            ends.append(ends[-1] + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT)
        if ends[-1] > self._buffer.nbytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before a larger one is made
            self._buffer = device.pinned(ends[-1])
        for start, tensor in zip(ends, taken, strict=False):
            copy = self._buffer[start : start + tensor.nbytes].view(tensor.dtype)
            copy = copy.view(tensor.shape).copy_(tensor, non_blocking=True)
            self._waiting.append((tensor, copy))
            tensor.untyped_storage().resize_(0)
        self._dropped = [tensor.detach() for tensor in dropped]
        for tensor in self._dropped:
            tensor.untyped_storage().resize_(0)

    def give_back(self) -> None:
        """Copy everything back to the device; dropped tensors are 0."""
        for tensor, copy in self._waiting:
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.copy_(copy, non_blocking=True)
        for tensor in self._dropped:
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()
        self._waiting, self._dropped = [], []

    @contextmanager
    def holding(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Keep tensors on the host within this context."""
        try:
            self.take(tensors)
            yield
        finally:
            self.give_back()
