"""Links: global rank 0's connections to the servers, by which it coordinates a publish."""

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch.distributed as dist

from qurl_megatron.config.schema import PauseMode, Releases
from qurl_megatron.device import SharedError, backend_to
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.control import RELEASED, ServerControl, UpdateRefused
from qurl_megatron.rollout.fleet import Fleet, Member
from qurl_megatron.rollout.server import Server
from qurl_megatron.rollout.wire import escaped
from qurl_megatron.weight_sync.bucket import Manifest, channel_name
from qurl_megatron.weight_sync.channel import (
    NOTICE_S,
    Endpoint,
    GroupEndpoint,
    HttpEndpoint,
    give_up,
)

T = TypeVar("T")

# A server that dies is noticed at once; this is for one that hangs. A weight of 1.5 GB takes 12 s
# over 1 Gb/s, and a server compiles its kernels in the first publish.
PEER_TIMEOUT_S = 60.0

# A server that ends a channel says why in its answer, which may come this much later.
ANSWER_GRACE_S = 5.0


class PublishError(SharedError, RuntimeError):
    """A server does not hold the weights that were sent."""


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
        self.endpoint: Endpoint | None = None  # at which the senders reach the server
        self.store: dist.TCPStore | None = None  # of the endpoint
        self.token = ""  # names the parameters that the server has handed out
        self._version: int | None = None  # that the server was verified to hold
        self._takes_delta = False
        self._tags = list(RELEASED[releases]) if releases else []
        self._asleep = list(self._tags)  # what the server has given back
        self._is_paused = bool(self._tags)
        # Once all was sent: the time that is left to the answer, and what to say if none comes.
        self._all_sent: Future[tuple[float, str]] = Future()
        self._fleet = fleet
        self._member = member
        self._timeout_s = timeout_s
        self._pause_mode = pause_mode
        self._control = ServerControl(member.server, pause_mode, timeout_s)
        self._thread = ThreadPoolExecutor(1)
        self._requests = ThreadPoolExecutor(1)  # a request that is answered after all transfers
        self._pause = contextlib.ExitStack()
        if self._is_paused:
            self._pause.enter_context(fleet.pausing(member))

    @property
    def server(self) -> Server:
        """The server at the other end."""
        return self._member.server

    @property
    def is_lost(self) -> bool:
        """True if the server is lost to the fleet."""
        return self._member.state == "lost"

    def holds(self, version: int) -> bool:
        """Return True if the server was verified to hold this version, and is not lost."""
        return self._version == version and not self.is_lost

    def begin(self, *, takes_delta: bool = False, num_senders: int = 0) -> Future[None]:
        """Pause the server, after opening channels to `num_senders` senders if there are none."""
        self.failure, self._version, self._takes_delta = None, None, takes_delta
        self._all_sent = Future()
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
            if "weights" in self._asleep:
                self._control.wake(["weights"])
                self._asleep.remove("weights")

        return self._do(work)

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

    def hand_out(self) -> Future[list[dict[str, str]] | None]:
        """Have the server hand out its parameters; None if it has done so before."""

        def work() -> list[dict[str, str]] | None:
            if self.token:
                return None
            parameters = self._control.parameters()
            self.token = secrets.token_hex(8)
            return parameters

        return self._do(work)

    def receive(self, request: Manifest, version: int) -> None:
        """Have the server load what the request announces."""
        self._do(lambda: self._await_answer(request, version))

    def sent(self, failed: dict[str, RuntimeError]) -> None:
        """Limit the time to the answer: all was sent. Channels are formed anew if any `failed`."""
        failure = failed.get(self.endpoint.token) if self.endpoint else None
        if failure is None:
            self._all_sent.set_result((self._timeout_s, "did not load its weights in time"))
        else:
            self._all_sent.set_result((ANSWER_GRACE_S, str(failure)))
            self._do(self._leave)

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
        self._thread.submit(self._leave, notice_s=0.0).result()  # no sender waits for anything
        self._thread.shutdown()
        self._requests.shutdown(wait=False)
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

    def _open_endpoint(self) -> None:
        """Open a store in which the senders and the server meet."""
        server = self.server
        endpoint = GroupEndpoint(
            token=f"weights-{secrets.token_hex(8)}",
            address=self._control.own_address(),
            port=0,
            # Of two processes on one GPU, NCCL takes only one.
            backend="gloo" if self._tags else backend_to(server.gpus if server.is_local else []),
            num_ranks=server.tensor_parallel_size,
            timeout_s=self._timeout_s,
        )
        self.store = endpoint.store(is_host=True)
        self.endpoint = dataclasses.replace(endpoint, port=self.store.port)

    def _connect_server(self, num_senders: int) -> None:
        """Have the server join the channel of each sender."""
        endpoint = self.endpoint
        assert isinstance(endpoint, GroupEndpoint)
        for sender in range(num_senders):
            self._control.init_weights_group(
                master_address=endpoint.address,
                master_port=endpoint.port,
                world_size=1 + endpoint.num_ranks,
                group_name=channel_name(endpoint.token, sender),
                backend=endpoint.backend,
            )

    def _await_answer(self, request: Manifest, version: int) -> None:
        """Send a request, and wait until the server has loaded what it announces.

        Raises:
            ServerFailed: it failed, or hung, or a channel to it was given up.
        """
        answer = self._requests.submit(
            self._control.update_weights,
            request.names,
            request.dtypes,
            request.shapes,
            group_name=self.endpoint.token if self.endpoint else "",
            weight_version=version,
        )
        either: list[Future[Any]] = [answer, self._all_sent]
        wait(either, return_when=FIRST_COMPLETED)
        if not answer.done():
            left_s, otherwise = self._all_sent.result()
            wait([answer], left_s)
            if not answer.done():
                raise self.server.failed(otherwise)
        answer.result()

    def _leave(self, notice_s: float = NOTICE_S) -> None:
        """End the channels, so that no sender waits for the server any longer."""
        if self.store is not None:
            give_up(self.store, self.server.url)
            time.sleep(notice_s)
        self.endpoint, self.store, self.token = None, None, ""


class HttpLink(Link):
    """Global rank 0's connection to a server that was started elsewhere."""

    def sent(self, failed: dict[str, RuntimeError]) -> None:
        """Fail as the senders' channels did."""
        failure = failed.get(self.endpoint.token) if self.endpoint else None
        if failure is not None:

            def fail() -> None:
                raise failure

            self._do(fail)

    def _open_endpoint(self) -> None:
        self.endpoint = HttpEndpoint(
            token=f"weights-{secrets.token_hex(8)}",
            server=self.server,
            timeout_s=self._timeout_s,
            flush_cache=self._pause_mode == "retract",
        )

    def _connect_server(self, num_senders: int) -> None:
        """Do nothing: the server listens already."""

    def _await_answer(self, request: Manifest, version: int) -> None:
        """Do nothing: the server answers the sender of each bucket."""


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
