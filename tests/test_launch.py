"""Decisions that launchers make before they start anything; tests/slurm runs real jobs."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from qurl_megatron.config.gpus import DGX_H100
from qurl_megatron.config.schema import (
    STOPPED_EARLY,
    Config,
    ConfigError,
    LearnerConfig,
    RolloutConfig,
    ServerConfig,
)
from qurl_megatron.config.servers import server_specs
from qurl_megatron.launch import local, slurm, slurm_node, supervisor
from qurl_megatron.launch.nodes import NodeGroup, make_plan, smallest_plan
from qurl_megatron.launch.placement import JobPlan, NodePlan
from qurl_megatron.launch.resume import prepare_resume_or_new
from qurl_megatron.launch.servers import Attempt
from qurl_megatron.machine.environment import NO_THREADS
from qurl_megatron.machine.output import CONSOLE_LOG, outlive_output
from qurl_megatron.rollout.preload import Started
from tiny import build_tiny_model


def config_of(ranks: int, servers: int, gpus_per_server: int, problems: int = 0) -> Config:
    config = Config(
        learner=LearnerConfig(tensor_parallel_size=ranks),
        rollout=RolloutConfig(
            servers=servers, server=ServerConfig(tensor_parallel_size=gpus_per_server)
        ),
    )
    config.evaluation.problems = problems
    return config


def test_ranks_and_servers_spread_evenly_and_each_node_needs_a_gpu_for_each() -> None:
    config = config_of(ranks=8, servers=3, gpus_per_server=2, problems=64)
    plan = make_plan(config, 0, ["a", "b"], ["c", "d"], port=1)
    assert plan.nodes == [
        NodePlan("a", gpus=4, ranks=4, sends=True),
        NodePlan("b", gpus=4, ranks=4),
        NodePlan("c", gpus=4, servers=[("rollout", 0, 0), ("rollout", 2, 2)]),
        NodePlan("d", gpus=3, servers=[("rollout", 1, 0), ("evaluation", 0, 2)]),
    ]


def test_a_plan_is_read_back_as_written(tmp_path: Path) -> None:
    plan = make_plan(config_of(2, 1, 1), 3, ["a"], ["b"], port=1)
    plan.save(tmp_path / "plan.json")
    read = JobPlan.load(tmp_path / "plan.json")
    assert (read.attempt, read.master_address) == (3, "a")
    assert [node.ranks for node in read.nodes] == [2, 0]
    mode = (tmp_path / "plan.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600  # it has the API key
    # SGLang parses the key, which it reads from a file, as it parses a command line.
    assert plan.api_key.isalnum() and len(plan.api_key) == 64


@pytest.mark.parametrize(
    ("learner_nodes", "rollout_nodes", "message"),
    [
        (3, 1, "--nodes=3 for the learner: its 8 ranks"),
        (2, 3, "rollout.servers=2: 3 rollout nodes"),
    ],
)
def test_an_uneven_spread_is_refused(learner_nodes: int, rollout_nodes: int, message: str) -> None:
    names = [str(number) for number in range(learner_nodes + rollout_nodes)]
    with pytest.raises(ConfigError, match=message):
        make_plan(config_of(8, 2, 1), 0, names[:learner_nodes], names[learner_nodes:], port=1)


def test_weights_are_not_written_into_servers_of_other_nodes() -> None:
    config = config_of(1, 1, 1)
    config.quantization.transport = "direct"
    with pytest.raises(ConfigError, match=r"^quantization.transport=direct: servers of this job"):
        make_plan(config, 0, ["a"], ["b"], port=1)
    (node,) = make_plan(config, 0, ["a"], [], port=1, gpus_per_node=8).nodes  # they are beside it
    assert node == NodePlan("a", gpus=2, ranks=1, servers=[("rollout", 0, 1)], sends=True)


def shared_config(ranks: int, servers: int, gpus_per_server: int, problems: int = 0) -> Config:
    config = config_of(ranks, servers, gpus_per_server, problems)
    config.rollout.placement = "colocated"
    return config


def test_servers_that_take_turns_are_on_the_learners_nodes_and_gpus() -> None:
    nodes, others = smallest_plan(shared_config(16, 4, 4, problems=64), gpus_per_node=8)
    assert others == []
    of_first = [("rollout", 0, 0), ("rollout", 1, 4), ("evaluation", 0, 0)]
    assert nodes == [
        NodePlan("learner0", gpus=8, ranks=8, servers=of_first, sends=True),
        NodePlan("learner1", gpus=8, ranks=8, servers=[("rollout", 2, 0), ("rollout", 3, 4)]),
    ]
    with pytest.raises(ConfigError, match=r"has 8 ranks on each; set it to a divisor of 8"):
        smallest_plan(shared_config(16, 2, 6), gpus_per_node=8)
    with pytest.raises(ConfigError, match=r"2 servers of tensor_parallel_size=4 take 8 GPUs, and"):
        smallest_plan(shared_config(4, 2, 4), gpus_per_node=8)


def test_smallest_plan_has_the_fewest_nodes_that_hold_the_ranks_and_servers() -> None:
    learner, rollout = smallest_plan(config_of(16, 5, 4, problems=1), gpus_per_node=8)
    assert [node.ranks for node in learner] == [8, 8]
    assert [len(node.servers) for node in rollout] == [2, 2, 2]
    assert [node.gpus for node in rollout] == [8, 8, 5]  # the evaluation server has its own GPU


def test_servers_have_the_gpus_that_the_learner_leaves_free_on_its_nodes() -> None:
    config = config_of(12, 4, 2, problems=1)  # six ranks on each of two nodes
    assert smallest_plan(config, gpus_per_node=8) == (
        [
            NodePlan("learner0", 8, 6, [("rollout", 3, 6)], sends=True),
            NodePlan("learner1", 7, 6, [("evaluation", 0, 6)]),
        ],
        [NodePlan("rollout0", 6, servers=[("rollout", n, 2 * n) for n in range(3)])],
    )
    learner, rollout = smallest_plan(config, gpus_per_node=8, heterogeneous=True)
    assert [node.gpus for node in (*learner, *rollout)] == [6, 6, 5, 4]  # nodes of two kinds
    # Beside a rank no process has its GPU, however many nodes there are.
    for further in ([], ["c"], ["c", "d"]):
        for node in make_plan(config_of(2, 3, 1), 0, ["a"], further, 1, gpus_per_node=8).nodes:
            firsts = [first for _, _, first in node.servers]
            assert sorted([*range(node.ranks), *firsts]) == [*range(node.gpus)]
    with pytest.raises(ConfigError, match=r"^--nodes=1: too few; nodes of 4 GPUs do not hold the"):
        make_plan(config_of(2, 3, 1), 0, ["a"], [], port=1, gpus_per_node=4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of(9, 1, 1), "its 9 ranks do not divide"),
        (config_of(8, 1, 16), "rollout.server.tensor_parallel_size=16: a server must fit on one"),
    ],
)
def test_a_run_that_fits_on_no_number_of_nodes_is_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        smallest_plan(config, gpus_per_node=8)


def job_environment(
    monkeypatch: pytest.MonkeyPatch, nodes: str, cpus: str, gpus: str
) -> dict[str, str]:
    """Return the variables of a job on nodes that are listed by comma."""
    monkeypatch.setattr(slurm, "hostnames", lambda nodelist: nodelist.split(","))
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_CPUS_PER_NODE": cpus,
        "SLURM_GPUS_ON_NODE": gpus,
    }


def test_one_allocation_gives_the_learner_as_many_nodes_as_its_ranks_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = job_environment(monkeypatch, "a,b,c", cpus="64(x2),32", gpus="4")
    learner, rollout = slurm.node_groups(environment, world_size=8)
    assert (learner.nodes, rollout.nodes, learner.cpus) == (["a", "b"], ["c"], 32)
    (both,) = slurm.node_groups(environment, world_size=9)  # which leave three GPUs
    assert (both.nodes, both.gpus) == (["a", "b", "c"], 4)
    with pytest.raises(ConfigError, match="--nodes=3: the learner's 16 ranks take 4 nodes of 4 GP"):
        slurm.node_groups(environment, world_size=16)
    with pytest.raises(ConfigError, match="ask for --gpus-per-node"):
        slurm.node_groups({**environment, "SLURM_GPUS_ON_NODE": "0"}, world_size=8)
    del environment["SLURM_GPUS_ON_NODE"]  # a cluster that counts no GPUs
    learner, rollout = slurm.node_groups({**environment, "QURL_GPUS_PER_NODE": "8"}, world_size=8)
    assert (learner.nodes, rollout.nodes) == (["a"], ["b", "c"])


def test_learner_and_servers_that_take_turns_have_one_group_of_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = job_environment(monkeypatch, "a,b", cpus="64(x2)", gpus="8")
    (both,) = slurm.node_groups(environment, world_size=16, is_colocated=True)
    assert both.nodes == ["a", "b"]
    fewer = {**environment, "SLURM_GPUS_PER_NODE": "h100:4"}  # of the eight of an exclusive node
    (both,) = slurm.node_groups(fewer, world_size=8, is_colocated=True)
    assert both.nodes == ["a", "b"]
    with pytest.raises(ConfigError, match=r"--nodes=2: .* take 3 nodes of 8 GPUs$"):
        slurm.node_groups(environment, world_size=24, is_colocated=True)
    with pytest.raises(ConfigError, match="heterogeneous job has two groups"):
        slurm.node_groups({**environment, "SLURM_HET_SIZE": "2"}, 16, is_colocated=True)


def test_every_server_in_every_attempt_has_its_own_seed() -> None:
    config = config_of(1, servers=2, gpus_per_server=1)
    seeds = [Attempt(config, n).server_seed(i) for n in range(3) for i in range(2)]
    assert len(set(seeds)) == 6 and seeds[0] == config.seed
    assert [spec.index for spec in server_specs(config)] == [0, 1]


def test_a_start_has_logs_of_its_own_also_after_logs_of_others_were_deleted(tmp_path: Path) -> None:
    config = Config(output_dir=str(tmp_path), name="first")
    config.run_dir.mkdir()
    assert [Attempt.create(config).number for _ in range(4)] == [0, 1, 2, 3]
    (config.run_dir / "logs" / "resumed_1").rmdir()
    (config.run_dir / "logs" / "resumed_9.tar.gz").touch()
    assert Attempt.create(config).logs.name == "resumed_4"


@pytest.mark.parametrize(
    ("steps", "saves", "lead_s"),
    [
        ([], [], 0),  # there is nothing to save
        ([(900, 0)] + [(100, 0)] * 20, [45], 60 + 1.1 * (100 + 45)),  # that stall was long ago
        ([(420, 0), (90, 40)], [], 60 + 1.1 * (420 + 200)),  # no save yet: 200 s are expected
        ([(120, 0), (90, 40)], [30, 45], 60 + 1.1 * (120 + 45)),
        ([(120, 0), (90, 140)], [45], 60 + 1.1 * (140 + 45)),  # asked as an evaluation begins
        ([(5, 0)], [45], 60 + 1.1 * (45 + 45)),  # asked as a save begins
    ],
)
def test_a_job_is_asked_to_stop_when_a_step_or_evaluation_and_a_save_still_fit(
    tmp_path: Path, steps: list[tuple[float, float]], saves: list[float], lead_s: float
) -> None:
    """Steps are seconds of the step and of its evaluation."""
    metrics = [
        {"time_rollout_s": step_s - 20, "time_waited_s": 80.0, "time_update_s": 20.0}
        | {"time_evaluation_s": evaluation_s}
        for step_s, evaluation_s in steps
    ]
    written = [{"step": 1, "time_write_s": save_s} for save_s in saves]
    for name, lines in {"metrics.jsonl": metrics, "checkpoints.jsonl": written}.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert slurm.stop_lead_s(tmp_path, save_s=200) == pytest.approx(lead_s)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("4:00:00", 14_400),
        ("2-0", 172_800),
        ("1-2:03", 93_780),
        ("1-02:03:04", 93_784),
        ("UNLIMITED", float("inf")),
        ("0", float("inf")),
    ],
)
def test_a_time_limit_is_read_as_sbatch_and_squeue_write_it(text: str, seconds: float) -> None:
    assert slurm.time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "-5", "1-", "4h", "1:2:3:4", "1-2:3:4:5", "INVALID"])
def test_what_is_no_time_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^time={text}: not a time limit of Slurm"):
        slurm.time_limit_s(text)


def test_the_expected_time_of_a_save_follows_from_its_size_and_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(model=str(build_tiny_model(tmp_path / "model")), output_dir=str(tmp_path))
    assert slurm.write_bytes_per_s(tmp_path) > 1e6
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    monkeypatch.setattr(slurm, "write_bytes_per_s", lambda directory: 1e5)
    parameters = sum(
        tensor.numel() for tensor in load_file(tmp_path / "model" / "model.safetensors").values()
    )
    assert slurm.expected_save_s(config) == 14 * parameters / 1e5
    assert "0.0001 GB/s from one node" in capsys.readouterr().out


def test_tasks_run_in_the_container_and_steps_with_the_options_that_the_script_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QURL_CONTAINER_OPTIONS", "--container-image='my image'")
    monkeypatch.setenv("QURL_SRUN_ARGS", "--mpi=none --comment='a b'")
    assert slurm.task("supervisor", "/logs")[0] == "--container-image=my image"
    command = slurm.srun(NodeGroup(["n3"], None, cpus=8), ["true"])
    assert command[-3:] == ["--mpi=none", "--comment=a b", "true"]


def test_a_task_whose_python_still_starts_ignores_the_signals_that_ask_it_to_stop() -> None:
    program = "import signal; print(*(signal.getsignal(n).value for n in (10, 15)))"
    command = [*slurm.IGNORE_SIGNALS, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (signal.SIGUSR1, signal.SIGTERM) == (10, 15)
    assert done.stdout.split() == [str(signal.SIG_IGN.value)] * 2


def test_steps_inherit_no_options_of_sbatch_and_none_of_a_job_that_has_submitted_theirs() -> None:
    of_sbatch = {"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "8"}
    of_sbatch |= {"SLURM_CPUS_PER_GPU": "12", "SLURM_MEM_PER_GPU": "1024"}
    # With --export=NONE a step would lack PYTHONPATH, and so run another copy of the code.
    of_sbatch |= {"SLURM_EXPORT_ENV": "NONE", "SRUN_EXPORT_ENV": "HOME"}
    # In salloc --mem=8G --ntasks=1, and in a shell of srun --pty
    of_other_job = {"SLURM_MEM_PER_NODE": "8192", "SLURM_MEM_PER_CPU_HET_GROUP_1": "2048"}
    of_other_job |= {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_GRES": "gpu:1"}
    of_other_job |= {"SLURM_TRES_BIND": "gres/gpu:single:1", "SLURM_STDOUTMODE": "out"}
    kept = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NETWORK": "job_vni"}
    kept |= {"SLURM_CONF": "/c", "SLURMD_NODENAME": "n1", "PYTHONPATH": "/code"}
    environment = {**of_sbatch, **of_other_job, **kept}
    assert slurm.step_environment(environment) == {**kept, **NO_THREADS}


def test_a_step_names_its_nodes_and_their_group_and_has_a_task_with_all_cpus_on_each() -> None:
    command = slurm.srun(NodeGroup(["n3", "n4"], 1, cpus=8), ["true"])
    assert command[:4] == ["srun", "--het-group=1", "--nodelist=n3,n4", "--nodes=2"]
    assert {"--ntasks=2", "--cpus-per-task=8"} <= set(command) and command[-1] == "true"


class Controller:
    """Slurm's commands, of which each fails as often as it is told, and then answers.

    A list is what a command answers one time after the other.
    """

    def __init__(self, failures: int, answers: dict[str, str | list[str]]) -> None:
        self.failures = dict.fromkeys(answers, failures)
        self.answers = answers
        self.done: list[str] = []

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        name = " ".join(command[:2]) if command[0] == "scontrol" else command[0]
        self.failures[name] -= 1
        if self.failures[name] == 0:
            raise FileNotFoundError(name)  # the program is being replaced
        if self.failures[name] > 0 and self.failures[name] % 2:
            raise subprocess.TimeoutExpired(command, slurm.ASK_ONCE_TIMEOUT_S)
        if self.failures[name] >= 0:
            message = "Unable to contact slurm controller"
            raise subprocess.CalledProcessError(1, command, "", message)
        self.done.append(" ".join(command) if command[0] == "scontrol" else name)
        answer = self.answers[name]
        text = answer.pop(0) if isinstance(answer, list) else answer
        return subprocess.CompletedProcess(command, 0, text)


Ask = Callable[[int, dict[str, str | list[str]]], Controller]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that puts a `Controller` in the place of Slurm's, for job 7."""

    def controller(failures: int, answers: dict[str, str | list[str]]) -> Controller:
        controller = Controller(failures, answers)
        monkeypatch.setattr(slurm.subprocess, "run", controller.run)
        return controller

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(slurm, "hostnames", lambda nodelist: nodelist.split(","))
    monkeypatch.setattr(slurm, "ASK_AGAIN_S", 0.01)
    return controller


def test_the_end_of_a_job_counts_from_its_start_if_slurms_clock_is_ahead(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "STARTED_AT", now := time.time())
    for left, left_s in {"8:30": 510, "11:30": 600, "8:30 10:00\n8:29": 510}.items():
        ask(0, {"squeue": f"{left} 10:00"})
        assert slurm.job_end_time() == pytest.approx(now + left_s, abs=1)
    ask(0, {"squeue": "UNLIMITED UNLIMITED"})
    assert slurm.job_end_time() == float("inf")
    for answer in ("", "INVALID 10:00", "garbage"):
        ask(0, {"squeue": answer})
        assert slurm.job_end_time() is None
    ask(1, {"squeue": "8:30 10:00"})
    assert slurm.job_end_time() is None


def test_the_guard_requeues_a_job_without_its_batch_host_and_believes_no_silence(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.json").write_text('{"id": "7", "batch_host": "n1"}')
    monkeypatch.setattr(slurm, "GUARD_POLL_S", 0.0)
    monkeypatch.setattr(slurm, "ASK_TIMEOUT_S", 0.0)
    # The nodes of the job; none is told; n1 is lost, and three requests to requeue fail.
    controller = ask(3, {"squeue": ["n1,n2", "", *["n2"] * 4], "scontrol requeue": ""})
    slurm.guard(tmp_path)
    assert controller.done == ["squeue"] * 6 + ["scontrol requeue 7"]


@pytest.mark.parametrize(
    ("code", "nodes", "preempted", "goes_on"),
    [
        (1, "n1,n2,n3", "None", False),  # the learner failed by itself
        (1, "n1,n3", "None", True),  # one of its nodes is lost
        (1, "n1,n2", "None", False),  # a rollout node is lost, which explains no failure
        (1, "", "None", False),  # the controller is silent
        (1, "n1,n2,n3", "2026-01-01T00:00:00", True),
        (0, "n1", "None", False),  # it has finished
        (STOPPED_EARLY, "n1,n2,n3", "None", True),
    ],
)
def test_a_job_goes_on_if_slurm_took_a_learner_node_or_the_run_stopped_early(
    ask: Ask, code: int, nodes: str, preempted: str, goes_on: bool
) -> None:
    ask(0, {"squeue": nodes, "scontrol show": f"PreemptTime={preempted}"})
    assert slurm.is_resumable(code, ["n1", "n2"]) == goes_on


def test_a_job_asks_a_controller_that_does_not_answer_again(ask: Ask) -> None:
    controller = ask(3, {"squeue": "RUNNING", "scontrol requeue": ""})
    assert slurm.requeue(max_restarts=1)
    assert controller.done == ["squeue", "scontrol requeue 7"]
    ask(3, {"scontrol show": "PreemptTime=2026-01-01T00:00:00"})
    assert slurm.is_preempted()


@pytest.mark.parametrize(
    ("answering", "said"),
    [
        ([], "not requeued: Slurm does not say whether the job still runs"),
        (["squeue"], "not requeued: Slurm did not do it"),
    ],
)
def test_a_job_whose_controller_stays_silent_is_not_requeued_and_no_error(
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answering: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(slurm, "ASK_TIMEOUT_S", 0.05)
    controller = ask(10**6, {"squeue": "RUNNING", "scontrol requeue": "", "scontrol show": ""})
    controller.failures |= dict.fromkeys(answering, 0)
    assert not slurm.requeue(max_restarts=1)
    assert said in capsys.readouterr().out
    assert not slurm.is_preempted()


def test_a_time_limit_that_is_not_told_is_asked_for_again_while_the_learner_runs(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The learner runs until it is asked to stop, which the time limit does."""

    class Learner:
        code: int | None = None

        def poll(self) -> int | None:
            return self.code

        def send_signal(self, number: signal.Signals) -> None:
            assert number == signal.SIGUSR1
            self.code = STOPPED_EARLY

    class Rollout:
        def check(self) -> bool:
            return time.monotonic() < deadline

    controller = ask(2, {"squeue": "0:00 10:00"})
    monkeypatch.setattr(slurm, "CLOCK_POLL_S", 0.1)
    monkeypatch.setattr(slurm, "POLL_S", 0.01)
    deadline = time.monotonic() + 20
    config = Config(output_dir=str(tmp_path))
    assert slurm.watch(config, Learner(), Rollout(), [], 1.0) == STOPPED_EARLY  # type: ignore
    assert set(controller.done) == {"squeue"}


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_whose_step_outlasts_its_limit_goes_on_from_what_it_has_saved(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saves: bool
) -> None:
    """The learner hangs. Without a checkpoint of this job, the next one would come no further."""

    class Learner:
        returncode = None

        def poll(self) -> None:
            return None

        def send_signal(self, number: signal.Signals) -> None:
            asked.append(number)

        def wait(self, timeout_s: float) -> None:
            raise subprocess.TimeoutExpired("srun", timeout_s)

    class Rollout:
        def check(self) -> bool:
            if saves and asked:
                (tmp_path / "checkpoints" / "step_000002").mkdir(exist_ok=True)
            return time.monotonic() < deadline

    asked: list[signal.Signals] = []
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)  # of the job before
    config = Config(output_dir=str(tmp_path.parent), name=tmp_path.name)
    ask(0, {"squeue": "0:40 10:00"})
    monkeypatch.setattr(slurm, "POLL_S", 0.01)
    deadline = time.monotonic() + (20 if saves else 0.5)
    code = slurm.watch(config, Learner(), Rollout(), [signal.SIGUSR1], 1.0)  # type: ignore
    assert code == (STOPPED_EARLY if saves else 1)


@pytest.mark.parametrize(
    ("own", "learner", "listens"),
    [
        ("192.0.2.7", "192.0.2.8", "192.0.2.7"),
        ("127.0.1.1", "192.0.2.8", "towards 192.0.2.8"),  # as Debian writes a node's own name
        ("127.0.1.2", "127.0.1.1", "127.0.1.2"),  # nodes that share one machine
    ],
)
def test_servers_listen_at_an_address_that_the_learner_reaches(
    monkeypatch: pytest.MonkeyPatch, own: str, learner: str, listens: str
) -> None:
    known = {"own": own, "learner": learner}
    monkeypatch.setattr(socket, "gethostbyname", lambda name: known[name])
    monkeypatch.setattr(slurm_node, "address_towards", lambda host: f"towards {host}")
    assert slurm_node.node_address("own", "learner") == listens


@pytest.mark.parametrize(
    ("number", "terminal"),
    [
        (signal.SIGINT, "terminal"),
        (signal.SIGTERM, "terminal"),
        (signal.SIGHUP, "terminal"),
        (signal.SIGHUP, "/dev/full"),  # like a terminal that has closed, it takes no line
    ],
)
def test_a_signal_to_a_launcher_or_its_closed_terminal_ends_a_run_in_order(
    signals: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    terminal: str,
) -> None:
    config = Config(output_dir=str(tmp_path), name="first")
    config.run_dir.mkdir()
    released: list[Config] = []

    @contextlib.contextmanager
    def claimed_servers(config: Config) -> Iterator[None]:
        try:
            yield
        finally:
            released.append(config)

    monkeypatch.setattr(supervisor, "preload", lambda *_: os.kill(os.getpid(), number))
    monkeypatch.setattr(local, "claimed_servers", claimed_servers)
    with contextlib.suppress(OSError), (tmp_path / terminal).open("w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        monkeypatch.setattr(sys, "stdout", sys.stdout)  # restored after the test
        outlive_output(config.run_dir)
        code = local.launch(config)
    assert code == 128 + number
    assert released == [config]
    place = tmp_path / terminal if terminal != "/dev/full" else config.run_dir / CONSOLE_LOG
    said = place.read_text()
    assert f"interrupted by {number.name}" in said and "to start again: " in said


def test_a_job_without_a_name_for_its_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="name=: missing"):
        prepare_resume_or_new("quickstart", DGX_H100)


def test_a_rank_that_loses_a_request_to_stop_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import signal, sys, time; asked = []\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3) if asked else asked.append(1))\n"
        "print('ready', flush=True); time.sleep(60); time.sleep(60)"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert rank.stdout and rank.stdout.readline() == b"ready\n"
    monkeypatch.setattr(supervisor, "REMIND_S", 0.5)
    supervisor.end_ranks([Started(rank.pid, rank.poll)])
    assert rank.returncode == 3
