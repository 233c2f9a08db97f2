"""Links: global rank 0's connections to the servers, by which it coordinates a publish."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from qurl_megatron.config.schema import PauseMode
from qurl_megatron.device import SharedError, backend_to
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.control import ServerControl, UpdateRefused, address_towards
from qurl_megatron.rollout.fleet import Fleet, Member
from qurl_megatron.weight_sync.channel import (
    NOTICE_S,
    Carrier,
    Endpoint,
    Rendezvous,
    give_up,
    is_given_up,
)
from qurl_megatron.weight_sync.stream import Announcement

# A server that dies is noticed at once; this is for one that hangs. A weight of 1.5 GB takes 12 s
# over 1 Gb/s, and a server compiles its kernels in the first publish.
PEER_TIMEOUT_S = 60.0

# A server that ends a channel says why in its answer, which may come this much later.
ANSWER_GRACE_S = 5.0

_POLL_S = 0.05


class PublishError(SharedError, RuntimeError):
    """A server does not hold the weights that were sent."""


class Link:
    """Global rank 0's connection to one server, which works in order in a thread of its own.

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
        self.endpoint: Endpoint | None = None  # to which the senders connect
        self.store: dist.TCPStore | None = None  # of the rendezvous
        self.token = ""  # names the parameters that the server has handed out
        self._parameters: list[dict[str, str]] | None = None  # until all ranks have them
        self._version: int | None = None  # that the server was verified to hold
        self._takes_delta = False
        self._is_paused = False
        self._answer_by: float | None = None  # a time of the monotonic clock
        self._fleet = fleet
        self._member = member
        server = member.server
        self._carrier: Carrier = carrier or backend_to(server.gpus if server.is_local else [])
        self._timeout_s = timeout_s
        self._control = ServerControl(server, pause_mode, timeout_s)
        self._thread = ThreadPoolExecutor(1)
        self._requests = ThreadPoolExecutor(1)  # a request that is answered after all transfers
        self._pause = contextlib.ExitStack()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._member.server.url

    @property
    def is_local(self) -> bool:
        """True if the server runs on this machine."""
        return self._member.server.is_local

    @property
    def is_lost(self) -> bool:
        """True if the server is lost to the fleet."""
        return self._member.state == "lost"

    def holds(self, version: int) -> bool:
        """Return True if the server was verified to hold this version, and is not lost."""
        return self._version == version and not self.is_lost

    def begin(self, *, takes_delta: bool = False, num_senders: int = 0) -> None:
        """Pause the server, after opening channels to `num_senders` senders if there are none."""
        self.failure, self._version, self._takes_delta = None, None, takes_delta
        self._answer_by = None
        if not self._is_paused:
            self._pause.enter_context(self._fleet.pausing(self._member))
        is_new = num_senders > 0 and self.endpoint is None
        if is_new:
            self._do(self._open_endpoint).result()  # all senders are told of it

        def work() -> None:
            if is_new:
                self._connect_server(num_senders)
            if not self._is_paused:
                self._control.pause()
                self._is_paused = True

        self._do(work)

    def hand_out(self) -> Future[None]:
        """Have the server hand out its parameters, if it has not done so."""

        def work() -> None:
            if not self.token:
                self._parameters = self._control.parameters()
                self.token = secrets.token_hex(8)

        return self._do(work)

    def new_parameters(self) -> list[dict[str, str]] | None:
        """Return what the server handed out since the last call, if anything."""
        parameters, self._parameters = self._parameters, None
        return parameters

    def receive(self, request: Announcement, version: int) -> Future[None]:
        """Have the server load what the request announces."""
        return self._do(lambda: self._await_answer(request, version))

    def sent(self, failed: dict[str, RuntimeError]) -> None:
        """Limit the time to the answer: all was sent. Channels are formed anew if any `failed`."""
        self._answer_by = time.monotonic() + self._timeout_s
        if self.endpoint is not None and self.endpoint.token in failed:
            self._do(self._leave)

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
        """Leave the server as it is."""
        self._thread.submit(self._leave, notice_s=0.0).result()  # no sender waits for anything
        self._thread.shutdown()
        self._requests.shutdown(wait=False)
        self._control.close()
        self._pause.close()

    def _do(self, work: Callable[[], None]) -> Future[None]:
        """Do work after all earlier work, unless that has failed."""

        def guarded() -> None:
            if self.failure is not None:
                return
            try:
                work()
            except RuntimeError as error:
                self.failure = error
                if self._takes_delta and isinstance(error, (PublishError, UpdateRefused)):
                    self._fleet.note(self._member, f"gets all tensors, not a delta: {error}")
                else:
                    self._fleet.lose(self._member, str(error))
                self._leave()

        return self._thread.submit(guarded)

    def _open_endpoint(self) -> None:
        """Open a store in which the senders and the server meet."""
        server = self._member.server
        rendezvous = Rendezvous(
            token=f"weights-{secrets.token_hex(8)}",
            address=address_towards(server),
            port=0,
            carrier=self._carrier,
            num_ranks=server.tensor_parallel_size,
            timeout_s=self._timeout_s,
        )
        self.store = rendezvous.host()
        self.endpoint = dataclasses.replace(rendezvous, port=self.store.port)

    def _connect_server(self, num_senders: int) -> None:
        """Have the server join the channel of each sender."""
        rendezvous = self.endpoint
        assert isinstance(rendezvous, Rendezvous)
        for sender in range(num_senders):
            self._control.init_weights_group(
                rendezvous.address,
                rendezvous.port,
                rank_offset=1,
                world_size=1 + rendezvous.num_ranks,
                group_name=rendezvous.channel(sender),
                backend=rendezvous.backend,
            )

    def _await_answer(self, request: Announcement, version: int) -> None:
        """Send a request, and wait until the server has loaded what it announces.

        Raises:
            ServerFailed: it failed, or hung, or a channel to it was given up.
        """
        endpoint, store = self.endpoint, self.store
        answer = self._requests.submit(
            self._control.update_weights,
            request.names,
            request.dtypes,
            request.shapes,
            group_name=endpoint.channel(0) if isinstance(endpoint, Rendezvous) else "",
            weight_version=version,
        )
        given_up = ""
        while not answer.done():
            with contextlib.suppress(TimeoutError):
                answer.exception(timeout=_POLL_S)
                break
            now = time.monotonic()
            if not given_up and store is not None and (given_up := is_given_up(store)):
                self._answer_by = min(self._answer_by or now + ANSWER_GRACE_S, now + ANSWER_GRACE_S)
            if self._answer_by is not None and now > self._answer_by:
                self._requests = ThreadPoolExecutor(1)  # the other waits until the server ends
                raise self._member.server.failed(given_up or "did not load its weights in time")
        answer.result()

    def _leave(self, notice_s: float = NOTICE_S) -> None:
        """End the channels, so that no sender waits for the server any longer."""
        if self.store is not None:
            give_up(self.store, self.url)
            time.sleep(notice_s)
        self.endpoint, self.store, self.token, self._parameters = None, None, "", None


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
