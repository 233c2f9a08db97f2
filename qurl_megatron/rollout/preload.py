"""Processes that share their imports: one process imports, and forks a child for each request.

Importing SGLang takes 16 CPU-seconds, and a server without a GPU is three processes. A fork of a
process that has imported it starts at once. In all else a child is like a fresh process: it has its
own session, environment, log file and exit code, and the kernel kills it with its parent.

A fork copies the calling thread only, so the parent must have no other thread; `_answer` checks it.
On a machine with a GPU nothing is forked: a CUDA context does not survive a fork.

The standard library's forkserver does less: its children have the session and environment of their
starter and outlive the process that forked them, nobody can stop waiting for its imports, and an
import that fails is silent.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from qurl_megatron import device
from qurl_megatron.process import die_with_parent, end_only_with_parent, tail

CPU_PLATFORM = "qurl_cpu"  # an entry point in pyproject.toml
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
class Program:
    """What runs in a process of its own: a fresh one, or a fork of a `Preload`."""

    command: Sequence[str]  # a module and its arguments, for a fresh process
    function: str  # module:function that does the same in a fork
    arguments: Sequence[str]  # of the function
    title: str  # of a fork, shown by ps
    log_file: Path  # receives standard error, and standard output unless it is inherited
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the starter's
    inherits_stdout: bool = False
    ignored_signals: Collection[int] = ()
    blocked_signals: Collection[int] = ()

    def begin(self) -> None:
        """Set up the process before the program runs in it."""
        die_with_parent()
        for number in self.ignored_signals:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals)


def start(program: Program, preload: Preload | None) -> Process:
    """Start a program as a fork of `preload`, or in a fresh process; it dies with its parent.

    Raises:
        PreloadFailed: the preload process died.
    """
    with program.log_file.open("wb") as log:
        if preload:
            return preload.start(program)
        return subprocess.Popen(
            [sys.executable, "-m", *program.command],
            env=device.child_environment(program.environment),
            stdin=subprocess.DEVNULL,
            stdout=None if program.inherits_stdout else log,
            stderr=log,
            start_new_session=True,  # only the starter handles Ctrl-C
            preexec_fn=program.begin,
        )


@dataclass
class Preload:
    """The handle of a parent process, with which its starter requests children."""

    connection: Connection
    log_file: Path  # of the parent
    is_ready: bool = False  # the parent has done its preparations

    def wait_ready(self, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until the preparations are done, or `given_up()` returns True.

        Raises:
            PreloadFailed: the parent died.
        """
        while not self.is_ready and not given_up():
            try:
                self.is_ready = self.connection.poll(POLL_S) and self.connection.recv()
            except (EOFError, OSError):
                raise self._failed() from None

    def start(self, program: Program) -> ForkedProcess:
        """Fork a child that runs a program, once the parent has done its preparations.

        Raises:
            PreloadFailed: the parent died.
        """
        return ForkedProcess(self, self._ask(program))

    def signal(self, pid: int, number: int) -> int | None:
        """Send a signal to a child that still runs; return the exit code of one that has ended.

        Number 0 sends no signal. The code is negative for a process that a signal ended.
        """
        try:
            return self._ask((pid, number))
        except PreloadFailed:
            return -signal.SIGKILL  # the kernel has killed the children with their parent

    def _ask(self, question: Program | tuple[int, int]) -> Any:
        self.wait_ready()
        try:
            self.connection.send(question)
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._failed() from None

    def _failed(self) -> PreloadFailed:
        return PreloadFailed(
            f"the preload process died; {self.log_file} ends:\n{tail(self.log_file)}"
        )


@dataclass
class ForkedProcess:
    """A child of a `Preload`, with the part of subprocess.Popen's interface that launchers use."""

    preload: Preload
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        self.send_signal(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self.returncode is None:
            self.returncode = self.preload.signal(self.pid, number)


Process = subprocess.Popen[bytes] | ForkedProcess
"""A program that `start` has started."""


@contextmanager
def preloaded(
    preparations: Sequence[str], environment: Mapping[str, str], log_file: Path
) -> Iterator[Preload]:
    """Yield the handle of a parent that imports each `module`, or calls each `module:function`.

    The end of the context kills it, and with it every child. `environment` is added to this
    process's environment, for the parent and all its children.
    """
    ours, theirs = Pipe()
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), *preparations],
            env=device.child_environment({**NO_THREADS, **environment}),
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # only the starter handles Ctrl-C
            preexec_fn=end_only_with_parent,
        )
    theirs.close()
    try:
        yield Preload(ours, log_file)
    finally:
        ours.close()
        process.kill()
        process.wait()


@contextmanager
def preloaded_sglang(log_file: Path, also: Sequence[str] = ()) -> Iterator[Preload | None]:
    """Yield a process that has imported SGLang, to fork servers from; None on a machine with a GPU.

    `also` lists further preparations of that process; see `preloaded`.
    """
    if device.accelerator() == "cuda":
        yield None
        return
    preparations = [f"{__name__}:import_sglang", *also]
    with preloaded(preparations, {"SGLANG_PLATFORM": CPU_PLATFORM}, log_file) as preload:
        yield preload


# What follows runs in the parent, and in the children that it turns into.


def main() -> None:
    """Run the parent: `python -m qurl_megatron.rollout.preload CONNECTION MODULE:FUNCTION...`."""
    connection = Connection(int(sys.argv[1]))
    for preparation in sys.argv[2:]:
        _call(preparation)
    fork_for(connection)


def fork_for(connection: Connection) -> None:
    """Fork the children that the other side of the connection requests, until it is closed.

    A child returns too, when its function does.
    """
    connection.send(True)
    program = _answer(connection)
    connection.close()
    if program is not None:
        _become(program)
        _call(program.function, *program.arguments)


def _answer(connection: Connection) -> Program | None:
    """Answer requests in the parent until the starter is gone; return a program in its child."""
    gc.freeze()  # a collection would write to, and so copy, every page that children share
    exit_codes: dict[int, int | None] = {}  # one per child; None while it runs
    while True:
        try:
            question = connection.recv() if connection.poll(POLL_S) else None
        except (EOFError, OSError):
            return None
        while None in exit_codes.values():  # no child that has ended stays a zombie
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            exit_codes[pid] = os.waitstatus_to_exitcode(status)
        if isinstance(question, tuple):
            pid, number = question
            if exit_codes[pid] is None:  # not reaped, so no other process can have its pid
                os.kill(pid, number)
            connection.send(exit_codes[pid])
        elif question:
            threads = os.listdir("/proc/self/task")
            if len(threads) > 1:
                raise RuntimeError(f"{len(threads)} threads run; a fork would lose all but one")
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                question.begin()
                if os.getppid() != parent:  # it died before `begin`
                    os._exit(1)
                return question
            exit_codes[pid] = None
            connection.send(pid)


def _become(program: Program) -> None:
    """Turn a fresh fork into the process that a program asks for."""
    os.setsid()
    log = os.open(program.log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 2)
    if not program.inherits_stdout:
        os.dup2(log, 1)
    os.close(log)
    device.extend_environment(program.environment)
    tempfile.tempdir = None  # TMPDIR may have changed
    sys.argv = [program.function, *program.arguments]
    setproctitle(program.title)


def _call(path: str, *arguments: str) -> None:
    """Import `module`, and for `module:function` call the function."""
    module, _, name = path.partition(":")
    imported = import_module(module)
    if name:
        getattr(imported, name)(*arguments)


def import_sglang() -> None:
    """Load this package's plugin, then import the modules that a server's three processes use."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # first: it replaces functions that other modules import by name
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def serve_sglang(threads: str, *options: str) -> None:
    """Run a server with options of `sglang.launch_server` until it is killed.

    `threads` is the number of CPU threads of each of its ranks. OMP_NUM_THREADS cannot set it,
    because OpenMP has read that variable in the parent.
    """
    import torch
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    torch.set_num_threads(int(threads))
    original = engine._set_envs_and_config

    def fork_after(server_args: object) -> None:
        original(server_args)  # asks multiprocessing to spawn
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = fork_after
    try:
        run_server(prepare_server_args(list(options)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
