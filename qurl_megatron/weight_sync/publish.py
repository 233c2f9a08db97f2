"""Publish the learner's policy to the servers as the next weight version.

    pause servers -> convert and send buckets -> compare checksums -> resume as version + 1

Every sender (`gather.py`) sends its own buckets to all servers; global rank 0 coordinates. It
pauses the servers, tells them in one request which bucket comes from which sender (`bucket.py`),
compares the checksums and resumes them.

For each server a publish is all or nothing:
- Between pause and resume the server samples nothing, so every token has one version.
- A prompt that starts after a publish uses no attention states of older weights. Nor does a request
  that was running, unless `pause_mode` is `in_place`.
- The server resumes only if, for every tensor, the checksum of the parameters that its layers
  multiply with equals the checksum that the learner computed from its shards before sending.

A server that was verified to hold the version before gets a delta (`delta.py`): what changed since
then. Every other server gets a key frame, all tensors: one that joins, all of a run that resumes,
and all after a publish that no server was verified to hold. A server that refuses a delta, or does
not hold the right weights after it, gets a key frame in the same publish. The compared checksums
are always those of all tensors.

What the learner does not train, such a server holds: over the base of adapters it gets these alone.

Servers fail one by one. A server that dies, hangs or holds other weights is dropped, and reported
as lost. The others do not notice, because each has channels of its own (`transport.py`). Each
request and each transfer has a time limit, `Server.timeout_s`. If servers were reached, and none of
them holds what it was sent, then the fault is not theirs: the publish raises `PublishError`.

A bucket is converted once, and goes to all servers at the same time, one copy to each. Meanwhile
the next is converted, and the servers load the one before. A publish lasts as long as the slowest
channel (`transport.py`).

With transport `direct`, for servers on the learner's machines, nothing is sent: every rank writes
into the parameters of the servers on its own machine (`direct.py`).

The servers of a `ColocatedPublisher` (`extensions/colocated/`) share its GPUs: they sleep outside
of `serving`.

Example, on every learner rank:

    publisher = Publisher(learner, fleet, config.quantization)
    published = publisher.publish()    # to the servers that serve or wait to join
    publisher.admit()                  # the same version, to servers that joined since
    publisher.close()
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import torch.distributed as dist

from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import QuantizationConfig
from qurl_megatron.device import from_rank_zero
from qurl_megatron.learner.learner import Learner, NonFinite
from qurl_megatron.machine.memory import trim_heap
from qurl_megatron.rollout.fleet import AdmissionNeeded, Fleet, Member
from qurl_megatron.rollout.server import Server
from qurl_megatron.weight_sync.broadcast import Broadcast
from qurl_megatron.weight_sync.bucket import (
    Manifest,
    announce,
    announce_delta,
    announce_in_place,
)
from qurl_megatron.weight_sync.conversion import Conversion
from qurl_megatron.weight_sync.gather import to_rank_zero
from qurl_megatron.weight_sync.reshard import Converter
from qurl_megatron.weight_sync.senders import Senders
from qurl_megatron.weight_sync.transport import Delivery, Destination, PublishError, Transport

T = TypeVar("T")

# In mode `auto`, a run sends no more deltas after one that is larger than this part of a key frame:
# to find and pack that many changes takes longer than to send all tensors.
LARGEST_DELTA = 0.5


@dataclass(frozen=True)
class Published:
    """The result of one publish; only global rank 0's is complete."""

    version: int  # the weight version the servers serve
    num_servers: int  # servers that serve it
    # Of a delta, of a key frame, or of both. If a bucket was compressed for some servers only, the
    # largest size counts.
    sent_bytes: int
    conversion: Conversion  # `conversion.num_bytes` is the size of a key frame


class Publisher:
    """Publishes a learner's weights to a fleet of servers.

    Collective: every learner rank constructs it, publishes and closes it.
    """

    def __init__(self, learner: Learner, fleet: Fleet, quantization: QuantizationConfig) -> None:
        """Store the settings; send nothing.

        Args:
            fleet: the servers, on global rank 0.
            quantization: the run's; the servers were started with the same format and the same
                layers in BF16.
        """
        self.version = 0
        self._settings = quantization
        self._fleet = fleet
        self._wait = fleet.controller.wait_for_all
        self.converter = Converter(
            learner,
            quantization.weight_format,
            quantization.bucket_bytes,
            sends_deltas=quantization.publish != "full",
            keep=quantization.keep,
        )
        self._transports: dict[Member, Transport] = {}  # on global rank 0
        self._senders = Senders(self.converter)
        self._sent: dict[str, int] = {}  # checksums of the current version
        # The version of which the next publish sends the changes. None until a server was verified
        # to hold it, or if the converter always sends all.
        self._since: int | None = None
        self._has_served = False  # a server has held weights

    def publish(self) -> Published:
        """Send the current policy under the next version to all servers that answer.

        Servers that fail are lost to the fleet; no server may be left.

        Raises:
            PublishError: no server holds the weights that were sent.
            NonFinite: a weight holds NaN or infinity; the message names the weight and the rank.
        """
        trim_heap()  # gives back what the step has freed
        self.version += 1
        self._sent = {}
        members = self._fleet.members("serving", "joining")
        holders = [member for member in members if self._since and member.holds(self._since)]
        if not from_rank_zero(lambda: bool(holders)):
            return self._send_to(members)
        delta = self._send_to(holders, self._since)
        rest = [
            member
            for member in members
            if member.state != "lost" and not member.holds(self.version)
        ]
        if not from_rank_zero(lambda: bool(rest)):
            return delta
        whole = self._send_to(rest)
        sent_bytes = delta.sent_bytes + whole.sent_bytes
        return replace(delta, num_servers=whole.num_servers, sent_bytes=sent_bytes)

    def admit(self) -> None:
        """Send the current version to the servers that wait to join, and to no other.

        Raises:
            PublishError: no server holds the weights that were sent, or the learner's weights
                have changed since the current version.
        """
        self._send_to(self._fleet.members("joining"))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Let the servers sample within this context. Collective."""
        yield

    def while_serving(self, work: Callable[[], T]) -> T:
        """Return, on every rank, the result of rank 0's `work()`, which samples from the servers.

        Collective. Whenever `work` raises `AdmissionNeeded`, the joining servers are admitted and
        `work` begins again.

        Raises:
            FleetTooSmall: too few servers serve.
        """

        def attempt() -> tuple[T] | None:
            try:
                return (work(),)
            except AdmissionNeeded:
                return None

        with self.serving():
            while (outcome := from_rank_zero(attempt)) is None:
                self.admit()
        return outcome[0]

    def close(self) -> None:
        """Leave the servers, which keep the last version."""
        self._wait(transport.close() for transport in self._transports.values())
        self._transports.clear()
        self._senders.close()  # while the servers still run

    @cache  # noqa: B019  a run has few publishers, and keeps them
    def _announcement(self, changing: bool) -> Manifest:
        """Announce all tensors, or all but constants; on global rank 0. Collective."""
        manifests = self.converter.manifests(changing=changing)
        return announce(to_rank_zero(manifests, self.converter.senders))

    def _send_to(self, members: list[Member], since: int | None = None) -> Published:
        """Convert the weights once, and send them, or what changed since a version."""
        self._since = None  # until a server was verified to hold this version
        senders = self.converter.senders
        in_place = self._writes_to(members)
        if in_place:
            request = announce_in_place()
        else:
            if dist.get_rank() in senders:
                import sglang.srt.utils  # noqa: F401  # takes seconds: servers would wait for it
            # The first request is a key frame: rank 0 has it when all senders have imported that.
            if since is not None and self.converter.sends_deltas:
                request = announce_delta(since, len(senders))
            else:
                request = self._announcement(changing=since is not None)
        delivery = Delivery(request, self.version, len(senders), since, in_place)
        used: list[Transport] = []  # by this delivery

        def begin() -> tuple[list[Destination], list[str]]:
            used.extend(self._transports_to(members, in_place))
            self._wait(transport.begin(delivery) for transport in used)
            # Read once each: after a failure the controller's loop takes a destination away.
            held = [each for x in self._transports.values() if (each := x.destination)]
            return held, [each.token for x in used if (each := x.destination)]

        destinations, tokens = from_rank_zero(begin)
        sent_bytes, conversion = self._senders.send(delivery, destinations, tokens)

        def commit() -> tuple[int, bool]:
            num_servers = self._commit(used, delivery, conversion)
            may_give_up = since is not None and self._settings.publish == "auto"
            return num_servers, may_give_up and sent_bytes > LARGEST_DELTA * conversion.num_bytes

        num_servers, gives_up = from_rank_zero(commit)
        if gives_up:
            self.converter.give_up_deltas()
        if num_servers and self.converter.sends_changes:
            self._since = self.version
        return Published(self.version, num_servers, sent_bytes, conversion)

    def _transports_to(self, members: list[Member], in_place: bool) -> list[Transport]:
        """Return the transports to these servers; leave lost ones, and those of another kind."""
        kinds = {member: transport_to(member.server, in_place=in_place) for member in members}
        left = [
            member
            for member, transport in self._transports.items()
            if member.state == "lost" or not isinstance(transport, kinds.get(member, Transport))
        ]
        self._wait(self._transports.pop(member).close() for member in left)
        for member, kind in kinds.items():
            if member not in self._transports:
                self._transports[member] = kind(member)
        return [self._transports[member] for member in members]

    def _writes_to(self, members: list[Member]) -> bool:
        """Return whether weights are written into the parameters of these servers.

        Raises:
            PublishError: the transport is `direct`, and a server's machine has no learner rank.
        """
        transport = self._settings.transport
        if transport == "broadcast" or self._settings.publish != "full":
            return False
        machines = set(self.converter.machines)

        def is_possible() -> bool:
            servers = [member.server for member in members]
            remote = [server.url for server in servers if server.machine not in machines]
            if remote and transport == "direct":
                raise PublishError(
                    f"quantization.transport=direct: no learner rank is on the machine of server "
                    f"{remote[0]}; set it to broadcast or auto"
                )
            return bool(members) and not remote

        return from_rank_zero(is_possible)

    def _commit(self, used: list[Transport], delivery: Delivery, conversion: Conversion) -> int:
        """Wait until each server has verified its weights; return how many hold this version."""
        if conversion.non_finite:
            raise NonFinite(f"{conversion.non_finite}; resume from a checkpoint")
        if self._sent and self._sent != conversion.checksums:
            raise PublishError(f"the learner no longer has the weights of version {self.version}")
        self._sent = conversion.checksums
        self._wait([delivery.end(self._sent), *(transport.delivered() for transport in used)])
        num_servers = sum(member.holds(self.version) for member in self._transports)
        wrong = [each.failure for each in used if isinstance(each.failure, PublishError)]
        if wrong and all(each.member.state == "lost" for each in used) and not num_servers:
            raise wrong[0]
        if used and not num_servers and not self._has_served:  # the next ones would fail alike
            raise PublishError(f"no server took the first weights: {self._fleet.last_loss}")
        self._has_served |= num_servers > 0
        return num_servers


def transport_to(server: Server, *, in_place: bool) -> type[Transport]:
    """Return the transport to a server; with `in_place`, ranks write into its parameters."""
    if in_place:
        from qurl_megatron.weight_sync.in_place import InPlace

        return InPlace
    if server.is_remote:
        http: type[Transport] = needed("elsewhere", "transport", by="rollout.servers_at").Http
        return http
    return Broadcast
