"""Helpers for processes: ports, addresses, logs, signals, the parent, freed memory, the driver."""

import contextlib
import ctypes
import errno
import importlib
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

LOG_TAIL_LINES = 20
LOG_LINE_LENGTH = 500
PORTS = range(20000, 32768)  # below Linux's ephemeral ports
OPEN_FILES = 65_536
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# Slurm and launchers send these to every process of a node; they are for the learner only.
LAUNCHER_SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
# numpy and pyarrow start threads when they are imported, unless these variables forbid it. A fork
# would lose the threads.
NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}

_drawn: set[int] = set()  # the ports that `free_port` has returned


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


def raise_open_file_limit() -> int:
    """Let this process have as many open files as it may, up to `OPEN_FILES`; return the number.

    Many systems begin with 1,024 and permit more to those who ask.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = max(soft, min(hard, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    return number


def address_towards(host: str) -> str:
    """Return the address of this machine under which another one can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # chooses a route, sends nothing; any port will do
        return str(probe.getsockname()[0])


def bind_stores() -> None:
    """Let torch's stores in this process listen on the address that they are reached at only.

    A `torch.distributed.TCPStore` listens on all addresses of a machine, and answers everybody who
    connects. Those of a run on one machine then listen on loopback.
    """
    import torch.distributed as dist

    # torch.distributed.rendezvous is a function of this module, which hides it.
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

    None lets torch listen on all addresses: if the host's name is that of no address here, and if
    it is that of loopback here only, as Debian writes it into /etc/hosts.
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


def tail(log_file: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log, truncated: SGLang prints all its settings on one line."""
    last = log_file.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:LOG_LINE_LENGTH] for line in last)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; call it in the child before exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def ending_signals() -> set[signal.Signals]:
    """Return what ends a command in order: Ctrl-C, SIGTERM, and SIGHUP when its terminal closes.

    `nohup` starts a command with SIGHUP ignored, and then it stays ignored.
    """
    ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    return ending - {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ending


def exit_on(numbers: Collection[signal.Signals]) -> None:
    """Have the first of these signals raise SystemExit, and ignore those that follow.

    A terminal that closes sends SIGHUP twice, by the kernel and by the shell. The second would
    interrupt what tidies up after the first.
    """

    def end(number: int, _: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, end)


def trim_heap() -> None:
    """Give the memory that this process has freed back to the kernel.

    glibc keeps what lies between pieces still in use. Where large temporary tensors of changing
    sizes come and go, as in a server that computes on a CPU, that becomes more and more.
    """
    ctypes.CDLL(None).malloc_trim(0)


def installed_gpus() -> int | None:
    """Return how many GPUs NVIDIA's driver lists; None without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return None
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


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
