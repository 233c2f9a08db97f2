"""The check of the nodes of a job and of their network; each node is a local process."""

import dataclasses
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from distributed import rank_context
from qurl_megatron.config.schema import Config, LearnerConfig, RolloutConfig, ServerConfig
from qurl_megatron.launch import preflight, slurm
from qurl_megatron.launch.nodes import NodeGroup, make_plan
from qurl_megatron.launch.placement import JobPlan, NodePlan
from qurl_megatron.launch.preflight import Report, problems, rounds, summarize
from qurl_megatron.launch.servers import Attempt
from qurl_megatron.machine.network import free_port

# Of a job of two learner nodes, of which the first sends, and two with servers.
N1, N2, N3, N4 = NAMES = [f"127.0.0.{number}" for number in range(1, 5)]
NODES = [
    NodePlan(N1, 0, ranks=1, sends=True),
    NodePlan(N2, 0, ranks=1),
    NodePlan(N3, 0, servers=[("rollout", 0, 0)]),
    NodePlan(N4, 0, servers=[("rollout", 1, 0)]),
]
TITLES = [f"{N1} -> {N2}", f"{N1} -> {N3}", f"{N1} -> {N4}", "all-reduce of 2 nodes"]
GROUPS = [NodeGroup([N1, N2], 0, cpus=1), NodeGroup([N3, N4], 1, cpus=1)]


def plan_of(nodes: list[NodePlan]) -> JobPlan:
    return JobPlan("key", 0, nodes[0].name, free_port(), nodes)


def test_senders_reach_every_server_once_and_a_node_does_one_thing_at_a_time() -> None:
    learner = LearnerConfig(
        tensor_parallel_size=4, pipeline_parallel_size=2, data_parallel_size=2
    )  # two ranks on each of eight nodes; ranks 0 and 8 send
    server = ServerConfig(tensor_parallel_size=2)
    config = Config(learner=learner, rollout=RolloutConfig(servers=3, server=server))
    config.evaluation.problems = 0
    learners, servers = [f"l{number}" for number in range(8)], ["s0", "s1", "s2"]
    nodes = make_plan(config, 0, learners, servers, port=1).nodes
    assert [node.name for node in nodes if node.sends] == ["l0", "l4"]
    *pairs, last = rounds(nodes)
    assert last == {"all-reduce of 8 nodes": learners}
    for exchanges in pairs:
        names = [*itertools.chain(*exchanges.values())]
        assert len(set(names)) == len(names)
    found = sorted(tuple(pair) for exchanges in pairs for pair in exchanges.values())
    published = itertools.product(["l0", "l4"], servers)
    assert found == sorted([*itertools.pairwise(learners), *published])
    assert len(pairs) <= 6
    (one,) = rounds(
        [NodePlan("a", 1, ranks=1, sends=True), NodePlan("b", 1, servers=[("r", 0, 0)])]
    )
    assert one == {"a -> b": ("a", "b")}


# Starts a process for each of the nodes, as srun does, and passes signals to them.
STARTER = """
import os, signal, subprocess, sys
nodes, *command = sys.argv[1:]
tasks = [
    subprocess.Popen(command, env={**os.environ, "SLURMD_NODENAME": node})
    for node in nodes.split(",")
]
signal.signal(signal.SIGUSR2, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempt]:
    """Give a start of a run whose steps are processes of this machine."""

    def srun(group: NodeGroup, command: Sequence[str]) -> list[str]:
        assert command[0] == "--wait=0"
        return [sys.executable, "-c", STARTER, ",".join(group.nodes), *command[1:]]

    monkeypatch.setattr(slurm, "srun", srun)
    monkeypatch.setenv("QURL_PYTHON", sys.executable)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    config = Config(output_dir=str(tmp_path), name="run")
    config.run_dir.mkdir()
    others = set(psutil.Process().children(recursive=True))  # of tests before this one
    yield Attempt.create(config)
    assert set(psutil.Process().children(recursive=True)) <= others, "a process is left"


def test_a_job_prints_how_fast_each_exchange_is(
    attempt: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(NODES)
    plan.save(attempt.logs / "plan.json")
    assert slurm.preflight(attempt, plan, GROUPS)
    printed = capsys.readouterr().out
    rates = dict(re.findall(r"network: (.+) (\S+) GB/s", printed))
    assert sorted(rates) == sorted(TITLES)
    assert all(0.001 < float(rate) < 100 for rate in rates.values()), printed
    assert printed.endswith("preflight passed on 4 nodes\n")


def test_processes_that_hang_are_ended_and_their_nodes_named(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import time; time.sleep(600)"
    monkeypatch.setattr(slurm, "task", lambda *words: [sys.executable, "-c", program])
    monkeypatch.setattr(slurm, "limit_s", lambda nodes: 2.0)
    assert not slurm.preflight(attempt, plan_of(NODES), GROUPS)
    missing = re.findall(r"qurl: preflight of (\S+): no report", capsys.readouterr().out)
    assert missing == NAMES


def take_part(name: str, logs: Path, port: int, meet_s: float, title: str, how: str) -> None:
    """Be a node that does not do the exchange of this title as it should."""
    os.environ.update({"SLURMD_NODENAME": name, "GLOO_SOCKET_IFNAME": "lo"})
    preflight.MEET_TIMEOUT_S, preflight.ROUND_TIMEOUT_S, preflight.LEAVE_TIMEOUT_S = (
        meet_s,
        4.0,
        1.0,
    )
    preflight.EXCHANGE_TIMEOUT_S, preflight.ALARM_S = 2.0, 3.0
    preflight.MESSAGE_BYTES, preflight.MEASURE_S = 2**16, 0.01
    measure = preflight.measure

    def disturbed(exchange: str, *where: Any) -> float:
        if exchange != title:
            return measure(exchange, *where)
        if how == "hangs":
            threading.Event().wait()
        if how == "dies at its end":
            measure(exchange, *where)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    preflight.measure = disturbed  # type: ignore[assignment]
    preflight.check_node(logs, port)


def exchange_on(
    names: Sequence[str],
    directory: Path,
    bad: str = "",
    title: str = "",
    how: str = "",
    *,
    nodes: list[NodePlan] = NODES,
    meet_s: float = 60.0,
) -> tuple[list[str], dict[str, int | None]]:
    """Return what is said of the exchanges between these nodes, and the processes' exit codes."""
    plan = plan_of(nodes)
    plan.save(directory / "plan.json")
    (directory / "preflight").mkdir()
    port = free_port()
    tasks = {
        name: rank_context().Process(
            target=take_part,
            args=(name, directory, port, meet_s, title if name == bad else "", how),
        )
        for name in names
    }
    try:
        for task in tasks.values():
            task.start()
        for task in tasks.values():
            task.join(60)
        codes = {name: task.exitcode for name, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.kill()
            task.join()
    lines, works = summarize(plan, directory / "preflight")
    assert not works
    return [line for line in lines if "GB/s" not in line], codes


def test_a_node_that_never_joins_is_named(tmp_path: Path) -> None:
    (line,), codes = exchange_on([N1, N2, N4], tmp_path, meet_s=3.0)
    assert line.startswith(f"qurl: preflight of {N3}: no report: the node did not start, lacks ")
    assert codes == {N1: 0, N2: 0, N4: 0}


def test_nothing_is_exchanged_if_a_node_lacks_something(
    tmp_path: Path,
) -> None:
    nodes = [NODES[0], NodePlan(N2, 4, servers=[("rollout", 0, 0)])]
    lines, codes = exchange_on([N1, N2], tmp_path, nodes=nodes)
    granted = "Slurm granted 0 GPUs, 4 are needed; ask for --gpus-per-node"
    assert lines == [f"qurl: preflight of {N2}: {granted}"]
    assert codes == {N1: 0, N2: 0}


def test_every_problem_of_a_node_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(preflight, "installed_gpus", lambda: 8)
    plan = plan_of([NodePlan(N1, 2, ranks=2), NodePlan("-", 1)])
    assert problems(plan_of(plan.nodes[:1]), plan.nodes[0], num_gpus=2) == []
    with socket.socket() as taken:
        taken.bind(("", plan.master_port))
        found = problems(plan, plan.nodes[0], num_gpus=0)
    assert [re.split("[:,]", problem)[0] for problem in found] == [
        "Slurm granted 2 GPUs",
        "cannot resolve - to an IPv4 address",
        f"port {plan.master_port} is not free",
    ]
    assert found[0].endswith("the driver shows 8, torch sees 0; the driver may be too old")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "none9")
    (problem,) = problems(plan_of(plan.nodes[:1]), plan.nodes[0], num_gpus=2)
    assert problem.startswith("NCCL_SOCKET_IFNAME=none9: ")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(preflight, "installed_gpus", lambda: None)
    assert problems(plan_of(plan.nodes[:1]), plan.nodes[0], num_gpus=0) == []
    broken = Mock(side_effect=TimeoutError("nvidia-smi -L has not answered"))
    monkeypatch.setattr(preflight, "installed_gpus", broken)
    assert problems(plan_of(plan.nodes[:1]), plan.nodes[0], num_gpus=0) == [str(broken.side_effect)]


@pytest.mark.parametrize(
    ("bad", "how", "signal_number"),
    [
        (N3, "dies", signal.SIGKILL),
        (N3, "dies at its end", signal.SIGKILL),
        (N3, "hangs", signal.SIGALRM),
        (N1, "dies", signal.SIGKILL),  # and with it the store
    ],
)
def test_a_pair_that_fails_is_named_with_its_interfaces_and_hcas(
    bad: str, how: str, signal_number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    lines, codes = exchange_on(NAMES, tmp_path, bad, f"{N1} -> {N3}", how)
    (line,) = lines
    devices = preflight.network_devices("GLOO_SOCKET_IFNAME")
    assert devices.startswith("GLOO_SOCKET_IFNAME=lo, ")  # and then the HCAs
    assert line.startswith(f"qurl: network: {N1} -> {N3} failed: ")
    assert line.endswith(f"; {N1}: {devices}; {N3}: {devices}")
    assert codes == {**dict.fromkeys(NAMES, 0), bad: -signal_number}


def test_the_interface_and_the_hcas_are_those_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(preflight.socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(preflight, "INFINIBAND", tmp_path)
    unset = "NCCL_SOCKET_IFNAME unset, localhost is 127.0.0.1"
    assert preflight.network_devices("NCCL_SOCKET_IFNAME") == f"{unset}, no HCA"
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert preflight.network_devices("NCCL_SOCKET_IFNAME") == f"{unset}, HCAs mlx5_0 mlx5_1"


def test_a_slow_exchange_is_a_warning_that_says_why(tmp_path: Path) -> None:
    """An exchange is as fast as the slowest node of it says."""
    for name in NAMES:
        rates: dict[str, float | str] = dict.fromkeys(TITLES, 20e9)
        rates |= {TITLES[2]: 2.5e9} if name == N4 else {}
        report = Report([], "", "nccl", f"interface of {name}", rates)
        (tmp_path / f"{name}.json").write_text(json.dumps(dataclasses.asdict(report)))
    lines, works = summarize(plan_of(NODES), tmp_path)
    assert works
    expected = [f"network: {title} 20 GB/s" for title in TITLES if title != TITLES[2]]
    expected += ["preflight passed on 4 nodes"]
    assert [line for line in lines if not line.startswith("qurl: ")] == expected
    (warning,) = [line for line in lines if line.startswith("qurl: ")]
    said = f"qurl: network: {TITLES[2]} 2.5 GB/s, below 5: InfiniBand or RoCE "
    assert warning.startswith(said)
    assert warning.endswith(f"; {N1}: interface of {N1}; {N4}: interface of {N4}")


def test_what_was_not_done_is_no_success(tmp_path: Path) -> None:
    for name in NAMES:
        report = Report([], "", "gloo", "", {TITLES[0]: 1e9})
        (tmp_path / f"{name}.json").write_text(json.dumps(dataclasses.asdict(report)))
    lines, works = summarize(plan_of(NODES), tmp_path)
    assert not works
    undone = ", ".join(TITLES[1:])
    assert lines == [
        f"network: {TITLES[0]} 1 GB/s",
        f"qurl: network: a node came too late to do: {undone}",
    ]
