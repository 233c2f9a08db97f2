"""Channels: the process groups through which a sender's buckets reach the servers.

Each sender has one channel to each server. Global rank 0 opens them: it sends all senders the
`Rendezvous` of each, and asks the server to join. A channel works in order in a thread of its own.
After a failure it sends nothing more, and the server, whose side of the channel then ends too, says
so to rank 0. Rank 0 gives a channel up through the store in which its ranks have met.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.device import device, rank
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.shared_memory import GROUP_SUFFIX, describe
from qurl_megatron.weight_sync.stream import channel_name

Carrier = Literal["nccl", "gloo", "shared_memory"]
"""The transport of buckets to the servers.

"nccl" broadcasts from GPU to GPU, "gloo" broadcasts through host memory. With "shared_memory" the
servers, on the learner's machine, read the buckets in place.
"""

_GIVEN_UP = "given up"  # a key of the store
_POLL_S = 0.001
_STORE_POLL_S = 0.05

# Who keeps a store ends it this long after giving its channels up. Who waits for a transfer has
# read why by then. Otherwise it would learn only that the store has gone, and torch would print a
# page of C++ frames about that.
NOTICE_S = 4 * _STORE_POLL_S


class Connection(Protocol):
    """What carries a sender's buckets to one server, in order."""

    failure: RuntimeError | None  # after which it sends nothing more

    def send(self, bucket: Bucket, version: int, *, announced: bool) -> Future[int]:
        """Send a bucket of a version; done when it may be released, or sending has failed.

        The result is how many bytes it took.

        Args:
            announced: the request told the server the bucket's size.
        """

    def end(self) -> Future[int]:
        """Tell the server that no more buckets come, which were not announced."""

    def close(self) -> None:
        """End the connection."""


class Endpoint(Protocol):
    """How the senders connect to a server; global rank 0 hands it to them."""

    @property
    def token(self) -> str:
        """A name, new for each attempt."""

    def connect(self, sender: int) -> Connection:
        """Begin to connect the sender of this number."""


@dataclass(frozen=True)
class Rendezvous:
    """The store in which the senders and a server meet, to form process groups."""

    token: str  # names the channels; a new one for each attempt, because servers refuse old names
    address: str  # of the store, as server and senders reach it
    port: int
    carrier: Carrier
    num_ranks: int  # of the server
    timeout_s: float

    @property
    def backend(self) -> str:
        """The backend of the process groups."""
        return "gloo" if self.carrier == "shared_memory" else self.carrier

    @property
    def suffix(self) -> str:
        """What the names of the channels end with."""
        return GROUP_SUFFIX if self.carrier == "shared_memory" else ""

    def channel(self, sender: int) -> str:
        """Return the name of a sender's channel."""
        return channel_name(self.token, sender, self.suffix)

    def connect(self, sender: int) -> Channel:
        """Begin to form the group of the sender of this number."""
        return Channel(self, sender)

    def host(self) -> dist.TCPStore:
        """Open the store in this process."""
        return self._store(is_master=True)

    def join(self) -> dist.TCPStore:
        """Connect to the store."""
        return self._store(is_master=False)

    def _store(self, *, is_master: bool) -> dist.TCPStore:
        return dist.TCPStore(
            self.address,
            self.port,
            1 + self.num_ranks,
            is_master=is_master,
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
        )


def give_up(store: dist.TCPStore, why: str) -> None:
    """End the channels that met in this store."""
    with contextlib.suppress(RuntimeError):
        store.set(_GIVEN_UP, why)


def is_given_up(store: dist.TCPStore) -> str:
    """Return why the channels that met in this store were given up; empty if they were not."""
    return store.get(_GIVEN_UP).decode() if store.check([_GIVEN_UP]) else ""


class Channel:
    """This sender's process group with one server."""

    def __init__(self, rendezvous: Rendezvous, sender: int) -> None:
        """Begin to form the group, as the sender of this number."""
        self.failure: RuntimeError | None = None
        self._rendezvous = rendezvous
        self._sender = sender
        self._store: dist.TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=rendezvous.channel(sender))
        self._do(self._join)

    def send(self, bucket: Bucket, version: int, *, announced: bool) -> Future[int]:
        """Broadcast a bucket's values; rank 0 told the server the version."""
        return self._do(lambda: self._send(bucket.flat, announced), len(bucket.flat))

    def end(self) -> Future[int]:
        """Tell the server that no more buckets come, which were not announced."""
        return self._do(lambda: self._send_size(0))

    def close(self) -> None:
        """Leave the process group."""
        self._thread.submit(self._leave).result()
        self._thread.shutdown()

    def _do(self, work: Callable[[], None], num_bytes: int = 0) -> Future[int]:
        """Do work after all earlier work; the result is `num_bytes`, and 0 after a failure."""

        def guarded() -> int:
            if self.failure is not None:
                return 0
            try:
                work()
                return num_bytes
            except RuntimeError as error:  # torch's errors of process groups among them
                self.failure = error
                if self._store is not None:
                    give_up(self._store, f"learner rank {rank()}: {error}")
                self._leave()
                return 0

        return self._thread.submit(guarded)

    def _join(self) -> None:
        from sglang.srt.utils import init_custom_process_group

        rendezvous, name = self._rendezvous, self._rendezvous.channel(self._sender)
        # A connection of its own, even where this process keeps the store: one that waits for the
        # server would block others.
        self._store = rendezvous.join()
        self._group = init_custom_process_group(
            backend=rendezvous.backend,
            store=dist.PrefixStore(name, self._store),  # the server's side does the same
            timeout=timedelta(seconds=rendezvous.timeout_s),
            world_size=1 + rendezvous.num_ranks,
            rank=0,
            group_name=name,
        )

    def _send(self, flat: Tensor, announced: bool) -> None:
        if not announced:
            self._send_size(len(flat))
        if self._rendezvous.carrier != "shared_memory":
            self._broadcast(flat)
            return
        self._broadcast(describe(flat))
        self._wait(dist.barrier(group=self._group, async_op=True))  # the server has read it

    @property
    def _place(self) -> torch.device:
        """The device on which the group exchanges sizes."""
        return device() if self._rendezvous.carrier == "nccl" else torch.device("cpu")

    def _send_size(self, num_bytes: int) -> None:
        self._broadcast(torch.tensor([num_bytes], device=self._place))

    def _broadcast(self, tensor: Tensor) -> None:
        self._wait(dist.broadcast(tensor, src=0, group=self._group, async_op=True))

    def _wait(self, work: dist.Work) -> None:
        """Wait for an operation, unless rank 0 gives the channel up."""
        assert self._store is not None
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_POLL_S)
            if time.monotonic() - looked > _STORE_POLL_S:
                looked = time.monotonic()
                if why := is_given_up(self._store):
                    raise RuntimeError(why)
        work.wait()

    def _leave(self) -> None:
        """Abort the group, so that neither side waits for the other any longer."""
        group, self._group = self._group, None
        if group is None:
            return
        # Destroying a group closes no connection while an operation is under way.
        group._get_backend(self._place).abort()
        dist.destroy_process_group(group)


class Channels:
    """This sender's channels to all servers; those of a rank that sends nothing are none."""

    def __init__(self) -> None:
        """Open none."""
        self._open: dict[str, Connection] = {}  # by token

    def prepare(self) -> None:
        """Import what channels need. That takes seconds, which servers would wait for."""
        import sglang.srt.utils  # noqa: F401

    def keep(self, endpoints: list[Endpoint], sender: int) -> None:
        """Stay connected to these endpoints and no other, as the sender of this number."""
        tokens = {endpoint.token for endpoint in endpoints}
        for token in [token for token in self._open if token not in tokens]:
            self._open.pop(token).close()
        for endpoint in endpoints:
            if endpoint.token not in self._open:
                self._open[endpoint.token] = endpoint.connect(sender)

    def send(
        self, tokens: list[str], bucket: Bucket, version: int, *, announced: bool
    ) -> Callable[[], int]:
        """Send a bucket to these servers; return a function that waits until it is sent.

        That returns how many bytes it took: of servers that took different numbers, the most.
        """
        sending = [self._open[token].send(bucket, version, announced=announced) for token in tokens]

        def wait() -> int:
            return max([future.result() for future in sending], default=0)

        return wait

    def end(self, tokens: list[str]) -> None:
        """Tell these servers that no more buckets come."""
        for future in [self._open[token].end() for token in tokens]:
            future.result()

    def failed(self) -> dict[str, RuntimeError]:
        """Return why channels have failed, by token."""
        return {
            token: channel.failure
            for token, channel in self._open.items()
            if channel.failure is not None
        }
