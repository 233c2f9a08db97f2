"""Jobs on a Slurm that is slow, silent or takes the job back, and on a disk that fills."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qurl_megatron.learner.checkpoint import read_state
from qurl_megatron.machine.disk import free_bytes
from qurl_megatron.report.record import list_checkpoints
from slurm.cluster import Cluster
from slurm.runs import metrics_of, script_of, wait_for_end, wait_for_text

SLOW_REWARD = """
import time

def reward(completion, problem):
    time.sleep(2.5)  # 40 s for each of two processes and 32 completions
    return 0.0
"""


def test_a_job_of_long_steps_saves_before_its_limit_by_its_own_clock(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Slurm sends no signal, and no checkpoint is due."""
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    words = ["reward=slow.py:reward", "scoring.workers=2"]
    script = script_of(*words, "steps=100", "checkpoint.every_steps=1000", sbatch={"signal": False})
    job = cluster.submit(tmp_path, script, "--time=00:05:00", "--nodelist=n1,n2")
    wait_for_text(job, "requeueing job")
    run_dir = tmp_path / "runs" / "run"
    steps = metrics_of(run_dir)
    assert len(steps) >= 2 and all(step["time_rollout_s"] > 30 for step in steps)
    assert read_state(list_checkpoints(run_dir)[-1]).step == len(steps)
    wait_for_text(job, f"resuming after step {len(steps)}")


def test_a_job_that_is_requeued_before_its_first_checkpoint_starts_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = cluster.submit(tmp_path, script_of("steps=3"), "--nodelist=n1,n2")
    wait_for_text(job, "preflight passed")
    cluster.call("scontrol", "requeue", job.id)
    assert wait_for_end(job) == "COMPLETED", job.text()
    assert job.text().count("preflight passed") == 2
    assert [step["step"] for step in metrics_of(tmp_path / "runs" / "run")] == [1, 2, 3]


@pytest.fixture
def commands(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Return a function that hides Slurm's commands behind a shell line while `broken` exists.

    It returns the variables of a job that uses them.
    """

    def commands(line: str) -> dict[str, str]:
        (tmp_path / "bin").mkdir()
        for name in ("squeue", "scontrol"):
            program = tmp_path / "bin" / name
            hidden = f'test -e "{tmp_path}/broken" && {{ {line}; }}'
            program.write_text(f'#!/bin/sh\n{hidden}\nexec /usr/bin/{name} "$@"\n')
            program.chmod(0o755)
        return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    return commands


@pytest.mark.parametrize("line", ["sleep 60", "echo down >&2; exit 1"], ids=["hang", "fail"])
def test_a_job_outlives_slurm_commands_that_hang_or_fail(
    cluster: Cluster, tmp_path: Path, commands: Callable[[str], dict[str, str]], line: str
) -> None:
    script = script_of("steps=100", environment=commands(line))
    job = cluster.submit(tmp_path, script, "--nodelist=n1,n2")
    wait_for_text(job, "step 2/")
    (tmp_path / "broken").touch()
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    wait_for_text(job, "squeue")  # it says what did not answer
    (tmp_path / "broken").unlink()
    wait_for_text(job, "requeueing job")
    run_dir = tmp_path / "runs" / "run"
    wait_for_text(job, f"resuming after step {len(metrics_of(run_dir))}")


def test_a_disk_that_fills_ends_the_job_with_the_last_checkpoint_and_the_next_one_resumes(
    cluster: Cluster, tmp_path: Path
) -> None:
    disk = cluster.small_disk / tmp_path.name
    disk.mkdir()
    words = ["checkpoint.every_steps=2", f"output_dir={disk}"]
    script = script_of("steps=100", *words)
    job = cluster.submit(tmp_path, script, "--nodelist=n1,n2")
    wait_for_text(job, "step 2/")
    with (disk / "other").open("wb", buffering=0) as other:
        while free_bytes(disk) > 8 * 2**20:  # enough for metrics, too little for a checkpoint
            other.write(bytes(2**20))
    assert wait_for_end(job) == "FAILED"
    assert "the disk is full" in job.text() and f"the last whole one is {disk}" in job.text()
    saved = read_state(list_checkpoints(disk / "run")[-1]).step
    (disk / "other").unlink()
    again = cluster.submit(tmp_path, script_of("steps=4", *words), "--nodelist=n1,n2")
    wait_for_text(again, f"resuming after step {saved}")
    assert wait_for_end(again) == "COMPLETED", again.text()
