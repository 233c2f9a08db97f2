"""The tasks on the nodes of a Slurm job, which `launch/slurm.py` starts through srun.

    preflight LOGS TOKEN    one task per node: report what the node lacks for its part of the plan
    network LOGS PORT       one task per node: exchange tensors with the others (`network.py`)
    rollout LOGS            one task per node: keep its servers running, and their addresses in
                            LOGS/servers_NODE.json
    learner LOGS            one task per rank: train

All tasks read LOGS/plan.json. USR2 ends a task at once. USR1 and TERM, which Slurm sends to every
process of a step, ask the learner to stop early; the servers ignore them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from qurl_megatron.process import installed_gpus

if TYPE_CHECKING:
    from qurl_megatron.launch.placement import JobPlan
    from qurl_megatron.launch.servers import Attempt

POLL_S = 0.5
START_FAILED = 3  # exit code of a rollout task with a server that failed during its first start


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


def rollout(logs: Path) -> int:
    """Start this node's servers, write their addresses, and keep them running until USR2.

    Return an exit code: 0 after USR2, START_FAILED when a server failed during its first start, or
    SGLang could not be imported.
    """
    received: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: received.append(number))
    from qurl_megatron.process import NO_THREADS

    if installed_gpus() is None:
        os.environ.update(NO_THREADS)  # before what starts threads is imported
    from qurl_megatron import device
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.launch.placement import server_specs
    from qurl_megatron.launch.servers import Servers
    from qurl_megatron.planning.host import settle_run
    from qurl_megatron.rollout.preload import PreloadFailed, preload
    from qurl_megatron.rollout.server import ServerFailed

    plan, attempt = read_job(logs)
    own = next(node for node in plan.nodes if node.name == os.environ["SLURMD_NODENAME"])
    specs = {(spec.set_name, spec.index): spec for spec in server_specs(attempt.config)}
    others = [node.name for node in plan.nodes if node.name != own.name]
    is_master = own.name == plan.master_address
    host = own_address(own.name, others[0] if is_master and others else plan.master_address)
    takes_turns = attempt.config.rollout.placement == "shared"
    roster = roster_of(logs, own.name)
    with contextlib.closing(Servers(attempt, roster, host, plan.api_key)) as servers:
        try:
            settle_run(attempt.config, Counter(name for name, _, _ in own.servers), own.ranks)
            preload(logs / f"preload_{own.name}.log")
            for set_name, index, first_gpu in own.servers:
                spec = specs[set_name, index]
                gpus = range(first_gpu, first_gpu + spec.server.tensor_parallel_size)
                while not (servers.may_start() or received):
                    time.sleep(POLL_S)  # this task is started again, in the learner's turn
                if received:
                    break
                servers.start(spec, gpus if device.num_gpus() else [])
                while takes_turns and not (servers.are_ready or received):
                    servers.check()
                    time.sleep(POLL_S)
            servers.save()
            while not received:
                servers.check()
                time.sleep(POLL_S)
        except (ConfigError, PreloadFailed, ServerFailed) as failure:
            print(f"\nqurl: {own.name}: {failure}", flush=True)
            return START_FAILED
    return 0


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


def learner(logs: Path) -> int:
    """Run one learner rank once all servers are known; return its exit code."""
    signal.signal(signal.SIGUSR2, lambda number, _: sys.exit(128 + number))
    rank = int(os.environ["SLURM_PROCID"])
    plan, attempt = read_job(logs)
    os.environ["MASTER_ADDR"] = plan.master_address
    os.environ["MASTER_PORT"] = str(plan.master_port)
    log = os.open(attempt.rank_log(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    if rank:
        os.dup2(log, 1)  # rank 0 shows the run's progress
    from qurl_megatron.loop import train
    from qurl_megatron.process import outlive_output

    outlive_output(attempt.config.run_dir)
    rosters = await_rosters(logs, plan, attempt.config.rollout.server.start_timeout_s)
    stop_on = {signal.SIGUSR1, signal.SIGTERM}
    return train.run_rank(attempt.config.run_dir, rosters, stop_on=stop_on, exit_on=signal.SIGUSR2)


def await_rosters(logs: Path, plan: JobPlan, timeout_s: float) -> list[Path]:
    """Wait until every rollout node has written its roster; return the rosters.

    `timeout_s` is for each server of a node, which may start one after the other.

    Raises:
        TimeoutError: a node has not written its roster after that.
    """
    timeout_s *= max(len(node.servers) for node in plan.nodes)
    rosters = [roster_of(logs, node.name) for node in plan.nodes if node.servers]
    deadline = time.monotonic() + timeout_s
    for roster in rosters:
        while not roster.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no servers after {timeout_s:.0f} s: {roster} is missing")
            time.sleep(POLL_S)
    return rosters


def roster_of(logs: Path, node: str) -> Path:
    """Return the file in which a rollout node lists its servers."""
    return logs / f"servers_{node}.json"


def read_job(logs: Path) -> tuple[JobPlan, Attempt]:
    """Return the plan and the start of the run to which LOGS belong."""
    from qurl_megatron.config.text import load
    from qurl_megatron.launch.placement import JobPlan
    from qurl_megatron.launch.servers import Attempt

    plan = JobPlan.load(logs / "plan.json")
    run_dir = logs.parent.parent if plan.attempt else logs.parent  # of RUN/logs/resumed_N, RUN/logs
    return plan, Attempt(load(run_dir / "config.yaml"), plan.attempt)


def main() -> None:
    """Run a task of a job: `python -m qurl_megatron.launch.slurm_task ROLE LOGS [WORD]`."""
    role, logs, *word = sys.argv[1:]
    if role == "preflight":
        preflight(Path(logs), *word)
    elif role == "network":
        from qurl_megatron.launch.network import check_node

        check_node(Path(logs), *map(int, word))
    else:
        sys.exit({"rollout": rollout, "learner": learner}[role](Path(logs)))


if __name__ == "__main__":
    main()
