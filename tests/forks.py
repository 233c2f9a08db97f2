"""Workers, ranks and programs as forks of one process that has imported what they need.

Imports are most of their start. In all else a fork is like a fresh process.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest
from execnet.gateway_base import Popen2IO
from execnet.gateway_io import popen_bootstrapline

from qurl_megatron.machine.environment import NO_THREADS

CONTEXT = multiprocessing.get_context("forkserver")


def begin(*modules: str, **variables: str) -> None:
    """Start the process that forks are of; it imports these modules in the background.

    In a worker this does nothing: its forks are of the process that it is a fork of.
    """
    if forkserver.get_inherited_fds() is not None:
        return
    CONTEXT.set_forkserver_preload(list(modules))
    with pytest.MonkeyPatch.context() as monkeypatch:
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
        for name, value in {**NO_THREADS, **variables}.items():
            monkeypatch.setenv(name, value)
        forkserver.ensure_running()


class Worker(Popen2IO):
    """A worker of xdist as a fork, in place of execnet's `Popen2IOMaster`, which starts Python."""

    def __init__(self, _: list[str], execmodel: Any) -> None:
        stdin, ours = os.pipe()
        answers, stdout = os.pipe()
        streams = Connection(stdin, writable=False), Connection(stdout, readable=False)
        self.process = CONTEXT.Process(target=work, args=(*streams, dict(os.environ)))
        self.process.start()
        for stream in streams:
            stream.close()
        super().__init__(os.fdopen(ours, "wb"), os.fdopen(answers, "rb"), execmodel)

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()


def work(stdin: Connection, stdout: Connection, environment: dict[str, str]) -> None:
    """Do what `python -c` does for execnet, in a fresh fork with its starter's environment."""
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(None, force=True)  # as in a fresh process; not this one's
    # Python would start another server for what this worker starts.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    stdin.close()
    stdout.close()
    sys.stdin = open(0, closefd=False)
    exec(popen_bootstrapline, {})
