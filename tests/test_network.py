"""The exchanges between the nodes of a job before it starts; each node is a local process."""

import dataclasses
import itertools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed import rank_context
from qurl_megatron.config.schema import Config, LearnerConfig, RolloutConfig, ServerConfig
from qurl_megatron.launch import network, slurm
from qurl_megatron.launch.network import Exchange, Report, rounds, summarize
from qurl_megatron.launch.placement import JobPlan, NodeGroup, NodePlan, make_plan
from qurl_megatron.launch.servers import Attempt
from qurl_megatron.process import free_port

# Of jobs of two learner nodes, of which the first sends, and two with servers.
NODES = [
    NodePlan("n1", 1, ranks=1, sends=True),
    NodePlan("n2", 1, ranks=1),
    NodePlan("n3", 1, servers=[("rollout", 0, 0)]),
    NodePlan("n4", 1, servers=[("rollout", 1, 0)]),
]
TITLES = ["n1 -> n2", "n1 -> n3", "n1 -> n4", "all-reduce of 2 nodes"]
GROUPS = [NodeGroup(["n1", "n2"], 0, cpus=1), NodeGroup(["n3", "n4"], 1, cpus=1)]


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
    *pairs, (last,) = rounds(nodes)
    assert last == Exchange("all-reduce", tuple(learners))
    for exchanges in pairs:
        names = [name for exchange in exchanges for name in exchange.nodes]
        assert len(set(names)) == len(names)
    found = sorted(exchange.nodes for exchanges in pairs for exchange in exchanges)
    published = itertools.product(["l0", "l4"], servers)
    assert found == sorted([*itertools.pairwise(learners), *published])
    assert len(pairs) <= 6
    (one,) = rounds(
        [NodePlan("a", 1, ranks=1, sends=True), NodePlan("b", 1, servers=[("r", 0, 0)])]
    )
    assert one == [Exchange("broadcast", ("a", "b"))]


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
    plan = JobPlan("token", "key", 0, "127.0.0.1", 1, NODES)
    plan.save(attempt.logs / "plan.json")
    assert slurm.network_works(attempt, plan, *GROUPS)
    printed = capsys.readouterr().out
    rates = dict(re.findall(r"network: (.+) (\S+) GB/s", printed))
    assert sorted(rates) == sorted(TITLES)
    assert all(0.001 < float(rate) < 100 for rate in rates.values()), printed


def test_processes_that_hang_are_ended_and_their_nodes_named(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import time; time.sleep(600)"
    monkeypatch.setattr(slurm, "task", lambda *words: [sys.executable, "-c", program])
    monkeypatch.setattr(network, "limit_s", lambda nodes: 2.0)
    assert not slurm.network_works(attempt, JobPlan("t", "k", 0, "n1", 1, NODES), *GROUPS)
    missing = re.findall(r"qurl: network: (\w+) never joined", capsys.readouterr().out)
    assert missing == [node.name for node in NODES]


def take_part(name: str, logs: Path, port: int, meet_s: float, title: str, how: str) -> None:
    """Be a node that does not do the exchange of this title as it should."""
    os.environ.update({"SLURMD_NODENAME": name, "GLOO_SOCKET_IFNAME": "lo"})
    network.MEET_TIMEOUT_S, network.ROUND_TIMEOUT_S, network.LEAVE_TIMEOUT_S = meet_s, 4.0, 1.0
    network.EXCHANGE_TIMEOUT_S, network.ALARM_S = 2.0, 3.0
    network.MESSAGE_BYTES, network.MEASURE_S = 2**16, 0.01
    measure = network.measure

    def disturbed(exchange: Exchange, rank: int, store: Any) -> float:
        if exchange.title != title:
            return measure(exchange, rank, store)
        if how == "hangs":
            threading.Event().wait()
        if how == "dies at its end":
            measure(exchange, rank, store)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    network.measure = disturbed
    network.check_node(logs, port)


def exchange_on(
    names: Sequence[str],
    directory: Path,
    bad: str = "",
    title: str = "",
    how: str = "",
    *,
    meet_s: float = 60.0,
) -> tuple[list[str], dict[str, int | None]]:
    """Return what is said of the exchanges between these nodes, and the processes' exit codes."""
    plan = JobPlan("token", "key", 0, "127.0.0.1", 1, NODES)
    plan.save(directory / "plan.json")
    (directory / "network").mkdir()
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
    lines, works = summarize(plan, directory / "network")
    assert not works
    return [line for line in lines if "GB/s" not in line], codes


def test_a_node_that_never_joins_is_named(tmp_path: Path) -> None:
    lines, codes = exchange_on(["n1", "n2", "n4"], tmp_path, meet_s=3.0)
    assert lines == ["qurl: network: n3 never joined; its step's log says why"]
    assert codes == {"n1": 0, "n2": 0, "n4": 0}


@pytest.mark.parametrize(
    ("bad", "how", "signal_number"),
    [
        ("n3", "dies", signal.SIGKILL),
        ("n3", "dies at its end", signal.SIGKILL),
        ("n3", "hangs", signal.SIGALRM),
        ("n1", "dies", signal.SIGKILL),  # and with it the store
    ],
)
def test_a_pair_that_fails_is_named_with_its_interfaces_and_hcas(
    bad: str, how: str, signal_number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    names = [node.name for node in NODES]
    lines, codes = exchange_on(names, tmp_path, bad, "n1 -> n3", how)
    (line,) = lines
    devices = network.network_devices("GLOO_SOCKET_IFNAME")
    assert devices.startswith("GLOO_SOCKET_IFNAME=lo, ")  # and then the HCAs
    assert line.startswith("qurl: network: n1 -> n3 failed: ")
    assert line.endswith(f"; n1: {devices}; n3: {devices}")
    assert codes == {**dict.fromkeys(names, 0), bad: -signal_number}


def test_the_interface_and_the_hcas_are_those_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(network.socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(network, "INFINIBAND", tmp_path)
    unset = "NCCL_SOCKET_IFNAME unset, localhost is 127.0.0.1"
    assert network.network_devices("NCCL_SOCKET_IFNAME") == f"{unset}, no HCA"
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert network.network_devices("NCCL_SOCKET_IFNAME") == f"{unset}, HCAs mlx5_0 mlx5_1"


def test_a_slow_exchange_is_a_warning_that_says_why(tmp_path: Path) -> None:
    """An exchange is as fast as the slowest node of it says."""
    fast = dict.fromkeys(TITLES, 20e9)
    for name in ("n1", "n2", "n3", "n4"):
        rates = fast | ({"n1 -> n4": 2.5e9} if name == "n4" else {})
        report = Report("nccl", f"interface of {name}", bytes_per_s=rates)
        (tmp_path / f"{name}.json").write_text(json.dumps(dataclasses.asdict(report)))
    lines, works = summarize(JobPlan("t", "k", 0, "n1", 1, NODES), tmp_path)
    assert works
    expected = [f"network: {title} 20 GB/s" for title in TITLES if title != "n1 -> n4"]
    assert [line for line in lines if not line.startswith("qurl: ")] == expected
    (warning,) = [line for line in lines if line.startswith("qurl: ")]
    assert warning.startswith("qurl: network: n1 -> n4 2.5 GB/s, below 5: InfiniBand or RoCE ")
    assert warning.endswith("; n1: interface of n1; n4: interface of n4")


def test_what_was_not_done_is_no_success(tmp_path: Path) -> None:
    for name in ("n1", "n2", "n3", "n4"):
        report = Report("gloo", "", bytes_per_s={"n1 -> n2": 1e9})
        (tmp_path / f"{name}.json").write_text(json.dumps(dataclasses.asdict(report)))
    lines, works = summarize(JobPlan("t", "k", 0, "n1", 1, NODES), tmp_path)
    assert not works
    undone = ", ".join(TITLES[1:])
    assert lines == [
        "network: n1 -> n2 1 GB/s",
        f"qurl: network: a node came too late to do: {undone}",
    ]
