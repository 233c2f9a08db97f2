"""Processes: workers, what ends them, signals of a command, limits, a lock between them."""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

OPEN_FILES = 65_536
TIDY_UP_S = 1.5  # from a signal to the end of a command
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
END_CONTAINED = signal.SIGRTMIN  # ends what `contain` has begun; nobody else sends it
# Slurm and launchers send these to every process of a node; they are for the learner only.
LAUNCHER_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def raise_open_file_limit() -> int:
    """Let this process open as many files as it may, up to `OPEN_FILES`; return the number.

    Many systems begin with 1,024 and permit more on request.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = max(soft, min(hard, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    return number


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; call it in the child before exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def contain() -> None:
    """Fork, and return in the child; this process ends everything that the child starts.

    It does so when the child ends, when its own parent ends, and on `END_CONTAINED`. It also ends
    processes in other sessions, and orphans, which become its children. Then it exits with the
    child's exit code.
    """
    import psutil

    os.setsid()  # a kill of its parent's process group must not reach it
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, END_CONTAINED)
    events = {END_CONTAINED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, events)
    child = os.fork()
    if child == 0:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    code = None
    while code is None and signal.sigwait(events) == signal.SIGCHLD:
        code = _reap().get(child)
    found: set[psutil.Process] = set()
    while new := {*psutil.Process().children(recursive=True)} - found:
        for process in new:
            with contextlib.suppress(psutil.Error):
                process.suspend()  # a stopped process starts no others
        found |= new
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=TIDY_UP_S)  # who waits for this process counts on it
    if code is not None and code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code or 0)


def _reap() -> dict[int, int]:
    """Return the exit codes of the children that have ended, by process id."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def start_worker(
    program: str, *descriptors: int, output: Any = 2
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a Python program, and return it with a connection to it.

    Its arguments are the descriptors of its end of the connection and of `descriptors`, which it
    inherits. What it prints goes to `output`, by default to standard error.

    It blocks the signals that stop a run, from the beginning. They are for the learner, which
    finishes its step with its workers. A terminal sends Ctrl-C to all processes, and a Python that
    still imports would answer with a traceback.

    No other thread forks meanwhile: its fork would inherit the pipe that Popen reads until all
    copies are closed, and Popen would wait for the fork's end.
    """
    connection, theirs = Pipe()
    inherited = theirs.fileno(), *descriptors
    blocked = LAUNCHER_SIGNALS | {signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with theirs, _no_fork:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", program, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=inherited,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process, connection


_no_fork = threading.RLock()
os.register_at_fork(
    before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release
)


def ending_signals() -> set[signal.Signals]:
    r"""Return the signals that end a command: Ctrl-C, Ctrl-\, SIGTERM, and SIGHUP of its terminal.

    `nohup` starts a command with SIGHUP ignored, and then it stays ignored.
    """
    ending = {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP}
    return ending - {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ending


@contextlib.contextmanager
def ended_by(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """End the process on the first of these signals, with a line, once the body has tidied up.

    The body gets SystemExit. What it and libraries print from then on is dropped, because it is
    about abandoned work. Later signals are ignored: when a terminal closes, the kernel and the
    shell each send SIGHUP. If the body takes longer than `TIDY_UP_S`, or Python has lost the
    exception, as it does in a destructor, the process ends at once.
    """
    ended_with: list[int] = []

    def end(number: int, _: object) -> None:
        ended_with.append(128 + number)
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + number))
        signal.setitimer(signal.ITIMER_REAL, TIDY_UP_S)
        with contextlib.suppress(OSError, RuntimeError):  # closed; or interrupted in a flush
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # its terminal has closed
            os.write(2, f"qurl: interrupted by {signal.Signals(number).name}\n".encode())
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        if ended_with:
            os._exit(ended_with[0])  # Python's own end can take seconds
        for number, handler in before.items():
            if signal.getsignal(number) is end:  # a launcher of several runs has its own
                signal.signal(number, handler)


class GpuLock:
    """A lock between processes of this machine; see `extensions/colocated/turns.py`.

    A fork does not hold it, and the kernel releases it when its process ends.
    """

    def __init__(self, directory: Path) -> None:
        """Open the lock's file in `directory`; do not take it yet."""
        self._file = (directory / f"turn_{socket.gethostname()}.lock").open("a")
        os.register_at_fork(after_in_child=self._file.close)

    def take(self) -> None:
        """Wait until nobody has the lock, and take it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def try_to_take(self) -> bool:
        """Take the lock and return True; return False if somebody has it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let others take the lock."""
        fcntl.flock(self._file, fcntl.LOCK_UN)


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
