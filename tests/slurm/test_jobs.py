"""Training as Slurm jobs, with real Slurm, learner, servers and node failures, on a tiny model."""

from __future__ import annotations

import json
import signal
import stat
import sys
from pathlib import Path

from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.learner.checkpoint import list_checkpoints, read_state
from slurm.cluster import Cluster
from slurm.runs import WORDS, metrics_of, wait_for_end, wait_for_text

SCRIPTS = Path(__file__).parents[2] / "launch"


def test_a_signalled_job_is_requeued_and_resumes_at_that_step_until_it_completes(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = [*WORDS, "steps=100", "checkpoint.every_steps=1000", "rollout.servers=2"]
    nodes = ["--nodes=1", "--gpus-per-node=2", ":", "--nodes=2", "--gpus-per-node=1"]
    once = "--export=ALL,QURL_MAX_RESTARTS=1"
    job = cluster.submit(tmp_path, once, *nodes, SCRIPTS / "qurl.sbatch", *words)
    after_job = f"--dependency=afterany:{job.id}"
    chained = cluster.submit(tmp_path, after_job, *nodes, SCRIPTS / "qurl.sbatch", *words)
    after_chained = f"--dependency=afterany:{chained.id}"
    late = cluster.submit(tmp_path, after_chained, *nodes, SCRIPTS / "qurl.sbatch", *words)
    run_dir = tmp_path / "runs" / "run"
    wait_for_text(job, "step 3/")
    servers = json.loads((run_dir / "logs" / "servers_n2.json").read_text())["rollout"]
    servers += json.loads((run_dir / "logs" / "servers_n3.json").read_text())["rollout"]
    assert [(server["machine"], bool(server["api_key"])) for server in servers] == [
        ("n2", True),
        ("n3", True),
    ]
    mode = (run_dir / "logs" / "servers_n2.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600

    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    wait_for_text(job, "requeueing job")
    (saved,) = list_checkpoints(run_dir)
    stopped_at = read_state(saved).step
    assert 3 <= stopped_at < 90
    before = metrics_of(run_dir)
    assert len(before) == stopped_at  # no step is lost

    # The restarted job is signalled again, and has no restarts left.
    wait_for_text(job, f"resuming after step {stopped_at}")
    assert job.show("Restarts") == "1"
    wait_for_text(job, f"step {stopped_at + 2}/")
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    assert wait_for_end(job) == "FAILED"
    assert job.exit_code() == STOPPED_EARLY == 75
    assert "not finished after 1 restarts, and no more are allowed" in job.text()

    # The next job of the chain completes the run, and the one after it has nothing to do.
    assert wait_for_end(chained) == "COMPLETED", chained.text()
    after = metrics_of(run_dir)
    assert [step["step"] for step in after] == list(range(1, 101))
    assert after[:stopped_at] == before
    assert (run_dir / "logs" / "resumed_1" / "server_rollout_1.log").exists()
    assert list((run_dir / "final_model").glob("*.safetensors"))
    lead = cluster.call(*lead_command(run_dir))
    assert 60 < int(lead) < 600

    assert wait_for_end(late) == "COMPLETED"
    assert "is finished" in late.text()
    assert metrics_of(run_dir) == after
    assert cluster.left_over() == []


def lead_command(run_dir: Path) -> list[str | Path]:
    return [sys.executable, "-m", "launch.slurm", "lead", run_dir]


def test_a_killed_rank_or_node_fails_the_job_and_the_next_job_resumes(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = [*WORDS, "steps=100000", "checkpoint.every_steps=2"]
    nodes = ["--nodes=2", "--gpus-per-node=2", "--nodelist=n1,n2"]
    script = SCRIPTS / "qurl_one_allocation.sbatch"
    run_dir = tmp_path / "runs" / "run"

    # A learner rank is killed.
    first = cluster.submit(tmp_path, *nodes, script, *words)
    second = cluster.submit(tmp_path, f"--dependency=afterany:{first.id}", *nodes, script, *words)
    wait_for_text(first, "step 5/")
    (rank,) = cluster.tasks("n1", "learner", rank=1)
    rank.kill()
    assert wait_for_end(first) == "FAILED"
    assert first.exit_code() == 128 + signal.SIGKILL
    assert "the learner side ended with code 137" in first.text()
    assert "task 1: Killed" in first.text()
    assert cluster.left_over() == []

    # The next job of the chain resumes from its checkpoint, and loses a rollout node.
    done = read_state(list_checkpoints(run_dir)[-1]).step
    wait_for_text(second, f"resuming after step {done}")
    wait_for_text(second, f"step {done + 5}/")
    cluster.kill_node("n2")
    wait_for_text(second, "side ended with code")
    assert "server http://127.0.1.2" in second.text()  # the learner lost it
    cluster.start_node("n2")  # Slurm needs the node to see that the job has ended there
    assert wait_for_end(second) == "FAILED"
    assert second.exit_code() == 1
    assert cluster.left_over() == []

    # A preempted job saves at once, ignoring the schedule, and is requeued until nodes are free.
    third = cluster.submit(tmp_path, *nodes, script, *words, "checkpoint.every_steps=100000")
    done = read_state(list_checkpoints(run_dir)[-1]).step
    wait_for_text(third, f"resuming after step {done}")
    wait_for_text(third, f"step {done + 3}/")
    urgent = ["--partition=high", "--exclusive", "--nodes=2", "--nodelist=n1,n2", "--output=urgent"]
    cluster.call("sbatch", *urgent, "--wrap=true", cwd=tmp_path)
    wait_for_text(third, "requeueing job")
    stopped_at = read_state(list_checkpoints(run_dir)[-1]).step
    assert stopped_at >= done + 3
    assert len(metrics_of(run_dir)) == stopped_at
    wait_for_text(third, f"resuming after step {stopped_at}")
    wait_for_text(third, f"step {stopped_at + 1}/")

    # A cancelled job saves too, and is not requeued.
    cluster.call("scancel", third.id)
    assert wait_for_end(third) == "CANCELLED"
    assert "not requeued" in third.text()
    assert len(metrics_of(run_dir)) == read_state(list_checkpoints(run_dir)[-1]).step
    assert cluster.left_over() == []


def test_a_node_with_too_few_gpus_is_named_before_anything_starts(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = ["--nodes=1", "--gpus-per-node=1", ":", "--nodes=1", "--gpus-per-node=1"]
    job = cluster.submit(tmp_path, *nodes, SCRIPTS / "qurl.sbatch", *WORDS)
    assert wait_for_end(job) == "FAILED"
    assert job.exit_code() == 2
    assert "preflight of n1: Slurm granted 1 GPUs, 2 are needed" in job.text()
    assert not list((tmp_path / "runs" / "run" / "logs").glob("server*"))
