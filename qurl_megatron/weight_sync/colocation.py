"""Whose turn it is on the GPUs that a learner and its servers share.

While the servers sample, the learner's memory is in the host's. While the learner trains, the
servers sleep. A server that starts takes a part of the memory it finds free, so it may start only
while the learner is away, and goes to sleep before the learner comes back. For that each node has a
lock: the first learner rank of the node holds it in the learner's turn, and who starts a server
holds it until that server sleeps. The kernel frees the lock of a process that ends.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from qurl_megatron import device
from qurl_megatron.process import TurnLock


class Resident(Protocol):
    """A model with an optimizer, which can leave the memory that it computes in."""

    def leave(self) -> None:
        """Move to the host's memory."""

    def come_back(self) -> None:
        """Move back, bit for bit."""


class Colocation:
    """A learner on the GPUs of servers, which has them first. Collective over learner ranks."""

    def __init__(self, directory: Path) -> None:
        """Take the node's lock in `directory`, the servers' log directory."""
        self._residents: list[Resident] = []
        self._lock = TurnLock(directory) if device.local_rank() == 0 else None
        self._take()

    def hold(self, residents: Sequence[Resident]) -> None:
        """Note the learner's models, in the order in which they come back."""
        self._residents = list(residents)

    def release(self) -> None:
        """Leave, and let servers wake and start."""
        for resident in reversed(self._residents):
            resident.leave()
        device.release_memory()
        dist.barrier()
        if self._lock:
            self._lock.release()

    def acquire(self) -> None:
        """Come back, once all servers of this node sleep."""
        self._take()
        for resident in self._residents:
            resident.come_back()

    def close(self) -> None:
        """Give the lock up."""
        if self._lock:
            self._lock.release()

    def _take(self) -> None:
        if self._lock:
            self._lock.take()
        dist.barrier()
