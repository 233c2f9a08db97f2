"""A process that imports once and forks: its children, their environment and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from qurl_megatron.config.schema import ServerConfig
from qurl_megatron.process import start_ticks
from qurl_megatron.rollout.preload import (
    Preload,
    PreloadFailed,
    Process,
    Program,
    preloaded,
    start,
)
from qurl_megatron.rollout.server import ServerPlan
from waiting import wait_until

FUNCTIONS = """
import os, signal, sys, threading, time
import ready_made

def describe(name):
    print(name, os.environ["COLOUR"], os.environ["SHARED"], os.getsid(0) == os.getpid())
    print("written to standard error", file=sys.stderr)
    print("imported before the fork:", ready_made.pid == os.getppid())
    print("USR1 ignored:", signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)
    print("blocked:", [number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])])
    sys.exit(7)

def fail():
    raise ValueError("this is why")

def sleep():
    time.sleep(600)

def start_thread():
    threading.Thread(target=sleep, daemon=True).start()

if __name__ == "__main__":
    describe(sys.argv[1])
"""
READY_MADE = "import os\npid = os.getpid()\n"


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the modules that children of these tests call."""
    directory = tmp_path_factory.mktemp("modules")
    (directory / "functions.py").write_text(FUNCTIONS)
    (directory / "ready_made.py").write_text(READY_MADE)
    return directory


def environment_with(modules: Path) -> dict[str, str]:
    path = os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "SHARED": "of-all"}


def parent_of(modules: Path, preparation: str = "functions") -> AbstractContextManager[Preload]:
    return preloaded([preparation], environment_with(modules), modules / "parent.log")


@pytest.fixture(scope="module")
def preload(modules: Path) -> Iterator[Preload]:
    with parent_of(modules) as parent:
        yield parent


def program(function: str, log_file: Path) -> Program:
    return Program([], f"functions:{function}", [], "its title", log_file)


def wait(child: Process) -> int:
    """Return the exit code of a child that ends soon."""
    assert wait_until(lambda: child.poll() is not None)
    assert child.returncode is not None
    return child.returncode


@pytest.mark.parametrize("is_forked", [True, False])
def test_a_program_has_its_own_session_environment_log_signals_and_exit_code(
    modules: Path,
    preload: Preload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_forked: bool,
) -> None:
    for name, value in environment_with(modules).items():
        monkeypatch.setenv(name, value)
    describing = Program(
        ["functions", "first"],
        "functions:describe",
        ["first"],
        "its title",
        tmp_path / "log",
        environment={"COLOUR": "green"},
        ignored_signals=[signal.SIGUSR1],
        blocked_signals=[signal.SIGUSR2],
    )
    assert wait(start(describing, preload if is_forked else None)) == 7
    assert set((tmp_path / "log").read_text().splitlines()) == {
        "first green of-all True",
        "written to standard error",
        f"imported before the fork: {is_forked}",
        "USR1 ignored: True",
        "blocked: ['SIGUSR2']",
    }


def test_a_child_that_raises_ends_with_code_1_and_its_traceback_in_the_log(
    preload: Preload, tmp_path: Path
) -> None:
    log = tmp_path / "child.log"
    assert wait(preload.start(program("fail", log))) == 1
    assert log.read_text().endswith("ValueError: this is why\n")


def test_a_running_child_is_signalled_and_shown_by_its_title(
    preload: Preload, tmp_path: Path
) -> None:
    child = preload.start(program("sleep", tmp_path / "child.log"))
    process = psutil.Process(child.pid)
    assert not wait_until(lambda: child.poll() is not None, 0.5)
    assert process.cmdline()[0] == "its title"
    child.send_signal(signal.SIGTERM)
    assert wait(child) == -signal.SIGTERM
    child.send_signal(signal.SIGKILL)  # the process has ended, so no other is signalled
    assert not process.is_running()


def test_the_exit_code_of_a_child_is_known_as_soon_as_it_has_ended(
    preload: Preload, tmp_path: Path
) -> None:
    for _ in range(5):
        child = preload.start(program("sleep", tmp_path / "child.log"))
        os.kill(child.pid, signal.SIGKILL)
        while start_ticks(child.pid) is not None:
            pass
        assert child.poll() == -signal.SIGKILL


def test_the_kernel_ends_parent_and_children_of_a_killed_starter(
    modules: Path, tmp_path: Path
) -> None:
    starter = (
        "import time\n"
        "from pathlib import Path\n"
        "from qurl_megatron.rollout.preload import Program, preloaded\n"
        f"with preloaded(['functions'], {environment_with(modules)!r}, Path('log')) as parent:\n"
        "    program = Program([], 'functions:sleep', [], 'sleeps', Path('child.log'))\n"
        "    print(parent.start(program).pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", starter], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    tree = [child, psutil.Process(child.ppid())]
    process.kill()
    process.wait()
    process.stdout.close()
    assert psutil.wait_procs(tree, timeout=30)[1] == []


def test_a_child_has_ended_when_its_parent_is_killed(modules: Path, tmp_path: Path) -> None:
    with parent_of(modules) as parent:
        child = parent.start(program("sleep", tmp_path / "log"))
        process = psutil.Process(child.pid)
        psutil.Process(process.ppid()).kill()
        assert wait(child) == -signal.SIGKILL
        assert psutil.wait_procs([process], timeout=30)[1] == []


def test_a_parent_with_threads_does_not_fork(modules: Path, tmp_path: Path) -> None:
    with parent_of(modules, "functions:start_thread") as parent:
        with pytest.raises(PreloadFailed, match="2 threads run; a fork would lose all but one"):
            parent.start(program("sleep", tmp_path / "log"))


def test_a_parent_that_cannot_import_is_reported_with_its_log(modules: Path) -> None:
    with parent_of(modules, "no_such_module") as parent:
        with pytest.raises(
            PreloadFailed, match="(?s)parent.log ends:.*No module named 'no_such_module"
        ):
            parent.wait_ready()


def test_waiting_for_a_parent_can_be_cancelled(modules: Path) -> None:
    with parent_of(modules, "functions:sleep") as parent:
        parent.wait_ready(given_up=lambda: True)  # it would wait for 600 s otherwise


def test_a_server_that_cannot_be_forked_leaves_no_files(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = psutil.Process().children()
    with parent_of(modules) as parent:
        parent.wait_ready()
        (process,) = set(psutil.Process().children()) - set(before)
        process.kill()
        plan = ServerPlan(tmp_path, ServerConfig(), "int8", 64, modules / "server.log", seed=0)
        with pytest.raises(PreloadFailed, match="the preload process died; .*parent.log ends"):
            plan.start(parent)
    assert list(tmp_path.iterdir()) == []
