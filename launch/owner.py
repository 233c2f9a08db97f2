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
from pathlib import Path
from typing import Any, TextIO

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.process import start_ticks

FILE_NAME = "owner.json"


def claim(run_dir: Path) -> TextIO:
    """Make this process the owner of a run directory until it closes the returned file.

    Raises:
        ConfigError: another launcher is the owner.
    """
    file = (run_dir / FILE_NAME).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = False
    except BlockingIOError:
        taken = True
    except OSError:  # the file system has no flock
        taken = _runs_here(_read(file))
    if taken:
        owner = _read(file)
        file.close()
        name = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        raise ConfigError(f"{run_dir}: {name} works on this run; wait for it to end, or stop it")
    pid = os.getpid()
    owner = {"host": socket.gethostname(), "pid": pid, "start_ticks": start_ticks(pid)}
    file.truncate(0)
    file.write(json.dumps(owner) + "\n")
    file.flush()
    return file


def is_owned(run_dir: Path) -> bool:
    """Return True if a launcher that this machine can detect works in a run directory."""
    try:
        with (run_dir / FILE_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # the file system has no flock
        with (run_dir / FILE_NAME).open() as file:
            return _runs_here(_read(file))


def _read(file: TextIO) -> dict[str, Any]:
    """Return the recorded owner, or {} if it is not written completely."""
    file.seek(0)
    try:
        return dict(json.loads(file.read()))
    except ValueError:
        return {}


def _runs_here(owner: dict[str, Any]) -> bool:
    """Return True if a recorded owner is another process of this machine that still runs."""
    if owner.get("host") != socket.gethostname() or owner["pid"] == os.getpid():
        return False
    return start_ticks(owner["pid"]) == owner["start_ticks"]
