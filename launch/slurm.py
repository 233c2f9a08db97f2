"""The batch process of a Slurm job, which the job's script (`launch/experiment.py`) starts.

    python -m qurl_megatron.launch.slurm run SCRIPT <<< CONFIGURATION

It reads the run's configuration, as YAML, and the variables that the script sets
(`launch/experiment.py:_variables`), whose names begin with QURL_.

Every node of the job has one task, which supervises its part of the plan (`slurm_node.py`). The
nodes of the learner, on which there may be servers too, are one job step. Each other node has
servers only, and is a step by itself. This process starts and watches them:

- When the learner ends, the other nodes are ended too. The job's exit code is the learner's.
- The supervisor of a rollout node that ends is started again. When the node is lost, or its
  supervisor has been started again too often, the learner goes on with the servers of the other
  nodes, if they are enough. A server that fails during its first start ends the job.
- With --no-kill, Slurm lets a job that loses its batch host go on, with nothing to end it. So a
  guard on a rollout node then requeues it.
- This process's own clock, USR1 (from Slurm, before the time limit) and TERM (preemption) ask the
  learner to stop early. It finishes its step, saves a checkpoint and ends with code 75. The job is
  then requeued, at most QURL_MAX_RESTARTS times, and resumes from that checkpoint. The clock knows
  what steps and saves of this run have taken; Slurm's signal is for a clock that failed.
- An existing run is resumed and a missing one is created. So a requeued job, the same command
  again, and a chain of jobs (`--dependency=afterany:ID`) all continue one run. A finished run ends
  at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from qurl_megatron.config import extensions
from qurl_megatron.config.gpus import H100, Node, node_of
from qurl_megatron.config.nodes import nodes_of_learner
from qurl_megatron.config.schema import STOPPED_EARLY, Config, ConfigError
from qurl_megatron.device import machine_memory_bytes
from qurl_megatron.files import read_json_lines, write_whole
from qurl_megatron.launch.bad_input import exit_on_bad_input
from qurl_megatron.launch.nodes import NodeGroup, make_plan
from qurl_megatron.launch.owner import JOB_SCRIPT, claim, how_to_resume
from qurl_megatron.launch.placement import JobPlan
from qurl_megatron.launch.preflight import limit_s, summarize
from qurl_megatron.launch.recipe import STDIN
from qurl_megatron.launch.resume import prepare_resume_or_new
from qurl_megatron.launch.servers import Attempt, RestartLimit, claimed_servers
from qurl_megatron.launch.slurm_node import START_FAILED
from qurl_megatron.launch.status import is_finished
from qurl_megatron.machine.environment import NO_THREADS
from qurl_megatron.machine.network import free_port
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.memory.disk import checkpoint_bytes
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.report.metrics import PHASES
from qurl_megatron.report.record import list_checkpoints
from qurl_megatron.rollout.roster import save_roster

STARTED_AT = time.time()
POLL_S = 0.5
REMIND_S = 5.0  # between two requests to stop early; a rank that is still starting ignores them
END_TIMEOUT_S = 30.0  # for a side to end; after that Slurm ends it with the job
RETRY_S = 10.0  # between the end of a rollout node's supervisor and its next start
GUARD_POLL_S = 60.0
ASK_AGAIN_S = 10.0  # between two attempts to reach Slurm's controller, which restarts now and then
ASK_ONCE_TIMEOUT_S = 15.0
ASK_TIMEOUT_S = 300.0  # for all of these attempts
CLOCK_POLL_S = 30.0  # between two looks at the time limit, and at what steps and saves take
SRUN_WAIT_S = 20  # for the other tasks of a side to end, once the first has ended
# A request to stop early must not kill a task whose Python is still starting. (The option
# --ignore-signal of `env` would do, but needs coreutils 8.31, and RHEL 8 has 8.30.)
IGNORE_SIGNALS = ["sh", "-c", "trap '' USR1 TERM; exec \"$@\"", "sh"]
# Variables that srun takes as options. sbatch sets some of them, and a job that is submitted from
# within another job also has those of the other: its memory, its CPUs, its list of variables.
SRUN_OPTIONS = re.compile(
    "SLURM_(N?TASKS|NPROCS|CPUS_PER|CPU_BIND|MEM_|GPU|GRES|TRES|DISTRIBUTION|EXPORT_ENV|EXACT"
    "|EXCLUSIVE|OVERCOMMIT|OVERLAP|TIMELIMIT|LABELIO|STD(IN|OUT|ERR)MODE|REMOTE_CWD|WORKING_DIR)"
    "|SRUN_(EXPORT_ENV|CPUS_PER_TASK|OUTPUT|ERROR|INPUT)"
)
OF_SLURM = ("srun: ", "slurmstepd: ", "pyxis: ")  # begin Slurm's lines in a step's output
LEAD_MARGIN_S = 60  # clocks of nodes differ, and Slurm may send the signal this much late
LEAD_GROWTH = 1.1  # how much longer than the longest yet a step, evaluation or save may take
RECENT = 20  # steps that tell how long the next one takes
LAST_S = 45.0  # to end what runs and to requeue the job; a stop as planned has ended before


def run(config: Config, max_restarts: int) -> int:
    """Run the job and return its exit code: 0 finished, 2 refused, 75 stopped early, else failed.

    The job is refused if another launcher owns the run.
    """
    with exit_on_bad_input():
        owner = claim(config.run_dir)
    with owner:
        return _run(config, max_restarts)


def _run(config: Config, max_restarts: int) -> int:
    stop_requests: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: stop_requests.append(number))
    with exit_on_bad_input():
        is_colocated = config.rollout.placement == "colocated"
        groups = node_groups(os.environ, config.learner.world_size, is_colocated=is_colocated)
        learner_group = groups[0]
        attempt = Attempt.create(config)
        rollout_nodes = [name for group in groups[1:] for name in group.nodes]
        plan = make_plan(
            config,
            attempt.number,
            learner_group.nodes,
            rollout_nodes,
            free_port(),
            learner_group.gpus,
        )
    plan.save(attempt.logs / "plan.json")
    job = {
        "id": os.environ["SLURM_JOB_ID"],
        "output": os.readlink("/proc/self/fd/1"),
        "batch_host": os.environ["SLURMD_NODENAME"],
    }
    write_whole(attempt.logs / "job.json", json.dumps(job) + "\n")  # for guard, status and logs
    print(f"run directory {config.run_dir}, logs {attempt.logs}", flush=True)
    if not preflight(attempt, plan, groups):
        return 2
    say_objections(config, max_restarts)
    with exit_on_bad_input():
        save_s = expected_save_s(config)
    with contextlib.ExitStack() as stack:
        with exit_on_bad_input():
            stack.enter_context(claimed_servers(config))
        rollout = RolloutSide(attempt, groups)
        stack.callback(rollout.end)
        learner = JobStep(attempt, "learner", srun(learner_group, task("slurm_node", attempt.logs)))
        stack.callback(end_steps, [learner])
        code = watch(config, learner, rollout, stop_requests, save_s)
    is_requeued = is_resumable(code, learner_group.nodes) and requeue(max_restarts)
    if code and not is_requeued:
        print(how_to_resume(config.run_dir), file=sys.stderr, flush=True)
    return code


def watch(
    config: Config,
    learner: JobStep,
    rollout: RolloutSide,
    stop_requests: list[int],
    save_s: float,
) -> int:
    """Keep the rollout side running until the learner ends; return the job's exit code.

    Ask the learner to stop early on a signal, or when a step and a save just fit before the time
    limit. If they do not fit after all, or the learner hangs, it counts as stopped if this job has
    saved a checkpoint; Slurm requeues no job that meets its limit. `save_s` is what a save is
    expected to take, in seconds, until one is measured.
    """
    looked_at, reminded_at = -CLOCK_POLL_S, -REMIND_S
    found = list_checkpoints(config.run_dir)
    ends_at = stops_at = float("inf")
    while True:
        if time.monotonic() >= looked_at + CLOCK_POLL_S:
            ends_at, looked_at = job_end_time() or ends_at, time.monotonic()
            stops_at = ends_at - stop_lead_s(config.run_dir, save_s)
        if not stop_requests and time.time() > stops_at:
            stop_requests.append(0)
        if stop_requests and time.monotonic() >= reminded_at + REMIND_S:
            reminded_at = time.monotonic()
            learner.send_signal(signal.SIGUSR1)
        code = learner.poll()
        if code is not None:
            if code not in (0, STOPPED_EARLY):
                learner.report(code)
            return code
        if time.time() > ends_at - LAST_S and list_checkpoints(config.run_dir)[-1:] != found[-1:]:
            print("qurl: the step goes on at the job's time limit; it is run again", flush=True)
            return STOPPED_EARLY
        if not rollout.check():
            # A learner that has finished or saved may still be ending.
            wait_for([learner], END_TIMEOUT_S)
            return learner.returncode if learner.returncode in (0, STOPPED_EARLY) else 1
        time.sleep(POLL_S)


class JobStep(subprocess.Popen[bytes]):
    """The learner, a rollout node or the guard: a running srun, which passes signals to its tasks.

    Its exit code is the highest of its tasks.
    """

    def __init__(self, attempt: Attempt, name: str, command: list[str]) -> None:
        self.started_at = time.monotonic()
        self.ended_at: float | None = None  # `time.monotonic()` when its end was noticed
        self._name = name
        self._log = attempt.logs / f"srun_{name}.log"
        with self._log.open("wb") as log:
            super().__init__(
                command,
                env=step_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stderr=log,
                # srun waits for the signals that are blocked when it starts, and forwards them.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}),
            )

    def report(self, code: int) -> None:
        """Print that the step ended, with Slurm's messages."""
        lines = self._log.read_text(errors="replace").splitlines()
        messages = "\n".join(line for line in lines if line.startswith(OF_SLURM))
        text = f"\nqurl: {self._name} ended with code {code}; srun printed:\n{messages}\n"
        print(text, file=sys.stderr, flush=True)


def end_steps(steps: Sequence[JobStep]) -> None:
    """End the tasks of several steps at once; Slurm ends what remains with the job."""
    for step in steps:
        step.send_signal(signal.SIGUSR2)
    wait_for(steps, END_TIMEOUT_S)


def wait_for(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait until all processes have ended, for at most `timeout_s` seconds together."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


class RolloutSide:
    """The nodes with servers only, with a job step each, so that one can end without the others.

    A node that is given up gets an empty roster, which tells the learner that no server will come
    back there. Where all servers are on the learner's nodes there is only the guard.
    """

    def __init__(self, attempt: Attempt, groups: Sequence[NodeGroup]) -> None:
        """Start the supervisors of all groups but the learner's, the first, and the guard."""
        self._attempt = attempt
        self._group = groups[-1]
        nodes = [name for group in groups[1:] for name in group.nodes]
        self._limits = {name: RestartLimit() for name in nodes}
        # For each node, the step that runs its supervisor, or ran it last.
        self._steps = {name: self._start(name) for name in nodes}
        self._guard = self._start_guard()

    def check(self) -> bool:
        """Start again the supervisors that have ended; call it often.

        Return False if one could not start its servers at all, which ends the job.
        """
        now = time.monotonic()
        for name, step in list(self._steps.items()):
            code = step.poll()
            if code is None:
                continue
            roster = self._attempt.roster(name)
            if step.ended_at is None:
                step.ended_at = now
                step.report(code)
                if code == START_FAILED or not roster.exists():
                    return False
            if now < step.ended_at + RETRY_S:
                continue
            if self._limits[name].allows():
                print(f"qurl: starting the supervisor of {name} again", flush=True)
                self._steps[name] = self._start(name)
            else:
                print(f"qurl: {name} is lost; its servers do not come back", flush=True)
                save_roster(roster, {})
                del self._steps[name]
        if self._guard.poll() is not None and now > self._guard.started_at + RETRY_S:
            self._guard = self._start_guard()
        return True

    def end(self) -> None:
        """End all supervisors, and the guard."""
        end_steps([self._guard, *self._steps.values()])

    def _start(self, node: str) -> JobStep:
        return self._step(node, f"rollout_{node}", task("slurm_node", self._attempt.logs))

    def _start_guard(self) -> JobStep:
        running = [node for node, step in self._steps.items() if step.ended_at is None]
        # It runs outside the container, which may not reach Slurm, and beside the node's own step.
        command = [*IGNORE_SIGNALS, sys.executable, "-m", "qurl_megatron.launch.slurm", "guard"]
        command = ["--overlap", *command, str(self._attempt.logs)]
        return self._step((running or self._group.nodes)[-1], "guard", command)

    def _step(self, node: str, name: str, command: list[str]) -> JobStep:
        group = dataclasses.replace(self._group, nodes=[node])
        return JobStep(self._attempt, name, srun(group, command))


def guard(logs: Path) -> None:
    """Requeue the job once it has lost its batch host; this runs on another node."""
    job = json.loads((logs / "job.json").read_text())
    while True:
        time.sleep(GUARD_POLL_S)
        nodes = nodes_of_job(job["id"])
        if nodes and job["batch_host"] not in nodes:
            print(f"qurl: the job has lost {job['batch_host']}; requeueing it", flush=True)
            if _ask_repeatedly("scontrol", "requeue", job["id"]) is not None:
                return


def nodes_of_job(job: str) -> list[str]:
    """Return the nodes that a job still has; none if Slurm's controller does not answer."""
    answer = _ask_repeatedly("squeue", "--noheader", f"--jobs={job}", "--format=%N")
    listed = (answer or "").split()
    try:
        return hostnames(",".join(listed)) if listed else []
    except (OSError, subprocess.CalledProcessError):  # the program is being replaced
        return []


def node_groups(
    environment: Mapping[str, str], world_size: int, *, is_colocated: bool = False
) -> list[NodeGroup]:
    """Return the job's learner nodes, which may have servers too, and its other nodes, if any.

    A heterogeneous job has two groups of nodes. In one allocation the learner gets the first nodes,
    as many as its ranks fill with one GPU each.

    Raises:
        ConfigError: this is not a Slurm job, or it has too few nodes.
    """
    if "SLURM_JOB_ID" not in environment:
        raise ConfigError("not in a Slurm job: submit it with sbatch, or use qurl train")
    if int(environment.get("SLURM_HET_SIZE", "1")) > 1:
        if is_colocated:
            raise ConfigError(
                "rollout.placement=colocated: a heterogeneous job has two groups of nodes, and "
                "learner and servers share one; submit a job of equal nodes"
            )
        return [
            NodeGroup(
                hostnames(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"]),
                group,
                min_cpus(environment[f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}"]),
            )
            for group in (0, 1)
        ]
    nodes = hostnames(environment["SLURM_JOB_NODELIST"])
    gpus = gpus_of_node(environment)
    if not gpus:
        raise ConfigError("no GPUs in the allocation: ask for --gpus-per-node")
    num_learner = nodes_of_learner(world_size, gpus)
    if num_learner > len(nodes):
        raise ConfigError(
            f"--nodes={len(nodes)}: the learner's {world_size} ranks take {num_learner} nodes of "
            f"{gpus} GPUs"
        )
    cpus = min_cpus(environment["SLURM_JOB_CPUS_PER_NODE"])
    sides = [nodes[:num_learner], [] if is_colocated else nodes[num_learner:]]
    return [NodeGroup(side, None, cpus, gpus) for side in sides if side]


def gpus_of_node(environment: Mapping[str, str]) -> int:
    """Return how many GPUs the job has on a node; 0 if it has asked for none."""
    asked = environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]  # such as 4 of h100:4
    # An exclusive job counts all GPUs of its nodes, but its steps see only what it asked for.
    counted = asked if asked.isdecimal() else environment.get("SLURM_GPUS_ON_NODE", "0")
    return int(environment.get("QURL_GPUS_PER_NODE", counted))


def job_node() -> Node:
    """Return what the job's nodes are like: this one, with the GPU that `qurl launch` was given."""
    node = node_of(os.environ.get("QURL_GPU", H100.name), gpus_of_node(os.environ))
    return dataclasses.replace(node, host_bytes=machine_memory_bytes())


def preflight(attempt: Attempt, plan: JobPlan, groups: Sequence[NodeGroup]) -> bool:
    """Check every node and the network between them; print what was found; return if all is well.

    A step that failed may say why a node has no report.
    """
    reports = attempt.logs / "preflight"
    reports.mkdir()
    # Without srun's own limit: the nodes that are left report which one is missing.
    command = ["--wait=0", *task("preflight", attempt.logs, free_port())]
    steps = [
        JobStep(attempt, f"preflight_{group.nodes[0]}", srun(group, command)) for group in groups
    ]
    wait_for(steps, limit_s(plan.nodes))
    end_steps(steps)
    lines, is_well = summarize(plan, reports)
    print("\n".join(lines), flush=True)
    for step in steps:
        if step.returncode:
            step.report(step.returncode)
    return is_well


def srun(group: NodeGroup, command: Sequence[str]) -> list[str]:
    """Return the command that runs one task on each node of a group, with all of its CPUs.

    When the first task ends, the others have `SRUN_WAIT_S` to end too. So a node whose rank dies
    ends the learner, and nodes that are done do not end the others. `command` may begin with
    further options.
    """
    het_group = [] if group.het_group is None else [f"--het-group={group.het_group}"]
    return [
        "srun",
        *het_group,
        f"--nodelist={','.join(group.nodes)}",
        f"--nodes={len(group.nodes)}",
        f"--ntasks={len(group.nodes)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={group.cpus}",
        f"--wait={SRUN_WAIT_S}",
        "--kill-on-bad-exit=0",
        *shlex.split(os.environ.get("QURL_SRUN_ARGS", "")),
        *command,
    ]


def task(module: str, *arguments: object) -> list[str]:
    """Return the command of a module of `launch/`, with srun's options for its container."""
    python = os.environ.get("QURL_PYTHON", "python")
    container = shlex.split(os.environ.get("QURL_CONTAINER_OPTIONS", ""))
    words = [*container, *IGNORE_SIGNALS, python, "-m", f"qurl_megatron.launch.{module}"]
    return words + [str(argument) for argument in arguments]


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a step, with `NO_THREADS` on a machine without GPUs.

    It lacks `SRUN_OPTIONS`: a step has all memory and GPUs of the job, and all of its variables.
    """
    kept = {name: value for name, value in environment.items() if not SRUN_OPTIONS.match(name)}
    return kept | ({} if shutil.which("nvidia-smi") else NO_THREADS)


def requeue(max_restarts: int) -> bool:
    """Ask Slurm to start the job again; Slurm then ends this process.

    Return False, and print why, if the job is not to start again.
    """
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = os.environ["SLURM_JOB_ID"]
    if restarts >= max_restarts:
        print(f"not finished after {restarts} restarts, and no more are allowed", flush=True)
        return False
    answer = _ask_repeatedly("squeue", "--noheader", f"--jobs={job}", "--format=%T")
    if answer is None:
        print("not requeued: Slurm does not say whether the job still runs", flush=True)
        return False
    state = answer.split()
    if "RUNNING" not in state:  # cancelled, or already being requeued
        print(f"not requeued: the job is {' '.join(state).lower() or 'gone'}", flush=True)
        return False
    print(f"restart {restarts + 1} of at most {max_restarts}: requeueing job {job}", flush=True)
    if _ask_repeatedly("scontrol", "requeue", job) is None:
        print("not requeued: Slurm did not do it", flush=True)
        return False
    return True


def is_resumable(code: int, learner_nodes: list[str]) -> bool:
    """Return True if a run that ended with this code is to go on, as nothing is wrong with it.

    The learner then stopped early, or failed because Slurm took one of its nodes, as it does when a
    node fails. (Without --no-kill, Slurm requeues the job by itself.) Or it failed on preemption:
    then SGLang ends by itself, possibly in the middle of a step.
    """
    if code in (0, STOPPED_EARLY):
        return code == STOPPED_EARLY
    left = nodes_of_job(os.environ["SLURM_JOB_ID"])
    return is_preempted() or (bool(left) and not set(learner_nodes) <= set(left))


def is_preempted() -> bool:
    """Return True if Slurm is taking the job's nodes for another job, and says so."""
    shown = _ask_repeatedly("scontrol", "show", "job", os.environ["SLURM_JOB_ID"])
    return re.search(r"PreemptTime=\d", shown or "") is not None


def stop_lead_s(run_dir: Path, save_s: float) -> float:
    """Return how many seconds before its time limit a job must be asked to stop.

    Asked at the worst moment, the learner first completes a whole step, an evaluation, or the save
    that is being written. Then it saves. `save_s` stands for a save that was not measured yet.
    """
    steps = read_json_lines(run_dir / "metrics.jsonl")
    if not steps:
        return 0.0  # nothing would be saved
    saves = [line["time_write_s"] for line in read_json_lines(run_dir / "checkpoints.jsonl")]
    longest_save_s = max(saves, default=save_s)
    longest_s = max(
        longest_save_s,
        # A step that stalled long ago must not cost the end of every job.
        *(sum(step.get(f"time_{phase}_s", 0.0) for phase in PHASES) for step in steps[-RECENT:]),
        *(step.get("time_evaluation_s", 0.0) for step in steps),
    )
    return LEAD_MARGIN_S + LEAD_GROWTH * (longest_s + longest_save_s)


def expected_save_s(config: Config) -> float:
    """Return and print the seconds that a checkpoint takes at this node's writing speed.

    All nodes of the learner write at the same time, so a save is likely to take less.

    Raises:
        ConfigError: the run's directory cannot be written.
    """
    num_bytes = checkpoint_bytes(Architecture.from_directory(config.model), config)
    try:
        speed = write_bytes_per_s(config.run_dir)
    except OSError as error:
        raise ConfigError(f"{config.run_dir}: cannot be written: {error.strerror}") from None
    save_s = num_bytes / speed
    print(
        f"a checkpoint has {gigabytes(num_bytes)}; at {gigabytes(speed)}/s from one node, it takes "
        f"{save_s:.0f} s",
        flush=True,
    )
    return save_s


def write_bytes_per_s(directory: Path) -> float:
    """Return how fast this machine writes 256 MiB of random bytes, which it then deletes."""
    block = os.urandom(2**20)
    trial = directory / "speed.unfinished"
    start = time.monotonic()
    try:
        with trial.open("wb") as file:
            for _ in range(256):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())  # the disk's speed, not that of the page cache
        return 256 * len(block) / (time.monotonic() - start)
    finally:
        trial.unlink(missing_ok=True)


def say_objections(config: Config, max_restarts: int) -> None:
    """Print what the plan of the run says against this job, where runs can be planned."""
    planned = extensions.find("planning", "job")
    if planned is None:
        return
    limit_s = (job_end_time() or float("inf")) - time.time()
    jobs_left = max_restarts + 1 - int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    for objection in planned.objections(config, job_node(), limit_s, jobs_left):
        print(f"qurl: warning: {objection}", flush=True)


def job_end_time() -> float | None:
    """Return the Unix time of the job's time limit; infinity if it has none.

    The time left depends on the clocks of this node and of Slurm's controller. In case they differ,
    the limit also counts from this process's start.

    Return None if Slurm does not answer. It is asked only once, because a running learner must be
    watched meanwhile: ask again later.
    """
    job = os.environ["SLURM_JOB_ID"]
    answer = (_ask("squeue", "--noheader", f"--jobs={job}", "--format=%L %l") or "").split()
    try:
        left, limit = answer[:2]  # a heterogeneous job lists each component
        return min(time.time() + time_limit_s(left), STARTED_AT + time_limit_s(limit))
    except ValueError:  # silent, or past its limit
        return None


def time_limit_s(text: str) -> float:
    """Return the seconds of a time limit in the words of sbatch and squeue; infinity for none.

    Raises:
        ConfigError: it has another form.
    """
    if text.lower() in ("infinite", "unlimited", "not_set", "0"):
        return float("inf")
    form = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,7}(?::\d{1,2}){0,2})", text)
    if not form:
        raise ConfigError(
            f"time={text}: not a time limit of Slurm; give MINUTES, HH:MM:SS or D-HH:MM:SS"
        )
    days, clock = form.groups()
    numbers = [int(number) for number in clock.split(":")]
    if days:  # D-H, D-H:M or D-H:M:S
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return 86_400 * int(days) + 3600 * hours + 60 * minutes + seconds
    # M, M:S or H:M:S
    hours, minutes, seconds = numbers if len(numbers) == 3 else [0, *numbers, 0][:3]
    return 3600 * hours + 60 * minutes + seconds


def hostnames(nodelist: str) -> list[str]:
    """Return the names in one of Slurm's lists, such as `node[1-4]`."""
    words = ["scontrol", "show", "hostnames", nodelist]  # which asks no controller
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()


def min_cpus(counts: str) -> int:
    """Return the smallest of Slurm's CPU counts, such as 8 of `16(x2),8`."""
    return min(int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", counts))


def _ask_repeatedly(*words: str) -> str | None:
    """Return what a command of Slurm prints; None if it fails for ASK_TIMEOUT_S."""
    deadline = time.monotonic() + ASK_TIMEOUT_S
    while (answer := _ask(*words)) is None and time.monotonic() < deadline:
        time.sleep(ASK_AGAIN_S)
    return answer


def _ask(*words: str) -> str | None:
    """Return what a command of Slurm prints; None, and print why, if it fails or does not end."""
    try:
        done = subprocess.run(
            list(words), check=True, capture_output=True, text=True, timeout=ASK_ONCE_TIMEOUT_S
        )
        return done.stdout
    except subprocess.TimeoutExpired:
        reason = f"no answer in {ASK_ONCE_TIMEOUT_S:.0f} s"
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()
    except OSError as error:  # the program is being replaced, or its file system is away
        reason = str(error)
    print(f"qurl: {shlex.join(words)} failed: {reason}", file=sys.stderr, flush=True)
    return None


def main() -> None:
    """Run a job, or guard it: `python -m qurl_megatron.launch.slurm guard LOGS`."""
    command, *words = sys.argv[1:]
    if command == "guard":
        return guard(Path(*words))
    print(f"{datetime.now():%F %T} {shlex.join(sys.argv[1:])}", flush=True)
    script = Path(*words).read_text()
    with exit_on_bad_input():
        config, data_summary = prepare_resume_or_new(STDIN, job_node(), script)
    # This script resumes the run. Its variables may be secrets.
    write_whole(config.run_dir / JOB_SCRIPT, script, private=True)
    if is_finished(config.run_dir):
        print(f"{config.run_dir} is finished")
        return
    print(data_summary, end="", flush=True)
    sys.exit(run(config, int(os.environ["QURL_MAX_RESTARTS"])))


if __name__ == "__main__":
    main()
