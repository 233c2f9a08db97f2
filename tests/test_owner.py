"""A run directory has one owner at a time, and loses it when the owner's process dies."""

import fcntl
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from qurl_megatron import cli
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import save
from qurl_megatron.launch import local, slurm
from qurl_megatron.launch.owner import OWNER_FILE, claim, owner_of
from qurl_megatron.machine.processes import start_ticks


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Make a run's directory with its config.yaml."""
    config = Config(output_dir=str(tmp_path), name="first")
    config.run_dir.mkdir()
    save(config, config.run_dir / "config.yaml")
    return config


def test_a_second_launcher_is_refused_with_pid_and_host_until_the_first_ends(
    tmp_path: Path,
) -> None:
    with claim(tmp_path):
        with pytest.raises(ConfigError) as refused:
            claim(tmp_path)
    name = f"process {os.getpid()} on {socket.gethostname()}"
    expected = f"{tmp_path}: {name} works on this run; wait for it to end, or stop it"
    assert str(refused.value) == expected
    claim(tmp_path).close()


@pytest.mark.parametrize(
    "start",
    [
        lambda config: local.launch(config),
        lambda config: slurm.run(config, max_restarts=0),
        lambda config: cli.app(["resume", str(config.run_dir), "steps=9"]),
    ],
    ids=["train", "slurm", "resume"],
)
def test_no_launcher_changes_a_directory_that_has_an_owner(
    start: Any, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = (config.run_dir / "config.yaml").read_text()
    with claim(config.run_dir), pytest.raises(SystemExit) as ended:
        start(config)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"qurl: {config.run_dir}: process {os.getpid()} on ")
    assert {path.name for path in config.run_dir.iterdir()} == {"config.yaml", OWNER_FILE}
    assert (config.run_dir / "config.yaml").read_text() == saved


def test_a_launcher_is_not_refused_because_somebody_asks_for_the_owner(tmp_path: Path) -> None:
    claim(tmp_path).close()
    with (tmp_path / OWNER_FILE).open() as asking:  # as `owner_of`, but for longer
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, [asking, fcntl.LOCK_UN]).start()
        claim(tmp_path).close()


def test_a_killed_owner_leaves_the_directory_free(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from qurl_megatron.launch.owner import claim\n"
        "file = claim(Path(sys.argv[1])); print('claimed', flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"claimed\n"
        with pytest.raises(ConfigError, match=f"process {owner.pid} on"):
            claim(tmp_path)
        owner.kill()
    claim(tmp_path).close()


def test_a_fork_of_an_owner_owns_nothing(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with claim(tmp_path):
        fork.start()
    claim(tmp_path).close()
    fork.kill()
    fork.join()


def test_without_flock_a_recorded_process_is_the_owner_while_it_runs_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flock(file: object, operation: int) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        record = {
            "host": socket.gethostname(),
            "pid": other.pid,
            "start_ticks": start_ticks(other.pid),
        }
        (tmp_path / OWNER_FILE).write_text(json.dumps(record))
        with pytest.raises(ConfigError, match=f"process {other.pid} on"):
            claim(tmp_path)
        for change in ({"host": "another"}, {"start_ticks": 0}):  # not known, and another process
            (tmp_path / OWNER_FILE).write_text(json.dumps({**record, **change}))
            claim(tmp_path).close()
        other.kill()
    (tmp_path / OWNER_FILE).write_text(json.dumps(record))
    claim(tmp_path).close()


@pytest.mark.parametrize(
    "record",
    [
        json.dumps({"host": "another", "pid": 1, "start_ticks": 2}),
        json.dumps({"host": socket.gethostname(), "pid": 1, "start_ticks": -1}),
        json.dumps([1]),
        "{",
        "",
    ],
    ids=["another host", "an earlier process", "a list", "cut off", "empty"],
)
def test_a_record_without_its_lock_is_stale_whatever_it_says(tmp_path: Path, record: str) -> None:
    (tmp_path / OWNER_FILE).write_text(record)
    assert owner_of(tmp_path) == ""
    with claim(tmp_path):
        assert owner_of(tmp_path) == f"process {os.getpid()} on {socket.gethostname()}"
        (tmp_path / OWNER_FILE).write_text(record)  # a spoilt record does not free a lock
        with pytest.raises(ConfigError, match="works on this run"):
            claim(tmp_path)
    assert owner_of(tmp_path) == ""
