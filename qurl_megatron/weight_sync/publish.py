"""Publish the learner's policy to the servers as the next weight version.

    pause servers -> convert and send buckets -> compare checksums -> resume as version + 1

Every sender (`gather.py`) sends its own buckets to all servers; global rank 0 coordinates. It
pauses the servers, tells them in one request what will come from whom (`stream.py`), compares the
checksums and resumes them.

For each server a publish is all or nothing:
- Between pause and resume it samples nothing, so every token has one version.
- A prompt that starts after it uses no attention states of older weights. Nor does a request that
  was running, unless `pause_mode` is `in_place`.
- It resumes only if every tensor's checksum, computed from the learner's shards before they were
  sent, equals the checksum of the parameters that the server's layers multiply with.

A publish sends a delta (`delta.py`), what changed since the last publish, to each server that has
been verified to hold the version before. All others get all tensors, a key frame: a server that
joins, all servers of a run that resumes, and all after a publish that no server could verify. A
server that does not hold the right weights after a delta, or refuses it, gets a key frame in the
same publish. Whatever was sent, the checksums of all tensors are compared.

Servers fail one by one. Each sender has a process group with each of them (`channel.py`), so a
server that dies, hangs or holds other weights is dropped and reported lost, and the others never
notice. Whatever a server is sent or asked ends after `PEER_TIMEOUT_S`. If servers were reached and
not one of them holds what it was sent, the servers are not to blame: the publish raises
`PublishError`.

A bucket is converted once, and goes to all servers at the same time, one copy to each. The next is
converted meanwhile, and the server loads the one before. A server that was started elsewhere gets
it over HTTP (`remote.py`). A publish lasts as long as the slowest way.

With transport `direct`, for servers on the learner's machine, nothing is sent: every rank writes
into the servers' parameters (`direct.py`).

Example, on every learner rank:

    publisher = Publisher(learner, fleet, "int8", bucket_bytes=512 * 2**20, mode="auto")
    published = publisher.publish()    # to the servers that serve or wait to join
    publisher.admit()                  # the same version, to servers that joined since
    publisher.close()
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch.distributed as dist

from qurl_megatron.config.schema import PauseMode, PublishMode, Transport, WeightFormat
from qurl_megatron.device import from_rank_zero
from qurl_megatron.learner.learner import Learner
from qurl_megatron.learner.non_finite import NonFinite
from qurl_megatron.process import trim_heap
from qurl_megatron.rollout.fleet import AdmissionNeeded, Fleet, Member
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.channel import Carrier, Channels, Endpoint
from qurl_megatron.weight_sync.conversion import Conversion
from qurl_megatron.weight_sync.direct import Places
from qurl_megatron.weight_sync.gather import to_rank_zero
from qurl_megatron.weight_sync.link import PEER_TIMEOUT_S, Link, PublishError
from qurl_megatron.weight_sync.over_http import RemoteLink
from qurl_megatron.weight_sync.reshard import Converter
from qurl_megatron.weight_sync.stream import (
    Announcement,
    announce,
    announce_delta,
    announce_in_place,
)

T = TypeVar("T")

# In mode `auto`, deltas that are larger than this part of a key frame are given up: to find and
# pack that many changes takes longer than to send all tensors.
LARGEST_DELTA = 0.5


@dataclass(frozen=True)
class Published:
    """The result of one publish; only global rank 0's is complete."""

    version: int  # the weight version the servers serve
    num_servers: int  # servers that serve it
    # Of a delta, of a key frame, or of both. If servers took different numbers of bytes for a
    # bucket, because its delta was coded for some of them, the most.
    sent_bytes: int
    conversion: Conversion  # `conversion.num_bytes` is the size of a key frame


class Publisher:
    """Publishes a learner's weights to a fleet of servers.

    Collective: every learner rank constructs it, publishes and closes it.
    """

    def __init__(
        self,
        learner: Learner,
        fleet: Fleet,
        weight_format: WeightFormat,
        bucket_bytes: int,
        carrier: Carrier | None = None,
        timeout_s: float = PEER_TIMEOUT_S,
        pause_mode: PauseMode = "retract",
        mode: PublishMode = "full",
        transport: Transport = "broadcast",
        keep: Sequence[str] = (),
        has_remote: bool = False,
    ) -> None:
        """Store the settings; send nothing.

        Args:
            fleet: the servers, on global rank 0.
            weight_format: the format in which the servers were started.
            bucket_bytes: largest bucket; see `reshard.Converter`.
            carrier: None: NCCL if learner and server have GPUs of their own, else gloo.
            timeout_s: time that a server has for each answer and each transfer.
            pause_mode: the run's `rollout.pause_mode`.
            mode: the run's `quantization.publish`.
            transport: the run's `quantization.transport`.
            keep: the layers that the servers were started to hold in BF16, as in
                `quantization.keep`.
            has_remote: some of the servers were started elsewhere; their deltas may be coded.
        """
        self.version = 0
        self._mode = mode
        self._transport = transport
        self._pause_mode = pause_mode
        self._fleet = fleet
        self._carrier = carrier
        self._timeout_s = timeout_s
        self._converter = Converter(
            learner,
            weight_format,
            bucket_bytes,
            keeps_codes=mode != "full",
            keep=keep,
            with_steps=has_remote,
        )
        self._links: dict[Member, Link] = {}  # on global rank 0
        self._channels = Channels()
        self._places = Places()
        self._sent: dict[str, int] = {}  # checksums of the current version
        # The version of the codes that the converter keeps, once a server was verified to hold it.
        self._base: int | None = None

    def publish(self) -> Published:
        """Send the current policy under the next version to all servers that answer.

        Servers that fail are lost to the fleet; there may be none left.

        Raises:
            PublishError: no server holds what was sent.
            NonFinite: a weight holds NaN or infinity; the message names it, and its rank.
        """
        trim_heap()  # of what the step has used
        self.version += 1
        self._sent = {}
        links = self._link(self._fleet.members("serving", "joining"))
        holders = [link for link in links if self._base and link.holds(self._base)]
        if not from_rank_zero(lambda: bool(holders)):
            return self._send_to(links)
        delta = self._send_to(holders, self._base)
        rest = [link for link in links if not link.is_lost and not link.holds(self.version)]
        if not from_rank_zero(lambda: bool(rest)):
            return delta
        whole = self._send_to(rest)
        sent_bytes = delta.sent_bytes + whole.sent_bytes
        return replace(delta, num_servers=whole.num_servers, sent_bytes=sent_bytes)

    def admit(self) -> None:
        """Send the current version to the servers that wait to join, and to no other.

        Raises:
            PublishError: no server holds what was sent, or the learner's weights are not those of
                the current version.
        """
        self._send_to(self._link(self._fleet.members("joining")))

    def while_serving(self, work: Callable[[], T]) -> T:
        """Return, on every rank, the result of rank 0's `work()`, which samples from the servers.

        Collective. Whenever `work` raises `AdmissionNeeded`, the joining servers are admitted and
        it begins again.

        Raises:
            FleetTooSmall: too few servers serve.
        """

        def attempt() -> tuple[T] | None:
            try:
                return (work(),)
            except AdmissionNeeded:
                return None

        while (outcome := from_rank_zero(attempt)) is None:
            self.admit()
        return outcome[0]

    def close(self) -> None:
        """Leave the process groups; the servers keep the last version."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._channels.keep([], 0)

    @cached_property
    def _key_frame(self) -> Announcement:
        """What announces all tensors; empty on all ranks but global rank 0. Collective."""
        return announce(to_rank_zero(self._converter.descriptions(), self._converter.senders))

    @cached_property
    def _is_on_one_machine(self) -> bool:
        """Whether all learner ranks are on one machine. Collective."""
        machines: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(machines, socket.gethostname())
        return len(set(machines)) == 1

    def _link(self, members: list[Member]) -> list[Link]:
        """Return the connections to these servers, and close those to lost ones."""
        for member in [member for member in self._links if member.state == "lost"]:
            self._links.pop(member).close()
        for member in members:
            if member not in self._links:
                if member.server.is_remote:
                    link: Link = RemoteLink(self._fleet, member, self._timeout_s, self._pause_mode)
                else:
                    link = Link(
                        self._fleet, member, self._carrier, self._timeout_s, self._pause_mode
                    )
                self._links[member] = link
        return [self._links[member] for member in members]

    def _send_to(self, links: list[Link], base: int | None = None) -> Published:
        """Convert the weights once, and send them, or what changed since version `base`."""
        self._base = None
        if self._writes_to(links):
            sent_bytes, conversion = 0, self._write(links)
        else:
            sent_bytes, conversion = self._broadcast(links, base)

        def commit() -> tuple[int, bool]:
            num_servers = self._commit(links, conversion)
            limit = LARGEST_DELTA * conversion.num_bytes
            is_large = base is not None and self._mode == "auto" and sent_bytes > limit
            return num_servers, is_large

        num_servers, is_large = from_rank_zero(commit)
        self._converter.keeps_codes &= not is_large
        if num_servers and self._converter.keeps_codes:
            self._base = self.version
        return Published(self.version, num_servers, sent_bytes, conversion)

    def _writes_to(self, links: list[Link]) -> bool:
        """Return whether weights are written into the parameters of these servers.

        Raises:
            PublishError: the transport is `direct`, and a server is on another machine.
        """
        if self._transport == "broadcast" or self._mode != "full":
            return False
        one_machine = self._is_on_one_machine

        def is_possible() -> bool:
            remote = [link.url for link in links if not (link.is_local and one_machine)]
            if remote and self._transport == "direct":
                raise PublishError(
                    f"quantization.transport=direct: server {remote[0]} and the learner are not "
                    "all on one machine; set it to broadcast or auto"
                )
            return bool(links) and not remote

        return from_rank_zero(is_possible)

    def _broadcast(self, links: list[Link], base: int | None) -> tuple[int, Conversion]:
        """Send the weights through channels; return the bytes sent, on rank 0, and the measures."""
        senders = self._converter.senders
        if dist.get_rank() in senders:
            self._channels.prepare()
        # The first request is a key frame: it is complete when all senders are prepared.
        request = self._key_frame if base is None else announce_delta(base, len(senders))
        paused = []
        for link in links:
            link.begin(takes_delta=base is not None, num_senders=len(senders))
            receiving = link.receive(request, self.version)
            paused += [receiving] if isinstance(link, RemoteLink) else []

        def open_endpoints() -> tuple[list[Endpoint], list[str]]:
            _wait(paused)  # nothing else keeps the senders until these servers are
            endpoints = [end for link in self._links.values() if (end := link.endpoint)]
            return endpoints, [end.token for link in links if (end := link.endpoint)]

        endpoints, tokens = from_rank_zero(open_endpoints)
        sent_bytes, failed = 0, dict[str, RuntimeError]()
        if dist.get_rank() in senders:
            self._channels.keep(endpoints, senders.index(dist.get_rank()))

        def send(bucket: Bucket) -> Callable[[], None]:
            wait = self._channels.send(tokens, bucket, self.version, announced=base is None)

            def release() -> None:
                nonlocal sent_bytes
                sent_bytes += wait()

            return release

        def all_sent() -> None:
            # A server reads the senders of a delta in turn, each to its end.
            if base is not None and dist.get_rank() in senders:
                self._channels.end(tokens)

        conversion = self._converter.convert(send, base=base, all_sent=all_sent)
        if dist.get_rank() in senders:
            failed = self._channels.failed()
        reports = to_rank_zero((sent_bytes, failed), senders)
        failures = {token: why for _, broken in reports for token, why in broken.items()}
        for link in links:
            link.sent(failures)
        return sum(number for number, _ in reports), conversion

    def _write(self, links: list[Link]) -> Conversion:
        """Write the weights into the servers' parameters."""
        for link in links:
            link.begin()
        _wait([link.hand_out() for link in links])
        places, paused = from_rank_zero(
            lambda: (
                {link.token: link.new_parameters() for link in self._links.values() if link.token},
                [link.token for link in links if link.token],
            )
        )
        self._places.attach({name: new for name, new in places.items() if new is not None})
        self._places.keep(places, paused)
        conversion = self._converter.write(self._places)
        for link in links:
            link.receive(announce_in_place(), self.version)
            link.sent({})
        return conversion

    def _commit(self, links: list[Link], conversion: Conversion) -> int:
        """Let each server serve that holds what was sent; return how many servers hold it."""
        if conversion.non_finite:
            raise NonFinite(f"{conversion.non_finite}; resume from a checkpoint")
        if self._sent and self._sent != conversion.checksums:
            raise PublishError(f"the learner no longer has the weights of version {self.version}")
        self._sent = conversion.checksums
        _wait([link.commit(conversion.checksums, self.version) for link in links])
        num_servers = sum(link.holds(self.version) for link in self._links.values())
        wrong = [link.failure for link in links if isinstance(link.failure, PublishError)]
        if wrong and all(link.is_lost for link in links) and not num_servers:
            raise wrong[0]
        return num_servers


def _wait(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()
