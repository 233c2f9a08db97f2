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
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from qurl_megatron import device
from qurl_megatron.process import end_only_with_parent
from qurl_megatron.rollout import preload


def import_commands() -> None:
    """Import what `qurl` imports only when a command needs it."""
    import math_verify  # noqa: F401
    import reasoning_gym  # noqa: F401

    import qurl_megatron.cli  # noqa: F401
    import qurl_megatron.launch.prepare  # noqa: F401


def main(directory: str, *words: str) -> None:
    """Run `qurl` with these words in a directory; the process ends with the command's code."""
    os.chdir(directory)
    # The command's own `Preload` is forked here, before the command starts any thread.
    ours, theirs = Pipe()
    command, parent = os.getpid(), os.fork()
    if parent == 0:
        ours.close()
        os.setsid()
        end_only_with_parent()
        if os.getppid() == command:  # it lived longer than until end_only_with_parent
            serve_command(theirs)
        os._exit(0)
    theirs.close()

    @contextlib.contextmanager
    def preloaded(
        preparations: Sequence[str], environment: Mapping[str, str], log_file: Path
    ) -> Iterator[preload.Preload]:
        """Yield the handle of the process, which has done the preparations."""
        ours.send((dict(environment), log_file))
        try:
            yield preload.Preload(ours, log_file)
        finally:
            os.kill(parent, signal.SIGKILL)

    preload.preloaded = preloaded
    sys.argv = ["qurl", *words]
    from qurl_megatron.cli import main

    try:
        main()
    finally:
        ours.close()
        os.waitpid(parent, 0)


def serve_command(connection: Connection) -> None:
    """Wait for what the command asks of its `Preload`, then fork for it."""
    try:
        environment, log_file = connection.recv()
    except EOFError:  # the command has ended without it
        return
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 2)
    os.close(log)
    device.extend_environment(environment)
    preload.fork_for(connection)
