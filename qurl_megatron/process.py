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


def free_port() -> int:
    """Return a random port that nothing on this machine uses.

    It is below the kernel's ephemeral range, so that no outgoing connection takes it in the seconds
    before a server binds it.
    """
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # on all addresses
            return port


def tail(log_file: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log, each cut short: SGLang prints all settings on one line."""
    last = log_file.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:LOG_LINE_LENGTH] for line in last)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; call it in the child before exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
