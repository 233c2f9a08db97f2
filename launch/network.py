"""Prove the network of a Slurm job before the model loads: its nodes exchange tensors.

One process a node runs `check_node`: over NCCL on the node's first GPU, over gloo without one. The
processes meet in a store on the learner's first node, and go through `rounds` together:

    broadcast     to each server's node from two of the senders', as a publish does, and from each
                  node of the learner to the next: a pair that fails is then known
    all-reduce    across the learner's nodes

- After a round in which an exchange failed, or to whose end a node did not come, all end.
- A node writes what it does to LOGS/network/NODE.json before it does it. So one that hangs or dies
  is named with its exchange.
- Every wait has a limit, also one inside NCCL: the kernel's alarm ends a process that hangs.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from qurl_megatron.files import read_json_object, write_whole
from qurl_megatron.launch.placement import JobPlan, NodePlan

if TYPE_CHECKING:
    from torch.distributed import Store

MESSAGE_BYTES = 2**26
MEASURE_S = 0.2  # that each exchange is repeated for
MEET_TIMEOUT_S = 180.0  # for all nodes to import torch
IMAGE_TIMEOUT_S = 3600.0  # and for them to import a container's image before
EXCHANGE_TIMEOUT_S = 15.0  # of each wait within an exchange
ALARM_S = 2 * EXCHANGE_TIMEOUT_S  # for a whole exchange
ROUND_TIMEOUT_S = ALARM_S + EXCHANGE_TIMEOUT_S  # for all nodes to end a round
LEAVE_TIMEOUT_S = 5.0
ROUND_S = 5.0  # is more than a round takes, so that the limit of the whole check is generous
INFINIBAND = Path("/sys/class/infiniband")
# Bytes per second below which an exchange is slower than what a run needs, and why.
FLOORS = {
    "nccl": (5e9, "InfiniBand or RoCE gives a GPU 10 GB/s or more; NCCL seems to use TCP"),
    "gloo": (0.05e9, "that is half of gigabit Ethernet"),
}


class Exchange(NamedTuple):
    """What some nodes do at the same time. The first sends to the second, or all reduce."""

    kind: Literal["broadcast", "all-reduce"]
    nodes: tuple[str, ...]

    @property
    def title(self) -> str:
        """The exchange in messages and reports."""
        if self.kind == "all-reduce":
            return f"all-reduce of {len(self.nodes)} nodes"
        return " -> ".join(self.nodes)


@dataclasses.dataclass
class Report:
    """What a node tells, in LOGS/network/NODE.json."""

    backend: str
    devices: str  # its network interface and its HCAs
    doing: str = ""  # empty at the end
    bytes_per_s: dict[str, float] = dataclasses.field(default_factory=dict)  # by exchange
    failures: dict[str, str] = dataclasses.field(default_factory=dict)  # reasons, by exchange


def rounds(nodes: Sequence[NodePlan]) -> list[list[Exchange]]:
    """Return the exchanges between these nodes; in a round each node has one at most."""
    learner = [node.name for node in nodes if node.ranks]
    senders = [node.name for node in nodes if node.sends]
    servers = [node.name for node in nodes if node.servers]
    # Each server's node with two senders, and each sender with a server's node: all pairs of a job
    # of hundreds of nodes would take minutes.
    left = [*itertools.pairwise(learner)]
    for number, server in enumerate(servers):
        left += [(senders[(number + turn) % len(senders)], server) for turn in range(2)]
    left += [(sender, servers[n % len(servers)]) for n, sender in enumerate(senders) if servers]
    left = [pair for pair in dict.fromkeys(left) if pair[0] != pair[1]]
    planned = []
    while left:
        busy: set[str] = set()
        now = []
        for pair in left:
            if not busy & set(pair):
                busy |= set(pair)
                now.append(Exchange("broadcast", pair))
        done = {exchange.nodes for exchange in now}
        left = [pair for pair in left if pair not in done]
        planned.append(now)
    return planned + ([[Exchange("all-reduce", tuple(learner))]] if len(learner) > 1 else [])


def limit_s(nodes: Sequence[NodePlan]) -> float:
    """Return the seconds after which what still runs of the whole check is to be ended."""
    return meet_timeout_s() + ROUND_TIMEOUT_S + ROUND_S * len(rounds(nodes))


def meet_timeout_s() -> float:
    """Return the seconds in which all nodes must have joined."""
    return MEET_TIMEOUT_S + (IMAGE_TIMEOUT_S if "QURL_CONTAINER_OPTIONS" in os.environ else 0)


def check_node(logs: Path, port: int) -> None:
    """Take part in the exchanges of this node; the nodes meet at a port of the learner's first."""
    import torch.distributed as dist

    from qurl_megatron import device
    from qurl_megatron.process import bind_stores

    plan = JobPlan.load(logs / "plan.json")
    own = os.environ["SLURMD_NODENAME"]
    host, names = plan.nodes[0].name, [node.name for node in plan.nodes]
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as the run has it
    backend = device.backend_to()
    report = Report(backend, network_devices(f"{backend.upper()}_SOCKET_IFNAME"))

    def say(doing: str) -> None:
        report.doing = doing
        path = logs / "network" / f"{own}.json"
        write_whole(path, json.dumps(dataclasses.asdict(report)))

    say(f"connecting to {plan.master_address}:{port}")
    bind_stores()
    store = dist.TCPStore(
        plan.master_address,
        port,
        is_master=own == host,
        timeout=timedelta(seconds=meet_timeout_s()),
        wait_for_workers=False,
    )

    def meet(number: int) -> bool:
        """Wait for all nodes; return whether they came, and no exchange has failed so far."""
        say("waiting for the other nodes")
        keys = [f"{number}/{name}" for name in names]
        timeout_s = ROUND_TIMEOUT_S if number else meet_timeout_s()
        try:
            store.set(f"{number}/{own}", "failed" if report.failures else "well")
            store.wait(keys, timedelta(seconds=timeout_s))
            return b"failed" not in store.multi_get(keys)
        except RuntimeError:  # a node is missing, or the store is, whose node then is
            return False

    for number, exchanges in enumerate(rounds(plan.nodes)):
        if not meet(number):
            break
        for exchange in exchanges:
            if own in exchange.nodes:
                say(exchange.title)
                signal.alarm(round(ALARM_S))
                try:
                    report.bytes_per_s[exchange.title] = measure(
                        exchange, exchange.nodes.index(own), store
                    )
                except RuntimeError as error:  # torch's errors of process groups among them
                    report.failures[exchange.title] = str(error).splitlines()[0]
                signal.alarm(0)
    say("")
    with contextlib.suppress(RuntimeError):
        store.set(f"left/{own}", "")
        if own == host:  # the others may still be asking its store
            store.wait([f"left/{name}" for name in names], timedelta(seconds=LEAVE_TIMEOUT_S))


def measure(exchange: Exchange, rank: int, store: "Store") -> float:
    """Do an exchange for `MEASURE_S`; return the bytes per second that pass a node's link.

    Of an all-reduce of n nodes that are 2 (n - 1) / n bytes for each byte of the message.

    Raises:
        RuntimeError: another node cannot be reached, or has ended.
    """
    import torch
    import torch.distributed as dist

    from qurl_megatron import device

    num_nodes = len(exchange.nodes)
    dist.init_process_group(
        device.backend_to(),
        store=dist.PrefixStore(exchange.title, store),
        rank=rank,
        world_size=num_nodes,
        timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S),
    )
    try:
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device.device())
        repeats = torch.ones(1, dtype=torch.int64, device=device.device())
        send: Callable[[], object] = (
            (lambda: dist.all_reduce(message))
            if exchange.kind == "all-reduce"
            else (lambda: dist.broadcast(message, src=0))
        )

        def time_s() -> float:
            start = time.perf_counter()
            for _ in range(int(repeats)):
                send()
            message[0].item()  # waits for a GPU
            return time.perf_counter() - start

        time_s()  # connects
        repeats.fill_(max(1, round(MEASURE_S / time_s())))
        dist.broadcast(repeats, src=0)
        factor = 2 * (num_nodes - 1) / num_nodes if exchange.kind == "all-reduce" else 1
        return factor * MESSAGE_BYTES * int(repeats) / time_s()
    finally:
        dist.destroy_process_group()


def network_devices(variable: str) -> str:
    """Return this node's interface, which a variable may name, and its HCAs, for messages."""
    interface = f"{variable}={os.environ.get(variable, '')}"
    if variable not in os.environ:
        hostname = socket.gethostname()
        try:
            address = f"{hostname} is {socket.gethostbyname(hostname)}"
        except OSError as error:
            address = f"{hostname}: {error.strerror}"
        interface = f"{variable} unset, {address}"
    hcas = " ".join(sorted(path.name for path in INFINIBAND.glob("*")))
    return f"{interface}, {f'HCAs {hcas}' if hcas else 'no HCA'}"


def summarize(plan: JobPlan, reports_directory: Path) -> tuple[list[str], bool]:
    """Return a line for each exchange and each missing node, and whether everything worked."""
    reports = {}
    for node in plan.nodes:
        if told := read_json_object(reports_directory / f"{node.name}.json"):
            reports[node.name] = Report(**told)
    lines, problems, undone = [], [], []
    exchanges = [exchange for each in rounds(plan.nodes) for exchange in each]
    for title, names in ((exchange.title, exchange.nodes) for exchange in exchanges):
        members = [reports[name] for name in names if name in reports]
        where = "; ".join(f"{name}: {reports[name].devices}" for name in names if name in reports)
        reasons = [report.failures[title] for report in members if title in report.failures]
        reasons += ["it hung, or a process died" for report in members if report.doing == title]
        rates = [report.bytes_per_s[title] for report in members if title in report.bytes_per_s]
        if reasons:
            problems.append(f"qurl: network: {title} failed: {reasons[0]}; {where}")
        elif len(rates) == len(names):
            floor, why = FLOORS[members[0].backend]
            slow = f", below {floor / 1e9:g}: {why}; {where}" if min(rates) < floor else ""
            prefix = "qurl: " if slow else ""
            lines.append(f"{prefix}network: {title} {min(rates) / 1e9:.3g} GB/s{slow}")
        else:
            undone.append(title)
    for node in plan.nodes:
        if node.name not in reports:
            problems.append(f"qurl: network: {node.name} never joined; its step's log says why")
        elif (report := reports[node.name]).doing not in ("", *(each.title for each in exchanges)):
            problems.append(
                f"qurl: network: {node.name} hung or died while {report.doing}; {report.devices}"
            )
    if undone and not problems:
        problems.append(f"qurl: network: a node came too late to do: {', '.join(undone)}")
    return lines + problems, not problems
