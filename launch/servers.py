"""One start of a run (an attempt), and the servers that a supervisor keeps running in it.

A server that dies, or that the learner reports hung, is killed and started again, and the roster is
written again. There are two limits:
- A server that fails during its first start is an error of the configuration or of the machine:
  `check` raises, and the run ends.
- A server that has failed more than MAX_RESTARTS times within an hour is given up. It is then no
  longer in the roster, and the learner goes on with the others, if they are enough.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import Config
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.launch.owner import logs_of, newest_attempt
from qurl_megatron.machine.network import make_key
from qurl_megatron.machine.output import tail
from qurl_megatron.machine.processes import GpuLock
from qurl_megatron.rollout.preload import exit_code, how_it_ended
from qurl_megatron.rollout.roster import Incarnation, incarnation, reported_lost, save_roster
from qurl_megatron.rollout.server import LOOPBACK, RELEASED, Server, ServerFailed, answers
from qurl_megatron.rollout.start import start

SEED_STRIDE = 100_003  # between the seeds of two servers, or of a server in two attempts
RESTART_SEED_STRIDE = 1_009  # between the seeds of a server's starts in one attempt
MAX_RESTARTS = 3
RESTART_WINDOW_S = 3600.0


@dataclass(frozen=True)
class Attempt:
    """The first start of a run, which has number 0, or its `number`-th resume."""

    config: Config
    number: int

    @staticmethod
    def create(config: Config) -> Attempt:
        """Create the log directory of the next attempt; return the attempt."""
        is_first = not (config.run_dir / "logs").exists()
        attempt = Attempt(config, 0 if is_first else 1 + newest_attempt(config.run_dir))
        attempt.logs.mkdir()
        return attempt

    @property
    def logs(self) -> Path:
        """The log directory."""
        return logs_of(self.config.run_dir, self.number)

    def roster(self, node: str) -> Path:
        """Return the file in which a node's supervisor lists its servers."""
        return self.logs / f"servers_{node}.json"

    def rank_log(self, rank: int) -> Path:
        """Return the log file of a learner rank."""
        return self.logs / f"learner_rank{rank}.log"

    def server_log(self, spec: ServerSpec, restarts: int) -> Path:
        """Return the log of a server's first start, or of its `restarts`-th restart."""
        suffix = f"_restarted_{restarts}" if restarts else ""
        return self.logs / f"server_{spec.set_name}_{spec.index}{suffix}.log"

    def num_starts(self, spec: ServerSpec) -> int:
        """Return how often a server was started in this attempt, which its logs show.

        A supervisor that takes the place of a dead one continues its count.
        """
        restarted = self.server_log(spec, 0).stem + "_restarted_*.log"
        return self.server_log(spec, 0).exists() + len(list(self.logs.glob(restarted)))

    def server_seed(self, index: int, restarts: int = 0) -> int:
        """Return the random seed of a server, different in each of its starts.

        A server does not save its random state. With the same seed it would sample again what it
        sampled before.
        """
        start = self.number * max(1, self.config.rollout.servers) + index
        return self.config.seed + SEED_STRIDE * start + RESTART_SEED_STRIDE * restarts


@dataclass
class RestartLimit:
    """Allows at most MAX_RESTARTS restarts of one thing within RESTART_WINDOW_S."""

    times: list[float] = field(default_factory=list)  # of restarts, by time.monotonic

    def allows(self) -> bool:
        """Count a restart and return True, or return False if it would be one too many."""
        now = time.monotonic()
        self.times = [then for then in self.times if now - then < RESTART_WINDOW_S]
        is_allowed = len(self.times) < MAX_RESTARTS
        if is_allowed:
            self.times.append(now)
        return is_allowed


@dataclass
class _Slot:
    """The place of one server: its present process, or its last one until it is started again."""

    spec: ServerSpec
    gpus: Sequence[int]
    server: Server
    listed: Server  # in the roster: this process, or the one before while this one starts
    limit: RestartLimit = field(default_factory=RestartLimit)
    is_ready: bool = False  # this process has answered
    waits: bool = False  # for its restart
    started_at: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return f"{self.spec.set_name}_{self.spec.index}"


@dataclass
class Servers:
    """The servers of an attempt that this process starts, restarts and ends; at first none."""

    attempt: Attempt
    roster: Path  # the file to write
    host: str = LOOPBACK  # for this and the next see `rollout/start.py`
    api_key: str = field(default_factory=make_key)
    _slots: list[_Slot] = field(default_factory=list)
    _has_turn: bool = False  # while a server starts on GPUs that it shares with the learner

    def start(self, spec: ServerSpec, gpus: Sequence[int]) -> None:
        """Start a server for the first time; it becomes ready in the background."""
        self._may_start()  # takes the GPUs, if learner and servers share them
        server = self._start(spec, gpus)
        self._slots.append(_Slot(spec, gpus, server, listed=server))

    def _may_start(self) -> bool:
        """Return whether a server may start; a colocated one waits for the servers' turn."""
        if self.are_colocated and not self._has_turn:
            self._has_turn = self._turn.try_to_take()
        return self._has_turn or not self.are_colocated

    @property
    def are_ready(self) -> bool:
        """Whether all servers have answered."""
        return all(slot.is_ready for slot in self._slots)

    def save(self) -> None:
        """Write the roster."""
        servers: dict[str, dict[int, Server]] = {}
        for slot in self._slots:
            servers.setdefault(slot.spec.set_name, {})[slot.spec.index] = slot.listed
        save_roster(self.roster, servers)

    def check(self) -> None:
        """Restart the servers that have died or hang, and write the roster; call it often.

        Raises:
            ServerFailed: a server died during its first start, or did not come up in time.
        """
        before = [slot.listed for slot in self._slots]
        reported = reported_lost(self.attempt.logs)
        for slot in list(self._slots):
            if not slot.waits and (failure := self._failure(slot, reported)):
                self._end(slot, failure)
        for slot in self._slots:
            if slot.waits and not self._shares_gpu_with_a_start(slot) and self._may_start():
                slot.server = self._start(slot.spec, slot.gpus)
                slot.waits, slot.started_at = False, time.monotonic()
                if not self.are_colocated:
                    slot.listed = slot.server
        if before != [slot.listed for slot in self._slots]:
            self.save()
        if self._has_turn and all(slot.is_ready or slot.waits for slot in self._slots):
            self._turn.release()
            self._has_turn = False

    def close(self) -> None:
        """End every server."""
        for slot in self._slots:
            slot.server.stop()

    def _start(self, spec: ServerSpec, gpus: Sequence[int]) -> Server:
        """Start a server; each of its starts in the attempt has a log and a seed of its own."""
        attempt = self.attempt
        restarts = attempt.num_starts(spec)
        return start(
            spec,
            attempt.server_log(spec, restarts),
            seed=attempt.server_seed(spec.index, restarts),
            host=self.host,
            api_key=self.api_key,
            gpus=gpus,
        )

    def _failure(self, slot: _Slot, reported: set[Incarnation]) -> str:
        """Return what is wrong with a server, or an empty string."""
        server, age_s = slot.server, time.monotonic() - slot.started_at
        is_alive = server.alive()
        is_reported = incarnation(slot.spec.set_name, slot.spec.index, server) in reported
        if is_reported or not is_alive:
            code = exit_code(server.pid)  # waits: a dying server first closes its connections
            if is_alive and code is None:
                return "does not answer the learner"
            starting = "" if slot.is_ready else "while starting "
            return f"died {starting}({how_it_ended(server.pid)})"
        timeout_s = slot.spec.server.start_timeout_s
        if not slot.is_ready and answers(server):
            if releases := slot.spec.releases:
                try:
                    # This is a part of the start, and has its limit.
                    asyncio.run(replace(server, timeout_s=timeout_s).sleep(RELEASED[releases]))
                except ServerFailed as failure:
                    return f"did not go to sleep: {failure}"
            slot.is_ready, slot.listed = True, server
            if self.attempt.num_starts(slot.spec) > 1:
                print(f"qurl: server {slot.name} answers again, {age_s:.0f} s after its start")
        return "" if slot.is_ready or age_s < timeout_s else f"did not come up in {timeout_s:.0f} s"

    def _end(self, slot: _Slot, failure: str) -> None:
        """End a failed server, and mark it for a restart or give it up."""
        server, starts = slot.server, self.attempt.num_starts(slot.spec)
        server.stop()
        if not slot.is_ready and starts == 1:
            raise server.failed(failure)
        slot.is_ready = False
        slot.waits = slot.limit.allows()
        if slot.waits:
            outcome = f"restarting ({starts}); log {server.log_file}"
        else:
            self._slots.remove(slot)
            outcome = (
                f"not restarting it, after {MAX_RESTARTS} restarts within "
                f"{RESTART_WINDOW_S / 60:.0f} minutes; {server.log_file} ends:\n"
                f"{tail(Path(server.log_file))}"
            )
        print(f"qurl: server {slot.name} {failure}; {outcome}", flush=True)

    @cached_property
    def _turn(self) -> GpuLock:
        return GpuLock(self.roster.parent)

    @property
    def are_colocated(self) -> bool:
        """Whether the servers share the learner's GPUs, in turn."""
        return self.attempt.config.rollout.placement == "colocated"

    def _shares_gpu_with_a_start(self, slot: _Slot) -> bool:
        """Return True if another server is starting on one of a server's GPUs.

        Each takes a fraction of the memory it finds free, so one starts after the other.
        """
        return any(
            set(slot.gpus) & set(other.gpus)
            for other in self._slots
            if other is not slot and not other.waits and not other.is_ready
        )


def claimed_servers(config: Config) -> AbstractContextManager[None]:
    """Return a context in which the run has claimed the servers of `rollout.servers_at`, if any."""
    if not config.rollout.servers_at:
        return nullcontext()
    elsewhere = needed("elsewhere", "claims", by="rollout.servers_at")
    claimed: AbstractContextManager[None] = elsewhere.claimed(config)
    return claimed
