"""Publish the learner's policy to the servers as the next weight version.

    pause servers -> convert and send buckets -> compare checksums -> resume as version + 1

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

Servers fail one by one. The learner has a process group with each of them, so a server that dies,
hangs or holds other weights is dropped and reported lost, and the others never notice. Whatever is
asked of a server ends after `PEER_TIMEOUT_S`. If servers were reached and not one of them holds
what it was sent, the servers are not to blame: the publish raises `PublishError`.

A bucket is converted once, and goes to all servers at the same time, one copy to each.

Example, on every learner rank:

    publisher = Publisher(learner, fleet, "int8", bucket_bytes=512 * 2**20, mode="auto")
    published = publisher.publish()    # to the servers that serve or wait to join
    publisher.admit()                  # the same version, to servers that joined since
    publisher.close()
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.config.schema import PauseMode, PublishMode, WeightFormat
from qurl_megatron.device import SharedError, backend_to, device, from_rank_zero
from qurl_megatron.learner.learner import Learner
from qurl_megatron.learner.non_finite import NonFinite
from qurl_megatron.process import trim_heap
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.control import ServerControl, UpdateRefused, address_towards
from qurl_megatron.rollout.fleet import AdmissionNeeded, Fleet, Member
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.reshard import Conversion, Converter
from qurl_megatron.weight_sync.shared_memory import GROUP_SUFFIX, describe

T = TypeVar("T")

Carrier = Literal["nccl", "gloo", "shared_memory"]
"""The transport of buckets to the servers.

"nccl" broadcasts from GPU to GPU, "gloo" broadcasts through host memory. With "shared_memory" the
servers, on the learner's machine, read the buckets in place.
"""

# A server that dies is noticed at once; this is for one that hangs. A weight of 1.5 GB takes 12 s
# over 1 Gb/s, and a server compiles its kernels in the first publish.
PEER_TIMEOUT_S = 60.0

# In mode `auto`, deltas that are larger than this part of a key frame are given up: to find and
# pack that many changes takes longer than to send all tensors.
LARGEST_DELTA = 0.5


class PublishError(SharedError, RuntimeError):
    """A server does not hold the weights that were sent."""


@dataclass(frozen=True)
class Published:
    """The result of one publish; only global rank 0's is complete."""

    version: int  # the weight version the servers serve
    num_servers: int  # servers that serve it
    sent_bytes: int  # size of all buckets: of a delta, of a key frame, or of both
    conversion: Conversion  # `conversion.num_bytes` is the size of a key frame


class Publisher:
    """Publishes a learner's weights to a fleet of servers.

    Collective: every learner rank constructs it, publishes and closes it. Only global rank 0 talks
    to the servers; it is rank 0 of the process group with each of them.
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
        """
        self.version = 0
        self._mode = mode
        self._pause_mode = pause_mode
        self._fleet = fleet
        self._carrier = carrier
        self._timeout_s = timeout_s
        self._converter = Converter(
            learner, weight_format, bucket_bytes, keeps_codes=mode != "full"
        )
        self._links: dict[Member, _Link] = {}
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

    def _link(self, members: list[Member]) -> list[_Link]:
        """Return the connections to these servers, and close those to lost ones."""
        for member in [member for member in self._links if member.state == "lost"]:
            self._links.pop(member).close()
        for member in members:
            if member not in self._links:
                self._links[member] = _Link(
                    self._fleet, member, self._carrier, self._timeout_s, self._pause_mode
                )
        return [self._links[member] for member in members]

    def _send_to(self, links: list[_Link], base: int | None = None) -> Published:
        """Convert the weights once, and send them, or what changed since version `base`."""
        self._base = None
        for link in links:
            link.begin(is_delta=base is not None)
        sent_bytes = 0

        def send(bucket: Bucket) -> None:
            nonlocal sent_bytes
            sent_bytes += bucket.flat.numel()
            shared = self._carrier == "shared_memory"
            message = describe(bucket.flat) if shared else bucket.flat
            # All links read the bucket until they are done, so it must not be released before.
            _wait([link.send(bucket, message, self.version) for link in links])

        conversion = self._converter.convert(send, base=base)

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

    def _commit(self, links: list[_Link], conversion: Conversion) -> int:
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


class _Link:
    """The connection to one server, which does its work in order in a thread of its own.

    After a failure it does nothing more until it begins again. The server is lost, unless it has
    answered that it cannot take a delta, or has not become what the delta should make of it.
    """

    def __init__(
        self,
        fleet: Fleet,
        member: Member,
        carrier: Carrier | None,
        timeout_s: float,
        pause_mode: PauseMode,
    ) -> None:
        self.failure: RuntimeError | None = None
        self._version: int | None = None  # that the server was verified to hold
        self._takes_delta = False
        self._is_paused = False
        self._fleet = fleet
        self._member = member
        server = member.server
        self._carrier = carrier or backend_to(server.gpus if server.is_local else [])
        self._timeout_s = timeout_s
        self._control = ServerControl(server, pause_mode, timeout_s)
        self._thread = ThreadPoolExecutor(1)
        self._requests = ThreadPoolExecutor(1)  # a request that is answered after a transfer
        self._suffix = GROUP_SUFFIX if self._carrier == "shared_memory" else ""
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._pause = contextlib.ExitStack()

    @property
    def is_lost(self) -> bool:
        """True if the server is lost to the fleet."""
        return self._member.state == "lost"

    def holds(self, version: int) -> bool:
        """Return True if the server was verified to hold this version, and is not lost."""
        return self._version == version and not self.is_lost

    def begin(self, *, is_delta: bool) -> None:
        """Pause the server, after forming the process group if there is none."""
        self.failure, self._version, self._takes_delta = None, None, is_delta
        if not self._is_paused:
            self._pause.enter_context(self._fleet.pausing(self._member))

        def work() -> None:
            if self._group is None:
                self._join()
            if not self._is_paused:
                self._control.pause()
                self._is_paused = True

        self._do(work)

    def send(self, bucket: Bucket, message: Tensor, version: int) -> Future[None]:
        """Broadcast a bucket's `message`; done when the server has loaded the bucket or failed."""
        return self._do(lambda: self._transfer(bucket, message, version))

    def commit(self, checksums: dict[str, int], version: int) -> Future[None]:
        """Resume the server if it holds what was sent."""

        def work() -> None:
            verify(self._control, checksums)
            self._control.resume()
            self._is_paused, self._version = False, version
            self._pause.close()
            self._fleet.joined(self._member)

        return self._do(work)

    def close(self) -> None:
        """Leave the process group."""
        self._thread.submit(self._leave).result()
        self._thread.shutdown()
        self._requests.shutdown()
        self._control.close()
        self._pause.close()

    def _do(self, work: Callable[[], None]) -> Future[None]:
        """Do work after all earlier work, unless that has failed."""

        def guarded() -> None:
            if self.failure is not None:
                return
            try:
                work()
            except RuntimeError as error:  # torch's errors of process groups among them
                self.failure = error
                if self._takes_delta and isinstance(error, (PublishError, UpdateRefused)):
                    self._fleet.note(self._member, f"gets all tensors, not a delta: {error}")
                else:
                    self._fleet.lose(self._member, str(error))
                self._leave()

        return self._thread.submit(guarded)

    def _join(self) -> None:
        """Form a process group with the server, under a new name: old names are refused."""
        from sglang.srt.utils import init_custom_process_group  # takes seconds; rank 0 only

        server = self._member.server
        self._group_name = f"weights-{secrets.token_hex(8)}{self._suffix}"
        address = address_towards(server)
        world_size = 1 + server.tensor_parallel_size
        timeout = timedelta(seconds=self._timeout_s)
        store = dist.TCPStore(
            address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False
        )
        backend = "gloo" if self._carrier == "shared_memory" else self._carrier
        joining = self._requests.submit(
            self._control.init_weights_group,
            address,
            store.port,
            rank_offset=1,
            world_size=world_size,
            group_name=self._group_name,
            backend=backend,
        )
        try:
            self._group = init_custom_process_group(
                backend=backend,
                store=dist.PrefixStore(self._group_name, store),  # the server's side does the same
                timeout=timeout,
                world_size=world_size,
                rank=0,
                group_name=self._group_name,
            )
        except RuntimeError:
            if joining.done():
                joining.result()  # raises the server's answer, which says more
            raise
        joining.result()

    def _transfer(self, bucket: Bucket, message: Tensor, version: int) -> None:
        receiving = self._requests.submit(
            self._control.update_weights,
            bucket.names,
            bucket.dtypes,
            bucket.shapes,
            group_name=self._group_name,
            weight_version=version,
        )
        sending = dist.broadcast(message, src=0, group=self._group, async_op=True)
        # The answer comes first. A server that refuses the request, or is dead, never receives; the
        # broadcast then ends only when the group is aborted.
        receiving.result()
        sending.wait()

    def _leave(self) -> None:
        """Abort the group, so that neither side waits for the other any longer."""
        group, self._group = self._group, None
        if group is None:
            return
        # Destroying a group closes no connection while an operation is under way.
        group._get_backend(device() if self._carrier == "nccl" else torch.device("cpu")).abort()
        dist.destroy_process_group(group)


def _wait(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()


def verify(control: ServerControl, sent: dict[str, int]) -> None:
    """Compare the checksums of a server's tensors with those of the tensors `sent`, by name.

    Raises:
        PublishError: a checksum differs; the message names the first such tensor.
    """
    try:
        held = checksum.combine(control.checksums())
    except ValueError as error:
        raise PublishError(f"{control.server.url}: {error}") from None
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise PublishError(
            f"{control.server.url} does not hold the weights it was sent: {len(wrong)} of "
            f"{len(sent)} checksums differ, first {wrong[0]}"
        )
