"""Starts a run on this machine, watches it, and leaves no process behind.

The launcher owns every process of the run: the servers and the learner ranks. It ends them all when
the learner is done, when any of them dies, on Ctrl-C and on SIGTERM; if the launcher itself is
killed, the kernel ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from qurl_megatron import device
from qurl_megatron.config import Config, place_servers
from qurl_megatron.rollout import (
    Server,
    ServerFailed,
    die_with_parent,
    free_port,
    save_servers,
    start_server,
    tail,
    wait_ready,
)

POLL_S = 0.2
STOP_TIMEOUT_S = 20.0


def run(config: Config) -> int:
    """Run `config`, whose directory holds its config.yaml, to its end; returns an exit code.

    0 when the run is complete, 130 after Ctrl-C, 143 after SIGTERM, 1 when one of its processes
    died; the last lines of that process's log are then printed.
    """
    # Noted and not raised: an exception in the midst of starting a process would lose it.
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    print(f"run directory {config.run_dir}", flush=True)
    logs = _new_log_directory(config)
    servers: dict[str, list[Server]] = {}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        try:
            _start_servers(config, logs, servers, received)
        except ServerFailed as failure:
            print(f"\nqurl: {failure}", file=sys.stderr)
            return 1
        save_servers(servers, config.run_dir / "servers.json")
        if not received:
            _start_ranks(config, logs, ranks)
        return _watch(
            ranks, [one for members in servers.values() for one in members], logs, received
        )
    finally:
        _stop_ranks(ranks)
        for members in servers.values():
            for server in members:
                server.stop()


def _start_servers(
    config: Config, logs: Path, servers: dict[str, list[Server]], received: list[int]
) -> None:
    """Fill `servers` as they start, so that those already there are ended if one does not.

    Servers come up side by side, but one after the other on a GPU they share: each takes its part
    of what it finds free.

    Raises:
        ServerFailed: one that others had to wait for did not come up.
    """
    placed = place_servers(config, device.num_gpus())
    used = set(range(config.learner.world_size))
    sets = {"rollout": (config.rollout.server, config.quantization.format)}
    if config.evaluation.wanted:
        sets["evaluation"] = (config.evaluation.server, "bf16")
    for name, (server, weight_format) in sets.items():
        servers[name] = [
            start_server(
                Path(config.model),
                server,
                weight_format,
                context_length=config.rollout.max_length,
                log_file=logs / f"server_{name}.log",
                seed=config.seed,
                gpus=placed[name],
            )
        ]
        if used & set(placed[name]):
            wait_ready(servers[name], server.start_timeout_s, lambda: bool(received))
        used |= set(placed[name])


def _start_ranks(config: Config, logs: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    world_size = config.learner.world_size
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": str(config.learner.threads_per_rank),
    }
    for rank in range(world_size):
        with _rank_log(logs, rank).open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "qurl_megatron.train", str(config.run_dir)],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else log,  # rank 0 shows the run's progress
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is the launcher's to handle
                    preexec_fn=die_with_parent,
                )
            )


def _watch(
    ranks: list[subprocess.Popen[bytes]], servers: list[Server], logs: Path, received: list[int]
) -> int:
    """Wait until every rank is done, any process of the run has died, or a signal is received."""
    while True:
        if received:
            name = signal.Signals(received[0]).name
            print(f"\ninterrupted by {name}: stopping the learner and the servers", file=sys.stderr)
            return 128 + received[0]
        codes = [rank.poll() for rank in ranks]
        dead = next((server for server in servers if not server.alive()), None)
        if dead is not None:
            return _report(f"server {dead.url} died", Path(dead.log_file))
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            return _report(
                f"learner rank {failed} ended with code {codes[failed]}", _rank_log(logs, failed)
            )
        if all(code == 0 for code in codes):
            return 0
        time.sleep(POLL_S)


def _report(what: str, log_file: Path) -> int:
    print(f"\nqurl: {what}; the end of {log_file}:\n{tail(log_file)}", file=sys.stderr)
    return 1


def _stop_ranks(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
        with contextlib.suppress(ProcessLookupError):  # what a killed rank had started
            os.killpg(rank.pid, signal.SIGKILL)


def _new_log_directory(config: Config) -> Path:
    """`logs`, and `logs/resumed_N` for each time the run is gone on with."""
    logs = config.run_dir / "logs"
    if logs.exists():
        logs = logs / f"resumed_{1 + len(list(logs.glob('resumed_*')))}"
    logs.mkdir()
    return logs


def _rank_log(logs: Path, rank: int) -> Path:
    return logs / f"learner_rank{rank}.log"
