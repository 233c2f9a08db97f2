"""The supervisor of a node; `sleep` stands for its servers, a few lines of Python for its ranks."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qurl_megatron.config.schema import SAID_WHY, STOPPED_EARLY, Config
from qurl_megatron.launch import servers, slurm_node, supervisor
from qurl_megatron.launch.placement import JobPlan, NodePlan
from qurl_megatron.launch.servers import Attempt, Servers
from qurl_megatron.launch.supervisor import Signals, supervise
from qurl_megatron.machine.processes import start_ticks
from qurl_megatron.rollout import preload
from qurl_megatron.rollout.preload import Program, Started
from qurl_megatron.rollout.server import Server, ServerFailed

END, STOP = signal.SIGUSR2, signal.SIGTERM  # as in a job
RANK = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(9))
signal.signal(signal.SIGHUP, lambda *_: sys.exit(3))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


class Node:
    """A node whose supervisor is this process; `at` has what happens at the start of a phase."""

    def __init__(self, config: Config) -> None:
        self.attempt = Attempt.create(config)
        self.at: dict[str, Callable[[], None]] = {}
        self.servers: list[subprocess.Popen[bytes]] = []
        self.programs: list[Program] = []
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.settled: list[tuple[list[str], int]] = []  # what shares this machine's memory

    def begin(self, phase: str) -> None:
        self.at.get(phase, lambda: None)()

    def settle(self, _: Config, servers: list[str], ranks: int) -> list[str]:
        self.settled.append((servers, ranks))
        return []

    def start_server(self, _: Any, log_file: Path, **__: Any) -> Server:
        self.begin("servers")
        log_file.touch()
        process = subprocess.Popen(["sleep", "600"])
        self.servers.append(process)
        preload._started[process.pid] = Started(process.pid, process.poll)
        machine, ticks = os.uname().nodename, start_ticks(process.pid)
        return Server("http://x", "key", machine, process.pid, ticks, log_file=str(log_file))

    def start_rank(self, program: Program) -> Started:
        self.programs.append(program)
        ready = self.attempt.logs / f"ready{len(self.ranks)}"
        process = subprocess.Popen([sys.executable, "-c", RANK, str(ready)])
        self.ranks.append(process)
        while not ready.exists():
            time.sleep(0.01)
        if len(self.ranks) == 2:  # a moment later, so that the supervisor watches them
            threading.Timer(0.5, self.begin, ["ranks"]).start()
        preload._started[process.pid] = started = Started(process.pid, process.poll)
        program.log_file.write_text("the last words of a rank\n")
        return started

    def supervise(self, ranks: int = 2) -> int:
        """Supervise two ranks, and the server that they use; they are ranks 1 and 2 of three."""
        own = NodePlan("own", 2, ranks, servers=[("rollout", 0, 0)])
        nodes = [NodePlan("other", 1, ranks=1), own]
        plan = JobPlan("key", 0, "other", 7, nodes)
        return supervise(self.attempt, plan, own, Signals({END}, {signal.SIGUSR1, STOP}))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    before = {number: signal.getsignal(number) for number in (END, STOP, signal.SIGUSR1)}
    config = Config(name="run", output_dir=str(tmp_path))
    config.learner.data_parallel_size = 3
    config.run_dir.mkdir()
    node = Node(config)
    monkeypatch.setattr(supervisor, "preload", lambda *_: node.begin("imports"))
    monkeypatch.setattr(supervisor, "settle_run", node.settle)
    monkeypatch.setattr(supervisor, "start", node.start_rank)
    monkeypatch.setattr(servers, "start", node.start_server)
    monkeypatch.setattr("qurl_megatron.launch.servers.answers", lambda server: True)
    yield node
    for number, handler in before.items():
        signal.signal(number, handler)
    assert None not in [process.poll() for process in (*node.servers, *node.ranks)]


@pytest.mark.parametrize(
    ("phase", "number", "code", "started"),
    [
        ("imports", END, 128 + END, (0, 0)),
        ("imports", STOP, STOPPED_EARLY, (0, 0)),
        ("servers", END, 128 + END, (1, 0)),
        ("servers", STOP, STOPPED_EARLY, (1, 0)),
        ("ranks", END, 128 + END, (1, 2)),
        ("ranks", STOP, STOPPED_EARLY, (1, 2)),
    ],
)
def test_what_a_signal_does_depends_on_the_phase_and_on_what_it_asks_for(
    node: Node, phase: str, number: signal.Signals, code: int, started: tuple[int, int]
) -> None:
    node.at[phase] = lambda: os.kill(os.getpid(), number)
    assert node.supervise() == code
    assert (len(node.servers), len(node.ranks)) == started
    assert node.settled == [(["rollout"], 2)] * started[0]  # before a server starts
    asked = 9 if number == END else STOPPED_EARLY
    assert [rank.returncode for rank in node.ranks] == [asked] * len(node.ranks)
    os.kill(os.getpid(), number)  # it is ignored from now on


def test_a_node_without_ranks_keeps_its_servers_when_the_learner_is_asked_to_stop(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    def both() -> None:
        time.sleep(1.0)
        assert node.servers[0].poll() is None
        os.kill(os.getpid(), END)

    node.at["imports"] = lambda: os.kill(os.getpid(), STOP)
    node.at["servers"] = lambda: threading.Timer(0.2, both).start()
    assert node.supervise(ranks=0) == 128 + END
    assert capsys.readouterr().err == ""  # nobody has interrupted the run


def test_ranks_are_told_their_numbers_their_peers_and_the_rosters_of_all_nodes(node: Node) -> None:
    node.at["ranks"] = lambda: node.ranks[1].kill()
    assert node.supervise() == 1
    variables = [program.environment for program in node.programs]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in variables] == [("1", "0"), ("2", "1")]
    assert {each["WORLD_SIZE"] for each in variables} == {"3"}
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in variables} == {("other", "7")}
    assert not any(program.inherits_stdout for program in node.programs)  # which is for rank 0
    roster = str(node.attempt.roster("own"))
    assert [program.arguments[1:] for program in node.programs] == [[roster]] * 2


def test_a_server_on_the_gpu_of_a_rank_is_up_before_the_ranks_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_when_asked: list[int] = []

    def answers(server: Server) -> bool:
        ranks_when_asked.append(len(node.ranks))
        return len(ranks_when_asked) >= 3

    monkeypatch.setattr(supervisor.device, "num_gpus", lambda: 2)
    monkeypatch.setattr("qurl_megatron.launch.servers.answers", answers)
    node.at["ranks"] = lambda: os.kill(os.getpid(), END)
    assert node.supervise() == 128 + END
    assert ranks_when_asked == [0, 0, 0]


def test_ranks_that_have_said_why_they_end_are_waited_for_and_no_log_is_shown(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_one_after_the_other() -> None:
        node.ranks[1].send_signal(signal.SIGHUP)
        time.sleep(1.0)
        node.ranks[0].send_signal(signal.SIGHUP)

    node.at["ranks"] = end_one_after_the_other
    assert node.supervise() == 1
    assert [rank.returncode for rank in node.ranks] == [SAID_WHY] * 2
    assert capsys.readouterr().err == ""


def test_each_rank_of_a_jobs_node_has_whole_cores_of_one_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sockets of two cores, which have two threads each: CPUs 4 to 7 are the second ones."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(slurm_node, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert slurm_node.cpus_of_gpus(4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert slurm_node.cpus_of_gpus(3) == [[0, 4], [1, 5], [2, 6]]
    assert slurm_node.cpus_of_gpus(9) == [[]] * 9
    monkeypatch.setattr(slurm_node, "TOPOLOGY", tmp_path / "missing")
    assert slurm_node.cpus_of_gpus(2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_rank_that_dies_ends_the_others_and_the_end_of_its_log_is_shown(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.at["ranks"] = lambda: node.ranks[1].kill()
    assert node.supervise() == 1
    assert [rank.returncode for rank in node.ranks] == [9, -signal.SIGKILL]
    said = capsys.readouterr().err
    assert "learner rank 2 ended (killed by signal 9); the end of" in said
    assert "the last words of a rank" in said


def test_ranks_wait_for_the_servers_of_every_node_but_not_forever(node: Node) -> None:
    config = node.attempt.config
    nodes = [NodePlan(name, 1, servers=[("rollout", 0, 0)]) for name in ("a", "b")]
    plan = JobPlan("key", 0, "a", 7, nodes)
    rosters = [node.attempt.roster(each.name) for each in nodes]
    rosters[0].touch()
    threading.Timer(0.3, rosters[1].touch).start()
    signals, servers = Signals({END}, {STOP}), Servers(node.attempt, rosters[0])
    assert supervisor.await_rosters(node.attempt, plan, servers, signals) == rosters
    rosters[1].unlink()
    config.rollout.server.start_timeout_s = 0.2
    with pytest.raises(ServerFailed, match=r"no servers after 0 s: .*servers_b.json is missing"):
        supervisor.await_rosters(node.attempt, plan, servers, signals)
