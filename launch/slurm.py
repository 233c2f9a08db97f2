"""A run as a Slurm job: the batch process of `qurl.sbatch` and `qurl_one_allocation.sbatch`.

    python -m launch.slurm run [--max-restarts N] RECIPE name=NAME [field=value ...]
    python -m launch.slurm lead RUN      the N of --signal=B:USR1@N that the run's times ask for

The job has learner nodes, with a task a rank, and rollout nodes, with a task a node that starts and
watches its servers; `launch/slurm_task.py` is what runs in them. This process starts both sides and
watches them:

- The side that ends first ends the other; the job's exit code is the learner's.
- USR1 (Slurm's, before the time limit), TERM (preemption), and this process's own clock ask the
  learner to stop early. It finishes its step, saves, and ends with code 75; the job is requeued, at
  most `--max-restarts` times, and goes on from that checkpoint.
- A run that is there goes on and one that is not is begun, so a restarted job, the same command
  again, and a chain of jobs (`--dependency=afterany:ID`) all go on; a finished run ends at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from launch.attempt import Attempt, WantedServer, wanted_servers
from launch.prepare import prepared, refusals
from qurl_megatron.config.schema import STOPPED_EARLY, Config, ConfigError
from qurl_megatron.files import read_json_lines, write_whole
from qurl_megatron.process import LOG_TAIL_LINES, free_port, tail

POLL_S = 0.5
REMIND_S = 5.0  # a rank that is still starting does not hear that it is to stop
PREFLIGHT_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0  # after it Slurm ends what is left, with the job
LAST_RANK_S = 20  # that the ranks have once the first has ended
RANK_LOG_LINES = 3 * LOG_TAIL_LINES  # its reason may be a server's, with the end of that log
LEAD_MARGIN_S = 60  # the signal's own
LEAD_UNMEASURED_S = 600  # before a run has taken a step and saved


@dataclasses.dataclass(frozen=True)
class NodeGroup:
    """Nodes of the allocation with one role."""

    nodes: list[str]
    het_group: int | None  # of a heterogeneous job
    cpus: int  # of a node, granted


@dataclasses.dataclass(frozen=True)
class NodePlan:
    """What one node is to do; `gpus` are as many as that takes."""

    name: str
    gpus: int
    ranks: int = 0
    servers: list[tuple[str, int]] = dataclasses.field(default_factory=list)  # set, index in it


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """What the job's tasks read: plan.json in the attempt's log directory."""

    token: str  # tells the directory from one of the same name that is not shared
    api_key: str  # of all servers
    attempt: int
    master_address: str
    master_port: int
    nodes: list[NodePlan]

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n", private=True)

    @staticmethod
    def load(path: Path) -> JobPlan:
        tree = json.loads(path.read_text())
        return JobPlan(**{**tree, "nodes": [NodePlan(**node) for node in tree["nodes"]]})


def run(config: Config, max_restarts: int) -> int:
    """The job, to its exit code: 0 finished, 2 refused, 75 stopped early, else failed."""
    asked: list[int] = []  # to stop early
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    with refusals():
        learner_part, rollout_part = parts(os.environ, config.learner.world_size)
        attempt = Attempt.begin(config)
        plan = make_plan(
            config, attempt.number, learner_part.nodes, rollout_part.nodes, free_port()
        )
    plan.save(attempt.logs / "plan.json")
    job = {"id": os.environ["SLURM_JOB_ID"], "output": os.readlink("/proc/self/fd/1")}
    write_whole(attempt.logs / "job.json", json.dumps(job) + "\n")  # for qurl status and logs
    print(f"run directory {config.run_dir}, logs {attempt.logs}", flush=True)
    if not preflight(attempt, plan, learner_part, rollout_part):
        return 2
    with contextlib.ExitStack() as stack:
        rollout = JobStep(attempt, "rollout", rollout_part, len(rollout_part.nodes), {})
        stack.callback(rollout.end)
        threads = {"OMP_NUM_THREADS": str(config.learner.threads_per_rank)}
        learner = JobStep(attempt, "learner", learner_part, config.learner.world_size, threads)
        stack.callback(learner.end)
        code = watch(config, learner, rollout, asked)
    # SGLang ends by itself when it is preempted, in the midst of a step perhaps.
    if code == STOPPED_EARLY or (code and preempted()):
        requeue(max_restarts)
    return code


def watch(config: Config, learner: JobStep, rollout: JobStep, asked: list[int]) -> int:
    """Wait for the side that ends first; asks the learner to stop early where it is time."""
    ends_at, reminded_at = job_ends_at(), -REMIND_S
    half_s = (ends_at - time.time()) / 2  # a short job is to do more than save
    while True:
        if not asked and time.time() > ends_at - min(signal_lead_s(config.run_dir), half_s):
            asked.append(0)
        if asked and time.monotonic() >= reminded_at + REMIND_S:
            reminded_at = time.monotonic()
            learner.signal(signal.SIGUSR1)
        code = learner.poll()
        if code is not None:
            if code not in (0, STOPPED_EARLY):
                learner.report(code)
            return code
        code = rollout.poll()
        if code is not None:
            rollout.report(code)
            left = learner.wait(END_TIMEOUT_S)  # a learner that has saved may be on its way out
            return left if left in (0, STOPPED_EARLY) else code or 1
        time.sleep(POLL_S)


class JobStep:
    """One side of the job: an srun of `launch.slurm_task`."""

    def __init__(
        self, attempt: Attempt, role: str, part: NodeGroup, tasks: int, environment: dict[str, str]
    ) -> None:
        self._role = role
        self._attempt = attempt
        self._log = attempt.logs / f"srun_{role}.log"
        words = srun(part, tasks, role, attempt.logs)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                env={**step_environment(os.environ), **environment},
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=_block_usr1,
            )

    def poll(self) -> int | None:
        """The highest exit code of its tasks, None while one runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """As `poll`, at most so many seconds later."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def signal(self, number: signal.Signals) -> None:
        """Send it to all its tasks, through srun."""
        self._process.send_signal(number)

    def report(self, code: int) -> None:
        """Say that it ended, and the reason as far as srun and the logs know it."""
        lines = self._log.read_text(errors="replace").splitlines()
        said = "\n".join(line for line in lines if line.startswith("srun: "))
        text = f"\nqurl: the {self._role} side ended with code {code}; srun said:\n{said}\n"
        ended = re.search(r"task[s]? (\d+)", said)
        if self._role == "learner" and ended:
            log = self._attempt.rank_log(int(ended[1]))
            text += f"the end of {log}:\n{tail(log, RANK_LOG_LINES)}"
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Have its tasks end at once; what does not, Slurm ends with the job."""
        if self.poll() is None:
            self.signal(signal.SIGUSR2)
            self.wait(END_TIMEOUT_S)


def parts(environment: Mapping[str, str], world_size: int) -> tuple[NodeGroup, NodeGroup]:
    """Learner and rollout nodes: two groups of a heterogeneous job, or of one allocation as many
    nodes for the learner as its ranks fill with a GPU each.

    Raises:
        ConfigError: no Slurm job, or not nodes enough.
    """
    if "SLURM_JOB_ID" not in environment:
        raise ConfigError("not in a Slurm job: submit it with sbatch, or use qurl train")
    if int(environment.get("SLURM_HET_SIZE", "1")) > 1:
        groups = [
            NodeGroup(
                hostnames(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"]),
                group,
                least_cpus(environment[f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}"]),
            )
            for group in (0, 1)
        ]
        return groups[0], groups[1]
    nodes = hostnames(environment["SLURM_JOB_NODELIST"])
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if not gpus:
        raise ConfigError("no GPUs in the allocation: ask for --gpus-per-node")
    learner_nodes = -(-world_size // gpus)
    if learner_nodes >= len(nodes):
        raise ConfigError(
            f"--nodes={len(nodes)}: the learner's {world_size} ranks take {learner_nodes} nodes of "
            f"{gpus} GPUs, and at least one is to be left for the rollout servers"
        )
    cpus = least_cpus(environment["SLURM_JOB_CPUS_PER_NODE"])
    return NodeGroup(nodes[:learner_nodes], None, cpus), NodeGroup(
        nodes[learner_nodes:], None, cpus
    )


def make_plan(
    config: Config, attempt: int, learner_nodes: list[str], rollout_nodes: list[str], port: int
) -> JobPlan:
    """Ranks in equal numbers on the learner's nodes, servers in turn on the others.

    Raises:
        ConfigError: they do not come out even, or a node would be left without a server.
    """
    world_size = config.learner.world_size
    if world_size % len(learner_nodes):
        raise ConfigError(
            f"--nodes={len(learner_nodes)} for the learner: its {world_size} ranks do not divide "
            "into that many nodes"
        )
    wanted = wanted_servers(config)
    if len(wanted) < len(rollout_nodes):
        raise ConfigError(
            f"rollout.servers={config.rollout.servers}: {len(rollout_nodes)} rollout nodes want at "
            f"least as many servers (there are {len(wanted)}, those of evaluation included)"
        )
    ranks = world_size // len(learner_nodes)
    nodes = [NodePlan(name, gpus=ranks, ranks=ranks) for name in learner_nodes]
    for number, name in enumerate(rollout_nodes):
        servers: list[WantedServer] = wanted[number :: len(rollout_nodes)]
        gpus = sum(one.server.tensor_parallel_size for one in servers)
        nodes.append(NodePlan(name, gpus, servers=[(one.set_name, one.index) for one in servers]))
    key = secrets.token_urlsafe(32)
    return JobPlan(secrets.token_hex(8), key, attempt, learner_nodes[0], port, nodes)


def preflight(attempt: Attempt, plan: JobPlan, *sides: NodeGroup) -> bool:
    """Whether every node is as the run needs it; prints a line for each thing that is not."""
    reports = attempt.logs / "preflight"
    reports.mkdir()
    steps = [
        subprocess.Popen(
            srun(side, len(side.nodes), "preflight", attempt.logs, plan.token),
            env=step_environment(os.environ),
            stdin=subprocess.DEVNULL,
        )
        for side in sides
    ]
    deadline = time.monotonic() + PREFLIGHT_TIMEOUT_S
    for step in steps:
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(max(0.0, deadline - time.monotonic()))
    problems = []
    for node in plan.nodes:
        try:
            found = json.loads((reports / f"{node.name}.json").read_text())
        except FileNotFoundError:
            found = [
                f"left no report in {PREFLIGHT_TIMEOUT_S:.0f} s at most: it did not start, lacks "
                f"this Python environment, or does not share the file system of {reports}"
            ]
        problems += [f"qurl: preflight of {node.name}: {problem}" for problem in found]
    print("\n".join(problems) or f"preflight passed on {len(plan.nodes)} nodes", flush=True)
    return not problems


def srun(part: NodeGroup, tasks: int, *words: object) -> list[str]:
    """The command that runs `launch.slurm_task` in as many tasks, in equal numbers on the nodes.

    When the first task ends, the others have a moment to end as well: a rank that dies takes its
    side with it, and ranks that are done do not kill each other.
    """
    per_node = tasks // len(part.nodes)
    where = [f"--nodelist={','.join(part.nodes)}"]
    if part.het_group is not None:
        where = [f"--het-group={part.het_group}"]
    return [
        "srun",
        *where,
        f"--nodes={len(part.nodes)}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={max(1, part.cpus // per_node)}",
        f"--wait={LAST_RANK_S}",
        "--kill-on-bad-exit=0",
        *container(os.environ),
        # Not to die of what asks for an early stop while Python starts.
        *("env", "--ignore-signal=USR1,TERM"),
        *(os.environ.get("QURL_PYTHON", "python"), "-m", "launch.slurm_task"),
        *(str(word) for word in words),
    ]


def container(environment: Mapping[str, str]) -> list[str]:
    """pyxis's options, where QURL_CONTAINER_IMAGE names an image; QURL_CONTAINER_MOUNTS as they."""
    image, mounts = (
        environment.get("QURL_CONTAINER_IMAGE"),
        environment.get("QURL_CONTAINER_MOUNTS"),
    )
    if not image:
        return []
    words = [f"--container-image={image}", "--no-container-mount-home"]
    return words + ([f"--container-mounts={mounts}"] if mounts else [])


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what sbatch was asked for as to tasks and GPUs, which srun would take for its own."""
    asked = re.compile(r"SLURM_(N?TASKS|NPROCS|GPUS|CPUS_PER_TASK|TRES_PER_TASK|DISTRIBUTION)")
    return {name: value for name, value in environment.items() if not asked.match(name)}


def requeue(max_restarts: int) -> None:
    """Have Slurm start the job again; it then ends this process."""
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = os.environ["SLURM_JOB_ID"]
    if restarts >= max_restarts:
        print(f"not finished after {restarts} restarts, and no more are allowed", flush=True)
        return
    state = _output("squeue", "--noheader", f"--jobs={job}", "--format=%T").split()
    if "RUNNING" not in state:  # cancelled, or Slurm is requeueing it already
        print(f"not requeued: the job is {' '.join(state).lower() or 'gone'}", flush=True)
        return
    print(f"restart {restarts + 1} of at most {max_restarts}: requeueing job {job}", flush=True)
    subprocess.run(["scontrol", "requeue", job], check=True)


def preempted() -> bool:
    """Whether Slurm has begun to take the job's nodes for another."""
    said = _output("scontrol", "show", "job", os.environ["SLURM_JOB_ID"])
    return re.search(r"PreemptTime=\d", said) is not None


def signal_lead_s(run_dir: Path) -> int:
    """Seconds before its end a job of this run is to be told: to finish a step and to save.

    The longest of each that the run has measured, and the minute by which the signal may be late.
    """
    steps = [
        sum(value for name, value in line.items() if name.startswith("time_"))
        for line in read_json_lines(run_dir / "metrics.jsonl")
    ]
    saves = [line["time_write_s"] for line in read_json_lines(run_dir / "checkpoints.jsonl")]
    if not steps or not saves:
        return LEAD_UNMEASURED_S
    return round(LEAD_MARGIN_S + max(steps) + max(saves))


def job_ends_at() -> float:
    """Unix time of the job's limit; infinite without one."""
    job = os.environ["SLURM_JOB_ID"]
    end = _output("squeue", "--noheader", f"--jobs={job}", "--format=%e").split()
    try:
        return datetime.fromisoformat(end[0]).timestamp()
    except (IndexError, ValueError):  # unlimited
        return float("inf")


def hostnames(nodelist: str) -> list[str]:
    return _output("scontrol", "show", "hostnames", nodelist).split()


def least_cpus(counts: str) -> int:
    """Of Slurm's list of counts, such as `16(x2),8`."""
    return min(int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", counts))


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _block_usr1() -> None:
    """In srun before its program starts: it waits for signals itself, and forwards them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.slurm")
    commands = parser.add_subparsers(dest="command", required=True)
    job = commands.add_parser("run", help="the batch process of a job")
    job.add_argument("--max-restarts", type=int, default=20)
    job.add_argument("recipe")
    job.add_argument("overrides", nargs="*", metavar="field=value")
    lead = commands.add_parser("lead", help="seconds before its end a job is to be told")
    lead.add_argument("run_dir", type=Path)
    words = parser.parse_args()
    if words.command == "lead":
        print(signal_lead_s(words.run_dir))
        return
    print(f"{datetime.now():%F %T} {shlex.join(sys.argv[1:])}", flush=True)
    with refusals():
        config = prepared(words.recipe, words.overrides)
    if (config.run_dir / "summary.json").exists():
        print(f"{config.run_dir} is finished")
        return
    sys.exit(run(config, words.max_restarts))


if __name__ == "__main__":
    main()
