"""A `qurl` command as a fork of a process that has imported what commands, servers and ranks need.

Imports are most of a command's start: its own, and those of the process that its servers and ranks
are forks of. In a fork both are there. The command is otherwise that of a user: its own process,
directory, output and exit code, with the same processes below it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from qurl_megatron import device, preload
from qurl_megatron.process import end_only_with_parent
from qurl_megatron.rollout import server


def import_commands() -> None:
    """Import what `qurl` imports only when a command needs it."""
    import math_verify  # noqa: F401
    import reasoning_gym  # noqa: F401

    import qurl_megatron.cli  # noqa: F401
    import qurl_megatron.launch.prepare  # noqa: F401


def main(directory: str, *words: str) -> None:
    """Run `qurl` with these words in a directory; the process ends with the command's code."""
    os.chdir(directory)
    parent = _Parent()
    sys.argv = ["qurl", *words]
    server.Preload = parent.preload  # type: ignore
    from qurl_megatron.cli import main

    try:
        main()
    finally:
        parent.end()


class _Parent:
    """The process of a command's `Preload`, forked before the command starts any thread."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        command = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            os.setsid()
            end_only_with_parent()
            if os.getppid() == command:  # it lived longer than until end_only_with_parent
                self._run(theirs)
            os._exit(0)
        theirs.close()

    @staticmethod
    def _run(connection: Connection) -> None:
        """Wait for what the command's `Preload` asks for, then serve it."""
        try:
            environment, log_file = connection.recv()
        except EOFError:  # the command has ended without it
            return
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 2)
        os.close(log)
        device.extend_environment(environment)
        preload.serve(connection)

    def preload(
        self, preparations: Sequence[str], environment: Mapping[str, str], log_file: Path
    ) -> preload.Preload:
        """Return the handle of this process, which has done the preparations."""
        self._connection.send((dict(environment), str(log_file)))
        handle = preload.Preload.__new__(preload.Preload)
        handle._log_file = log_file
        handle._ready = False
        handle._connection = self._connection
        handle._process = self  # type: ignore
        return handle

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self._pid, 0)

    def end(self) -> None:
        """Wait for the end of this process if no `Preload` has had it."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            self.wait()
