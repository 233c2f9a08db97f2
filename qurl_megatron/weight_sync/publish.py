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
request and each transfer has a time limit, `PEER_TIMEOUT_S`. If servers were reached, and none of
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
from functools import cache, partial
from typing import TypeVar

import torch.distributed as dist

from qurl_megatron.config.schema import PauseMode, QuantizationConfig, Releases
from qurl_megatron.device import from_rank_zero
from qurl_megatron.learner.learner import Learner, NonFinite
from qurl_megatron.machine.memory import trim_heap
from qurl_megatron.rollout.fleet import AdmissionNeeded, Fleet, Member
from qurl_megatron.weight_sync.bucket import (
    Manifest,
    announce,
    announce_delta,
    announce_in_place,
)
from qurl_megatron.weight_sync.conversion import Conversion
from qurl_megatron.weight_sync.gather import to_rank_zero
from qurl_megatron.weight_sync.link import PEER_TIMEOUT_S, Link, PublishError
from qurl_megatron.weight_sync.reshard import Converter
from qurl_megatron.weight_sync.senders import Senders
from qurl_megatron.weight_sync.transport import Destination, Update

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

    def __init__(
        self,
        learner: Learner,
        fleet: Fleet,
        quantization: QuantizationConfig,
        *,
        pause_mode: PauseMode = "retract",
        timeout_s: float = PEER_TIMEOUT_S,
        releases: Releases | None = None,
    ) -> None:
        """Store the settings; send nothing.

        Args:
            fleet: the servers, on global rank 0.
            quantization: the run's; the servers were started with the same format and the same
                layers in BF16.
            pause_mode: the run's `rollout.pause_mode`.
            timeout_s: time limit of each answer and each transfer of a server, in seconds.
            releases: what these servers give back while a learner on their GPUs trains.
        """
        self.version = 0
        self._settings = quantization
        self._fleet = fleet
        self._wait = fleet.controller.wait_for_all
        self._link_to = partial(
            Link, fleet, timeout_s=timeout_s, pause_mode=pause_mode, releases=releases
        )
        self.converter = Converter(
            learner,
            quantization.weight_format,
            quantization.bucket_bytes,
            keeps_codes=quantization.publish != "full",
            keep=quantization.keep,
        )
        self._links: dict[Member, Link] = {}  # on global rank 0
        self._senders = Senders(self.converter)
        self._sent: dict[str, int] = {}  # checksums of the current version
        # The version of which the next publish sends the changes. None until a server was verified
        # to hold it, or if the converter always sends all.
        self._base: int | None = None
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
            PublishError: no server holds the weights that were sent, or the learner's weights
                have changed since the current version.
        """
        self._send_to(self._link(self._fleet.members("joining")))

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
        self._wait(link.close() for link in self._links.values())
        self._links.clear()
        self._senders.close()  # while the servers still run

    @cache  # noqa: B019  a run has few publishers, and keeps them
    def _announcement(self, changing: bool) -> Manifest:
        """Announce all tensors, or all but constants; on global rank 0. Collective."""
        manifests = self.converter.manifests(changing=changing)
        return announce(to_rank_zero(manifests, self.converter.senders))

    def _link(self, members: list[Member]) -> list[Link]:
        """Return the links to these servers; close the links to lost servers."""
        lost = [member for member in self._links if member.state == "lost"]
        self._wait(self._links.pop(member).close() for member in lost)
        for member in members:
            if member not in self._links:
                self._links[member] = self._link_to(member)
        return [self._links[member] for member in members]

    def _send_to(self, links: list[Link], base: int | None = None) -> Published:
        """Convert the weights once, and send them, or what changed since version `base`."""
        self._base = None  # until a server was verified to hold this version
        senders = self.converter.senders
        in_place = self._writes_to(links)
        if in_place:
            request = announce_in_place()
        else:
            if dist.get_rank() in senders:
                import sglang.srt.utils  # noqa: F401  # takes seconds: servers would wait for it
            # The first request is a key frame: rank 0 has it when all senders have imported that.
            if base is not None and self.converter.keeps_codes:
                request = announce_delta(base, len(senders))
            else:
                request = self._announcement(changing=base is not None)
        update = Update(request, self.version, len(senders), base, in_place)

        def begin() -> tuple[list[Destination], list[str]]:
            self._wait(link.begin(update) for link in links)
            held = [each for link in self._links.values() if (each := link.destination)]
            return held, [each.token for link in links if (each := link.destination)]

        destinations, tokens = from_rank_zero(begin)
        sent_bytes, conversion = self._senders.send(update, destinations, tokens)

        def commit() -> tuple[int, bool]:
            num_servers = self._commit(links, update, conversion)
            may_give_up = base is not None and self._settings.publish == "auto"
            return num_servers, may_give_up and sent_bytes > LARGEST_DELTA * conversion.num_bytes

        num_servers, gives_up = from_rank_zero(commit)
        self.converter.keeps_codes &= not gives_up
        if num_servers and self.converter.sends_changes:
            self._base = self.version
        return Published(self.version, num_servers, sent_bytes, conversion)

    def _writes_to(self, links: list[Link]) -> bool:
        """Return whether weights are written into the parameters of these servers.

        Raises:
            PublishError: the transport is `direct`, and a server's machine has no learner rank.
        """
        transport = self._settings.transport
        if transport == "broadcast" or self._settings.publish != "full":
            return False
        machines = set(self.converter.machines)

        def is_possible() -> bool:
            servers = [link.server for link in links]
            remote = [server.url for server in servers if server.machine not in machines]
            if remote and transport == "direct":
                raise PublishError(
                    f"quantization.transport=direct: no learner rank is on the machine of server "
                    f"{remote[0]}; set it to broadcast or auto"
                )
            return bool(links) and not remote

        return from_rank_zero(is_possible)

    def _commit(self, links: list[Link], update: Update, conversion: Conversion) -> int:
        """Wait until each server has verified its weights; return how many hold this version."""
        if conversion.non_finite:
            raise NonFinite(f"{conversion.non_finite}; resume from a checkpoint")
        if self._sent and self._sent != conversion.checksums:
            raise PublishError(f"the learner no longer has the weights of version {self.version}")
        self._sent = conversion.checksums
        self._wait([update.end(self._sent), *(link.updated() for link in links)])
        num_servers = sum(link.holds(self.version) for link in self._links.values())
        wrong = [link.failure for link in links if isinstance(link.failure, PublishError)]
        if wrong and all(link.is_lost for link in links) and not num_servers:
            raise wrong[0]
        if links and not num_servers and not self._has_served:  # the next ones would fail alike
            raise PublishError(f"no server took the first weights: {self._fleet.last_loss}")
        self._has_served |= num_servers > 0
        return num_servers
