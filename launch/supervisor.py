"""The supervisor of a node: it starts, watches and ends the servers and learner ranks on it.

The plan of the run says what a node has. One machine is a plan of one node, whose supervisor is the
launcher itself (`launch/local.py`). In a Slurm job each node has one (`launch/slurm_node.py`).

It starts the node's servers and lists them in the node's roster. Once all nodes have listed theirs,
it starts the ranks. A server that dies is started again (`launch/servers.py`). A rank that dies
ends the supervisor, and with it the run. The kernel ends everything whose supervisor is killed.

What a signal does depends on what it asks for and on the phase. On one machine INT, TERM, QUIT and
HUP ask to end, and USR1 asks to stop early. In a job USR2 asks to end; USR1 and TERM, which Slurm
sends to every process of a node, ask to stop early.

    phase       to end                             to stop early
    imports     ends at once                       ends after the imports, with code 75
    servers     ends what has started              the same, with code 75
    ranks       ends ranks, then servers           ranks finish their step, save, end with code 75
    ending      is ignored                         is ignored

A node without ranks ignores what asks to stop early: its servers are needed for that.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from qurl_megatron import device
from qurl_megatron.config.schema import SAID_WHY, STOPPED_EARLY
from qurl_megatron.config.servers import server_specs
from qurl_megatron.launch.placement import JobPlan, NodePlan
from qurl_megatron.launch.servers import Attempt, Servers
from qurl_megatron.machine.output import tail
from qurl_megatron.memory.host import settle_run
from qurl_megatron.rollout.preload import (
    Program,
    Started,
    how_it_ended,
    preload,
    start,
)
from qurl_megatron.rollout.server import LOOPBACK, POLL_S, ServerFailed

LEARNER = "qurl_megatron.loop.train"
# Exit codes of a rank after which the others are waited for; None: it still runs.
KNOWN_CODES = (None, 0, STOPPED_EARLY, SAID_WHY)
REMIND_S = 5.0  # between two requests to stop; a starting rank ignores those to stop early
END_REQUESTS = 4  # to a rank, REMIND_S apart, before it is killed


class Signals:
    """What signals have asked this process for, since this was made."""

    def __init__(self, to_end: Collection[int], to_stop: Collection[int]) -> None:
        """Handle two sets of signals, which may have been blocked until now."""
        self.ended_by = 0  # the first signal that asked to end
        self.asks_to_stop = False
        self.to_stop = to_stop
        self._is_importing = False
        self.handled = {*to_end, *to_stop}
        for number in self.handled:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.handled)

    def __bool__(self) -> bool:
        return bool(self.ended_by) or self.asks_to_stop

    def preload(self, log_file: Path, *modules: str) -> None:
        """Import what programs share; a signal that asks to end interrupts that."""
        with contextlib.suppress(SystemExit):
            self._is_importing = True
            preload(log_file, *modules)
            self._is_importing = False

    def _receive(self, number: int, _: object) -> None:
        if number in self.to_stop:
            self.asks_to_stop = True
            return
        self.ended_by = self.ended_by or number
        if self._is_importing:
            self._is_importing = False  # later, an exception might lose a process being started
            raise SystemExit


def supervise(
    attempt: Attempt,
    plan: JobPlan,
    node: NodePlan,
    signals: Signals,
    host: str = LOOPBACK,
    cpus: Sequence[Sequence[int]] = (),
) -> int:
    """Run a node's part of a plan until its ranks are done or a signal ends it.

    Return an exit code: the highest of the ranks, 1 if one of them died, 128 plus the number of the
    signal that asked to end, and 75 if one asked to stop before the ranks had started.

    Args:
        host: the address at which the servers listen.
        cpus: the CPUs of each rank, in the order of ranks; none: all of the node's.

    Raises:
        ConfigError: the servers do not fit in the memory of a machine without a GPU.
        PreloadFailed: what programs share could not be imported.
        ServerFailed: a server failed during its first start, here or on another node.
    """
    if not node.ranks:
        ignore(signals.to_stop)  # the learner needs the servers of this node for that
    ranks: dict[int, Started] = {}
    roster = attempt.roster(node.name)
    with contextlib.closing(Servers(attempt, roster, host, plan.api_key)) as servers:
        try:
            if node.servers:
                log = attempt.logs / f"preload_{node.name}.log"
                signals.preload(log, *([LEARNER] if node.ranks else []))
                if not signals:
                    start_servers(servers, node, signals)
                servers.save()
            if node.ranks:
                rosters = await_rosters(attempt, plan, servers, signals)
                programs = rank_programs(attempt, plan, node, rosters, cpus, signals.to_stop)
                for rank, program in programs.items():
                    if not signals:
                        ranks[rank] = start(program)
            return watch(ranks, servers, signals, has_ranks=bool(node.ranks))
        finally:
            ignore(signals.handled)  # also while Python exits
            end_ranks(list(ranks.values()))


def ignore(numbers: Collection[int]) -> None:
    """Ignore signals from now on."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def start_servers(servers: Servers, node: NodePlan, signals: Signals) -> None:
    """Start a node's servers, which the caller ends on a failure.

    They start at the same time, except on a GPU that they share. There one starts after the other,
    because each takes a fraction of the memory that it finds free.
    """
    config = servers.attempt.config
    for line in settle_run(config, [name for name, _, _ in node.servers], node.ranks):
        print(f"qurl: {line}", file=sys.stderr, flush=True)
    specs = {(spec.set_name, spec.index): spec for spec in server_specs(config)}
    used = set(range(node.ranks))
    for set_name, index, first_gpu in node.servers:
        if signals:
            return
        spec = specs[set_name, index]
        gpus = range(first_gpu, first_gpu + spec.server.tensor_parallel_size)
        servers.start(spec, gpus if device.num_gpus() else [])
        is_shared = bool(device.num_gpus() and used & set(gpus))
        while (is_shared or servers.are_colocated) and not (servers.are_ready or signals):
            servers.check()
            time.sleep(POLL_S)
        used |= set(gpus)


def await_rosters(
    attempt: Attempt, plan: JobPlan, servers: Servers, signals: Signals
) -> list[Path]:
    """Wait until every node has listed its servers, or a signal comes; return the rosters.

    Raises:
        ServerFailed: a node has not listed them in the time that they may take one by one.
    """
    most = max(len(node.servers) for node in plan.nodes)
    timeout_s = attempt.config.rollout.server.start_timeout_s * most
    rosters = [attempt.roster(node.name) for node in plan.nodes if node.servers]
    deadline = time.monotonic() + timeout_s
    while (missing := [roster for roster in rosters if not roster.exists()]) and not signals:
        if time.monotonic() > deadline:
            raise ServerFailed(f"no servers after {timeout_s:.0f} s: {missing[0]} is missing")
        servers.check()
        time.sleep(POLL_S)
    return rosters


def rank_programs(
    attempt: Attempt,
    plan: JobPlan,
    node: NodePlan,
    rosters: Sequence[Path],
    cpus: Sequence[Sequence[int]],
    ignored: Collection[int],
) -> dict[int, Program]:
    """Return the programs of a node's learner ranks, by global rank.

    Args:
        cpus: as in `supervise`.
        ignored: signals that would kill a rank before it can handle them.
    """
    run_dir, learner = str(attempt.config.run_dir), attempt.config.learner
    first = sum(each.ranks for each in plan.nodes[: plan.nodes.index(node)])
    shared = {
        "WORLD_SIZE": str(learner.world_size),
        "MASTER_ADDR": plan.master_address,
        "MASTER_PORT": str(plan.master_port),
        "OMP_NUM_THREADS": str(learner.threads_per_rank),
    }
    return {
        first + local: Program(
            LEARNER,
            [run_dir, *map(str, rosters)],
            title=f"{LEARNER} {run_dir}",
            log_file=attempt.rank_log(first + local),
            environment={**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)},
            inherits_stdout=first + local == 0,  # rank 0 shows the run's progress
            cpus=cpus[local] if cpus else [],
            ignored_signals=ignored,
        )
        for local in range(node.ranks)
    }


def watch(ranks: dict[int, Started], servers: Servers, signals: Signals, has_ranks: bool) -> int:
    """Keep the servers running until all ranks are done, one dies or a signal ends the run.

    Return the exit code of `supervise`.

    Raises:
        ServerFailed: a server did not start.
    """
    reminded_at = -REMIND_S
    while True:
        if signals.ended_by:
            if has_ranks:
                name = signal.Signals(signals.ended_by).name
                text = f"\ninterrupted by {name}: stopping the learner and the servers"
                print(text, file=sys.stderr, flush=True)
            return 128 + signals.ended_by
        if signals.asks_to_stop and time.monotonic() >= reminded_at + REMIND_S:
            reminded_at = time.monotonic()
            for started in ranks.values():
                started.send_signal(signal.SIGUSR1)
        codes = {rank: started.poll() for rank, started in ranks.items()}
        for rank, code in codes.items():
            if code not in KNOWN_CODES:
                log = servers.attempt.rank_log(rank)
                print(
                    f"\nqurl: learner rank {rank} ended ({how_it_ended(ranks[rank].pid)}); the end "
                    f"of {log}:\n{tail(log)}",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
        done = [code for code in codes.values() if code is not None]
        if has_ranks and len(done) == len(ranks):
            # Without a rank, a request to stop came before any was started.
            return 1 if SAID_WHY in done else max(done, default=STOPPED_EARLY)
        servers.check()
        time.sleep(POLL_S)


def end_ranks(ranks: Sequence[Started]) -> None:
    """Ask ranks to end, and kill the ones that go on."""
    # A request is lost if it comes while Python runs code that ignores exceptions, such as
    # logging's functions after a fork. So it is repeated.
    for _ in range(END_REQUESTS):
        for rank in ranks:
            rank.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + REMIND_S
        while _running(ranks) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
        # The process group holds the children that a killed rank leaves behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    while _running(ranks):
        time.sleep(POLL_S)


def _running(ranks: Sequence[Started]) -> bool:
    return None in [rank.poll() for rank in ranks]
