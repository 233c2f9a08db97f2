"""Carries buckets to a server outside the learner's network: over HTTP, deltas coded on slow links.

A link is slow if coding a delta and reading it take less time than they save on the way. How fast
it is, is measured with every bucket that is large enough to tell. The first is always all tensors.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.rollout.remote import WeightsPost
from qurl_megatron.rollout.server import Server
from qurl_megatron.rollout.wire import BucketHeader, Coding
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.coding import encode
from qurl_megatron.weight_sync.delta import base_version, bucket_name

# To code and to decode a delta of a 32B model takes a core about as long as a link of 200 to
# 300 Mb/s takes for the bytes that it saves, in every format (`python -m benchmarks.delta`).
CODING_PAYS_BELOW_BYTES_PER_S = 25e6
MEASURED_BYTES = 2**16  # smaller buckets say more of the latency than of the rate


class Coder:
    """Codes each delta once, for all servers that want it coded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[weakref.ref[Bucket], Tensor] | None = None

    def code(self, bucket: Bucket) -> Tensor:
        """Return the coded buffer of a delta's bucket, `[bytes]` uint8 on the CPU."""
        with self._lock:
            if self._last is None or self._last[0]() is not bucket:
                self._last = weakref.ref(bucket), encode(bucket.flat.cpu())
            return self._last[1]


@dataclass(frozen=True)
class RemoteDoor:
    """Where the senders reach a server that was started elsewhere."""

    token: str  # names it; a new one for each connection to the server
    server: Server
    flush_cache: bool  # have the server empty its cache of prefixes with each bucket
    timeout_s: float  # longest time without progress


class Courier:
    """Carries this sender's buckets to one server, in order, in a thread of its own.

    After a failure it carries nothing more.
    """

    def __init__(self, door: RemoteDoor, coder: Coder) -> None:
        """Connect nothing yet."""
        self.failure: RuntimeError | None = None
        self.rate = float("inf")  # of the link, in bytes per second
        self.sent_bytes = 0  # in all
        self._door = door
        self._coder = coder
        self._post = WeightsPost(door.server, door.timeout_s)
        self._thread = ThreadPoolExecutor(1)
        self._version = 0
        self._base: int | None = None
        self._is_empty = True  # nothing was sent of this version

    def begin(self, version: int, base: int | None) -> None:
        """Begin to carry a version; a delta of version `base` if there is one."""
        self._version, self._base, self._is_empty = version, base, True

    def send(self, bucket: Bucket, *, announced: bool) -> Future[None]:
        """Send a bucket; done when it may be released, or the courier has failed.

        `announced` says nothing here: every bucket has its own description.
        """
        self._is_empty = False
        return self._thread.submit(self._guarded, bucket)

    def end(self) -> Future[None]:
        """End a delta. Without a change, the server must still learn of the version."""
        if not self._is_empty or self._base is None:
            return self._thread.submit(lambda: None)
        flat = torch.empty(0, dtype=torch.uint8)
        return self.send(
            Bucket([bucket_name(self._base)], [flat.dtype], [(0,)], flat), announced=False
        )

    def close(self) -> None:
        """Close the connection; the server keeps running."""
        self._thread.shutdown()
        self._post.close()

    def _guarded(self, bucket: Bucket) -> None:
        if self.failure is None:
            try:
                self.deliver(bucket)
            except RuntimeError as error:
                self.failure = error

    def deliver(self, bucket: Bucket) -> None:
        """Send a bucket.

        Raises:
            ServerFailed: the server did not take it.
        """
        is_delta = base_version(bucket.names) is not None
        coding: Coding = "plain"
        payload = bucket.flat
        if is_delta and self.rate < CODING_PAYS_BELOW_BYTES_PER_S:
            coding, payload = "rice", self._coder.code(bucket)
        header = BucketHeader(
            names=bucket.names,
            dtypes=[str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
            shapes=[list(shape) for shape in bucket.shapes],
            version=self._version,
            flush_cache=self._door.flush_cache,
            coding=coding,
            num_bytes=len(payload),
        )
        send_s = self._post.send(header, payload)
        self.sent_bytes += len(payload)
        if len(payload) >= MEASURED_BYTES:
            self.rate = len(payload) / send_s
