"""Ports, scratch directories, memory, ends of logs and the identity of processes."""

import ctypes
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE
from unittest.mock import Mock

import psutil
import pytest

from distributed import run_ranks
from qurl_megatron import device
from qurl_megatron.machine import environment as surroundings
from qurl_megatron.machine import interfaces, memory, network
from qurl_megatron.machine.environment import LOCK, scratch_directory
from qurl_megatron.machine.imports import without
from qurl_megatron.machine.memory import trim_heap
from qurl_megatron.machine.network import PORTS, address_towards, free_port
from qurl_megatron.machine.output import CONSOLE_LOG, LOG_LINE_LENGTH, outlive_output, tail
from qurl_megatron.machine.processes import ending_signals, start_ticks
from qurl_megatron.machine.stores import _listen


def test_an_import_goes_without_packages_that_are_installed_but_not_without_loaded_ones() -> None:
    sys.modules.pop("this", None)
    with without("this", "json"):
        import json  # noqa: F401

        with pytest.raises(ImportError):
            import this  # noqa: F401
    assert "this" not in sys.modules and "json" in sys.modules


def test_start_ticks_tell_a_process_from_a_later_one_and_from_a_dead_one() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    own = start_ticks(os.getpid())
    assert ticks is not None and own is not None and ticks > own
    seconds = ticks / os.sysconf("SC_CLK_TCK") + psutil.boot_time()
    assert abs(seconds - psutil.Process(process.pid).create_time()) < 1
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert start_ticks(process.pid) is None
    process.communicate()
    assert start_ticks(process.pid) is None


def test_a_free_port_is_below_the_ephemeral_ports_and_can_be_bound() -> None:
    port = free_port()
    assert port in PORTS
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()


def test_no_port_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_drawn", set())  # other tests may draw these ports again
    ports = [free_port() for _ in range(1000)]
    assert len(set(ports)) == len(ports)


def test_this_machine_speaks_to_loopback_and_to_itself_from_the_address_that_it_speaks_to() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    addresses = [found for card in psutil.net_if_addrs().values() for found in card]
    for address in {found.address for found in addresses if found.family == socket.AF_INET}:
        assert address_towards(address) == address


def test_a_closed_terminal_ends_a_command_that_was_not_started_with_nohup(signals: None) -> None:
    always = {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
    assert ending_signals() == always | {signal.SIGHUP}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ending_signals() == always


INTERRUPTED = """
import asyncio, signal, sys, time
from qurl_megatron.machine.processes import ended_by
async def sample():
    async def ask():
        print("sampling", flush=True)
        await asyncio.sleep(60)
    await asyncio.wait({asyncio.gather(ask(), ask())})
class Lost:
    def __del__(self):
        print("sampling", flush=True)
        time.sleep(60)
with ended_by([signal.SIGTERM, signal.SIGUSR1]):
    asyncio.run(sample()) if sys.argv[1] == "sample" else Lost()
    time.sleep(60)
"""


@pytest.mark.parametrize("doing", ["sample", "lose the exception"])
def test_a_signal_ends_a_command_within_two_seconds_with_one_line(doing: str) -> None:
    """Asyncio reports tasks that are abandoned, and Python what a destructor raises."""
    command = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, doing],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout and command.stdout.readline() == "sampling\n"
    command.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    _, shown = command.communicate(timeout=60)
    assert command.returncode == 143
    assert shown == "qurl: interrupted by SIGTERM\n"
    assert time.monotonic() - begin < 2.0 + 3.0  # the machine may be busy


def test_no_line_is_lost_when_its_reader_ends_and_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    long = "x" * 2 * io.DEFAULT_BUFFER_SIZE
    with open(writer, "w") as pipe, open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", full)
        outlive_output(tmp_path / "run")
        print("to nobody, since the run has no directory", file=sys.stderr)
        (tmp_path / "run").mkdir()
        print("to the reader")
        assert os.read(reader, 80) == b"to the reader\n"
        os.close(reader)
        print(f"to the log {long}")
        print("to the log too", file=sys.stderr)
    assert (tmp_path / "run" / CONSOLE_LOG).read_text() == f"to the log {long}\nto the log too\n"


def test_the_end_of_a_log_is_short_and_keeps_undecodable_bytes_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 9999 + b"\n\xff last\n")
    assert tail(log, 2).splitlines() == ["x" * LOG_LINE_LENGTH, "\N{REPLACEMENT CHARACTER} last"]


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(30 * 2**30)  # takes no space
        file.seek(0, os.SEEK_END)
        file.write(b"\nbefore\nlast\n")
    assert tail(log, 2).splitlines() == ["before", "last"]


def test_a_scratch_directory_whose_owner_was_killed_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import tempfile; from qurl_megatron.machine.environment import scratch_directory\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "print(scratch_directory('qurl-server-')[0], flush=True); input()"
    )
    owners = [
        subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True)
        for _ in range(2)
    ]
    killed, used = (Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout)
    owners[0].kill()
    owners[0].communicate()
    of_older_version = tmp_path / "qurl-server-older"
    of_older_version.mkdir()
    new, _ = scratch_directory("qurl-server-")
    assert killed.exists()  # it may be that of a process that has not locked it yet
    for directory in (killed, used):
        os.utime(directory / LOCK, (0, 0))
    other, _ = scratch_directory("qurl-server-")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {used.name, Path(new).name, Path(other).name, of_older_version.name}
    owners[1].kill()
    owners[1].communicate()


def test_a_scratch_directory_of_another_machine_is_left_whatever_its_lock_says_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines may share TMPDIR on a file system whose locks are each machine's own, or that has
    none.
    """
    with monkeypatch.context() as of_other:
        of_other.setattr(surroundings, "MACHINE", b"other")
        directory, lock = scratch_directory("qurl-server-", str(tmp_path))
        os.close(lock)
    os.utime(f"{directory}/{LOCK}", (0, 0))
    with monkeypatch.context() as without_locks:
        without_locks.setattr(surroundings.fcntl, "flock", Mock(side_effect=OSError(38, "none")))
        scratch_directory("qurl-server-", str(tmp_path))
    scratch_directory("qurl-server-", str(tmp_path))
    assert Path(directory).exists() and len([*tmp_path.iterdir()]) == 3


def listened_at() -> list[str]:
    """Return the addresses at which a rank listens, also one that has another store."""
    import torch.distributed as dist

    from qurl_megatron.device import initialize_distributed
    from qurl_megatron.machine.stores import Store

    def listening() -> set[str]:
        connections = psutil.Process().net_connections("inet")
        return {each.laddr.ip for each in connections if each.status == "LISTEN"}

    initialize_distributed()
    addresses = listening()
    dist.barrier()
    store = Store("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    other = Store("127.0.0.1", store.port, 1, wait_for_workers=False)
    store.set("key", "value")
    assert other.get("key") == b"value"
    return sorted(addresses | listening())


def test_a_store_listens_on_the_address_it_is_reached_at_and_on_no_other() -> None:
    """Two ranks meet as in a run; the second connects through the address of the first."""
    assert run_ranks(listened_at, 2) == [["127.0.0.1"]] * 2


@pytest.mark.parametrize(
    ("host", "address", "listens"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("node1", "127.0.1.1", False),  # as Debian writes a node's own name
        ("node2", "203.0.113.7", False),  # an address of no machine, so not of this one
    ],
)
def test_an_address_that_others_cannot_use_is_left_to_torch(
    host: str, address: str, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    listening = _listen(host, port)
    assert (listening is not None) == listens
    if listening is not None:
        with listening:
            assert listening.getsockname() == (address, port)
            with pytest.raises(OSError, match="in use"):
                _listen(host, port)


def test_memory_that_was_freed_between_pieces_in_use_goes_back_to_the_kernel() -> None:
    libc, size, number = ctypes.CDLL(None), 100_000, 400  # smaller than what malloc maps on its own
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(size) for _ in range(number)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[::2]:
        libc.free(piece)
    kept = psutil.Process().memory_info().rss
    trim_heap()
    trimmed = psutil.Process().memory_info().rss
    for piece in pieces[1::2]:
        libc.free(piece)
    assert kept - trimmed > 0.8 * number * size / 2


KEEPING = """
import ctypes, resource
from qurl_megatron.machine.memory import keep_heap, trim_heap
libc, size = ctypes.CDLL(None), 2**26
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    piece = libc.malloc(size)
    ctypes.memset(piece, 1, size)
    libc.free(piece)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()
mapped = [pages(), pages()]
keep_heap()
kept = [pages(), pages()]
trim_heap()
print([round(each / size) for each in (*mapped, *kept, pages())])
"""


def test_a_process_that_keeps_its_heap_gets_no_cleared_pages_for_the_next_tensor() -> None:
    ran = subprocess.run([sys.executable, "-c", KEEPING], stdout=PIPE, check=True, text=True)
    assert ran.stdout == "[1, 1, 1, 0, 1]\n"


@pytest.mark.parametrize(
    ("cgroups", "files"),
    [
        ("0::/job/step\n", {"job/memory.max": "5000", "job/memory.current": "4000"}),
        (
            "3:cpu:/x\n4:memory:/a/b\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "5000",
                "memory/a/memory.usage_in_bytes": "4000",
                "memory/memory.limit_in_bytes": str(2**63 - 4096),  # has no limit
                "memory/memory.usage_in_bytes": "100",
            },
        ),
    ],
)
def test_a_cgroup_around_the_own_one_limits_memory_and_pages_of_files_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str, files: dict[str, str]
) -> None:
    (tmp_path / "own").write_text(cgroups)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
        prefix = "total_" if "memory/" in name else ""
        stat = f"cache 9\n{prefix}inactive_file 200\n{prefix}active_file 50\n"
        (path.parent / "memory.stat").write_text(stat)
    no_limit = tmp_path / "job/step"
    no_limit.mkdir(parents=True)
    (no_limit / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    assert min(memory.memory_limits()) == (5000, 1250)
    assert device.free_memory_bytes() == 1250
    assert device.machine_memory_bytes() == 5000
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "no such file")
    assert memory.memory_limits() == []


@pytest.mark.parametrize(
    ("cgroups", "counted"),
    [
        ("0::/job/step\n", 2),
        ("0::/job/step/task\n", 2),  # counts nothing itself
        ("4:memory:/job/step\n0::/\n", 9),  # version 1
        ("0::/not/in/this/container\n", 9),
        ("", 9),
    ],
)
def test_a_process_that_the_kernel_killed_elsewhere_on_the_machine_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroups: str, counted: int
) -> None:
    (tmp_path / "own").write_text(cgroups)
    (tmp_path / "job/step/task").mkdir(parents=True)
    (tmp_path / "job/memory.events").write_text("oom 4\noom_kill 4\noom_group_kill 0\n")
    (tmp_path / "job/step/memory.events").write_text("oom 5\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "vmstat").write_text("oom_kill 9\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "KERNEL_EVENTS", tmp_path / "vmstat")
    assert memory.oom_kills() == counted
    (tmp_path / "memory.events").write_text("oom_kill 3\n")  # the root that a container sees
    assert memory.oom_kills() == min(counted, 3)
    monkeypatch.setattr(memory, "KERNEL_EVENTS", tmp_path / "no such file")
    (tmp_path / "memory.events").unlink()
    assert memory.oom_kills() == (counted if counted == 2 else None)


@pytest.mark.parametrize(
    ("variable", "value", "is_right"),
    [
        ("GLOO_SOCKET_IFNAME", "", True),
        ("GLOO_SOCKET_IFNAME", "ib0,lo", True),
        ("GLOO_SOCKET_IFNAME", "lo,eth7", False),
        ("GLOO_SOCKET_IFNAME", "ib", False),  # no whole name
        ("NCCL_SOCKET_IFNAME", "ib", True),
        ("NCCL_SOCKET_IFNAME", "eth,ib", True),
        ("NCCL_SOCKET_IFNAME", "=ib", False),
        ("NCCL_SOCKET_IFNAME", "eth", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
    ],
)
def test_an_interface_that_is_not_there_is_named_with_those_that_are(
    variable: str, value: str, is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "INTERFACES", tmp_path)
    for name in ("lo", "ib0"):
        (tmp_path / name).touch()
    problem = interfaces.missing_interface(variable, value)
    assert (
        not problem
        if is_right
        else problem.endswith(", but ib0, lo; name one of these, or unset it")
    )


def test_requests_to_this_machine_go_through_no_proxy_beside_those_of_the_user() -> None:
    def settled(**variables: str) -> set[str]:
        environment = {"HOME": "/", **variables}
        surroundings.settle_environment(environment)
        return {environment.get(name, "") for name in ("NO_PROXY", "no_proxy")}

    assert settled() == {"127.0.0.1,localhost,::1"}
    given = {"NO_PROXY": "a.org, localhost", "no_proxy": "b.org"}
    assert settled(**given) == {"b.org,a.org,localhost,127.0.0.1,::1"}
    assert settled(no_proxy="*") == {"*", ""}


def test_threads_are_bound_to_no_cpu_before_torch_is_imported() -> None:
    environment = {
        "HOME": "/",
        "OMP_PROC_BIND": "close",
        "OMP_PLACES": "cores",
        "OMP_NUM_THREADS": "2",
    }
    surroundings.settle_environment(environment)
    assert {name for name in environment if name.startswith("OMP_")} == {"OMP_NUM_THREADS"}
    assert surroundings.mended.pop(0).startswith("OMP_PROC_BIND, OMP_PLACES would bind all proc")
    surroundings.mended.clear()
    program = "import sys, qurl_megatron.cli; print('torch' in sys.modules)"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert asked.stdout == "False\n"


def settled_by_a_program(**variables: str) -> list[str]:
    """Return HOME, TMPDIR and the name of a socket below it, as a fresh program has them."""
    program = (
        "import os, socket, tempfile\n"
        "from qurl_megatron.machine.environment import settle_environment\n"
        "settle_environment(os.environ)\n"
        "directory = tempfile.mkdtemp(prefix='qurl-server-')\n"
        "socket.socket(socket.AF_UNIX).bind(directory + '/tmp12345678')\n"
        "print(os.environ['HOME'], tempfile.gettempdir(), os.path.realpath(directory), sep='\\n')"
    )
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_tmpdir_that_is_too_long_for_sockets_is_reached_by_a_short_link(tmp_path: Path) -> None:
    place = tmp_path / "as_a_cluster_names_the_scratch_directory_of_each_job" / ("job_" * 20)
    place.mkdir(parents=True)
    _, temporary, made = settled_by_a_program(TMPDIR=str(place))
    assert len(temporary) <= surroundings.LONGEST_TMPDIR and Path(made).parent == place


def test_a_home_that_cannot_be_written_lends_passwords_and_models_to_a_scratch_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".cache" / "huggingface" / "hub").mkdir(parents=True)
    (home / ".netrc").write_text("machine a")
    assert settled_by_a_program(HOME=str(home))[0] == str(home)
    monkeypatch.setattr(surroundings, "can_hold_caches", lambda home: False)
    monkeypatch.setenv("HOME", str(home))
    environment = {"HOME": str(home)}
    surroundings.settle_environment(environment)
    scratch = Path(environment["HOME"])
    assert scratch != home and (scratch / ".netrc").read_text() == "machine a"
    assert (scratch / ".cache" / "huggingface" / "hub").is_dir()
    (scratch / ".cache" / "torch").mkdir()  # can be written
    assert surroundings.mended.pop().startswith(f"HOME={home} cannot be written")


def test_a_user_whom_the_machine_does_not_know_gets_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for such a user
    monkeypatch.setattr(surroundings.tempfile, "tempdir", str(tmp_path))
    environment: dict[str, str] = {}
    surroundings.settle_environment(environment)
    assert Path(environment["HOME"]).parent == tmp_path and surroundings.mended.pop()
