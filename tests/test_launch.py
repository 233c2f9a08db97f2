"""What launchers decide before they start anything; tests/slurm runs real jobs."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest

from launch import slurm, slurm_task
from launch.attempt import Attempt, wanted_servers
from launch.slurm import JobPlan, NodePlan
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    LearnerConfig,
    RolloutConfig,
    ServerConfig,
)
from qurl_megatron.process import free_port


def config_of(ranks: int, servers: int, gpus_a_server: int, problems: int = 0) -> Config:
    config = Config(
        learner=LearnerConfig(tensor_parallel_size=ranks),
        rollout=RolloutConfig(
            servers=servers, server=ServerConfig(tensor_parallel_size=gpus_a_server)
        ),
    )
    config.evaluation.problems = problems
    return config


def test_ranks_and_servers_are_spread_evenly_and_each_node_needs_a_gpu_for_each() -> None:
    config = config_of(ranks=8, servers=3, gpus_a_server=2, problems=64)
    plan = slurm.make_plan(config, 0, ["a", "b"], ["c", "d"], port=1)
    assert plan.nodes == [
        NodePlan("a", gpus=4, ranks=4),
        NodePlan("b", gpus=4, ranks=4),
        NodePlan("c", gpus=4, servers=[("rollout", 0), ("rollout", 2)]),
        NodePlan("d", gpus=3, servers=[("rollout", 1), ("evaluation", 0)]),
    ]


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = slurm.make_plan(config_of(2, 1, 1), 3, ["a"], ["b"], port=1)
    plan.save(tmp_path / "plan.json")
    read = JobPlan.load(tmp_path / "plan.json")
    assert (read.token, read.attempt, read.master_address) == (plan.token, 3, "a")
    assert [node.ranks for node in read.nodes] == [2, 0]
    mode = (tmp_path / "plan.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600  # there is a key in it


@pytest.mark.parametrize(
    ("learner_nodes", "rollout_nodes", "message"),
    [
        (3, 1, "--nodes=3 for the learner: its 8 ranks"),
        (2, 3, "rollout.servers=2: 3 rollout nodes"),
    ],
)
def test_what_does_not_come_out_even_is_refused(
    learner_nodes: int, rollout_nodes: int, message: str
) -> None:
    names = [str(number) for number in range(learner_nodes + rollout_nodes)]
    with pytest.raises(ConfigError, match=message):
        slurm.make_plan(config_of(8, 2, 1), 0, names[:learner_nodes], names[learner_nodes:], port=1)


def test_one_allocation_gives_the_learner_as_many_nodes_as_its_ranks_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, "hostnames", lambda nodelist: nodelist.split(","))
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a,b,c",
        "SLURM_JOB_CPUS_PER_NODE": "64(x2),32",
        "SLURM_GPUS_ON_NODE": "4",
    }
    learner, rollout = slurm.parts(environment, world_size=8)
    assert (learner.nodes, rollout.nodes, learner.cpus) == (["a", "b"], ["c"], 32)
    with pytest.raises(ConfigError, match="12 ranks take 3 nodes of 4 GPUs, and at least one is"):
        slurm.parts(environment, world_size=12)
    with pytest.raises(ConfigError, match="ask for --gpus-per-node"):
        slurm.parts({**environment, "SLURM_GPUS_ON_NODE": "0"}, world_size=8)


def test_every_server_of_every_attempt_has_random_numbers_of_its_own() -> None:
    config = config_of(1, servers=2, gpus_a_server=1)
    seeds = [Attempt(config, n).server_seed(i) for n in range(3) for i in range(2)]
    assert len(set(seeds)) == 6 and seeds[0] == config.seed
    assert [one.index for one in wanted_servers(config)] == [0, 1]


def test_the_lead_of_the_signal_comes_from_the_longest_step_and_save(tmp_path: Path) -> None:
    assert slurm.signal_lead_s(tmp_path) == slurm.LEAD_UNMEASURED_S
    steps = [{"step": 1, "time_rollout_s": 100.0, "time_update_s": 20.0}, {"time_rollout_s": 90.0}]
    saves = [{"step": 1, "time_write_s": 30.0}, {"step": 2, "time_write_s": 45.0}]
    for name, lines in {"metrics.jsonl": steps, "checkpoints.jsonl": saves}.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert slurm.signal_lead_s(tmp_path) == 60 + 120 + 45


def test_gpus_that_slurm_or_the_driver_lacks_are_counted() -> None:
    assert slurm_task.gpu_problems(needed=2, granted=2, installed=None) == []
    (problem,) = slurm_task.gpu_problems(needed=2, granted=1, installed=None)
    assert "granted 1 GPUs, 2 are needed" in problem
    (problem,) = slurm_task.gpu_problems(needed=2, granted=8, installed=7)
    assert "granted 8 GPUs, the driver finds 7" in problem


def preflight(directory: Path, plan: JobPlan, token: str) -> list[str]:
    """What the preflight of this machine, called `here`, reports."""
    (directory / "preflight").mkdir()
    plan.save(directory / "plan.json")
    slurm_task.preflight(directory, token)
    return json.loads((directory / "preflight" / "here.json").read_text())


@pytest.fixture
def as_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(slurm_task, "installed_gpus", lambda: None)
    known = {"here": "127.0.0.1"}

    def resolve(name: str, port: None) -> str:
        if name not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known[name]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_preflight_passes_a_node_that_has_what_it_needs(as_node: None, tmp_path: Path) -> None:
    plan = JobPlan("token", "key", 0, "here", free_port(), [NodePlan("here", gpus=2, ranks=2)])
    assert preflight(tmp_path, plan, "token") == []


def test_preflight_names_everything_that_is_wrong_with_a_node(
    as_node: None, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        nodes = [NodePlan("here", gpus=4, ranks=4), NodePlan("there", gpus=1)]
        found = preflight(tmp_path, JobPlan("other", "key", 0, "here", port, nodes), "token")
    assert [problem.split(":")[0].split(",")[0] for problem in found] == [
        f"{tmp_path} is not the one this job writes to",
        "Slurm granted 2 GPUs",
        "cannot resolve there",
        f"port {port} is not free",
    ]


def test_a_container_is_used_where_one_is_named() -> None:
    assert slurm.container({}) == []
    words = slurm.container({"QURL_CONTAINER_IMAGE": "i.sqsh", "QURL_CONTAINER_MOUNTS": "/d:/d"})
    assert "--container-image=i.sqsh" in words and "--container-mounts=/d:/d" in words


def test_steps_are_not_told_what_sbatch_was_asked_for() -> None:
    environment = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "8", "SLURM_JOB_ID": "7"}
    assert slurm.step_environment(environment) == {"SLURM_JOB_ID": "7"}


def test_a_job_without_a_name_for_its_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="name=: missing"):
        slurm.prepared("quickstart", ["steps=1"])
