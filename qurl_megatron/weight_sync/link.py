"""Links: global rank 0's connections to the servers, by which it coordinates a publish."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from qurl_megatron.config.schema import PauseMode, Releases
from qurl_megatron.device import SharedError
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.control import RELEASED, ServerControl, UpdateRefused
from qurl_megatron.rollout.fleet import Fleet, Member
from qurl_megatron.rollout.server import Server
from qurl_megatron.rollout.wire import escaped
from qurl_megatron.weight_sync.broadcast import Broadcast
from qurl_megatron.weight_sync.bucket import Manifest
from qurl_megatron.weight_sync.elsewhere.transport import Http
from qurl_megatron.weight_sync.in_place import InPlace
from qurl_megatron.weight_sync.transport import Endpoint, Transport

T = TypeVar("T")

# A server that dies is noticed at once; this is for one that hangs. A weight of 1.5 GB takes 12 s
# over 1 Gb/s, and a server compiles its kernels in the first publish.
PEER_TIMEOUT_S = 60.0

_DONE: Future[None] = Future()
_DONE.set_result(None)


class PublishError(SharedError, RuntimeError):
    """A server does not hold the weights that were sent."""


def transport_to(server: Server, *, in_place: bool) -> type[Transport]:
    """Return the transport of weights to a server; `in_place`: its machine has a learner rank."""
    if in_place:
        return InPlace
    return Http if server.is_remote else Broadcast


class Link:
    """Global rank 0's connection to one server, which works in order in a thread of its own.

    After a failure it does nothing more until it begins again. The server is lost, unless it was
    sent a delta and has answered that it cannot take it, or holds other weights after it.
    """

    def __init__(
        self,
        fleet: Fleet,
        member: Member,
        timeout_s: float,
        pause_mode: PauseMode,
        releases: Releases | None = None,
    ) -> None:
        """Take a server, which sleeps if it is one that `releases` memory in its sleep."""
        self.failure: RuntimeError | None = None
        self._transport: Transport | None = None
        self._version: int | None = None  # that the server was verified to hold
        self._takes_delta = False
        self._tags = list(RELEASED[releases]) if releases else []
        self._asleep = list(self._tags)  # what the server has given back
        self._is_paused = bool(self._tags)
        self._all_sent: Future[RuntimeError | None] = Future()  # see `Transport.load`
        self._fleet = fleet
        self._member = member
        self._control = ServerControl(member.server, pause_mode, timeout_s)
        self._thread = ThreadPoolExecutor(1)
        self._pause = contextlib.ExitStack()
        if self._is_paused:
            self._pause.enter_context(fleet.pausing(member))

    @property
    def server(self) -> Server:
        """The server at the other end."""
        return self._member.server

    @property
    def endpoint(self) -> Endpoint | None:
        """Where the ranks reach the server, if they can."""
        transport = self._transport  # the link's thread may drop it now
        return transport.endpoint if transport else None

    @property
    def is_lost(self) -> bool:
        """True if the server is lost to the fleet."""
        return self._member.state == "lost"

    def holds(self, version: int) -> bool:
        """Return True if the server was verified to hold this version, and is not lost."""
        return self._version == version and not self.is_lost

    def begin(
        self, *, in_place: bool = False, takes_delta: bool = False, num_senders: int = 0
    ) -> Future[None]:
        """Pause the server, and connect it with `num_senders` senders if it is not.

        The result is done when the ranks may send. The endpoint of a server that waits for senders
        meanwhile is there at once.
        """
        self.failure, self._version, self._takes_delta = None, None, takes_delta
        self._all_sent = Future()
        if not self._is_paused:
            self._pause.enter_context(self._fleet.pausing(self._member))
        kind = transport_to(self.server, in_place=in_place)
        is_new = self.endpoint is None or not isinstance(self._transport, kind)

        def open_transport() -> None:
            self._leave()
            self._transport = kind(self._control, shares_gpus=bool(self._tags))

        def work() -> None:
            if not self._is_paused:
                self._control.pause()
                self._is_paused = True
            if "weights" in self._asleep:
                self._control.wake(["weights"])
                self._asleep.remove("weights")
            if is_new and self._transport is not None:
                self._transport.connect(num_senders)

        if is_new:
            self._do(open_transport).result()  # all ranks are told of its endpoint
        begun = self._do(work)
        return _DONE if kind.meets_senders else begun

    def sleep(self) -> Future[None]:
        """Have the server stop sampling and give memory back."""
        self._pause.enter_context(self._fleet.pausing(self._member))

        def work() -> None:
            self._is_paused, self._asleep = True, list(self._tags)
            if "weights" in self._tags:
                self._version = None
            self._control.sleep(self._tags)

        return self._do(work)

    def wake(self) -> Future[None]:
        """Have the server take its memory again, and sample."""

        def work() -> None:
            if self._asleep:
                self._control.wake(self._asleep)
                self._asleep = []
            self._resume()

        return self._do(work)

    def receive(self, request: Manifest, version: int) -> None:
        """Have the server load what the request announces."""

        def work() -> None:
            if self._transport is not None:
                self._transport.load(request, version, self._all_sent)

        self._do(work)

    def sent(self, failed: dict[str, RuntimeError]) -> None:
        """Tell the transport that all was sent, or that one of its channels `failed`."""
        failure = failed.get(self.endpoint.token) if self.endpoint else None
        self._all_sent.set_result(failure)

        def work() -> None:
            if self._transport is not None:
                self._transport.finish(failure)

        self._do(work)

    def commit(self, checksums: dict[str, int], version: int) -> Future[None]:
        """Resume the server if it holds what was sent. One that sleeps goes on sleeping."""

        def work() -> None:
            verify(self._control, checksums)
            self._version = version
            if not self._asleep:
                self._resume()
            self._fleet.joined(self._member)

        return self._do(work)

    def close(self) -> None:
        """Leave the server as it is."""
        self._thread.submit(self._leave, at_once=True).result()  # no sender waits for anything
        self._thread.shutdown()
        self._pause.close()

    def _resume(self) -> None:
        self._control.resume()
        self._is_paused = False
        self._pause.close()

    def _do(self, work: Callable[[], T]) -> Future[T | None]:
        """Do work after all earlier work, unless that has failed; the result is then None."""

        def guarded() -> T | None:
            if self.failure is not None:
                return None
            try:
                return work()
            except RuntimeError as error:
                self.failure = error
                if self._takes_delta and isinstance(error, (PublishError, UpdateRefused)):
                    self._fleet.note(self._member, f"gets all tensors, not a delta: {error}")
                else:
                    self._fleet.lose(self._member, str(error))
                self._leave()
                return None

        return self._thread.submit(guarded)

    def _leave(self, *, at_once: bool = False) -> None:
        if self._transport is not None:
            self._transport.leave(at_once=at_once)
        self._transport = None


def verify(control: ServerControl, sent: dict[str, int]) -> None:
    """Compare the checksums of a server's tensors with those of the tensors `sent`, by name.

    Raises:
        PublishError: a checksum differs; the message names the first such tensor.
    """
    try:
        held = checksum.combine(control.checksums())
    except ValueError as error:
        raise PublishError(f"{control.server.url}: {escaped(str(error))}") from None
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise PublishError(
            f"{control.server.url} does not hold the weights it was sent: {len(wrong)} of "
            f"{len(sent)} checksums differ, first {escaped(wrong[0])}"
        )
