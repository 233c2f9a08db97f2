"""The task of each node in a Slurm job: it supervises the node's part of the plan.

    python -m qurl_megatron.launch.slurm_node LOGS

`launch/slurm.py` starts it. The run has the node to itself, and each rank gets a part of its CPUs.
"""

import os
import signal
import socket
import sys
from pathlib import Path

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.text import load
from qurl_megatron.launch.placement import JobPlan
from qurl_megatron.launch.servers import Attempt
from qurl_megatron.launch.supervisor import Signals, supervise
from qurl_megatron.machine.environment import settle_environment
from qurl_megatron.machine.network import address_towards
from qurl_megatron.rollout.preload import PreloadFailed
from qurl_megatron.rollout.server import LOOPBACK, ServerFailed

START_FAILED = 3  # exit code with a server that failed in its first start
TOPOLOGY = Path("/sys/devices/system/cpu")


def main(logs: Path) -> int:
    """Run this node's part of a job's plan; return an exit code.

    It is that of `supervise`, or START_FAILED when a server failed during its first start, SGLang
    could not be imported, or the servers do not fit in memory.
    """
    os.dup2(1, 2)  # its lines belong to the job's output
    settle_environment(os.environ)  # a node's may be another than that of `qurl launch`
    signals = Signals({signal.SIGUSR2}, {signal.SIGUSR1, signal.SIGTERM})
    plan = JobPlan.load(logs / "plan.json")
    run_dir = logs.parent.parent if plan.attempt else logs.parent  # of RUN/logs/resumed_N, RUN/logs
    attempt = Attempt(load(run_dir / "config.yaml"), plan.attempt)
    own = next(node for node in plan.nodes if node.name == os.environ["SLURMD_NODENAME"])
    others = [node.name for node in plan.nodes if node != own]
    is_master = own.name == plan.master_address
    host = node_address(own.name, others[0] if is_master and others else plan.master_address)
    cpus = cpus_of_gpus(own.gpus) if own.ranks and host != LOOPBACK else []
    try:
        return supervise(attempt, plan, own, signals, host, cpus)
    except (ConfigError, PreloadFailed, ServerFailed) as failure:
        print(f"\nqurl: {own.name}: {failure}", flush=True)
        return START_FAILED


def node_address(name: str, learner: str) -> str:
    """Return the address of this node, `name`, at which `learner`, another node, reaches it.

    A node's own name may stand for loopback on the node itself, as Debian writes it into
    /etc/hosts. Then return the address from which the node speaks to the other.
    """
    address = socket.gethostbyname(name)
    learner_address = socket.gethostbyname(learner)
    # Nodes that share one machine may all be on loopback.
    if address.startswith("127.") and not learner_address.startswith("127."):
        return address_towards(learner_address)
    return address


def cpus_of_gpus(gpus: int) -> list[list[int]]:
    """Return equal parts of this process's CPUs, in the order of sockets, as GPUs usually are.

    CPUs that share a core are next to each other. With more GPUs than CPUs the parts are empty.
    """

    def place(cpu: int) -> tuple[int, ...]:
        names = ("physical_package_id", "core_id")
        try:
            return *(int((TOPOLOGY / f"cpu{cpu}/topology" / n).read_text()) for n in names), cpu
        except OSError:  # the kernel does not tell
            return 0, 0, cpu

    cpus = sorted(os.sched_getaffinity(0), key=place)
    size = len(cpus) // gpus
    return [cpus[gpu * size : (gpu + 1) * size] for gpu in range(gpus)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
