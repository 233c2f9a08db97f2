"""Links: global rank 0's connections to the servers, through which it coordinates a publish."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import partial

from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import PauseMode, Releases
from qurl_megatron.device import SharedError
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.control import RELEASED, ServerControl, UpdateRefused
from qurl_megatron.rollout.controller import end
from qurl_megatron.rollout.fleet import Fleet, Member
from qurl_megatron.rollout.server import POLL_S, Server
from qurl_megatron.rollout.wire import escaped
from qurl_megatron.weight_sync.broadcast import Broadcast
from qurl_megatron.weight_sync.in_place import InPlace
from qurl_megatron.weight_sync.transport import Destination, Transport, Update

# A server's death is noticed at once; this limit is for a server that hangs. A weight of 1.5 GB
# takes 12 s over 1 Gb/s, and a server compiles its kernels in the first publish.
PEER_TIMEOUT_S = 60.0
LOST_TIMEOUT_S = 30.0  # for a lost server to end: the learner needs its memory


class PublishError(SharedError, RuntimeError):
    """A server does not hold the weights that were sent."""


def transport_to(server: Server, *, in_place: bool) -> type[Transport]:
    """Return the transport to a server; with `in_place`, ranks write into its parameters."""
    if in_place:
        return InPlace
    if server.is_remote:
        http: type[Transport] = needed("elsewhere", "transport", by="rollout.servers_at").Http
        return http
    return Broadcast


class Link:
    """Global rank 0's connection to one server. Its coroutines run in the controller's loop.

    If something fails, the server is lost, unless it refuses a delta or holds other weights after
    one: then it can still get a key frame.
    """

    def __init__(
        self,
        fleet: Fleet,
        member: Member,
        timeout_s: float,
        pause_mode: PauseMode,
        releases: Releases | None,
    ) -> None:
        """Take a server; one that `releases` memory in its sleep sleeps now."""
        self.failure: RuntimeError | None = None  # of the last update
        self._reachable = asyncio.Event()  # `destination` is set if the ranks can reach it
        self._updating: asyncio.Task[None] | None = None
        self._transport: Transport | None = None
        self._version: int | None = None  # the version that the server was verified to hold
        self._tags = list(RELEASED[releases]) if releases else []
        self._asleep = list(self._tags)  # tags of memory that the server has given back
        self._fleet = fleet
        self._member = member
        self._control = ServerControl(member.server, pause_mode, timeout_s)
        member.is_paused = bool(self._tags)

    @property
    def server(self) -> Server:
        """The server at the other end."""
        return self._member.server

    @property
    def destination(self) -> Destination | None:
        """Where the ranks reach the server, if they can."""
        transport = self._transport  # read once: the loop may drop it meanwhile
        return transport.destination if transport else None

    @property
    def is_lost(self) -> bool:
        """True if the server is lost to the fleet."""
        return self._member.state == "lost"

    def holds(self, version: int) -> bool:
        """Return True if the server was verified to hold this version, and is not lost."""
        return self._version == version and not self.is_lost

    async def begin(self, update: Update) -> None:
        """Begin an update, and wait until the ranks may send to the destination, if there is one.

        The server is paused, loads what is sent, and resumes if it then holds the right weights. A
        sleeping server goes on sleeping.
        """
        self.failure, self._version = None, None
        self._reachable.clear()
        self._updating = asyncio.create_task(self._update(update))
        await self._reachable.wait()

    async def updated(self) -> None:
        """Wait until the update has ended."""
        if self._updating:
            await self._updating

    async def sleep(self) -> None:
        """Let the server stop sampling and give memory back; a lost one does so when it ends."""
        if not self.is_lost:
            async with self._losing():
                self._member.is_paused = True
                self._asleep = list(self._tags)
                if "weights" in self._tags:
                    self._version = None
                await self._control.sleep(self._tags)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOST_TIMEOUT_S):
                while self.is_lost and self.server.alive():
                    await asyncio.sleep(POLL_S)

    async def wake(self) -> None:
        """Let the server take its memory again, and sample."""
        async with self._losing():
            if self._asleep:
                await self._control.wake(self._asleep)
                self._asleep = []
            await self._resume()

    async def close(self) -> None:
        """Disconnect, and leave the server as it is."""
        if self._updating:
            await end([self._updating])
        await self._leave()
        self._fleet.expect_answers(self._member)

    async def _update(self, update: Update) -> None:
        try:
            async with self._losing():
                transport = await self._reach(update)
                self._reachable.set()
                async with self._losing(unless_refused=update.base is not None):
                    await transport.load(update)
                    await verify(self._control, update.checksums)
                    self._version = update.version
                    if not self._asleep:
                        await self._resume()
                    self._fleet.joined(self._member)
        finally:
            self._reachable.set()  # after a failure too: `begin` waits for it

    async def _reach(self, update: Update) -> Transport:
        """Pause the server, and connect it with the senders unless it is connected."""
        kind = transport_to(self.server, in_place=update.in_place)
        transport = self._transport
        is_new = not isinstance(transport, kind) or transport.destination is None
        if is_new:
            await self._leave()
            make = partial(kind, self._control, shares_gpus=bool(self._tags))
            transport = self._transport = await asyncio.to_thread(make)
        assert transport is not None
        if kind.meets_senders:
            self._reachable.set()
        if not self._member.is_paused:
            self._member.is_paused = True
            await self._control.pause()
        if "weights" in self._asleep:
            await self._control.wake(["weights"])
            self._asleep.remove("weights")
        if is_new:
            await transport.connect(update.num_senders)
        return transport

    async def _resume(self) -> None:
        await self._control.resume()
        self._fleet.expect_answers(self._member)

    @contextlib.asynccontextmanager
    async def _losing(self, *, unless_refused: bool = False) -> AsyncIterator[None]:
        """Lose the server if this context raises; with `unless_refused`, keep one that refuses."""
        try:
            yield
        except RuntimeError as error:
            self.failure = error
            if unless_refused and isinstance(error, (PublishError, UpdateRefused)):
                self._fleet.note(self._member, f"gets all tensors, not a delta: {error}")
            else:
                self._fleet.lose(self._member, str(error))
            await self._leave()

    async def _leave(self) -> None:
        if self._transport is not None:
            await self._transport.leave()
        self._transport = None


async def verify(control: ServerControl, sent: Mapping[str, int]) -> None:
    """Compare the checksums of a server's tensors with those of the tensors `sent`, by name.

    Raises:
        PublishError: a checksum differs; the message names the first such tensor.
    """
    try:
        held = checksum.combine(await control.checksums())
    except ValueError as error:
        raise PublishError(f"{control.server.url}: {escaped(str(error))}") from None
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise PublishError(
            f"{control.server.url} does not hold the weights it was sent: {len(wrong)} of "
            f"{len(sent)} checksums differ, first {escaped(wrong[0])}"
        )
