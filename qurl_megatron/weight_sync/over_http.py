"""Carries buckets to a server outside the learner's network: over HTTP, deltas coded on slow links.

A link is slow if coding a delta and reading it take less time than they save on the way. How fast
it is, is measured with every bucket that is large enough to tell. The first is always all tensors.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.config.schema import PauseMode
from qurl_megatron.rollout.elsewhere import WeightsPost
from qurl_megatron.rollout.fleet import Fleet, Member
from qurl_megatron.rollout.server import Server
from qurl_megatron.rollout.wire import BucketHeader, Coding, dtype_names
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.coding import encode
from qurl_megatron.weight_sync.delta import base_version
from qurl_megatron.weight_sync.link import Link
from qurl_megatron.weight_sync.stream import Announcement

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


_CODER = Coder()


@dataclass(frozen=True)
class HttpEndpoint:
    """How the senders reach a server that was started elsewhere."""

    token: str
    server: Server
    timeout_s: float
    flush_cache: bool

    def connect(self, sender: int) -> HttpConnection:
        """Return a connection, which is made with the first bucket."""
        return HttpConnection(self)


class HttpConnection:
    """Carries a sender's buckets to one server, in order, in a thread of its own."""

    def __init__(self, endpoint: HttpEndpoint) -> None:
        """Connect nothing yet."""
        self.failure: RuntimeError | None = None
        self.rate = float("inf")  # of the link, in bytes per second
        self._post = WeightsPost(endpoint.server, endpoint.timeout_s)
        self._flush_cache = endpoint.flush_cache
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=endpoint.token)

    def send(self, bucket: Bucket, version: int, *, announced: bool) -> Future[int]:
        """Send a bucket; done when the server has loaded it, or has failed."""

        def work() -> int:
            if self.failure is None:
                try:
                    return self.deliver(bucket, version)
                except RuntimeError as error:
                    self.failure = error
            return 0

        return self._thread.submit(work)

    def end(self) -> Future[int]:
        """Return at once: each request is complete by itself."""
        return self._thread.submit(lambda: 0)

    def deliver(self, bucket: Bucket, version: int) -> int:
        """Send a bucket of a version; return how many bytes that took.

        Raises:
            ServerFailed: the server did not take it.
            UpdateRefused: the server answered that it did not load it.
        """
        is_delta = base_version(bucket.names) is not None
        coding: Coding = "plain"
        payload = bucket.flat
        if is_delta and self.rate < CODING_PAYS_BELOW_BYTES_PER_S:
            coding, payload = "rice", _CODER.code(bucket)
        header = BucketHeader(
            names=bucket.names,
            dtypes=dtype_names(bucket.dtypes),
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
        self._thread.shutdown()
        self._post.close()


class RemoteLink(Link):
    """Global rank 0's connection to a server that was started elsewhere."""

    def __init__(
        self, fleet: Fleet, member: Member, timeout_s: float, pause_mode: PauseMode
    ) -> None:
        super().__init__(fleet, member, "gloo", timeout_s, pause_mode)
        self._flush_cache = pause_mode == "retract"
        self._post = WeightsPost(member.server, timeout_s)

    def sent(self, failed: dict[str, RuntimeError]) -> None:
        """Fail as the senders' connections did: with each bucket the server answers them."""
        failure = failed.get(self.endpoint.token) if self.endpoint else None
        if failure is not None:

            def fail() -> None:
                raise failure

            self._do(fail)

    def close(self) -> None:
        """Leave the server as it is."""
        super().close()
        self._post.close()

    def _open_endpoint(self) -> None:
        token = f"weights-{secrets.token_hex(8)}"
        self.endpoint = HttpEndpoint(token, self._member.server, self._timeout_s, self._flush_cache)

    def _connect_server(self, num_senders: int) -> None:
        """Do nothing: the server listens."""

    def _await_answer(self, request: Announcement, version: int) -> None:
        """Announce a delta, which may change nothing but the version; buckets say the rest."""
        if base_version(request.names) is not None:
            header = BucketHeader(
                request.names,
                dtype_names(request.dtypes),
                request.shapes,
                version,
                self._flush_cache,
                coding="plain",
                num_bytes=0,
            )
            self._post.send(header, torch.empty(0, dtype=torch.uint8))
