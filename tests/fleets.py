"""Servers whose process is this one, and fleets of them: no engine is started."""

import os
import socket
from dataclasses import replace
from pathlib import Path

from qurl_megatron.machine.processes import start_ticks
from qurl_megatron.rollout.fleet import Fleet, State
from qurl_megatron.rollout.server import Server
from waiting import wait_until


def make_server(
    index: int, logs: Path, *, url: str = "http://127.0.0.1:9", **fields: object
) -> Server:
    """Return a server whose process is this one."""
    log = logs / f"server_{index}.log"
    log.write_text("the log\n")
    server = Server(
        url=url,
        api_key="the key of a test",
        machine=socket.gethostname(),
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        tensor_parallel_size=1,
        gpus=[],
        log_file=str(log),
        scratch_dir=str(logs),
    )
    return replace(server, **fields)  # type: ignore[arg-type]


def make_fleet(logs: Path, number: int = 2, **options: object) -> Fleet:
    servers = {index: make_server(index, logs, url=f"http://{index}") for index in range(number)}
    return Fleet("rollout", servers, **{"loaded": True, **options})  # type: ignore[arg-type]


def wait_for(fleet: Fleet, state: State, timeout_s: float = 5.0) -> bool:
    return wait_until(lambda: bool(fleet.members(state)), timeout_s)
