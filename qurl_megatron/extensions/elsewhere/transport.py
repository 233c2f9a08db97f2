"""Weights over HTTP, to a server that somebody started elsewhere.

Each bucket is a request, and the server's answer says whether it has loaded it. Deltas are
compressed on slow links. A link is slow if compressing a delta and reading it take less time than
they save on the way. Every bucket that is large enough measures the rate of the link. The first
buckets are always those of a key frame.
"""

import asyncio
import contextlib
import secrets
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.extensions.elsewhere.wire import BucketHeader
from qurl_megatron.rollout.requests import transfer_s
from qurl_megatron.rollout.server import Server, UpdateRefused
from qurl_megatron.rollout.wire import WEIGHTS_PATH, dtype_names, escaped
from qurl_megatron.weight_sync.bucket import Bucket, changed_version
from qurl_megatron.weight_sync.transport import Channel, ChannelDestination, Delivery, Transport

# A core takes about as long to compress and read a delta of a 32B model as a link of this rate
# takes for the saved bytes (docs/findings/systems.md).
COMPRESSION_PAYS_BELOW_BYTES_PER_S = 25e6
MEASURED_BYTES = 2**16  # smaller buckets measure the latency, not the rate
_CHUNK_BYTES = 2**20  # copied from the device and written to the connection at once


@dataclass(frozen=True)
class HttpDestination(ChannelDestination):
    """How the senders reach a server that was started elsewhere."""

    server: Server
    flush_cache: bool
    may_compress = True  # if the link is slow enough

    def open(self, sender: int) -> Channel:
        """Return a channel, which connects anew for each bucket."""
        return HttpChannel(self)


class HttpChannel(Channel):
    """A connection to one server over HTTP."""

    def __init__(self, destination: HttpDestination) -> None:
        """Take the destination; connect only when a bucket is sent."""
        super().__init__(destination.token)
        self.rate = float("inf")  # of the link, in bytes per second
        self._destination = destination

    def _send(self, bucket: Bucket, version: int) -> int:
        """Send a bucket, and wait until the server has loaded it.

        Raises:
            ServerFailed: the server did not answer, or its answer makes no sense.
            UpdateRefused: the server answered that it did not load the bucket.
        """
        destination = self._destination
        is_delta = changed_version(bucket.names) is not None
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
            flush_cache=destination.flush_cache,
            num_bytes=len(bucket.flat),
            is_compressed=is_compressed,
        )
        send_s = post_weights(destination.server, header, payload)
        if len(payload) >= MEASURED_BYTES:
            self.rate = len(payload) / send_s
        return len(payload)


class Http(Transport):
    """Global rank 0's end of the way to a server that was started elsewhere."""

    def open(self) -> None:
        """Tell the senders the server's address."""
        self.destination = HttpDestination(
            f"weights-{secrets.token_hex(8)}", self.server, self.member.fleet.flushes_cache
        )

    async def load(self, delivery: Delivery) -> None:
        """Wait until all was sent, then raise what a channel raised: senders get the answers."""
        await delivery.sent.wait()
        if self.destination and self.destination.token in delivery.failed:
            raise delivery.failed[self.destination.token]


def post_weights(server: Server, header: BucketHeader, payload: Tensor) -> float:
    """Send a bucket to a server; return how many seconds it was on its way.

    Args:
        payload: `[bytes]` uint8, on any device.

    Raises:
        UpdateRefused: the server answered that it did not load the bucket.
        ServerFailed: the server did not answer, or its `load_s` makes no sense.
    """
    start = header.pack()
    num_bytes = len(start) + len(payload)
    headers = {"Content-Length": str(num_bytes), "Content-Type": "application/octet-stream"}
    begin = time.perf_counter()
    answer = asyncio.run(
        server.request(
            "POST",
            WEIGHTS_PATH,
            headers=headers,
            timeout_s=server.timeout_s + transfer_s(num_bytes),
            data=_chunks(start, payload),
        )
    )
    took_s = time.perf_counter() - begin
    fields: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        fields = answer.fields()
    if not answer.is_success or fields.get("success") is not True:
        message = escaped(str(fields["message"])) if "message" in fields else answer.text
        raise UpdateRefused(str(server.failed(f"refused weights: {message}")))
    load_s = fields.get("load_s")
    if not isinstance(load_s, float) or not 0 <= load_s < took_s:
        raise server.failed(f"says that it loaded weights in {escaped(str(load_s))} s")
    return took_s - load_s


async def _chunks(start: bytes, payload: Tensor) -> AsyncIterator[bytes]:
    yield start
    for chunk in payload.split(_CHUNK_BYTES):
        yield chunk.cpu().numpy().tobytes()
