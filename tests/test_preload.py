"""Programs in processes of their own, fresh ones and forks: their environment and their end."""

import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest

from distributed import rank_context
from qurl_megatron.machine.environment import NO_THREADS

# What starts programs here is a process of its own, because a fork needs one without threads.
STARTER = """
import atexit, os, signal, sys, tempfile, threading, time
from pathlib import Path
from qurl_megatron.rollout import preload

def start(name, **fields):
    program = preload.Program("programs", [name], "its title", Path(name + ".log"), **fields)
    return preload.start(program)

def wait(started):
    while started.poll() is None:
        time.sleep(0.01)
    return started.poll()

preload.import_sglang = lambda: None
signal.signal(signal.SIGTERM, lambda *_: None)  # as a launcher handles it
if "preload" in sys.argv:
    preload.preload(Path("preload.log"), "programs")
"""
PROGRAMS = """
import asyncio, atexit, os, signal, sys, time
import uvloop
imported_by = os.getpid()
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # as SGLang does

def main(name):
    if name == "sleep":
        time.sleep(600)
    if name == "fail":
        raise ValueError("this is why")
    atexit.register(print, "at its end")
    print(os.environ["COLOUR"], os.getsid(0) == os.getpid(), sys.stdin.read() == "")
    print("written to standard error", file=sys.stderr)
    print("inherited:", [name for name in ("COLD", "WARM") if name in os.environ])
    print("imported before the fork:", imported_by == os.getppid())
    print("USR1 ignored:", signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)
    print("TERM by default:", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    print("event loops:", type(asyncio.get_event_loop_policy()).__module__)
    print("CPUs:", len(os.sched_getaffinity(0)))
    print("blocked:", [number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])])
    sys.exit(7)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def be_starter(stdout: Connection, directory: Path, code: str, words: tuple[str, ...]) -> None:
    """Run what a starter does in its directory; this is a fresh process."""
    os.chdir(directory)
    os.dup2(stdout.fileno(), 1)
    path = os.pathsep.join([str(directory), *sys.path])
    os.environ.update(NO_THREADS, PYTHONPATH=path, COLD="", WARM="")
    sys.path.insert(0, str(directory))
    sys.argv = ["-c", *words]
    exec(STARTER + code, {})


class Starter:
    """A process that starts programs, with its own directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "programs.py").write_text(PROGRAMS)

    def begin(self, code: str, *words: str) -> tuple[Any, TextIO]:
        """Return the process and what it prints."""
        context = rank_context()
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=be_starter, args=(theirs, self.directory, code, words))
        process.start()
        theirs.close()
        return process, open(os.dup(ours.fileno()))

    def run(self, code: str, *words: str) -> list[str]:
        """Return the lines that the starter prints."""
        process, stdout = self.begin(code, *words)
        process.join(timeout=120)
        assert process.exitcode == 0
        with stdout:
            return stdout.read().splitlines()

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()


@pytest.fixture
def starter(tmp_path: Path) -> Starter:
    return Starter(tmp_path)


@pytest.fixture(params=["preload", "fresh"])
def how(request: pytest.FixtureRequest) -> str:
    return request.param


DESCRIBE = """
signals = {"ignored_signals": [signal.SIGUSR1], "blocked_signals": [signal.SIGUSR2]}
cpus = [min(os.sched_getaffinity(0))]
started = start("describe", environment={"COLOUR": "green"}, cpus=cpus, **signals)
print(wait(started), preload.exit_code(started.pid))
"""


KEEP = """
made = tempfile.TemporaryDirectory()
atexit.register(made.cleanup)
print(wait(start("describe", environment={"COLOUR": ""})), Path(made.name).exists())
"""


def test_a_program_deletes_no_temporary_directory_of_its_starter(
    starter: Starter, how: str
) -> None:
    assert starter.run(KEEP, how) == ["7 True"]


def test_a_program_has_its_own_session_environment_log_cpus_signals_and_exit_code(
    starter: Starter, how: str
) -> None:
    assert starter.run(DESCRIBE, how) == ["7 7"]
    assert set(starter.log("describe").splitlines()) == {
        "green True True",
        "written to standard error",
        "inherited: ['COLD', 'WARM']",
        f"imported before the fork: {how == 'preload'}",
        "USR1 ignored: True",
        "TERM by default: True",
        "event loops: uvloop",
        "CPUs: 1",
        "blocked: ['SIGUSR2']",
        "at its end",
    }


def test_a_process_with_threads_starts_fresh_ones(starter: Starter) -> None:
    """A fork would lose its threads."""
    begin_thread = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    assert starter.run(begin_thread + DESCRIBE, "preload") == ["7 7"]
    assert "imported before the fork: False" in starter.log("describe")


def test_a_program_can_be_started_afresh_without_some_variables(starter: Starter) -> None:
    """A fork may have read them when it imported something."""
    without = DESCRIBE.replace("**signals", "**signals, without={'COLD'}, is_fresh=True")
    assert starter.run(without, "preload") == ["7 7"]
    log = starter.log("describe")
    assert "inherited: ['WARM']" in log and "imported before the fork: False" in log


def test_a_process_that_has_asked_a_server_still_forks(starter: Starter) -> None:
    """An event loop of uvloop would leave threads, and so would keep it from forking."""
    ask_server = """
import asyncio
from qurl_megatron.rollout.requests import NoAnswer, ask
try:
    asyncio.run(ask("GET", "http://127.0.0.1:9", {}, timeout_s=5.0))
except NoAnswer:
    print("no answer")
"""
    assert starter.run(ask_server + DESCRIBE, "preload") == ["no answer", "7 7"]
    assert "imported before the fork: True" in starter.log("describe")


def test_a_program_that_raises_ends_with_code_1_and_its_traceback_in_the_log(
    starter: Starter, how: str
) -> None:
    assert starter.run("print(wait(start('fail')))", how) == ["1"]
    assert starter.log("fail").endswith("ValueError: this is why\n")


def test_a_running_program_is_signalled_and_an_ended_one_is_not(starter: Starter, how: str) -> None:
    title = "its title" if how == "preload" else sys.executable
    code = f"""
sleeping = start("sleep")
for _ in range(600):
    shown = Path(f"/proc/{{sleeping.pid}}/cmdline").read_text().split(chr(0))[0]
    if shown == {title!r}:
        break
    time.sleep(0.1)
print(sleeping.poll(), shown)
sleeping.send_signal(signal.SIGKILL)
print(wait(sleeping))
os.kill = None
sleeping.send_signal(signal.SIGKILL)
"""
    assert starter.run(code, how) == [f"None {title}", f"-{signal.SIGKILL:d}"]


def test_the_kernel_ends_the_programs_of_a_killed_starter(starter: Starter, how: str) -> None:
    process, stdout = starter.begin("print(start('sleep').pid, flush=True); time.sleep(600)", how)
    with stdout:
        child = psutil.Process(int(stdout.readline()))
        process.kill()
    assert psutil.wait_procs([child], timeout=30)[1] == []


def test_an_import_that_fails_is_reported_with_its_log(starter: Starter) -> None:
    code = """
try:
    preload.preload(Path("preload.log"), "no_such_module")
except preload.PreloadFailed as failure:
    print(failure)
"""
    shown = starter.run(code)
    assert shown[0] == "an import failed; preload.log ends:"
    assert shown[-1] == "ModuleNotFoundError: No module named 'no_such_module'"
