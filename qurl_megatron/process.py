"""Helpers for processes: ports, keys, addresses, logs, signals, the parent, memory, the driver."""

import contextlib
import ctypes
import errno
import fcntl
import importlib
import io
import os
import resource
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, MutableMapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

LOG_TAIL_LINES = 20
LOG_LINE_LENGTH = 500
LOG_LINE_BYTES = 2**16  # to read for each line; most are far shorter
LOG_TAIL_BYTES = 2**27
CONSOLE_LOG = "console.log"  # in a run's directory
LOCK = "lock"  # in a directory of `scratch_directory`
NEW_S = 60.0  # a scratch directory younger than this may not be locked yet
PORTS = range(20000, 32768)  # below Linux's ephemeral ports
OPEN_FILES = 65_536
INTERFACES = Path("/sys/class/net")
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
LONGEST_TMPDIR = 74  # a socket's path has at most 107 bytes, and those of a server add 33
SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")
# What a scratch HOME shows of the user's: passwords, and models that are there already.
OF_HOME = (".netrc", ".cache/huggingface/token", ".cache/huggingface/hub")
DRIVER_TIMEOUT_S = 120.0  # a driver without persistence first starts every GPU
TIDY_UP_S = 1.5  # from a signal to the end of a command
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
END_CONTAINED = signal.SIGRTMIN  # ends what `contain` has begun; nobody else sends it
# Slurm and launchers send these to every process of a node; they are for the learner only.
LAUNCHER_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
# numpy and pyarrow start threads when they are imported, unless these variables forbid it. A fork
# would lose the threads.
NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
KERNEL_EVENTS = Path("/proc/vmstat")

_drawn: set[int] = set()  # the ports that `free_port` has returned
mended: list[str] = []  # what `settle_environment` has changed, for `qurl doctor`


def free_port() -> int:
    """Return a free port below the ephemeral range, drawn at random; no port is returned twice.

    A server binds its ports many seconds after they are chosen. In between, the kernel could give
    an ephemeral port to any outgoing connection, and another server of this process could draw it.
    """
    while True:
        port = secrets.choice(PORTS)
        if port in _drawn:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # on all addresses
            _drawn.add(port)
            return port


def make_key() -> str:
    """Return a key of 256 bits for servers; it does not begin with a dash, as an option would."""
    return secrets.token_hex(32)


def raise_open_file_limit() -> int:
    """Let this process open as many files as it may, up to `OPEN_FILES`; return the number.

    Many systems begin with 1,024 and permit more on request.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = max(soft, min(hard, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    return number


def address_towards(host: str) -> str:
    """Return the address at which the machine `host` can reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # chooses a route, sends nothing; any port will do
        return str(probe.getsockname()[0])


def bind_stores() -> None:
    """Make torch's stores in this process listen only on the address at which they are reached.

    By default a `torch.distributed.TCPStore` listens on all addresses of a machine, and answers
    everybody. With this, the stores of a run on one machine listen on loopback.
    """
    import torch.distributed as dist

    # An import statement would find the function of this name, which hides the module.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")

    class Store(dist.TCPStore):
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            **options: Any,
        ) -> None:
            listening = _listen(host_name, port) if is_master else None
            if listening is not None:
                port = listening.getsockname()[1]  # port 0 asks for any
                options["master_listen_fd"] = listening.detach()
            super().__init__(host_name, port, world_size, is_master, **options)

    if dist.TCPStore.__name__ != Store.__name__:
        dist.TCPStore = rendezvous.TCPStore = Store  # type: ignore


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on one address of this machine.

    Return None, so that torch listens on all addresses, if the host is not on this machine, or if
    only this machine takes its name for loopback, as Debian's /etc/hosts says.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_name = not host.startswith("127.") and host != "localhost"
    if is_name and str(address[0]).startswith("127."):
        return None
    try:
        return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


def qurl_command(*words: object) -> str:
    """Return a `qurl` command as a shell here takes it, with the program beside this Python."""
    program = Path(sys.executable).with_name("qurl")
    found = shutil.which("qurl")
    is_found = found is not None and program.exists() and program.samefile(found)
    shorter = os.path.relpath(program)
    name = "qurl" if is_found else str(program) if shorter.startswith("..") else shorter
    return shlex.join([name, *map(str, words)])


def tail(log_file: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log, truncated: SGLang prints all its settings on one line.

    Only the end of the file is read, at most `LOG_TAIL_BYTES`.
    """
    with log_file.open("rb") as log:
        log.seek(
            -min(log.seek(0, os.SEEK_END), lines * LOG_LINE_BYTES, LOG_TAIL_BYTES), os.SEEK_END
        )
        text = log.read()
    last = text.decode(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:LOG_LINE_LENGTH] for line in last)


def outlive_output(run_dir: Path) -> None:
    """Continue standard output and error in a run's console.log once they cannot be written.

    So a run goes on if its reader ends (`head`, a terminal) or the disk is full. Forks of this
    process inherit this.
    """
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        stream.flush()
        buffer = io.BufferedWriter(_Lasting(stream.fileno(), run_dir / CONSOLE_LOG))
        lasting = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
        setattr(sys, name, lasting)


class _Lasting(io.FileIO):
    """An open file that leads to another once it cannot be written, and at last to /dev/null."""

    def __init__(self, descriptor: int, log_file: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._others = [log_file, Path(os.devnull)]

    def write(self, data: Any) -> int:
        while True:
            try:
                return super().write(data)
            except OSError as error:
                if not self._others:
                    raise
                self._lead_to(self._others.pop(0), error)

    def _lead_to(self, path: Path, error: OSError) -> None:
        with contextlib.suppress(OSError):
            other = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(other, self.fileno())
            os.close(other)
            reason = f"file descriptor {self.fileno()} cannot be written: {error.strerror}"
            os.write(self.fileno(), f"{reason}; its further output follows\n".encode())


def settle_environment(environment: MutableMapping[str, str]) -> None:
    """Mend the variables of a machine under which processes would fail; children inherit them.

    - Requests to this machine go through no proxy.
    - Where HOME cannot be written, libraries get a scratch one for their caches.
    - Where TMPDIR is too long for the paths of sockets, a link to it takes its place.
    """
    given = [environment.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    names = [name.strip() for name in ",".join(given).split(",") if name.strip()]
    if "*" not in names:
        value = ",".join(dict.fromkeys([*names, *THIS_MACHINE]))
        environment.update(dict.fromkeys(("no_proxy", "NO_PROXY"), value))
    # Path.expanduser would raise for a user whom the machine does not know, as in some containers.
    home, temporary = Path(os.path.expanduser("~")), tempfile.gettempdir()
    short = next((each for each in SHORT_DIRECTORIES if os.access(each, os.W_OK)), temporary)
    if len(os.fsencode(temporary)) > LONGEST_TMPDIR:
        link = f"{_inherited_directory('qurl-tmp-', short)}/t"
        os.symlink(temporary, link)
        environment["TMPDIR"] = tempfile.tempdir = link
        mended.append(f"TMPDIR={temporary} is too long for sockets; {link} leads there")
    if not can_hold_caches(home):
        scratch = Path(_inherited_directory("qurl-home-"))
        for name in filter(lambda name: os.access(home / name, os.R_OK), OF_HOME):
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).symlink_to(home / name)
        environment["HOME"] = str(scratch)
        mended.append(f"HOME={home} cannot be written; each command has caches of its own")


def can_hold_caches(home: Path) -> bool:
    """Return whether libraries can write their caches into a home."""
    return home.is_dir() and all(
        os.access(each, os.W_OK) for each in (home, home / ".cache") if each.exists()
    )


def _inherited_directory(prefix: str, place: str | None = None) -> str:
    """Make a scratch directory for this process, and for the program that it may become."""
    directory, lock = scratch_directory(prefix, place)
    os.set_inheritable(lock, True)
    return directory


def missing_interface(variable: str, value: str) -> str:
    """Return what is wrong with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; "" if nothing.

    gloo takes every interface of its list. NCCL takes what it finds of it: by beginnings of
    names, after `=` by whole names, after `^` all others.
    """
    present = sorted(path.name for path in INTERFACES.glob("*"))
    is_gloo, is_whole = variable.startswith("GLOO"), value.startswith("=")

    def exists(name: str) -> bool:
        return name in present if is_gloo or is_whole else any(p.startswith(name) for p in present)

    names = [name.strip() for name in value.removeprefix("=").split(",") if name.strip()]
    lacking = [name for name in names if not exists(name)]
    is_right = len(lacking) < len(names) if names and not is_gloo else not lacking
    if is_right or value.startswith("^") or not present:
        return ""
    return (
        f"{variable}={value}: {socket.gethostname()} has no interface {', '.join(lacking)}, but "
        f"{', '.join(present)}; name one of these, or unset it"
    )


def scratch_directory(prefix: str, place: str | None = None) -> tuple[str, int]:
    """Make a directory for temporary files of this process, and remove what others left behind.

    Return its path, and a file descriptor that marks it as in use until it is closed. Whoever
    removes the directory closes it, or the kernel does if the process is killed.

    `place` is the directory in which it is made; None: that of temporary files.
    """
    for leftover in Path(place or tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or just removed
            _remove_unused(leftover)
    directory = tempfile.mkdtemp(prefix=prefix, dir=place)
    lock = os.open(f"{directory}/{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return directory, lock


def _remove_unused(directory: Path) -> None:
    """Remove a directory of `scratch_directory` that no process uses.

    Raises:
        OSError: it is another kind of directory, or a process uses it.
    """
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        status = os.fstat(lock)
        # A directory that is just being made is not locked yet.
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > NEW_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
    finally:
        os.close(lock)


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


def trim_heap() -> None:
    """Give the memory that this process has freed back to the kernel.

    glibc keeps freed memory that lies between pieces in use. Where large temporary tensors of
    changing sizes come and go, as in a server that computes on a CPU, that grows and grows.
    """
    ctypes.CDLL(None).malloc_trim(0)


def memory_limits() -> list[tuple[int, int]]:
    """Return the limit of each cgroup around this process, and what is free of it, in bytes.

    In a container the process's own cgroup is the root of the mounted tree. The kernel's cache of
    files counts as free, because the kernel gives it up.
    """
    limits = []
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []:
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        root = CGROUPS / "memory" if version == 1 else CGROUPS
        names = {1: ("limit_in_bytes", "usage_in_bytes", "total_"), 2: ("max", "current", "")}
        of_limit, of_usage, prefix = names[version]
        for parent in (Path(own), *Path(own).parents):
            group = root / parent.relative_to("/")
            limit = group / f"memory.{of_limit}"  # a number, or `max`
            if not limit.exists() or not (text := limit.read_text().strip()).isdecimal():
                continue
            usage = int((group / f"memory.{of_usage}").read_text())
            counts = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
            files = int(counts[f"{prefix}active_file"]) + int(counts[f"{prefix}inactive_file"])
            limits.append((int(text), max(0, int(text) - usage + files)))
    return limits


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed so far because memory ran out.

    They are those of this process's cgroup and of the ones below it, or of the nearest around it
    that counts them; without cgroups of version 2, those of the whole machine. Return None if the
    kernel does not count them.
    """
    groups = OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []
    own = Path(next((line.removeprefix("0::") for line in groups if line.startswith("0::")), "/"))
    counters = [CGROUPS / each.relative_to("/") / "memory.events" for each in (own, *own.parents)]
    counter = next((file for file in (*counters, KERNEL_EVENTS) if file.exists()), None)
    lines = counter.read_text().splitlines() if counter else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def installed_gpus() -> int | None:
    """Return how many GPUs NVIDIA's driver lists; None without nvidia-smi.

    Raises:
        TimeoutError: the driver does not answer; the text says what to do.
    """
    if not shutil.which("nvidia-smi"):
        return None
    asking = subprocess.Popen(
        ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        listed, _ = asking.communicate(timeout=DRIVER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        asking.kill()  # not waited for: what waits for a broken driver may never end
        raise TimeoutError(
            f"nvidia-smi -L has not answered in {DRIVER_TIMEOUT_S:g} s: the driver or a GPU is "
            "broken; restart this machine, or take another"
        ) from None
    return sum(line.startswith("GPU ") for line in listed.splitlines())


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
