"""The servers of one set, which of them can be asked, and what happens to a lost one.

A server is in one of four states; `TRANSITIONS` lists all changes of state. A `Member` makes them:
only there a server is paused, resumed, put to sleep, woken and lost.

- Only serving servers are asked. A prompt goes to the one with the fewest tokens outstanding.
- A lost server is never asked again. The others answer its open requests, once.
- The process that started a server replaces it, and writes the new one to its roster. It is
  another server here: it starts, joins and serves.
- A server that somebody started elsewhere cannot be replaced. After a loss the fleet asks its URL
  every few seconds, and a server that answers there is another server here too.
- A request waits for servers for `patience_s` seconds, then fails with `FleetTooSmall`. It fails at
  once if the rosters list too few servers.

A server counts as lost when its process has ended, when it closes a connection before it has
answered, when it is silent and does not answer /health, when it answers /health but no prompt for
hours, or when a publish to it fails. A paused server does not answer /health, so it is not asked
for that. It still gets prompts, and samples completions once it resumes. If the prompts waited
here, the first server to resume would get all of them.

A fleet changes in the controller's loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from qurl_megatron.config.schema import PauseMode, Releases
from qurl_megatron.device import SharedError
from qurl_megatron.rollout.controller import Controller, end
from qurl_megatron.rollout.requests import NoAnswer
from qurl_megatron.rollout.roster import incarnation, report_lost
from qurl_megatron.rollout.server import POLL_S, RELEASED, Server, ServerFailed, revived

T = TypeVar("T")
State = Literal["starting", "joining", "serving", "lost"]

# From each state, the next ones and the reason for each. `docs/architecture.md` draws this.
TRANSITIONS: Mapping[State, Mapping[State, str]] = {
    "starting": {"joining": "answers", "lost": "is given up"},
    "joining": {"serving": "holds the current weights", "lost": "is given up"},
    "serving": {"lost": "is given up"},
    "lost": {},
}

# A server that owes answers and gives none for this long is lost, although it answers /health. The
# longest completions of the largest models take less.
STALLED_S = 7200.0
SILENT_S = 2.0  # a server with prompts that has not answered any for this long is asked for /health
# To restart a server without need costs more than to wait for it: SGLang answers /health after a
# step of its scheduler. Without a GPU that takes up to `Server.step_s` longer.
HEALTH_TIMEOUT_S = 20.0
# On a GPU a server may compile a kernel in its first prompt, which takes a minute or two.
FIRST_ANSWER_TIMEOUT_S = 300.0
# A server with fewer requests gains nothing by giving one away: each decoding step reads all
# weights, for one request as for many.
FEW_REQUESTS = 32
ASK_AGAIN_S = 5.0  # between two questions whether a server elsewhere is back
LOST_TIMEOUT_S = 30.0  # for a lost server to end, on GPUs that it shares with the learner


class FleetTooSmall(ServerFailed, SharedError):
    """Fewer servers than the run needs, for longer than a server takes to start."""


class AdmissionNeeded(Exception):
    """Too few servers serve, but others could once they have the current weights."""


class RequestRefused(ServerFailed):
    """A server refused a request; another would refuse it too."""


class ServerBusy(Exception):
    """A server did not take a request for lack of room; ask again later."""


@dataclass(eq=False)
class Member:
    """One process of a server in a fleet, and all that can happen to it."""

    fleet: Fleet = field(repr=False)
    index: int  # within the set
    server: Server
    state: State
    version: int | None = None  # of the weights that it was verified to hold
    outstanding: int = 0  # tokens that were asked for and not answered yet
    requests: set[asyncio.Future[Any]] = field(default_factory=set)
    heard_at: float = field(default_factory=time.monotonic)  # when it last answered
    answered_at: float = field(default_factory=time.monotonic)  # a prompt; or began to owe one
    is_paused: bool = False  # no sign of life is expected
    asleep: list[str] = field(default_factory=list)  # tags of the memory that it has given back
    has_answered: bool = False  # a prompt
    is_reported: bool = False  # as lost, to its starter

    def holds(self, version: int) -> bool:
        """Return True if the server was verified to hold this version, and is not lost."""
        return self.version == version and self.state != "lost"

    def change(self, state: State) -> None:
        """Go to another state."""
        assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state = state
        self.fleet.note_size()

    def join(self) -> None:
        """Let a joining server serve: it has the current weights."""
        if self.state == "joining":
            self.note(f"serves: {self.server.url}")
            self.change("serving")

    def lose(self, why: str) -> None:
        """Give the server up: others answer what it owes, and its starter replaces it."""
        if self.state == "lost":
            return
        self.change("lost")
        self.fleet.last_loss = f"server {self.fleet.set_name}_{self.index} was lost: {why}"
        # The log of a failed server follows the first line, which names it.
        reason = why.splitlines()[0].removesuffix(" ends:")
        retried = "; it was started elsewhere, so it is asked again until it answers"
        self.note(f"is lost: {reason}{retried if self.server.is_remote else ''}")
        for request in self.requests:
            request.cancel()
        self.report()

    def report(self) -> None:
        """Ask the starter of a lost server that still runs to replace it."""
        server = self.server
        if self.is_reported or server.is_remote or not server.alive():
            return
        with contextlib.suppress(OSError):  # a full disk; the next look tries again
            report_lost(Path(server.log_file).parent, self.fleet.set_name, self.index, server)
            self.is_reported = True

    def note(self, what: str) -> None:
        """Tell the user, on one line, what happens to the server."""
        self.fleet.say(f"server {self.fleet.set_name}_{self.index} {what.splitlines()[0]}")

    async def pause(self) -> None:
        """Stop sampling, unless it has stopped; take memory for the weights again."""
        if not self.is_paused:
            self.is_paused = True
            await self.server.pause(self.fleet.pause_mode)
        if "weights" in self.asleep:
            await self.server.wake(["weights"])
            self.asleep.remove("weights")

    async def resume(self) -> None:
        """Sample again. A server that sleeps goes on sleeping."""
        if not self.asleep:
            await self.server.resume()
            self.expect_answers()

    def expect_answers(self) -> None:
        """End a pause; the server's silence is counted from now."""
        self.heard_at = self.answered_at = time.monotonic()
        self.is_paused = False

    async def sleep(self) -> None:
        """Stop sampling and give memory back; a lost server does so when it ends."""
        tags = self.fleet.tags
        if self.state != "lost":
            self.is_paused, self.asleep = True, [*tags]
            if "weights" in tags:
                self.version = None
            try:
                await self.server.sleep(tags)
            except ServerFailed as failure:
                self.lose(str(failure))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOST_TIMEOUT_S):
                while self.state == "lost" and self.server.alive():
                    await asyncio.sleep(POLL_S)

    async def wake(self) -> None:
        """Take the memory again, and sample."""
        try:
            if self.asleep:
                await self.server.wake(self.asleep)
                self.asleep = []
            await self.resume()
        except ServerFailed as failure:
            self.lose(str(failure))


class Fleet:
    """The servers of one set. Only global rank 0 has any; a fleet without servers does nothing."""

    def __init__(
        self,
        set_name: str,
        servers: Mapping[int, Server],
        *,
        loaded: bool = False,
        min_servers: int = 1,
        patience_s: float = 0.0,
        health_timeout_s: float = HEALTH_TIMEOUT_S,
        pause_mode: PauseMode = "retract",
        releases: Releases | None = None,
        controller: Controller | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        """Take servers, by index, that answer already.

        Args:
            loaded: the servers hold the weights to sample from. Otherwise they wait for a publish.
            min_servers: nothing is sampled while fewer serve.
            patience_s: for how many seconds fewer may serve or wait for weights.
            health_timeout_s: seconds in which a silent server must answer /health. Without a GPU
                it has `Server.step_s` more, on a GPU more until its first answer.
            pause_mode: the run's `rollout.pause_mode`.
            releases: what servers give back in their sleep, while the learner has the GPUs that
                they share. A new server sleeps, and gets the weights in the learner's next turn.
                None: the servers do not sleep.
            controller: its loop asks the servers; None: a new one, which lasts as long as the
                process.
            say: prints a line for the user.
        """
        self.controller = controller or Controller()
        self.set_name = set_name
        self._min_servers = min_servers
        self._patience_s = patience_s
        self._health_timeout_s = health_timeout_s
        self.pause_mode = pause_mode
        self.tags = RELEASED[releases] if releases else ()
        self.say = say
        self._watching: Future[None] = Future()
        self.last_loss = "none was started"  # why the newest lost server was given up
        self._too_small_since: float | None = None
        self._num_listed = len(servers)  # in the rosters: they run, or will be started again
        self._members = {
            index: self._member(index, server, "serving" if loaded else "joining")
            for index, server in servers.items()
        }
        self.note_size()

    def watch(self, read: Callable[[], Mapping[int, Server]] | None = None) -> None:
        """Begin to watch the servers in the background, until `close`.

        Args:
            read: returns the servers of the rosters, by index; called several times a second. A
                new server is added; a server that is no longer listed is lost. None: no server is
                replaced.
        """
        self._watching = self.controller.start(self._watch(read))

    def close(self) -> None:
        """Stop watching; the servers keep running."""
        self._watching.cancel()

    def members(self, *states: State) -> list[Member]:
        """Return the servers in these states, by index."""
        members = sorted(self._members.items())
        return [member for _, member in members if member.state in states]

    @property
    def flushes_cache(self) -> bool:
        """Whether servers drop cached prefixes in a publish, as they cannot while requests run."""
        return self.pause_mode == "retract"

    def has_joining(self) -> bool:
        """Return whether to interrupt sampling and give a joining server the current weights."""
        return self.needs_admission() if self.tags else bool(self.members("joining"))

    def needs_admission(self) -> bool:
        """Return whether nothing can be sampled before a joining server gets the weights."""
        joining, serving = self.members("joining"), self.members("serving")
        return bool(joining) and len(serving) < self._min_servers

    async def ask(
        self,
        tokens: int,
        request: Callable[[Server], Awaitable[T]],
        prefer: Server | None = None,
    ) -> T:
        """Ask the server with the fewest tokens outstanding, and return its answer.

        But `prefer`, whose cache has the beginning of the prompt, is asked if it serves and has
        fewer than `FEW_REQUESTS` requests or at most twice as many tokens outstanding.

        If that server is lost, another is asked; if no server serves, this waits.

        Args:
            tokens: an upper bound of the request's tokens, prompt and completions.
            request: sends the request. It raises `ServerFailed` if the server did not answer, and
                `ServerBusy` if it did not take the request.

        Raises:
            FleetTooSmall: too few servers serve.
            RequestRefused: `request` raised it.
        """
        while True:
            member = await self._choose(tokens, prefer)
            asking = asyncio.ensure_future(request(member.server))
            member.requests.add(asking)
            try:
                await asyncio.wait({asking})
                if asking.cancelled():
                    continue  # `Member.lose` did that
                result = asking.result()
                member.answered_at, member.has_answered = time.monotonic(), True
                return result
            except RequestRefused:  # the server is not lost: another would refuse too
                raise
            except ServerFailed as failure:
                member.lose(str(failure))
            except ServerBusy:
                await asyncio.sleep(SILENT_S)
            finally:
                asking.cancel()
                member.requests.discard(asking)
                member.outstanding -= tokens
                member.heard_at = time.monotonic()

    async def _choose(self, tokens: int, prefer: Server | None) -> Member:
        """Wait for a server and add `tokens` to what it owes."""
        while True:
            serving = self.members("serving")
            if len(serving) >= self._min_servers:
                member = min(serving, key=lambda member: member.outstanding)
                most = 2 * (member.outstanding + tokens)
                for other in serving:
                    is_free = other.outstanding <= most or len(other.requests) < FEW_REQUESTS
                    if other.server is prefer and is_free:
                        member = other
                if not member.outstanding:  # silence counts from the first prompt that it owes
                    member.heard_at = member.answered_at = time.monotonic()
                member.outstanding += tokens
                return member
            self.check_size()
            await asyncio.sleep(POLL_S)

    def check_size(self) -> None:
        """Raise `FleetTooSmall` if servers were too few for too long, or if no more will come."""
        if self._watching.done():
            self._watching.result()  # raises what ended it
        since = self._too_small_since
        if since is None:
            return
        number = len(self.members("serving", "joining"))
        few = f"{number} of at least {self._min_servers} {self.set_name} servers"
        if self._num_listed < self._min_servers:
            raise FleetTooSmall(f"{few}, and no more will start; {self.last_loss}")
        if time.monotonic() - since > self._patience_s:
            raise FleetTooSmall(f"{few} for {self._patience_s:g} s; {self.last_loss}")

    def _member(self, index: int, server: Server, state: State) -> Member:
        return Member(self, index, server, state, is_paused=bool(self.tags), asleep=[*self.tags])

    def note_size(self) -> None:
        """Note since when too few servers serve or wait for weights, after one's change."""
        if len(self.members("serving", "joining")) >= self._min_servers:
            self._too_small_since = None
        elif self._too_small_since is None:
            self._too_small_since = time.monotonic()

    async def _watch(self, read: Callable[[], Mapping[int, Server]] | None) -> None:
        probes: dict[Member, asyncio.Task[None]] = {}
        try:
            while True:
                if read:
                    with contextlib.suppress(OSError):  # a shared file system may falter
                        self._compare(await asyncio.to_thread(read))
                probes = {member: probe for member, probe in probes.items() if not probe.done()}
                self._await_lost_ones()
                for member in self.members("lost"):
                    member.report()
                for member in self.members("starting", "joining", "serving"):
                    if not member.server.alive():
                        member.lose(str(member.server.failed("died")))
                    elif self._stalls(member):
                        what = f"has answered no prompt for {STALLED_S / 3600:g} h"
                        member.lose(str(member.server.failed(what)))
                    elif member not in probes and self._is_doubtful(member):
                        probes[member] = asyncio.create_task(self._probe(member))
                await asyncio.sleep(POLL_S)
        finally:
            await end(probes.values())

    def _compare(self, servers: Mapping[int, Server]) -> None:
        """Add the servers that are new in the rosters, and lose the ones that left them."""
        self._num_listed = len(servers)
        for index, member in list(self._members.items()):
            if index not in servers:
                member.lose("it will not be started again")
        for index, server in servers.items():
            known = self._members.get(index)
            name = self.set_name
            if known and incarnation(name, index, known.server) == incarnation(name, index, server):
                continue
            if known:
                known.lose("it was started again")
            # A colocated server is listed once it is up.
            self._members[index] = self._member(
                index, server, "joining" if self.tags else "starting"
            )
            self.note_size()

    def _await_lost_ones(self) -> None:
        """Replace each lost server that was started elsewhere by a starting one at the same URL."""
        for member in self.members("lost"):
            if member.server.is_remote:
                index, server = member.index, member.server
                self._members[index] = self._member(index, server, "starting")

    @staticmethod
    def _is_doubtful(member: Member) -> bool:
        silent_s = time.monotonic() - member.heard_at
        if member.state == "starting":
            return not member.server.is_remote or silent_s > ASK_AGAIN_S
        return bool(member.requests) and not member.is_paused and silent_s > SILENT_S

    @staticmethod
    def _stalls(member: Member) -> bool:
        owes = bool(member.requests) and not member.is_paused
        return owes and time.monotonic() - member.answered_at > STALLED_S

    async def _probe(self, member: Member) -> None:
        asked_at = time.monotonic()
        problem = ""
        server = member.server
        timeout_s = self._health_timeout_s + server.step_s
        if server.gpus and not member.has_answered:
            timeout_s = FIRST_ANSWER_TIMEOUT_S
        try:
            if member.state == "starting" and server.is_remote:
                problem = "" if await revived(server, timeout_s) else "does not resume"
            else:
                answer = await server.ask("GET", "/health", timeout_s=timeout_s)
                if not answer.is_success:
                    problem = f"answers /health with status {answer.status}"
        except NoAnswer as error:
            problem = str(error)
        is_starting = member.state == "starting"
        if is_starting and not problem:
            member.change("joining")
        if is_starting or not problem:
            member.heard_at = time.monotonic()
        elif not member.is_paused and member.heard_at <= asked_at:  # no prompt answered since
            member.lose(str(member.server.failed(problem)))
