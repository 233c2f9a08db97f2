"""The owner of a run directory: the one launcher that may work in it.

A launcher locks RUN/owner.json with flock for as long as it works, and writes its host and process
id there, for the message to a second launcher. The kernel releases the lock when the owner ends,
however it ends.

A network file system may apply flock to each node alone (Lustre with `localflock`) or lack it. Then
a launcher on another node is not detected. Without flock, the recorded process is looked up, which
works on its own host only. An owner recorded on another host may have died with its node, so it
never stops a requeued job.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, TextIO

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.files import read_json_object
from qurl_megatron.process import start_ticks

FILE_NAME = "owner.json"
CLAIM_TIMEOUT_S = 1.0
CLAIM_POLL_S = 0.02


def claim(run_dir: Path) -> TextIO:
    """Make this process the owner of a run directory until it closes the returned file.

    It tries for CLAIM_TIMEOUT_S, because `owner_of` has the lock for a moment.

    Raises:
        ConfigError: another launcher is the owner.
    """
    file = (run_dir / FILE_NAME).open("a+")
    deadline = time.monotonic() + CLAIM_TIMEOUT_S
    while (owner := _holder(file, fcntl.LOCK_EX)) and time.monotonic() < deadline:
        time.sleep(CLAIM_POLL_S)
    if owner:
        file.close()
        raise ConfigError(f"{run_dir}: {owner} works on this run; wait for it to end, or stop it")
    pid = os.getpid()
    record = {"host": socket.gethostname(), "pid": pid, "start_ticks": start_ticks(pid)}
    file.truncate(0)
    file.write(json.dumps(record) + "\n")
    file.flush()
    os.register_at_fork(after_in_child=file.close)  # or a fork would have the lock too
    return file


def owner_of(run_dir: Path) -> str:
    """Return `process PID on HOST` of the launcher that works in a run directory.

    The text is empty if this machine can detect none.
    """
    try:
        with (run_dir / FILE_NAME).open() as file:
            return _holder(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return ""


def _holder(file: TextIO, lock: int) -> str:
    """Take a lock of an owner's file; return an empty text, or who has the lock already."""
    has_flock = True
    try:
        fcntl.flock(file, lock | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        pass
    except OSError:
        has_flock = False
    owner = read_json_object(Path(file.name))
    if not owner.keys() >= {"host", "pid", "start_ticks"}:  # it is not written completely
        return "another process" if has_flock else ""
    return f"process {owner['pid']} on {owner['host']}" if has_flock or _runs_here(owner) else ""


def _runs_here(owner: dict[str, Any]) -> bool:
    """Return True if a recorded owner is another process of this machine that still runs."""
    if owner["host"] != socket.gethostname() or owner["pid"] == os.getpid():
        return False
    return start_ticks(owner["pid"]) == owner["start_ticks"]
