"""Helpers for child processes: free ports, the ends of logs, and ending with the parent."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import signal
import socket
from pathlib import Path

LOG_TAIL_LINES = 20
LOG_LINE_LENGTH = 500
PORTS = range(20000, 32768)  # below Linux's ephemeral ports
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# Slurm and launchers send these to every process of a node; they are for the learner only.
LAUNCHER_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def free_port() -> int:
    """Return a free port below the ephemeral range, drawn at random.

    A server binds its ports many seconds after they are chosen. In between, the kernel could give
    an ephemeral port to any outgoing connection.
    """
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # on all addresses
            return port


def tail(log_file: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log, truncated: SGLang prints all its settings on one line."""
    last = log_file.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:LOG_LINE_LENGTH] for line in last)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; call it in the child before exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_only_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, and block the launcher's signals."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended.

    A pid and its start ticks identify a process, even after the kernel has reused the pid.
    """
    try:
        # The process name, in parentheses, may hold spaces. The first field after it is the state,
        # the twentieth is the start time.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
