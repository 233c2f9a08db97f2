"""A process that imports once and forks: its children, their environment and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from qurl_megatron.config.schema import ServerConfig
from qurl_megatron.preload import Preload, PreloadFailed
from qurl_megatron.process import start_ticks
from qurl_megatron.rollout.server import start_server

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


@pytest.fixture(scope="module")
def preload(modules: Path) -> Iterator[Preload]:
    with Preload(["functions"], environment_with(modules), modules / "parent.log") as parent:
        yield parent


def test_a_child_has_its_own_session_environment_log_signals_and_exit_code(
    preload: Preload, tmp_path: Path
) -> None:
    child = preload.start(
        "functions:describe",
        ["first"],
        title="a title of its own",
        environment={"COLOUR": "green"},
        log_file=tmp_path / "child.log",
        ignored_signals=[signal.SIGUSR1],
        blocked_signals=[signal.SIGUSR2],
    )
    assert child.wait(30) == 7
    assert set((tmp_path / "child.log").read_text().splitlines()) == {
        "first green of-all True",
        "written to standard error",
        "imported before the fork: True",
        "USR1 ignored: True",
        "blocked: ['SIGUSR2']",
    }


def test_a_child_that_raises_ends_with_code_1_and_its_traceback_in_the_log(
    preload: Preload, tmp_path: Path
) -> None:
    log = tmp_path / "child.log"
    child = preload.start("functions:fail", [], title="fails", environment={}, log_file=log)
    assert child.wait(30) == 1
    assert log.read_text().endswith("ValueError: this is why\n")


def test_a_running_child_is_waited_for_signalled_and_shown_by_its_title(
    preload: Preload, tmp_path: Path
) -> None:
    child = preload.start(
        "functions:sleep", [], title="sleeps", environment={}, log_file=tmp_path / "child.log"
    )
    process = psutil.Process(child.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    assert child.poll() is None and process.cmdline()[0] == "sleeps"
    child.terminate()
    assert child.wait(30) == -signal.SIGTERM
    child.kill()  # the process has ended, so no other is signalled
    assert not process.is_running()


def test_the_exit_code_of_a_child_is_known_as_soon_as_it_has_ended(
    preload: Preload, tmp_path: Path
) -> None:
    for _ in range(5):
        child = preload.start(
            "functions:sleep", [], title="sleeps", environment={}, log_file=tmp_path / "child.log"
        )
        os.kill(child.pid, signal.SIGKILL)
        while start_ticks(child.pid) is not None:
            pass
        assert child.poll() == -signal.SIGKILL


def test_closing_the_parent_ends_every_child(modules: Path, tmp_path: Path) -> None:
    with Preload(["functions"], environment_with(modules), tmp_path / "parent.log") as parent:
        children = [
            parent.start(
                "functions:sleep", [], title="sleeps", environment={}, log_file=tmp_path / "log"
            )
            for _ in range(2)
        ]
        processes = [psutil.Process(child.pid) for child in children]
    assert psutil.wait_procs(processes, timeout=30)[1] == []


def test_the_kernel_ends_parent_and_children_of_a_killed_starter(
    modules: Path, tmp_path: Path
) -> None:
    starter = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from qurl_megatron.preload import Preload\n"
        f"parent = Preload(['functions'], {environment_with(modules)!r}, Path('parent.log'))\n"
        "child = parent.start('functions:sleep', [], title='sleeps', environment={},\n"
        "    log_file=Path('child.log'))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
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
    with Preload(["functions"], environment_with(modules), tmp_path / "parent.log") as parent:
        child = parent.start(
            "functions:sleep", [], title="sleeps", environment={}, log_file=tmp_path / "log"
        )
        process = psutil.Process(child.pid)
        psutil.Process(process.ppid()).kill()
        assert child.wait(30) == -signal.SIGKILL
        assert psutil.wait_procs([process], timeout=30)[1] == []


def test_a_parent_with_threads_does_not_fork(modules: Path, tmp_path: Path) -> None:
    log = tmp_path / "parent.log"
    with Preload(["functions:start_thread"], environment_with(modules), log) as parent:
        with pytest.raises(PreloadFailed, match="2 threads run; a fork would lose all but one"):
            parent.start("functions:sleep", [], title="", environment={}, log_file=tmp_path / "c")


def test_a_parent_that_cannot_import_is_reported_with_its_log(
    modules: Path, tmp_path: Path
) -> None:
    log = tmp_path / "parent.log"
    with Preload(["no_such_module"], environment_with(modules), log) as parent:
        with pytest.raises(
            PreloadFailed, match=f"(?s){log} ends:.*No module named 'no_such_module"
        ):
            parent.wait_ready()


def test_waiting_for_a_parent_can_be_cancelled(modules: Path, tmp_path: Path) -> None:
    with Preload(["functions:sleep"], environment_with(modules), tmp_path / "log") as parent:
        parent.wait_ready(given_up=lambda: True)  # it would wait for 600 s otherwise


def test_a_server_that_cannot_be_forked_leaves_no_files(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Preload(["functions"], environment_with(modules), modules / "dying.log") as parent:
        parent.wait_ready()
        parent._process.kill()
        parent._process.wait()
        with pytest.raises(PreloadFailed, match="the preload process died; .*dying.log ends"):
            start_server(
                tmp_path,
                ServerConfig(),
                "int8",
                context_length=64,
                log_file=modules / "server.log",
                seed=0,
                preload=parent,
            )
    assert list(tmp_path.iterdir()) == []
