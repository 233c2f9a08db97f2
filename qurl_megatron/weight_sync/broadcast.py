"""Weights by broadcast: each sender has a process group with each server.

The groups of a server are formed in a store that rank 0 hosts. After a failure both sides leave
their group, and the server's answer tells rank 0. Through the store, rank 0 tells the senders to
give up a server's groups.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.device import backend_to, device, rank, surviving_errors
from qurl_megatron.machine.stores import Store
from qurl_megatron.weight_sync.bucket import Bucket, changed_version, channel_name
from qurl_megatron.weight_sync.transport import Channel, ChannelDestination, Transport

_GIVEN_UP = "given up"  # a key of the store
_POLL_S = 0.001
_STORE_POLL_S = 0.05

# Rank 0 keeps a store for this many seconds after it has given the channels up, so that senders in
# the middle of a transfer can read the reason. Otherwise they would only find the store gone, and
# torch would print a page of C++ frames about that.
NOTICE_S = 4 * _STORE_POLL_S


@dataclass(frozen=True)
class GroupDestination(ChannelDestination):
    """The store through which the senders and a server form process groups."""

    address: str  # of the store, as server and senders reach it
    port: int
    backend: Literal["nccl", "gloo"]
    num_ranks: int  # of the server
    timeout_s: float

    def open(self, sender: int) -> Channel:
        """Begin to form the server's group with the sender of this number."""
        return GroupChannel(self, sender)

    def store(self, *, is_host: bool = False) -> Store:
        """Connect to the store, or open it as its host."""
        return Store(
            self.address,
            self.port,
            1 + self.num_ranks,
            is_host,
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
        )


def give_up(store: Store, why: str) -> None:
    """End the channels of this store; their senders fail with the reason `why`."""
    with contextlib.suppress(RuntimeError):
        store.set(_GIVEN_UP, why)


class GroupChannel(Channel):
    """A process group of this sender and one server."""

    def __init__(self, destination: GroupDestination, sender: int) -> None:
        """Begin to form the group, as the sender of this number."""
        self._destination = destination
        self._name = channel_name(destination.token, sender)
        # The device on which the group exchanges sizes.
        self._place = device() if destination.backend == "nccl" else torch.device("cpu")
        self._store: Store | None = None
        self._group: dist.ProcessGroup | None = None
        super().__init__(self._name)
        self._do(self._join)

    def _join(self) -> int:
        from sglang.srt.utils import init_custom_process_group

        destination = self._destination
        # Each channel has its own connection, even where this process hosts the store: one that
        # waits for the server would block others.
        self._store = destination.store()
        # Over gloo, forming a group waits for the server; over NCCL, the first transfer waits.
        with surviving_errors() if destination.backend == "nccl" else contextlib.nullcontext():
            self._group = init_custom_process_group(
                backend=destination.backend,
                store=dist.PrefixStore(self._name, self._store),  # the server's side does the same
                timeout=timedelta(seconds=destination.timeout_s),
                world_size=1 + destination.num_ranks,
                rank=0,
                group_name=self._name,
            )
        return 0

    def _send(self, bucket: Bucket, version: int) -> int:
        """Broadcast a bucket's values; rank 0 has told the server their version.

        Rank 0 has also told their sizes, except for a delta.
        """
        if changed_version(bucket.names) is not None:
            self._broadcast(torch.tensor([len(bucket.flat)], device=self._place))
        if len(bucket.flat):
            self._broadcast(bucket.flat)
        return len(bucket.flat)

    def _broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all ranks of the server.

        Over NCCL nothing else limits the time, see `surviving_errors`.

        Raises:
            RuntimeError: the transfer failed, took too long, or rank 0 gave the channel up.
        """
        assert self._store is not None
        work = dist.broadcast(tensor, src=0, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group
        looked = began = time.monotonic()
        while not work.is_completed():
            time.sleep(_POLL_S)
            if time.monotonic() - looked > _STORE_POLL_S:
                looked = time.monotonic()
                if self._store.check([_GIVEN_UP]):
                    raise RuntimeError(self._store.get(_GIVEN_UP).decode())
                if looked - began > self._destination.timeout_s:
                    raise RuntimeError(f"a transfer took over {self._destination.timeout_s:g} s")
        work.wait()

    def _leave(self) -> None:
        """Abort the group, so that neither side goes on waiting for the other."""
        if self.failure is not None and self._store is not None:
            give_up(self._store, f"learner rank {rank()}: {self.failure}")
        group, self._group = self._group, None
        if group is None:
            return
        # Destroying a group closes no connection while an operation is under way.
        group._get_backend(self._place).abort()
        dist.destroy_process_group(group)


class Broadcast(Transport):
    """Global rank 0's end of one server's process groups: the store that forms them."""

    meets_senders = True
    store: Store | None = None

    def open(self) -> None:
        """Open a store for the senders and the server."""
        server, shares_gpus = self.server, bool(self.member.fleet.tags)
        destination = GroupDestination(
            token=f"weights-{secrets.token_hex(8)}",
            address=server.address_here(),
            port=0,
            # NCCL refuses two ranks on one GPU.
            backend="gloo" if shares_gpus else backend_to(server.gpus if server.is_local else []),
            num_ranks=server.tensor_parallel_size,
            timeout_s=server.timeout_s,
        )
        self.store = destination.store(is_host=True)
        self.destination = self._at = dataclasses.replace(destination, port=self.store.port)

    async def connect(self, num_senders: int) -> None:
        """Let the server join the group of each sender."""
        at = self._at
        for sender in range(num_senders):
            await self.server.init_weights_group(
                master_address=at.address,
                master_port=at.port,
                world_size=1 + at.num_ranks,
                group_name=channel_name(at.token, sender),
                backend=at.backend,
            )

    async def leave(self) -> None:
        """Give the groups up, and drop the store."""
        await super().leave()
        if self.store is not None:
            give_up(self.store, self.server.url)
            await asyncio.sleep(NOTICE_S)
        self.store = None
