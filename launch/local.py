"""Start a run on this machine, watch it, and leave no process behind.

The launcher owns every process of the run: the servers and the learner ranks. It ends them all when
the learner is done, when a rank dies, on Ctrl-C, on SIGTERM, and when its terminal closes. A server
that dies is started again (`launch/servers.py`). If the launcher itself is killed, the kernel ends
them.
"""

import contextlib
import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from qurl_megatron import device
from qurl_megatron.config.schema import STOPPED_EARLY, Config
from qurl_megatron.config.text import load
from qurl_megatron.launch.bad_input import exit_on_bad_input
from qurl_megatron.launch.placement import place_servers, server_specs
from qurl_megatron.launch.serve import release_servers_at, save_servers_at
from qurl_megatron.launch.servers import Attempt, Servers
from qurl_megatron.launch.status import claim, how_to_resume
from qurl_megatron.planning.host import servers_here, settle_run
from qurl_megatron.process import NO_THREADS, ending_signals, free_port, outlive_output, tail
from qurl_megatron.rollout.preload import (
    PreloadFailed,
    Program,
    Started,
    how_it_ended,
    preload,
    start,
)
from qurl_megatron.rollout.server import ServerFailed, wait_ready

LEARNER = "qurl_megatron.loop.train"
POLL_S = 0.2
GOOD_CODES = (None, 0, STOPPED_EARLY)  # exit codes of a rank: still running, done, stopped early
REMIND_S = 5.0  # between two requests to stop; a starting rank ignores those to stop early
STOP_REQUESTS = 4  # to a rank, REMIND_S apart, before it is killed


def run(config: Config) -> NoReturn:
    """Turn this process into the launcher of `config`, whose directory holds its config.yaml.

    The launcher is a fresh program: it has none of the threads that prepared the run, which forks
    would lose. Signals wait until it handles them.
    """
    environment = {} if device.num_gpus() else NO_THREADS
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals() | {signal.SIGUSR1})
    words = [sys.executable, "-m", __name__, str(config.run_dir)]
    os.execve(sys.executable, words, {**os.environ, **environment})


def main(run_dir: str) -> None:
    """Launch a run: `python -m qurl_megatron.launch.local RUN_DIR`."""
    outlive_output(Path(run_dir))
    sys.exit(launch(load(Path(run_dir) / "config.yaml")))


def launch(config: Config) -> int:
    """Launch `config` and return an exit code once its run has ended.

    The code is 0 when the run is complete, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP,
    and 75 when SIGUSR1 asked it to stop early, or too few servers are left: it has then saved a
    checkpoint, or not started yet. It is 1 when a learner rank died or a server did not start; the
    last lines of its log are then printed. It is 2, and nothing is started, when another launcher
    owns the run. Whatever ended a run that is not complete, the last line says how to resume it.
    """
    with exit_on_bad_input():
        owner = claim(config.run_dir)
    code = 1
    with owner:
        try:
            with exit_on_bad_input():  # such as a disk that is full
                code = _launch(config)
        finally:
            if code:
                print(how_to_resume(config.run_dir), file=sys.stderr, flush=True)
    return code


def _launch(config: Config) -> int:
    received: list[int] = []
    is_importing = False

    def receive(number: int, _: object) -> None:
        nonlocal is_importing
        received.append(number)
        if is_importing and number != signal.SIGUSR1:
            is_importing = False  # later, an exception might lose a process that is being started
            raise SystemExit

    handled = ending_signals() | {signal.SIGUSR1}
    for number in handled:
        signal.signal(number, receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    print(f"run directory {config.run_dir}", flush=True)
    with exit_on_bad_input():
        save_servers_at(config)
    attempt = Attempt.create(config)
    ranks: list[Started] = []
    with closing(Servers(attempt, config.run_dir / "servers.json")) as servers:
        try:
            with contextlib.suppress(SystemExit):
                is_importing = True
                preload(attempt.logs / "preload.log", LEARNER)
                is_importing = False
            if not received:
                _start_servers(servers, received)
            servers.save()
            if not received:
                for program in _rank_programs(attempt):
                    ranks.append(start(program))
            return _watch(ranks, servers, received)
        except (ServerFailed, PreloadFailed) as failure:
            print(f"\nqurl: {failure}", file=sys.stderr)
            return 1
        finally:
            _stop_ranks(ranks)
            release_servers_at(config)


def _start_servers(servers: Servers, received: list[int]) -> None:
    """Start the run's servers, which the caller ends on a failure.

    Servers start at the same time, except on a GPU they share. There one starts after the other,
    because each takes a fraction of the memory it finds free.

    Raises:
        ConfigError: they do not fit in the memory of a machine without a GPU.
        ServerFailed: a server that others had to wait for did not start.
    """
    config = servers.attempt.config
    settle_run(config, servers_here(config), config.learner.world_size)
    placed = place_servers(config, device.num_gpus())
    used = set(range(config.learner.world_size))
    for spec in server_specs(config):
        gpus = placed[spec.set_name][spec.index]
        server = servers.start(spec, gpus)
        if config.rollout.placement == "shared":
            while not (servers.are_ready or received):
                servers.check()
                time.sleep(POLL_S)
        elif used & set(gpus):
            wait_ready([server], spec.server.start_timeout_s, lambda: bool(received))
        used |= set(gpus)


def _rank_programs(attempt: Attempt) -> list[Program]:
    config, run_dir = attempt.config, str(attempt.config.run_dir)
    world_size = config.learner.world_size
    shared = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(config.learner.threads_per_rank),
    }
    return [
        Program(
            LEARNER,
            [run_dir],
            title=f"{LEARNER} {run_dir}",
            log_file=attempt.rank_log(rank),
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            inherits_stdout=rank == 0,  # rank 0 shows the run's progress
            ignored_signals=[signal.SIGUSR1],  # would kill a rank that cannot handle it yet
        )
        for rank in range(world_size)
    ]


def _watch(ranks: list[Started], servers: Servers, received: list[int]) -> int:
    """Keep the servers running until all ranks are done, one dies or a signal ends the run.

    Return the exit code.

    Raises:
        ServerFailed: a server did not start.
    """
    reminded_at = -REMIND_S
    while True:
        ending = [number for number in received if number != signal.SIGUSR1]
        if ending:
            name = signal.Signals(ending[0]).name
            text = f"\ninterrupted by {name}: stopping the learner and the servers"
            print(text, file=sys.stderr, flush=True)
            return 128 + ending[0]
        if received and time.monotonic() >= reminded_at + REMIND_S:
            reminded_at = time.monotonic()
            for rank in ranks:
                rank.send_signal(signal.SIGUSR1)
        codes = [rank.poll() for rank in ranks]
        failed = next((n for n, code in enumerate(codes) if code not in GOOD_CODES), None)
        if failed is not None:
            log = servers.attempt.rank_log(failed)
            print(
                f"\nqurl: learner rank {failed} ended ({how_it_ended(ranks[failed].pid)}); the end "
                f"of {log}:\n{tail(log)}",
                file=sys.stderr,
            )
            return 1
        if None not in codes:
            # Without a rank, SIGUSR1 came before any was started.
            return max((code for code in codes if code is not None), default=STOPPED_EARLY)
        servers.check()
        time.sleep(POLL_S)


def _stop_ranks(ranks: list[Started]) -> None:
    # A request is lost that comes while Python calls what ignores exceptions, such as logging's
    # functions after a fork.
    for _ in range(STOP_REQUESTS):
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
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


def _running(ranks: list[Started]) -> bool:
    return None in [rank.poll() for rank in ranks]


if __name__ == "__main__":
    main(sys.argv[1])
