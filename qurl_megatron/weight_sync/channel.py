"""Channels: the ways on which a sender's buckets reach the servers.

Each sender has one channel to each server, which works in order in a thread of its own. Global
rank 0 opens them: it hands every sender the server's endpoint. There are two kinds:

- A process group, formed in a store that rank 0 hosts. After a failure both sides of the group
  end, and the server's answer tells rank 0. Rank 0 gives a channel up through the store.
- HTTP, to a server that was started elsewhere. Each bucket is a request, and the server's answer
  says whether it has loaded it. Deltas are compressed on slow links. A link is slow if compressing
  a delta and reading it take less time than they save on the way. How fast it is, is measured with
  every bucket that is large enough to tell. The first is always all tensors.
"""

import contextlib
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.device import device, rank, surviving_errors
from qurl_megatron.rollout.elsewhere import post_weights
from qurl_megatron.rollout.server import Server
from qurl_megatron.rollout.wire import BucketHeader, dtype_names
from qurl_megatron.weight_sync.bucket import Bucket, channel_name
from qurl_megatron.weight_sync.delta import base_version

# To compress and to read a delta of a 32B model takes a core about as long as a link of this rate
# takes for the bytes that it saves (`python -m benchmarks.delta`).
COMPRESSION_PAYS_BELOW_BYTES_PER_S = 25e6
MEASURED_BYTES = 2**16  # smaller buckets say more of the latency than of the rate

_GIVEN_UP = "given up"  # a key of the store
_POLL_S = 0.001
_STORE_POLL_S = 0.05

# Rank 0 keeps a store this long after it has given its channels up, so that senders which wait for
# a transfer can read why. Otherwise they would learn only that the store has gone, and torch would
# print a page of C++ frames about that.
NOTICE_S = 4 * _STORE_POLL_S


class Channel:
    """A sender's way to one server. After a failure it sends nothing more."""

    def __init__(self, name: str) -> None:
        """Send nothing yet; `name` is that of the channel's thread."""
        self.failure: RuntimeError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def send(self, bucket: Bucket, version: int) -> Future[int]:
        """Send a bucket of a version, after all before; done when it may be released.

        The result is how many bytes that took; 0 after a failure.
        """
        return self._do(lambda: self._send(bucket, version))

    def close(self) -> None:
        """Leave the server, which keeps running."""
        self._thread.submit(self._leave).result()
        self._thread.shutdown()

    def _do(self, work: Callable[[], int]) -> Future[int]:
        """Do work after all earlier work, unless that has failed; its result is then 0."""

        def guarded() -> int:
            if self.failure is not None:
                return 0
            try:
                return work()
            except RuntimeError as error:  # torch's errors of process groups among them
                self.failure = error
                self._leave()
                return 0

        return self._thread.submit(guarded)

    def _send(self, bucket: Bucket, version: int) -> int:
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class GroupEndpoint:
    """The store in which the senders and a server meet, to form process groups."""

    token: str  # names the channels; a new one for each attempt, because servers refuse old names
    address: str  # of the store, as server and senders reach it
    port: int
    backend: Literal["nccl", "gloo"]
    num_ranks: int  # of the server
    timeout_s: float

    def open(self, sender: int) -> Channel:
        """Begin to form the group of the sender of this number."""
        return GroupChannel(self, sender)

    def store(self, *, is_host: bool = False) -> dist.TCPStore:
        """Connect to the store, which the host opens."""
        return dist.TCPStore(
            self.address,
            self.port,
            1 + self.num_ranks,
            is_master=is_host,
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
        )


def give_up(store: dist.TCPStore, why: str) -> None:
    """End the channels that met in this store."""
    with contextlib.suppress(RuntimeError):
        store.set(_GIVEN_UP, why)


class GroupChannel(Channel):
    """A process group of this sender and one server."""

    def __init__(self, endpoint: GroupEndpoint, sender: int) -> None:
        """Begin to form the group, as the sender of this number."""
        self._endpoint = endpoint
        self._name = channel_name(endpoint.token, sender)
        # The device on which the group exchanges sizes.
        self._place = device() if endpoint.backend == "nccl" else torch.device("cpu")
        self._store: dist.TCPStore | None = None
        self._group: dist.ProcessGroup | None = None
        super().__init__(self._name)
        self._do(self._join)

    def _join(self) -> int:
        from sglang.srt.utils import init_custom_process_group

        endpoint = self._endpoint
        # A connection of its own, even where this process keeps the store: one that waits for the
        # server would block others.
        self._store = endpoint.store()
        # Forming a group over gloo waits for the server; over NCCL the first transfer does.
        with surviving_errors() if endpoint.backend == "nccl" else contextlib.nullcontext():
            self._group = init_custom_process_group(
                backend=endpoint.backend,
                store=dist.PrefixStore(self._name, self._store),  # the server's side does the same
                timeout=timedelta(seconds=endpoint.timeout_s),
                world_size=1 + endpoint.num_ranks,
                rank=0,
                group_name=self._name,
            )
        return 0

    def _send(self, bucket: Bucket, version: int) -> int:
        """Broadcast a bucket's values, of which rank 0 told the server the version.

        It also told the sizes, but those of a delta.
        """
        if base_version(bucket.names) is not None:
            self._broadcast(torch.tensor([len(bucket.flat)], device=self._place))
        if len(bucket.flat):
            self._broadcast(bucket.flat)
        return len(bucket.flat)

    def _broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all ranks of the server, unless rank 0 gives the channel up.

        Over NCCL nothing else limits the time, see `surviving_errors`.
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
                if looked - began > self._endpoint.timeout_s:
                    raise RuntimeError(f"a transfer took over {self._endpoint.timeout_s:g} s")
        work.wait()

    def _leave(self) -> None:
        """Abort the group, so that neither side waits for the other any longer."""
        if self.failure is not None and self._store is not None:
            give_up(self._store, f"learner rank {rank()}: {self.failure}")
        group, self._group = self._group, None
        if group is None:
            return
        # Destroying a group closes no connection while an operation is under way.
        group._get_backend(self._place).abort()
        dist.destroy_process_group(group)


@dataclass(frozen=True)
class HttpEndpoint:
    """How the senders reach a server that was started elsewhere."""

    token: str  # names the channels
    server: Server
    timeout_s: float
    flush_cache: bool

    def open(self, sender: int) -> Channel:
        """Return a channel, which connects with each bucket."""
        return HttpChannel(self)


class HttpChannel(Channel):
    """A connection to one server over HTTP."""

    def __init__(self, endpoint: HttpEndpoint) -> None:
        """Connect nothing yet."""
        super().__init__(endpoint.token)
        self.rate = float("inf")  # of the link, in bytes per second
        self._endpoint = endpoint

    def _send(self, bucket: Bucket, version: int) -> int:
        """Send a bucket, and wait until the server has loaded it.

        Raises:
            ServerFailed: the server did not take it.
            UpdateRefused: the server answered that it did not load it.
        """
        endpoint = self._endpoint
        is_delta = base_version(bucket.names) is not None
        payload = bucket.flat
        is_compressed = is_delta and self.rate < COMPRESSION_PAYS_BELOW_BYTES_PER_S
        if is_compressed:
            compressed = zlib.compress(payload.cpu().numpy().tobytes(), level=1)
            payload = torch.frombuffer(bytearray(compressed), dtype=torch.uint8)
        header = BucketHeader(
            names=bucket.names,
            dtypes=dtype_names(bucket.dtypes),
            shapes=[list(shape) for shape in bucket.shapes],
            version=version,
            flush_cache=endpoint.flush_cache,
            num_bytes=len(bucket.flat),
            is_compressed=is_compressed,
        )
        send_s = post_weights(endpoint.server, endpoint.timeout_s, header, payload)
        if len(payload) >= MEASURED_BYTES:
            self.rate = len(payload) / send_s
        return len(payload)

    def _leave(self) -> None:
        """Do nothing: each bucket has a connection of its own."""


Endpoint = GroupEndpoint | HttpEndpoint
