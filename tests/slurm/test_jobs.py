"""Training as Slurm jobs, with real Slurm, learner, servers and node failures, on a tiny model."""

import json
import os
import re
import signal
import stat
from pathlib import Path

import pytest

from e2e.running import QURL
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.config.text import load
from qurl_megatron.launch.slurm import stop_lead_s
from qurl_megatron.learner.checkpoint import read_state
from qurl_megatron.report.record import list_checkpoints
from qurl_megatron.rollout.roster import read_roster
from slurm.cluster import Cluster, Job
from slurm.runs import TIMEOUT_S, WORDS, metrics_of, script_of, wait_for_end, wait_for_text

QURL_TIMEOUT_S = 300.0  # one `qurl` command on a busy machine


def test_a_signalled_job_is_requeued_and_resumes_at_that_step_until_it_completes(
    cluster: Cluster, tmp_path: Path
) -> None:
    directory = tmp_path / """it's "here" #1"""
    directory.mkdir()

    def qurl(*words: str) -> str:
        return cluster.call(QURL, *words, cwd=directory, timeout_s=QURL_TIMEOUT_S)

    def launch(*options: str) -> Job:
        """Submit a job: learner ranks on n1 and n2, servers on n3 and n4."""
        recipe, *fields = WORDS  # the fields in a file of one's own
        lines = "".join(f"{field.replace('=', ': ', 1)}\n" for field in fields)
        (directory / "own.yaml").write_text(f"recipe: {recipe}\n{lines}")
        words = ["own.yaml", "steps=100", "checkpoint.every_steps=1000", "rollout.servers=2"]
        nodes = ["--executor=slurm", "--partition=low", "--gpus-per-node=1", "--heterogeneous"]
        output = qurl("launch", *words, *nodes, *options)
        number = output.removeprefix("runs/run: job ").removesuffix("\n")
        return Job(cluster, number, directory / "logs" / f"qurl.run-{number}.out")

    job = launch("--max-restarts=1")
    chained = launch(f"--sbatch=dependency=afterany:{job.id}")
    late = launch(f"--sbatch=dependency=afterany:{chained.id}")
    run_dir = directory / "runs" / "run"
    comments = cluster.call("squeue", "--noheader", f"--jobs={job.id}", "--format=%k").splitlines()
    assert set(comments) == {str(run_dir)}  # of both components
    wait_for_text(job, "step 3/")
    for exchange in ("n1 -> n2", "n1 -> n3", "n1 -> n4", "all-reduce of 2 nodes"):
        assert re.search(rf"^(qurl: )?network: {exchange} \S+ GB/s", job.text(), re.MULTILINE)
    plan = json.loads((run_dir / "logs" / "plan.json").read_text())
    parts = [(node["name"], node["ranks"], len(node["servers"])) for node in plan["nodes"]]
    assert parts == [("n1", 1, 0), ("n2", 1, 0), ("n3", 0, 1), ("n4", 0, 1)]
    servers = read_roster(run_dir / "logs" / "servers_n3.json")["rollout"]
    servers |= read_roster(run_dir / "logs" / "servers_n4.json")["rollout"]
    assert {index: server.machine for index, server in servers.items()} == {0: "n3", 1: "n4"}
    assert all(server.api_key for server in servers.values())
    mode = (run_dir / "logs" / "servers_n3.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600

    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    wait_for_text(job, "requeueing job")
    first, saved = list_checkpoints(run_dir)
    assert read_state(first).step == 1
    stopped_at = read_state(saved).step
    assert 3 <= stopped_at < 90
    before = metrics_of(run_dir)
    assert len(before) == stopped_at  # no step is lost
    progress = f"step {stopped_at} of 100, newest checkpoint {saved.name}, job {job.id} "
    assert qurl("status", "runs/run").startswith(f"runs/run: {progress}")
    assert f"==> {job.output} <==" in qurl("logs", "runs/run")

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
    assert 60 < stop_lead_s(run_dir, save_s=1e9) < 600

    assert wait_for_end(late) == "COMPLETED"
    assert "is finished" in late.text()
    assert metrics_of(run_dir) == after
    status = "runs/run: step 100 of 100, newest checkpoint step_000100, finished\n"
    assert qurl("status", "runs/run") == status
    assert sorted(path.name for path in directory.iterdir()) == ["logs", "own.yaml", "runs"]
    assert cluster.left_over() == []


def test_a_killed_rank_fails_the_job_and_the_next_job_resumes(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = "--nodelist=n1,n2"
    run_dir = tmp_path / "runs" / "run"

    # A learner rank is killed.
    script = script_of("steps=100000", "checkpoint.every_steps=2")
    first = cluster.submit(tmp_path, script, nodes)
    script = script_of("steps=100000", "checkpoint.every_steps=100000")
    second = cluster.submit(tmp_path, script, nodes, f"--dependency=afterany:{first.id}")
    wait_for_text(first, "step 5/")
    cluster.rank("n1", 1).kill()
    assert wait_for_end(first) == "FAILED"
    assert first.exit_code() == 1
    assert "learner ended with code 1;" in first.text()
    assert "learner rank 1 ended (killed by signal 9); the end of" in first.text()

    # The next job of the chain resumes from its checkpoint. When it is preempted it saves at once,
    # ignoring the schedule, and is requeued until nodes are free.
    done = read_state(list_checkpoints(run_dir)[-1]).step
    wait_for_text(second, f"resuming after step {done}")
    wait_for_text(second, f"step {done + 3}/")
    urgent = ["--partition=high", "--exclusive", "--nodes=2", "--nodelist=n1,n2", "--output=urgent"]
    cluster.call("sbatch", *urgent, "--wrap=true", cwd=tmp_path)
    wait_for_text(second, "requeueing job")
    stopped_at = read_state(list_checkpoints(run_dir)[-1]).step
    assert stopped_at >= done + 3
    assert len(metrics_of(run_dir)) == stopped_at
    wait_for_text(second, f"resuming after step {stopped_at}")
    wait_for_text(second, f"step {stopped_at + 1}/")

    # A cancelled job saves too, and is not requeued.
    cluster.call("scancel", second.id)
    assert wait_for_end(second) == "CANCELLED"
    assert "not requeued" in second.text()
    assert len(metrics_of(run_dir)) == read_state(list_checkpoints(run_dir)[-1]).step
    assert cluster.left_over() == []


def test_a_job_goes_on_without_lost_servers_tasks_and_nodes_until_none_is_left(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = script_of("steps=100000", "checkpoint.every_steps=100000", "rollout.servers=2")
    job = cluster.submit(tmp_path, script, "--nodes=3", "--nodelist=n1,n2,n3")
    run_dir = tmp_path / "runs" / "run"
    logs = run_dir / "logs"

    def wait_for_steps(number: int) -> None:
        last = len(metrics_of(run_dir)) + number
        cluster.wait_for(
            lambda: len(metrics_of(run_dir)),
            lambda steps: steps >= last,
            TIMEOUT_S,
            f"{last} steps",
        )

    # A server is killed; its supervisor starts it again.
    wait_for_text(job, "step 3/")
    os.kill(read_roster(logs / "servers_n3.json")["rollout"][1].pid, signal.SIGKILL)
    wait_for_text(job, "server rollout_1 died (killed by signal 9); restarting (1)")
    wait_for_steps(1)
    wait_for_text(job, "server rollout_1 serves", count=2)

    # The supervisor of a rollout node is killed; the job starts it again.
    (supervisor,) = cluster.supervisors("n2")
    supervisor.kill()
    wait_for_text(job, "rollout_n2 ended with code 137")
    wait_for_text(job, "starting the supervisor of n2 again")
    wait_for_text(job, "server rollout_0 serves", count=2)
    assert (logs / "server_rollout_0_restarted_1.log").exists()
    wait_for_steps(2)

    # A rollout node is lost; Slurm takes it out of the job.
    cluster.kill_node("n3")
    wait_for_text(job, "server rollout_1 is lost", count=2)
    wait_for_steps(2)
    wait_for_text(job, "n3 is lost; its servers do not come back")
    wait_for_steps(2)
    assert job.state() == "RUNNING"

    # The other rollout node is lost; the job saves, and is requeued until there are nodes again.
    cluster.kill_node("n2")
    wait_for_text(job, "requeueing job")
    stopped_at = read_state(list_checkpoints(run_dir)[-1]).step
    assert stopped_at == len(metrics_of(run_dir))
    assert f"stopped early after step {stopped_at}" in job.text()
    cluster.start_node("n2")
    cluster.start_node("n3")
    wait_for_text(job, f"resuming after step {stopped_at}")
    wait_for_text(job, f"step {stopped_at + 1}/")

    # The batch host is lost, and with it whoever would end the job: the guard requeues it.
    cluster.kill_node("n1")
    cluster.wait_for(lambda: job.show("Restarts"), lambda number: number == "2", 300, "requeued")
    cluster.start_node("n1")
    cluster.wait_for(cluster.left_over, lambda left: left == [], what="ended")


def test_servers_have_the_gpus_that_the_learner_leaves_on_its_node(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = ["learner.tensor_parallel_size=1", "rollout.servers=2", "steps=4"]
    script = script_of(*words)  # a rank and a server on one node, a server on the other
    assert "#SBATCH --nodes=2\n" in script
    job = cluster.submit(tmp_path, script, "--nodelist=n1,n2")
    wait_for_text(job, "step 2/")
    run_dir = tmp_path / "runs" / "run"
    nodes = json.loads((run_dir / "logs" / "plan.json").read_text())["nodes"]
    parts = [(node["name"], node["ranks"], node["servers"], node["gpus"]) for node in nodes]
    # The rank has the first GPU of its node, and no server has that one.
    assert parts == [("n1", 1, [["rollout", 1, 1]], 2), ("n2", 0, [["rollout", 0, 0]], 1)]
    for node in ("n1", "n2"):
        (supervisor,) = cluster.supervisors(node)
        assert supervisor.environ()["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert wait_for_end(job) == "COMPLETED", job.text()
    assert [step["servers_serving"] for step in metrics_of(run_dir)] == [2] * 4
    assert cluster.left_over() == []


@pytest.mark.parametrize(("gpus_per_node", "nodes"), [(2, ["n1"]), (1, ["n1", "n2"])])
def test_learner_and_servers_take_turns_on_the_same_gpus_of_one_group_of_nodes(
    cluster: Cluster, tmp_path: Path, gpus_per_node: int, nodes: list[str]
) -> None:
    words = ["rollout.placement=colocated", "rollout.servers=2", "steps=6"]
    script = script_of(*words, gpus_per_node=gpus_per_node)
    assert f"#SBATCH --nodes={len(nodes)}\n" in script
    job = cluster.submit(tmp_path, script, f"--nodelist={','.join(nodes)}")
    wait_for_text(job, "step 2/")
    logs = tmp_path / "runs" / "run" / "logs"
    plan = json.loads((logs / "plan.json").read_text())
    parts = [(node["name"], node["ranks"], len(node["servers"])) for node in plan["nodes"]]
    assert parts == [(node, gpus_per_node, gpus_per_node) for node in nodes]
    for node in nodes:
        (supervisor,) = cluster.supervisors(node)  # of the ranks and the servers
        gpus = ",".join(map(str, range(gpus_per_node)))
        assert supervisor.environ()["CUDA_VISIBLE_DEVICES"] == gpus
    assert wait_for_end(job) == "COMPLETED", job.text()
    steps = metrics_of(tmp_path / "runs" / "run")
    assert [step["servers_serving"] for step in steps] == [2] * 6
    config = load(tmp_path / "runs" / "run" / "config.yaml")
    assert config.rollout.server.releases == "cache"  # as `auto` was settled before the start
    assert cluster.left_over() == []


def test_a_node_with_too_few_gpus_is_named_before_anything_starts(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = script_of(heterogeneous=True)
    job = cluster.submit(tmp_path, script, "--gpus-per-node=1", ":", "--gpus-per-node=1")
    assert wait_for_end(job) == "FAILED"
    assert job.exit_code() == 2
    assert "preflight of n1: Slurm granted 1 GPUs, 2 are needed" in job.text()
    assert not list((tmp_path / "runs" / "run" / "logs").glob("server*"))
