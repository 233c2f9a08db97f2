"""Processes that share their imports: one process imports, and forks a child for each request.

Importing SGLang takes 16 CPU-seconds, and a server without a GPU is three processes. A fork of a
process that has imported it starts at once. In all else a child is like a fresh process: it has its
own session, environment, log file and exit code, and the kernel kills it with its parent.

A fork copies the calling thread only, so the parent must have no other thread; `_answer` checks it.
On a machine with a GPU nothing is forked: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from qurl_megatron import device
from qurl_megatron.process import die_with_parent, end_only_with_parent, tail

POLL_S = 0.05
# numpy and pyarrow start threads when they are imported, unless these variables forbid it.
NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class PreloadFailed(RuntimeError):
    """The parent process died; the text ends with the last lines of its log."""


@dataclass(frozen=True)
class _Request:
    """The process that a child turns into."""

    function: str  # module:function, called with `arguments`
    arguments: list[str]
    title: str  # shown by ps
    environment: dict[str, str]  # added to the parent's
    log_file: str  # receives standard error, and standard output unless it is inherited
    inherits_stdout: bool
    ignored_signals: list[int]
    blocked_signals: list[int]


class Preload:
    """The handle of a parent process, with which its starter requests children.

    Use it as a context manager: leaving it kills the parent, and with it every child.
    """

    def __init__(
        self, preparations: Sequence[str], environment: Mapping[str, str], log_file: Path
    ) -> None:
        """Start the parent; it imports each `module`, or calls each `module:function`, first.

        `environment` is added to this process's environment, for the parent and all its children.
        """
        self._log_file = log_file
        self._ready = False
        self._connection, theirs = Pipe()
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *preparations],
                env=device.child_environment({**NO_THREADS, **environment}),
                stdin=subprocess.DEVNULL,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # only the starter handles Ctrl-C
                preexec_fn=end_only_with_parent,
            )
        theirs.close()

    def wait_ready(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the preparations are done, or `given_up()` returns True.

        Raises:
            PreloadFailed: the parent died.
        """
        while not self._ready and not given_up():
            try:
                self._ready = self._connection.poll(POLL_S) and self._connection.recv()
            except (EOFError, OSError):
                raise self._failed() from None

    def start(
        self,
        function: str,
        arguments: Sequence[str],
        *,
        title: str,
        environment: Mapping[str, str],
        log_file: Path,
        inherits_stdout: bool = False,
        ignored_signals: Collection[int] = (),
        blocked_signals: Collection[int] = (),
    ) -> ForkedProcess:
        """Fork a child that calls `function` (`module:function`) with `arguments`.

        Wait first until the parent has done its preparations.

        Raises:
            PreloadFailed: the parent died.
        """
        request = _Request(
            function,
            list(arguments),
            title,
            dict(environment),
            str(log_file.absolute()),
            inherits_stdout,
            list(ignored_signals),
            list(blocked_signals),
        )
        return ForkedProcess(self, self._ask(request))

    def signal(self, pid: int, number: int) -> int | None:
        """Send a signal to a child that still runs; return the exit code of one that has ended.

        Number 0 sends no signal. The code is negative for a process that a signal ended.
        """
        try:
            return self._ask((pid, number))
        except PreloadFailed:
            return -signal.SIGKILL  # the kernel has killed the children with their parent

    def _ask(self, question: _Request | tuple[int, int]) -> Any:
        self.wait_ready()
        try:
            self._connection.send(question)
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._failed() from None

    def _failed(self) -> PreloadFailed:
        return PreloadFailed(
            f"the preload process died; {self._log_file} ends:\n{tail(self._log_file)}"
        )

    def close(self) -> None:
        """Kill the parent and, through it, every child."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Preload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkedProcess:
    """A child of a `Preload`, with the part of subprocess.Popen's interface that launchers use."""

    def __init__(self, preload: Preload, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._preload = preload

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._preload.signal(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self.returncode is None:
            self.returncode = self._preload.signal(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _answer(connection: Connection) -> _Request | None:
    """Answer requests in the parent until the starter is gone; return a request in its child."""
    gc.freeze()  # a collection would write to, and so copy, every page that children share
    exit_codes: dict[int, int | None] = {}  # one per child; None while it runs
    while True:
        _reap(exit_codes)
        try:
            if not connection.poll(POLL_S):
                continue
            question = connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(question, tuple):
            pid, number = question
            _reap(exit_codes)  # the answer about a child that has ended is its exit code
            if exit_codes[pid] is None:  # not reaped, so no other process can have its pid
                os.kill(pid, number)
            connection.send(exit_codes[pid])
            continue
        threads = os.listdir("/proc/self/task")
        if len(threads) > 1:
            raise RuntimeError(f"{len(threads)} threads run; a fork would lose all but one")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            if os.getppid() != parent:  # it died before die_with_parent
                os._exit(1)
            return question
        exit_codes[pid] = None
        connection.send(pid)


def _reap(exit_codes: dict[int, int | None]) -> None:
    """Record the exit codes of children that have ended, so that none stays a zombie."""
    while any(code is None for code in exit_codes.values()):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        exit_codes[pid] = os.waitstatus_to_exitcode(status)


def _become(request: _Request) -> None:
    """Turn a fresh fork into the process that a request describes."""
    os.setsid()
    for number in request.ignored_signals:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked_signals)
    log = os.open(request.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 2)
    if not request.inherits_stdout:
        os.dup2(log, 1)
    os.close(log)
    device.extend_environment(request.environment)
    tempfile.tempdir = None  # TMPDIR may have changed
    sys.argv = [request.function, *request.arguments]
    setproctitle(request.title)


def _call(path: str, *arguments: str) -> None:
    """Import `module`, and for `module:function` call the function."""
    module, _, name = path.partition(":")
    imported = import_module(module)
    if name:
        getattr(imported, name)(*arguments)


def main() -> None:
    """Run the parent: `python -m qurl_megatron.preload CONNECTION MODULE:FUNCTION...`."""
    connection = Connection(int(sys.argv[1]))
    for preparation in sys.argv[2:]:
        _call(preparation)
    serve(connection)


def serve(connection: Connection) -> None:
    """Fork the children that the other side of the connection requests, until it is closed.

    A child returns too, when its function does.
    """
    connection.send(True)
    request = _answer(connection)
    connection.close()
    if request is not None:
        _become(request)
        _call(request.function, *request.arguments)


if __name__ == "__main__":
    main()
