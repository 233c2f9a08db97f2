"""This rank's ways to the servers: buckets through channels, or codes into parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.conversion import Conversion
from qurl_megatron.weight_sync.gather import to_rank_zero
from qurl_megatron.weight_sync.reshard import Converter
from qurl_megatron.weight_sync.transport import Channel, ChannelDestination, Delivery, Destination

if TYPE_CHECKING:
    from qurl_megatron.weight_sync.in_place import Writer


class Senders:
    """This rank's channels and memory to write to. Collective over learner ranks."""

    def __init__(self, converter: Converter) -> None:
        """Send nothing yet."""
        self._converter = converter
        self.channels: dict[str, Channel] = {}  # of a sender, by the destination's token
        self._writer: Writer | None = None  # once weights are written in place

    def send(
        self, delivery: Delivery, destinations: Sequence[Destination], tokens: Sequence[str]
    ) -> tuple[int, Conversion]:
        """Convert the weights and send them; return the bytes sent, on rank 0, and the measures.

        Collective over learner ranks.

        Args:
            destinations: of all servers that can be reached. Channels to others are closed.
            tokens: of the destinations to which this delivery goes.
        """
        if delivery.in_place:
            return 0, self._write(delivery, destinations, tokens)
        to_channels = [each for each in destinations if isinstance(each, ChannelDestination)]
        if dist.get_rank() in self._converter.senders:
            self._open_channels(to_channels)
        sizes: list[int] = []  # bytes sent for each bucket: the most that one server took

        def send(bucket: Bucket) -> Callable[[], None]:
            sending = [self.channels[token].send(bucket, delivery.version) for token in tokens]
            return lambda: sizes.append(max((future.result() for future in sending), default=0))

        # Relative deltas compress much better.
        is_relative = any(destination.may_compress for destination in to_channels)
        conversion = self._converter.convert(send, since=delivery.since, is_relative=is_relative)
        own = {token: each.failure for token, each in self.channels.items() if each.failure}
        sent_bytes = 0
        for num_bytes, failed in to_rank_zero((sum(sizes), own), self._converter.senders):
            sent_bytes += num_bytes
            delivery.failed |= failed
        return sent_bytes, conversion

    def close(self) -> None:
        """Leave all servers, which keep running."""
        self._open_channels([])
        if self._writer:
            self._writer.close()

    def _open_channels(self, destinations: Sequence[ChannelDestination]) -> None:
        """Open channels to these destinations, and close all others."""
        tokens = {destination.token for destination in destinations}
        for token in self.channels.keys() - tokens:
            self.channels.pop(token).close()
        for destination in destinations:
            if destination.token not in self.channels:
                number = self._converter.senders.index(dist.get_rank())
                self.channels[destination.token] = destination.open(number)

    def _write(
        self, delivery: Delivery, destinations: Sequence[Destination], paused: Sequence[str]
    ) -> Conversion:
        from qurl_megatron.weight_sync.direct import ServerParameters
        from qurl_megatron.weight_sync.in_place import Writer

        self._writer = self._writer or Writer(self._converter, ServerParameters())
        return self._writer.send(delivery, destinations, paused)
