"""The servers that one process starts and keeps running.

A server that dies, or that the learner reports hung, is killed and started again, and the roster is
written again. There are two limits:
- A server that fails during its first start is an error of the configuration or of the machine:
  `check` raises, and the run ends.
- A server that has failed more than MAX_RESTARTS times within an hour is given up. It is then no
  longer in the roster, and the learner goes on with the others, if they are enough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qurl_megatron.launch.attempt import Attempt
from qurl_megatron.launch.placement import ServerSpec
from qurl_megatron.preload import Preload
from qurl_megatron.process import tail
from qurl_megatron.rollout.roster import Incarnation, incarnation, reported_lost, save_roster
from qurl_megatron.rollout.server import LOOPBACK, Server, answers

MAX_RESTARTS = 3
RESTART_WINDOW_S = 3600.0
ASK_S = 1.0  # between two questions to a starting server whether it answers


class RestartLimit:
    """Allows at most MAX_RESTARTS restarts of one thing within RESTART_WINDOW_S."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def allows(self) -> bool:
        """Count a restart and return True, or return False if it would be one too many."""
        now = time.monotonic()
        self._times = [then for then in self._times if now - then < RESTART_WINDOW_S]
        if len(self._times) >= MAX_RESTARTS:
            return False
        self._times.append(now)
        return True


@dataclass
class _Member:
    """One server of a set: its present process, or its last one while it waits for a restart."""

    spec: ServerSpec
    gpus: Sequence[int]
    server: Server
    limit: RestartLimit = field(default_factory=RestartLimit)
    restarts: int = 0
    is_ready: bool = False  # this process has answered
    waits: bool = False  # for its restart
    started_at: float = 0.0  # clock of time.monotonic
    asked_at: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.spec.set_name}_{self.spec.index}"

    @property
    def incarnation(self) -> Incarnation:
        return incarnation(self.spec.set_name, self.spec.index, self.server)


class Servers:
    """The servers of an attempt that this process starts, restarts and ends."""

    def __init__(
        self,
        attempt: Attempt,
        roster: Path,
        *,
        host: str = LOOPBACK,
        api_key: str | None = None,
        preload: Preload | None = None,
    ) -> None:
        """Start none yet. `roster` is the file to write; for the rest see `start_server`."""
        self._attempt = attempt
        self._roster = roster
        self._host = host
        self._api_key = api_key
        self._preload = preload
        self._members: list[_Member] = []

    def start(self, spec: ServerSpec, gpus: Sequence[int]) -> Server:
        """Start a server for the first time; it becomes ready in the background."""
        restarts = self._attempt.num_starts(spec)  # by a process that was in this one's place
        member = _Member(spec, gpus, self._start(spec, gpus), restarts=restarts)
        member.started_at = time.monotonic()
        self._members.append(member)
        return member.server

    def save(self) -> None:
        """Write the roster."""
        servers: dict[str, dict[int, Server]] = {}
        for member in self._members:
            servers.setdefault(member.spec.set_name, {})[member.spec.index] = member.server
        save_roster(self._roster, servers)

    def check(self) -> None:
        """Restart the servers that have died or hang, and write the roster; call it often.

        Raises:
            ServerFailed: a server died during its first start, or did not come up in time.
            PreloadFailed: the process that servers are forked from died.
        """
        before = [member.server for member in self._members]
        reported = reported_lost(self._attempt.logs)
        for member in list(self._members):
            if not member.waits and (failure := self._failure(member, reported)):
                self._end(member, failure)
        for member in self._members:
            if member.waits and not self._shares_gpu_with_a_start(member):
                member.server = self._start(member.spec, member.gpus)
                member.restarts += 1
                member.waits, member.started_at = False, time.monotonic()
        if before != [member.server for member in self._members]:
            self.save()

    def close(self) -> None:
        """End every server."""
        for member in self._members:
            member.server.stop()

    def _start(self, spec: ServerSpec, gpus: Sequence[int]) -> Server:
        return self._attempt.start(
            spec, host=self._host, api_key=self._api_key, gpus=gpus, preload=self._preload
        )

    def _failure(self, member: _Member, reported: set[Incarnation]) -> str:
        """Return what is wrong with a server, or an empty string."""
        server, now = member.server, time.monotonic()
        if not server.alive():
            starting = "" if member.is_ready else "while starting "
            return f"died {starting}({how_it_ended(self._exit_code(server.pid))})"
        if member.incarnation in reported:
            return "does not answer the learner"
        if member.is_ready or now < member.asked_at + ASK_S:
            return ""
        member.asked_at = now
        timeout_s = member.spec.server.start_timeout_s
        if answers(server):
            member.is_ready = True
            if member.restarts:
                waited_s = now - member.started_at
                print(f"qurl: server {member.name} answers again, {waited_s:.0f} s after its start")
        elif now > member.started_at + timeout_s:
            return f"did not come up in {timeout_s:.0f} s"
        return ""

    def _end(self, member: _Member, failure: str) -> None:
        """End a failed server, and mark it for a restart or give it up."""
        server = member.server
        server.stop()
        if not member.is_ready and not member.restarts:
            raise server.failed(failure)
        member.is_ready = False
        if member.limit.allows():
            member.waits = True
            print(
                f"qurl: server {member.name} {failure}; restarting ({member.restarts + 1}); "
                f"log {server.log_file}",
                flush=True,
            )
        else:
            self._members.remove(member)
            print(
                f"qurl: server {member.name} {failure}; not restarting it, after {MAX_RESTARTS} "
                f"restarts within {RESTART_WINDOW_S / 60:.0f} minutes; {server.log_file} ends:\n"
                f"{tail(Path(server.log_file))}",
                flush=True,
            )

    def _shares_gpu_with_a_start(self, member: _Member) -> bool:
        """Return True if another server is starting on one of a server's GPUs.

        Each takes a fraction of the memory it finds free, so one starts after the other.
        """
        return any(
            set(member.gpus) & set(other.gpus)
            for other in self._members
            if other is not member and not other.waits and not other.is_ready
        )

    def _exit_code(self, pid: int) -> int | None:
        """Return the exit code of a server's process that has ended; None if it is not known."""
        if self._preload:
            return self._preload.signal(pid, 0)
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1])
        except ChildProcessError:  # the subprocess module has collected the code
            return None


def how_it_ended(code: int | None) -> str:
    """Describe a process's exit code; None if it is not known."""
    if code is None:
        return "exit code unknown"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
