"""The tasks on the nodes of a Slurm job, one a node, which `launch/slurm.py` starts through srun.

    preflight LOGS TOKEN    report what the node lacks for its part of the plan
    network LOGS PORT       exchange tensors with the other nodes (`network.py`)
    supervisor LOGS         run the node's servers and learner ranks (`supervisor.py`)

All tasks read LOGS/plan.json. USR2 ends a task at once.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

from qurl_megatron.process import installed_gpus

START_FAILED = 3  # exit code of a supervisor with a server that failed during its first start


def preflight(logs: Path, token: str) -> None:
    """Write a list of this node's problems to LOGS/preflight/NODE.json, empty if it has none."""
    name = os.environ["SLURMD_NODENAME"]
    plan = json.loads((logs / "plan.json").read_text())
    problems = []
    if plan["token"] != token:
        problems.append(f"{logs} is not the directory of this job: the node does not share it")
    own = next(node for node in plan["nodes"] if node["name"] == name)
    problems += gpu_problems(own["gpus"], granted_gpus(), installed_gpus())
    for node in plan["nodes"]:
        try:
            socket.getaddrinfo(node["name"], None)
        except OSError as error:
            problems.append(f"cannot resolve {node['name']}: {error.strerror}")
    if name == plan["master_address"]:
        try:
            with socket.socket() as probe:
                probe.bind(("", plan["master_port"]))
        except OSError as error:
            problems.append(f"port {plan['master_port']} is not free: {error.strerror}")
    # Written without qurl_megatron.files: this task imports nothing that takes seconds.
    unfinished = logs / "preflight" / f"{name}.unfinished"
    unfinished.write_text(json.dumps(problems))
    unfinished.rename(unfinished.with_suffix(".json"))


def gpu_problems(needed: int, granted: int, installed: int | None) -> list[str]:
    """Return what is wrong with a node's GPUs; `installed` is None without NVIDIA's driver."""
    if granted < needed:
        return [f"Slurm granted {granted} GPUs, {needed} are needed; ask for --gpus-per-node"]
    if installed is None or not granted:
        return []
    if installed < granted:
        return [f"Slurm granted {granted} GPUs, the driver shows {installed}"]
    if (usable := usable_gpus()) < granted:
        return [f"Slurm granted {granted} GPUs, torch sees {usable}; the driver may be too old"]
    return []


def usable_gpus() -> int:
    """Return how many GPUs torch sees. A driver that is too old for its CUDA shows none."""
    import torch  # takes seconds, so only where there are GPUs

    return torch.cuda.device_count()


def granted_gpus() -> int:
    """Return how many GPUs Slurm gave this task; where it counts none, how many it should have."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len(visible.split(",")) if visible else int(os.environ.get("QURL_GPUS_PER_NODE", "0"))


def supervisor(logs: Path) -> int:
    """Run this node's part of the plan; return an exit code.

    It is that of `supervise`, or START_FAILED when a server failed during its first start, or
    SGLang could not be imported.
    """
    from qurl_megatron.process import NO_THREADS

    if installed_gpus() is None:
        os.environ.update(NO_THREADS)  # before what starts threads is imported
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.config.text import load
    from qurl_megatron.launch.placement import JobPlan
    from qurl_megatron.launch.servers import Attempt
    from qurl_megatron.launch.supervisor import Signals, supervise
    from qurl_megatron.rollout.preload import PreloadFailed
    from qurl_megatron.rollout.server import ServerFailed

    signals = Signals({signal.SIGUSR2}, {signal.SIGUSR1, signal.SIGTERM})
    plan = JobPlan.load(logs / "plan.json")
    run_dir = logs.parent.parent if plan.attempt else logs.parent  # of RUN/logs/resumed_N, RUN/logs
    attempt = Attempt(load(run_dir / "config.yaml"), plan.attempt)
    own = next(node for node in plan.nodes if node.name == os.environ["SLURMD_NODENAME"])
    others = [node.name for node in plan.nodes if node != own]
    is_master = own.name == plan.master_address
    host = own_address(own.name, others[0] if is_master and others else plan.master_address)
    try:
        return supervise(attempt, plan, own, signals, host)
    except (ConfigError, PreloadFailed, ServerFailed) as failure:
        print(f"\nqurl: {own.name}: {failure}", flush=True)
        return START_FAILED


def own_address(name: str, learner: str) -> str:
    """Return the address of this node, `name`, at which `learner`, another node, reaches it.

    A node's own name may stand for loopback on the node itself, as Debian writes it into
    /etc/hosts. Then it is the address from which the node speaks to the other.
    """
    from qurl_megatron.process import address_towards

    address = socket.gethostbyname(name)
    learner_address = socket.gethostbyname(learner)
    # Nodes that share one machine may all be on loopback.
    if address.startswith("127.") and not learner_address.startswith("127."):
        return address_towards(learner_address)
    return address


def main() -> None:
    """Run a task of a job: `python -m qurl_megatron.launch.slurm_task ROLE LOGS [WORD]`."""
    role, logs, *word = sys.argv[1:]
    if role == "preflight":
        preflight(Path(logs), *word)
    elif role == "network":
        from qurl_megatron.launch.network import check_node

        check_node(Path(logs), *map(int, word))
    else:
        os.dup2(1, 2)  # a line of the supervisor belongs to the job's output
        sys.exit(supervisor(Path(logs)))


if __name__ == "__main__":
    main()
