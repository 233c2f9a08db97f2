"""Transports: the ways in which weights reach a server, behind one interface.

    broadcast.py              a process group of each sender and the server
    in_place.py, direct.py    the server's memory, which the ranks of its machine write
    extensions/elsewhere/     HTTP requests, to a server that somebody started elsewhere

Global rank 0 has a `Transport` for each server. Its `destination` says how the other ranks reach
it: there each sender opens a `Channel`, which sends buckets in order. A transport does the same
for a key frame and for a delta.

A server is paused, connected, loads what is sent, and resumes if it then holds the right weights.
If something fails, it is lost, unless it refuses a delta or holds other weights after one: then it
can still get a key frame.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from qurl_megatron.device import SharedError
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.controller import end
from qurl_megatron.rollout.fleet import Member
from qurl_megatron.rollout.server import Server, UpdateRefused
from qurl_megatron.rollout.wire import escaped
from qurl_megatron.weight_sync.bucket import Bucket, Manifest

# A server that ends a channel says why in its answer, which may come this many seconds later.
ANSWER_GRACE_S = 5.0


class PublishError(SharedError, RuntimeError):
    """A server does not hold the weights that were sent."""


class Channel(ABC):
    """A sender's connection to one server, with a thread. After a failure it sends nothing more."""

    def __init__(self, name: str) -> None:
        """Start the channel's thread under this name; send nothing yet."""
        self.failure: RuntimeError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def send(self, bucket: Bucket, version: int) -> Future[int]:
        """Send a bucket after all earlier ones; the future is done when it may be released.

        The result is the number of bytes that were sent; 0 after a failure.
        """
        return self._do(lambda: self._send(bucket, version))

    def close(self) -> None:
        """Disconnect from the server, which keeps running, and end the thread."""
        self._thread.submit(self._leave).result()
        self._thread.shutdown()

    def _do(self, work: Callable[[], int]) -> Future[int]:
        """Queue work behind all earlier work; if any has failed, skip it with result 0."""

        def guarded() -> int:
            if self.failure is not None:
                return 0
            try:
                return work()
            except RuntimeError as error:  # which includes torch's errors of process groups
                self.failure = error
                self._leave()
                return 0

        return self._thread.submit(guarded)

    @abstractmethod
    def _send(self, bucket: Bucket, version: int) -> int:
        """Send a bucket; return the number of bytes that were sent."""

    def _leave(self) -> None:  # noqa: B027  not every channel has something to leave
        """Disconnect."""


@dataclass(frozen=True)
class Destination:
    """How the ranks reach a server; global rank 0 hands it to them."""

    token: str  # new for each connection, because servers refuse the names of earlier groups


class ChannelDestination(Destination, ABC):
    """How senders reach a server that loads buckets from channels."""

    may_compress = False  # whether channels may compress deltas

    @abstractmethod
    def open(self, sender: int) -> Channel:
        """Begin to connect the sender of this number; return its channel."""


@dataclass
class Delivery:
    """What global rank 0 knows of weights that are sent to several servers at once."""

    request: Manifest  # announces them
    version: int
    num_senders: int
    since: int | None  # the version that the servers hold; None: everything is sent
    in_place: bool  # ranks write into the servers' parameters
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    failed: dict[str, RuntimeError] = field(default_factory=dict)  # why channels failed, by token
    checksums: Mapping[str, int] = field(default_factory=dict)  # of all tensors

    async def end(self, checksums: Mapping[str, int]) -> None:
        """Tell the transports that all was sent."""
        self.checksums = checksums
        self.sent.set()


class Transport:
    """Global rank 0's end of the way to one server. Its coroutines run in the controller's loop.

    It connects in the first publish, and again in the one after a failure.
    """

    # True if `connect` waits for the senders, so they must begin before it returns.
    meets_senders = False

    def __init__(self, member: Member) -> None:
        """Take a server; connect later."""
        self.member = member
        self.server = member.server
        self.destination: Destination | None = None  # where the ranks reach the server, if they can
        self.failure: RuntimeError | None = None  # of the last delivery
        self._delivering: asyncio.Task[None] | None = None

    async def begin(self, delivery: Delivery) -> None:
        """Begin a delivery, and wait until the ranks may send to the destination, if there is one.

        A sleeping server goes on sleeping.
        """
        self.failure = self.member.version = None
        reachable = asyncio.Event()
        self._delivering = asyncio.create_task(self._deliver(delivery, reachable))
        await reachable.wait()

    async def delivered(self) -> None:
        """Wait until the delivery has ended."""
        if self._delivering:
            await self._delivering

    async def close(self) -> None:
        """Disconnect, and leave the server as it is."""
        if self._delivering:
            await end([self._delivering])
        await self.leave()
        self.member.version = None
        self.member.expect_answers()

    async def _deliver(self, delivery: Delivery, reachable: asyncio.Event) -> None:
        member, loads = self.member, False
        try:
            is_new = self.destination is None
            if is_new:
                await asyncio.to_thread(self.open)
            if self.meets_senders:
                reachable.set()
            await member.pause()
            if is_new:
                await self.connect(delivery.num_senders)
            reachable.set()
            loads = True
            await self.load(delivery)
            await verify(self.server, delivery.checksums)
            await member.resume()
            member.version = delivery.version
            member.join()
        except RuntimeError as error:
            self.failure = error
            is_refusal = isinstance(error, (PublishError, UpdateRefused))
            if loads and is_refusal and delivery.since is not None:
                member.note(f"gets all tensors, not a delta: {error}")
            else:
                member.lose(str(error))
            await self.leave()
        finally:
            reachable.set()  # after a failure too: `begin` waits for it

    def open(self) -> None:
        """Prepare to connect. This may wait for the network."""

    async def connect(self, num_senders: int) -> None:
        """Connect the server, which is paused, with this many senders."""

    async def load(self, delivery: Delivery) -> None:
        """Let the server load what is sent; wait until it has done so and all was sent.

        Raises:
            ServerFailed: the server failed or hung, or a channel to it ended.
        """
        assert self.destination is not None
        request, token = delivery.request, self.destination.token
        answer = asyncio.create_task(
            self.server.update_weights(
                request.names,
                request.dtypes,
                request.shapes,
                group_name=token,
                weight_version=delivery.version,
                flush_cache=self.member.fleet.flushes_cache,
            )
        )
        sent = asyncio.create_task(delivery.sent.wait())
        try:
            await asyncio.wait({answer, sent}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                failure = delivery.failed.get(token)
                timeout_s = ANSWER_GRACE_S if failure else self.server.timeout_s
                await asyncio.wait({answer}, timeout=timeout_s)
                if not answer.done():
                    what = str(failure) if failure else "did not load its weights in time"
                    raise self.server.failed(what)
            answer.result()
            await sent
        finally:
            await end([answer, sent])
        if token in delivery.failed:
            await self.leave()  # the next publish has new channels

    async def leave(self) -> None:
        """End the channels, so that no sender goes on waiting for the server."""
        self.destination = None


async def verify(server: Server, sent: Mapping[str, int]) -> None:
    """Compare the checksums of a server's tensors with those of the tensors `sent`, by name.

    Raises:
        PublishError: a checksum differs; the message names the first such tensor.
    """
    try:
        held = checksum.combine(await server.checksums())
    except ValueError as error:
        raise PublishError(f"{server.url}: {escaped(str(error))}") from None
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise PublishError(
            f"{server.url} does not hold the weights it was sent: {len(wrong)} of "
            f"{len(sent)} checksums differ, first {escaped(wrong[0])}"
        )
