"""Turns on the GPUs that a learner and its servers share.

While the servers sample, the learner's memory is in the host's. While the learner trains, the
servers sleep. A server that starts takes a part of the memory it finds free, so it may start only
while the learner is away, and goes to sleep before the learner comes back. For that each node has a
lock: the first learner rank of the node holds it in the learner's turn, and the process that starts
a server holds it until that server sleeps. If a process ends, the kernel frees its lock.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from qurl_megatron import device
from qurl_megatron.device import SharedError, from_rank_zero
from qurl_megatron.machine.processes import GpuLock
from qurl_megatron.rollout.fleet import Member
from qurl_megatron.weight_sync.publish import Publisher


class Resident(Protocol):
    """A model with an optimizer, which can leave the memory in which it computes."""

    def leave(self) -> None:
        """Move to the host's memory."""

    def come_back(self) -> None:
        """Move back, bit for bit."""


class Colocation:
    """A learner that shares GPUs with servers and has the first turn. Collective over its ranks."""

    def __init__(self, directory: Path) -> None:
        """Take the node's lock in `directory`, the servers' log directory."""
        self._residents: list[Resident] = []
        self._lock = GpuLock(directory) if device.local_rank() == 0 else None
        self._take()

    def hold(self, residents: Sequence[Resident]) -> None:
        """Take the learner's models, in the order in which they come back."""
        self._residents = list(residents)

    def release(self) -> None:
        """Leave the GPUs, and let servers wake and start."""
        for resident in reversed(self._residents):
            resident.leave()
        device.release_memory()
        dist.barrier()  # a server may start only when all ranks have left
        if self._lock:
            self._lock.release()

    def acquire(self) -> None:
        """Come back to the GPUs, once all servers of this node sleep."""
        self._take()
        for resident in self._residents:
            resident.come_back()

    def close(self) -> None:
        """Release the lock."""
        if self._lock:
            self._lock.release()

    def _take(self) -> None:
        if self._lock:
            self._lock.take()
        dist.barrier()  # the other ranks wait until the first of their node has the lock


class ColocatedPublisher(Publisher):
    """Publishes to servers on the learner's GPUs, which sleep outside of `serving`."""

    def __init__(self, colocation: Colocation, *arguments: Any, **named: Any) -> None:
        """Take the other arguments as `Publisher` does."""
        super().__init__(*arguments, **named)
        self._colocation = colocation
        self._awake: list[Member] = []  # the servers whose turn it is, on global rank 0

    def admit(self) -> None:
        """Give the learner a turn, in which the servers that wait to join get the weights."""
        self._end_serving()
        self._begin_serving()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Give the servers their turn within this context. Collective."""
        self._begin_serving()
        try:
            yield
        except SharedError:  # on every rank, as ending a turn is collective
            self._end_serving()
            raise
        self._end_serving()

    def _begin_serving(self) -> None:
        """Send the current weights to servers that lack them, then let all servers wake."""
        self._awake = self._fleet.members("serving", "joining")
        lacking = [member for member in self._awake if not member.holds(self.version)]
        if from_rank_zero(lambda: bool(lacking)):
            self._send_to(lacking)
        self._colocation.release()
        waking = [member for member in self._awake if member.state != "lost"]
        from_rank_zero(lambda: self._wait(member.wake() for member in waking))

    def _end_serving(self) -> None:
        """Put the servers to sleep, and bring the learner back."""
        from_rank_zero(lambda: self._wait(member.sleep() for member in self._awake))
        self._colocation.acquire()
