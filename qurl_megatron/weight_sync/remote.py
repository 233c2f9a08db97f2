"""Carries buckets to a server outside the learner's network: over HTTP, deltas coded on slow links.

A link is slow if coding a delta and reading it take less time than they save on the way. How fast
it is, is measured with every bucket that is large enough to tell. The first is always all tensors.
"""

from __future__ import annotations

import threading
import weakref

from torch import Tensor

from qurl_megatron.rollout.remote import WeightsPost
from qurl_megatron.rollout.server import Server
from qurl_megatron.rollout.wire import BucketHeader, Coding
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.coding import encode
from qurl_megatron.weight_sync.delta import base_version

# To code and to read a delta takes about this long for a byte of it, and spares a third of its
# bytes (`python -m benchmarks.delta`). So it pays on links below this rate.
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


class Courier:
    """Carries buckets to one server."""

    def __init__(self, server: Server, coder: Coder, timeout_s: float, *, flush_cache: bool):
        """Connect nothing yet.

        Args:
            timeout_s: longest time without progress.
            flush_cache: have the server empty its cache of prefixes with each bucket.
        """
        self.rate = float("inf")  # of the link, in bytes per second
        self._post = WeightsPost(server, timeout_s)
        self._coder = coder
        self._flush_cache = flush_cache

    def deliver(self, bucket: Bucket, version: int) -> int:
        """Send a bucket of a version; return how many bytes that took.

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
            version=version,
            flush_cache=self._flush_cache,
            coding=coding,
            num_bytes=len(payload),
        )
        send_s = self._post.send(header, payload)
        if len(payload) >= MEASURED_BYTES:
            self.rate = len(payload) / send_s
        return len(payload)

    def close(self) -> None:
        """Close the connection; the server keeps running."""
        self._post.close()
