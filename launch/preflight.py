"""Check the nodes of a Slurm job and the network between them, before a model loads.

    python -m qurl_megatron.launch.preflight LOGS PORT

One process on each node reads LOGS/plan.json, and finds what the node lacks for its part. Then all
meet in a store at PORT of the learner's first node. Unless a node lacks something, they go through
`rounds` of exchanges together, over NCCL on a node's first GPU, over gloo without one.

- All end after a round in which an exchange failed or which a node did not finish.
- A node writes what it does to LOGS/preflight/NODE.json before it does it. So a node that hangs or
  dies is named with its exchange.
- Every wait has a limit, even inside NCCL: the kernel's alarm ends a process that hangs.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from qurl_megatron.files import read_json_object, write_whole
from qurl_megatron.launch.placement import JobPlan, NodePlan
from qurl_megatron.machine.gpus import installed_gpus
from qurl_megatron.machine.interfaces import missing_interface
from qurl_megatron.machine.memory import lack_of_shared_memory

if TYPE_CHECKING:
    from qurl_megatron.machine.stores import Store

MESSAGE_BYTES = 2**26
MEASURE_S = 0.2  # for which each exchange is repeated
MEET_TIMEOUT_S = 180.0  # for all nodes to import torch
IMAGE_TIMEOUT_S = 3600.0  # more, if they first import a container's image
EXCHANGE_TIMEOUT_S = 15.0  # of each wait within an exchange
ALARM_S = 2 * EXCHANGE_TIMEOUT_S  # for a whole exchange
ROUND_TIMEOUT_S = ALARM_S + EXCHANGE_TIMEOUT_S  # for all nodes to end a round
LEAVE_TIMEOUT_S = 5.0
ROUND_S = 5.0  # is more than a round takes, so that the limit of the whole check is generous
INFINIBAND = Path("/sys/class/infiniband")
HUNG = "it hung, or a process died"
# Bytes per second below which an exchange is slower than a run needs, and why.
FLOORS = {
    "nccl": (5e9, "InfiniBand or RoCE gives a GPU 10 GB/s or more; NCCL seems to use TCP"),
    "gloo": (0.05e9, "that is half of gigabit Ethernet"),
}


@dataclasses.dataclass
class Report:
    """What a node writes to LOGS/preflight/NODE.json."""

    lacks: list[str]  # what is wrong with the node itself
    doing: str  # empty at the end, and during exchanges
    backend: str = ""
    devices: str = ""  # its network interface and its HCAs
    exchanges: dict[str, float | str] = dataclasses.field(default_factory=dict)
    """Bytes per second of each exchange, or why it failed."""


def rounds(nodes: Sequence[NodePlan]) -> list[dict[str, Sequence[str]]]:
    """Return rounds of exchanges by title, each with its nodes; a round has a node at most once.

    Each server's node is paired with two of the senders, each sender with a server's node, and each
    learner node with the next. All pairs of a job of hundreds of nodes would take minutes. All
    learner nodes exchange together last, when a failing pair is already known.
    """
    learner = [node.name for node in nodes if node.ranks]
    senders = [node.name for node in nodes if node.sends]
    servers = [node.name for node in nodes if node.servers]
    pairs = [*itertools.pairwise(learner)]
    for number, server in enumerate(servers):
        pairs += [(senders[(number + turn) % len(senders)], server) for turn in range(2)]
    pairs += [(sender, servers[n % len(servers)]) for n, sender in enumerate(senders) if servers]
    planned: list[dict[str, Sequence[str]]] = []
    for pair in dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]):
        free = (each for each in planned if not {*pair} & {*itertools.chain(*each.values())})
        if (chosen := next(free, None)) is None:
            planned.append(chosen := {})
        chosen[" -> ".join(pair)] = pair
    if len(learner) > 1:
        planned.append({f"all-reduce of {len(learner)} nodes": learner})
    return planned


def limit_s(nodes: Sequence[NodePlan]) -> float:
    """Return the seconds after which the caller ends the whole check."""
    return meet_timeout_s() + ROUND_TIMEOUT_S + ROUND_S * len(rounds(nodes))


def meet_timeout_s() -> float:
    """Return the seconds in which all nodes must have joined."""
    return MEET_TIMEOUT_S + (IMAGE_TIMEOUT_S if "QURL_CONTAINER_OPTIONS" in os.environ else 0)


def check_node(logs: Path, port: int) -> None:
    """Check this node, and take part in its exchanges."""
    plan = JobPlan.load(logs / "plan.json")
    own = next(node for node in plan.nodes if node.name == os.environ["SLURMD_NODENAME"])
    names, is_host = [node.name for node in plan.nodes], own == plan.nodes[0]
    report = Report([], "")

    def say(doing: str) -> None:
        report.doing = doing
        path = logs / "preflight" / f"{own.name}.json"
        write_whole(path, json.dumps(dataclasses.asdict(report)))

    say("importing torch")

    from qurl_megatron import device
    from qurl_megatron.machine.stores import Store

    report.lacks = problems(plan, own, device.num_gpus())
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as the run has it
    report.backend = device.backend_to()
    report.devices = network_devices(f"{report.backend.upper()}_SOCKET_IFNAME")
    say(f"connecting to {plan.master_address}:{port}")
    store = Store(
        plan.master_address,
        port,
        is_master=is_host,
        timeout=timedelta(seconds=meet_timeout_s()),
        wait_for_workers=False,
    )

    def meet(number: int) -> bool:
        """Wait for all nodes; return whether they came, and all is well so far."""
        say("waiting for the other nodes")
        failed = report.lacks or any(isinstance(told, str) for told in report.exchanges.values())
        keys = [f"{number}/{name}" for name in names]
        timeout_s = ROUND_TIMEOUT_S if number else meet_timeout_s()
        try:
            store.set(f"{number}/{own.name}", "failed" if failed else "well")
            store.wait(keys, timedelta(seconds=timeout_s))
            return b"failed" not in store.multi_get(keys)
        except RuntimeError:  # a node is missing, maybe the one with the store
            return False

    for number, exchanges in enumerate(rounds(plan.nodes)):
        if not meet(number):
            break
        for title, nodes in exchanges.items():
            if own.name in nodes:
                report.exchanges[title] = HUNG
                say("")
                signal.alarm(round(ALARM_S))
                rank = nodes.index(own.name)
                try:
                    report.exchanges[title] = measure(title, rank, len(nodes), store)
                except RuntimeError as error:  # which torch's errors of process groups are
                    report.exchanges[title] = str(error).splitlines()[0]
                signal.alarm(0)
    say("")
    with contextlib.suppress(RuntimeError):
        store.set(f"left/{own.name}", "")
        if is_host:  # the others may still be asking its store
            store.wait([f"left/{name}" for name in names], timedelta(seconds=LEAVE_TIMEOUT_S))


def problems(plan: JobPlan, own: NodePlan, num_gpus: int) -> list[str]:
    """Return what this node, `own`, lacks; torch sees `num_gpus` GPUs on it."""
    found = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # Where Slurm counts no GPUs, the job's script says how many a node has.
    granted = len(visible.split(",")) if visible else int(os.environ.get("QURL_GPUS_PER_NODE", "0"))
    if granted < own.gpus:
        found.append(
            f"Slurm granted {granted} GPUs, {own.gpus} are needed; ask for --gpus-per-node"
        )
    elif num_gpus < granted:
        try:
            if (installed := installed_gpus()) is not None:
                found.append(
                    f"Slurm granted {granted} GPUs, the driver shows {installed}, torch sees "
                    f"{num_gpus}; the driver may be too old"
                )
        except TimeoutError as error:
            found.append(str(error))
    if problem := lack_of_shared_memory():
        found.append(problem)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if problem := missing_interface(variable, os.environ.get(variable, "")):
            found.append(problem)
    for node in plan.nodes:
        try:
            socket.gethostbyname(node.name)
        except OSError as error:
            found.append(f"cannot resolve {node.name} to an IPv4 address: {error.strerror}")
    if own == plan.nodes[0]:
        try:
            with socket.socket() as probe:
                probe.bind(("", plan.master_port))
        except OSError as error:
            found.append(f"port {plan.master_port} is not free: {error.strerror}")
    return found


def measure(title: str, rank: int, num_nodes: int, store: "Store") -> float:
    """Reduce a message over nodes for `MEASURE_S`; return the bytes per second of a node's link.

    For each byte of the message, 2 (n - 1) / n bytes pass the link of each of n nodes.

    Raises:
        RuntimeError: another node cannot be reached, or has ended.
    """
    import torch
    import torch.distributed as dist

    from qurl_megatron import device

    dist.init_process_group(
        device.backend_to(),
        store=dist.PrefixStore(title, store),
        rank=rank,
        world_size=num_nodes,
        timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S),
    )
    try:
        message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device.device())
        repeats = torch.ones(1, dtype=torch.int64, device=device.device())

        def time_s() -> float:
            start = time.perf_counter()
            for _ in range(int(repeats)):
                dist.all_reduce(message)
            message[0].item()  # waits for a GPU
            return time.perf_counter() - start

        time_s()  # connects
        repeats.fill_(max(1, round(MEASURE_S / time_s())))
        dist.broadcast(repeats, src=0)  # all nodes must reduce equally often
        return 2 * (num_nodes - 1) / num_nodes * MESSAGE_BYTES * int(repeats) / time_s()
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


def summarize(plan: JobPlan, reports: Path) -> tuple[list[str], bool]:
    """Return lines about the nodes and each exchange, and whether nothing is wrong."""
    told: dict[str, Report] = {}
    lacks = []
    for node in plan.nodes:
        if report := read_json_object(reports / f"{node.name}.json"):
            told[node.name] = Report(**report)
            lacks += [f"{node.name}: {problem}" for problem in told[node.name].lacks]
        else:
            lacks.append(
                f"{node.name}: no report: the node did not start, lacks this Python environment, "
                f"or does not share the file system of {reports}"
            )
    if lacks:
        return [f"qurl: preflight of {problem}" for problem in lacks], False
    lines, failed, undone = [], [], []
    for title, names in itertools.chain(*map(dict.items, rounds(plan.nodes))):
        where = "; ".join(f"{name}: {told[name].devices}" for name in names)
        outcomes = [told[name].exchanges.get(title) for name in names]
        # A reason that a node gave goes before a mere hang.
        reasons = sorted((each for each in outcomes if isinstance(each, str)), key=HUNG.__eq__)
        rates = [each for each in outcomes if isinstance(each, float)]
        if reasons:
            failed.append(f"{title} failed: {reasons[0]}; {where}")
        elif len(rates) < len(names):
            undone.append(title)
        else:
            floor, why = FLOORS[told[names[0]].backend]
            line = f"network: {title} {min(rates) / 1e9:.3g} GB/s"
            is_slow = min(rates) < floor
            slow = f"qurl: {line}, below {floor / 1e9:g}: {why}; {where}"
            lines.append(slow if is_slow else line)
    failed += [
        f"{name} hung or died while {report.doing}; {report.devices}"
        for name, report in told.items()
        if report.doing
    ]
    if undone and not failed:
        failed.append(f"a node came too late to do: {', '.join(undone)}")
    if not failed:
        lines.append(f"preflight passed on {len(told)} nodes")
    return lines + [f"qurl: network: {problem}" for problem in failed], not failed


if __name__ == "__main__":
    check_node(Path(sys.argv[1]), int(sys.argv[2]))
