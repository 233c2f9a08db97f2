"""The batch process of a Slurm job, which the job's script (`launch/experiment.py`) starts.

    python -m qurl_megatron.launch.slurm run RECIPE name=NAME [field=value ...]

It reads these variables: QURL_MAX_RESTARTS; QURL_PYTHON, with which the job's steps run; and for
pyxis QURL_CONTAINER_IMAGE and QURL_CONTAINER_MOUNTS.

The job has learner nodes, with one task per rank, and rollout nodes, with one task per node that
starts and watches the node's servers. The tasks run `launch/slurm_task.py`. This process starts and
watches both sides, learner and rollout:

- When the learner ends, the rollout nodes are ended too. The job's exit code is the learner's.
- A rollout task that ends is started again on its node. When the node is lost, or its task has been
  started again too often, the learner goes on with the servers of the other nodes, if they are
  enough. A server that fails during its first start ends the job.
- With --no-kill, Slurm lets a job that loses its batch host go on, with nothing to end it. So a
  guard on a rollout node then requeues it.
- USR1 (from Slurm, before the time limit), TERM (preemption) and this process's own clock ask the
  learner to stop early. It finishes its step, saves a checkpoint and ends with code 75. The job is
  then requeued, at most QURL_MAX_RESTARTS times, and resumes from that checkpoint.
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
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from qurl_megatron.config.schema import STOPPED_EARLY, Config, ConfigError
from qurl_megatron.files import read_json_lines, write_whole
from qurl_megatron.launch import network
from qurl_megatron.launch.bad_input import exit_on_bad_input
from qurl_megatron.launch.placement import JobPlan, NodeGroup, make_plan
from qurl_megatron.launch.prepare import prepare_resume_or_new
from qurl_megatron.launch.serve import release_servers_at, save_servers_at
from qurl_megatron.launch.servers import Attempt, RestartLimit
from qurl_megatron.launch.slurm_task import START_FAILED, roster_of
from qurl_megatron.launch.status import claim, how_to_resume, is_finished
from qurl_megatron.process import LOG_TAIL_LINES, free_port, tail
from qurl_megatron.report.metrics import PHASES
from qurl_megatron.rollout.roster import save_roster

POLL_S = 0.5
REMIND_S = 5.0  # between two requests to stop early; a rank that is still starting ignores them
PREFLIGHT_TIMEOUT_S = 300.0
END_TIMEOUT_S = 30.0  # for a side to end; after that Slurm ends it with the job
RETRY_S = 10.0  # between the end of a rollout node's task and its next start
GUARD_POLL_S = 60.0
ASK_AGAIN_S = 10.0  # between two attempts to reach Slurm's controller, which restarts now and then
ASK_TIMEOUT_S = 300.0  # for all of these attempts
END_TIME_POLL_S = 60.0  # between two questions for a time limit, until one is known
SRUN_WAIT_S = 20  # for the other tasks of a side to end, once the first has ended
RANK_LOG_LINES = 3 * LOG_TAIL_LINES  # a rank's error may include the end of a server's log
# A request to stop early must not kill a task whose Python is still starting.
IGNORE_SIGNALS = ["env", "--ignore-signal=USR1,TERM"]
LEAD_MARGIN_S = 60  # Slurm may send the signal this much late
LEAD_UNMEASURED_S = 600  # the lead before a run has measured a step and a save


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
        learner_group, rollout_group = node_groups(os.environ, config.learner.world_size)
        attempt = Attempt.create(config)
        plan = make_plan(
            config, attempt.number, learner_group.nodes, rollout_group.nodes, free_port()
        )
        save_servers_at(config)
    plan.save(attempt.logs / "plan.json")
    job = {
        "id": os.environ["SLURM_JOB_ID"],
        "output": os.readlink("/proc/self/fd/1"),
        "batch_host": os.environ["SLURMD_NODENAME"],
    }
    write_whole(attempt.logs / "job.json", json.dumps(job) + "\n")  # for guard, status and logs
    print(f"run directory {config.run_dir}, logs {attempt.logs}", flush=True)
    groups = (learner_group, rollout_group)
    if not (preflight(attempt, plan, *groups) and network_works(attempt, plan, *groups)):
        return 2
    with contextlib.ExitStack() as stack:
        stack.callback(release_servers_at, config)
        rollout = RolloutSide(attempt, rollout_group)
        stack.callback(rollout.end)
        threads = {"OMP_NUM_THREADS": str(config.learner.threads_per_rank)}
        tasks = srun(learner_group, config.learner.world_size, task("learner", attempt.logs))
        learner = JobStep(attempt, "learner", tasks, threads)
        stack.callback(end_steps, [learner])
        code = watch(config, learner, rollout, stop_requests)
    is_requeued = is_resumable(code, learner_group.nodes) and requeue(max_restarts)
    if code and not is_requeued:
        print(how_to_resume(config.run_dir, "submit the same job"), file=sys.stderr, flush=True)
    return code


def watch(config: Config, learner: JobStep, rollout: RolloutSide, stop_requests: list[int]) -> int:
    """Keep the rollout side running until the learner ends; return the job's exit code.

    Ask the learner to stop early on a signal, or shortly before the time limit.
    """
    started_at, asked_at, reminded_at = time.time(), time.monotonic(), -REMIND_S
    ends_at = job_end_time()
    while True:
        if ends_at == float("inf") and time.monotonic() >= asked_at + END_TIME_POLL_S:
            ends_at, asked_at = job_end_time(), time.monotonic()
        half_s = (ends_at - started_at) / 2  # a short job still trains for half of its time
        if not stop_requests and time.time() > ends_at - min(signal_lead_s(config.run_dir), half_s):
            stop_requests.append(0)
        if stop_requests and time.monotonic() >= reminded_at + REMIND_S:
            reminded_at = time.monotonic()
            learner.send_signal(signal.SIGUSR1)
        code = learner.poll()
        if code is not None:
            if code not in (0, STOPPED_EARLY):
                learner.report(code)
            return code
        if not rollout.check():
            # A learner that has finished or saved may still be ending.
            wait_for([learner], END_TIMEOUT_S)
            return learner.returncode if learner.returncode in (0, STOPPED_EARLY) else 1
        time.sleep(POLL_S)


class JobStep(subprocess.Popen[bytes]):
    """The learner, a rollout node or the guard: a running srun, which passes signals to its tasks.

    Its exit code is the highest of its tasks.
    """

    def __init__(
        self, attempt: Attempt, name: str, command: list[str], environment: Mapping[str, str] = {}
    ) -> None:
        self.started_at = time.monotonic()
        self.ended_at: float | None = None  # the clock when its end was noticed
        self._name = name
        self._attempt = attempt
        self._log = attempt.logs / f"srun_{name}.log"
        with self._log.open("wb") as log:
            super().__init__(
                command,
                env={**step_environment(os.environ), **environment},
                stdin=subprocess.DEVNULL,
                stderr=log,
                # srun waits for the signals that are blocked when it starts, and forwards them.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}),
            )

    def report(self, code: int) -> None:
        """Print that the step ended, with srun's messages and the end of the failed rank's log."""
        lines = self._log.read_text(errors="replace").splitlines()
        messages = "\n".join(line for line in lines if line.startswith("srun: "))
        text = f"\nqurl: {self._name} ended with code {code}; srun printed:\n{messages}\n"
        task = re.search(r"task[s]? (\d+)", messages)
        if self._name == "learner" and task:
            log = self._attempt.rank_log(int(task[1]))
            text += f"the end of {log}:\n{tail(log, RANK_LOG_LINES)}"
        print(text, file=sys.stderr, flush=True)


def end_steps(steps: Sequence[JobStep]) -> None:
    """End the tasks of several steps at once; Slurm ends those that remain, with the job."""
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
    """The rollout nodes of the job, with a job step each, so that one can end without the others.

    A node that is given up gets an empty roster, which tells the learner that no server will come
    back there.
    """

    def __init__(self, attempt: Attempt, group: NodeGroup) -> None:
        self._attempt = attempt
        self._group = group
        self._limits = {name: RestartLimit() for name in group.nodes}
        # For each node, the step that runs its task, or ran it last.
        self._steps = {name: self._start(name) for name in group.nodes}
        self._guard = self._start_guard()

    def check(self) -> bool:
        """Start again the tasks that have ended; call it often.

        Return False if a task could not start its servers at all, which ends the job.
        """
        now = time.monotonic()
        for name, step in list(self._steps.items()):
            code = step.poll()
            if code is None:
                continue
            roster = roster_of(self._attempt.logs, name)
            if step.ended_at is None:
                step.ended_at = now
                step.report(code)
                if code == START_FAILED or not roster.exists():
                    return False
            if now < step.ended_at + RETRY_S:
                continue
            if self._limits[name].allows():
                print(f"qurl: starting the rollout task of {name} again", flush=True)
                self._steps[name] = self._start(name)
            else:
                print(f"qurl: {name} is lost; its servers do not come back", flush=True)
                save_roster(roster, {})
                del self._steps[name]
        is_due = now > self._guard.started_at + RETRY_S
        if self._guard.poll() is not None and self._steps and is_due:
            self._guard = self._start_guard()
        return True

    def end(self) -> None:
        """End all tasks, and the guard."""
        end_steps([self._guard, *self._steps.values()])

    def _start(self, node: str) -> JobStep:
        return self._step(node, f"rollout_{node}", task("rollout", self._attempt.logs))

    def _start_guard(self) -> JobStep:
        running = [node for node, step in self._steps.items() if step.ended_at is None]
        # It asks Slurm, which a container may not be able to.
        command = [*IGNORE_SIGNALS, sys.executable, "-m", "qurl_megatron.launch.slurm", "guard"]
        command = ["--overlap", *command, str(self._attempt.logs)]
        return self._step((running or list(self._steps))[-1], "guard", command)

    def _step(self, node: str, name: str, command: list[str]) -> JobStep:
        group = dataclasses.replace(self._group, nodes=[node])
        return JobStep(self._attempt, name, srun(group, 1, command))


def guard(logs: Path) -> None:
    """Requeue the job once it has lost its batch host; run it on another node."""
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
    return hostnames(",".join(listed)) if listed else []


def node_groups(environment: Mapping[str, str], world_size: int) -> tuple[NodeGroup, NodeGroup]:
    """Return the job's learner nodes and rollout nodes.

    A heterogeneous job has two groups of nodes. In one allocation the learner gets the first nodes,
    as many as its ranks fill with one GPU each.

    Raises:
        ConfigError: this is no Slurm job, or it has too few nodes.
    """
    if "SLURM_JOB_ID" not in environment:
        raise ConfigError("not in a Slurm job: submit it with sbatch, or use qurl train")
    if int(environment.get("SLURM_HET_SIZE", "1")) > 1:
        groups = [
            NodeGroup(
                hostnames(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"]),
                group,
                min_cpus(environment[f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}"]),
            )
            for group in (0, 1)
        ]
        return groups[0], groups[1]
    nodes = hostnames(environment["SLURM_JOB_NODELIST"])
    gpus = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    if not gpus:
        raise ConfigError("no GPUs in the allocation: ask for --gpus-per-node")
    num_learner = -(-world_size // gpus)
    if num_learner >= len(nodes):
        raise ConfigError(
            f"--nodes={len(nodes)}: the learner's {world_size} ranks take {num_learner} nodes of "
            f"{gpus} GPUs, and at least one more is needed for the rollout servers"
        )
    cpus = min_cpus(environment["SLURM_JOB_CPUS_PER_NODE"])
    learner, rollout = nodes[:num_learner], nodes[num_learner:]
    return NodeGroup(learner, None, cpus), NodeGroup(rollout, None, cpus)


def preflight(attempt: Attempt, plan: JobPlan, *groups: NodeGroup) -> bool:
    """Check that every node has what the run needs; print a line for each problem."""
    reports = attempt.logs / "preflight"
    reports.mkdir()
    steps = [
        subprocess.Popen(
            srun(group, len(group.nodes), task("preflight", attempt.logs, plan.token)),
            env=step_environment(os.environ),
            stdin=subprocess.DEVNULL,
        )
        for group in groups
    ]
    wait_for(steps, PREFLIGHT_TIMEOUT_S)
    problems = []
    for node in plan.nodes:
        try:
            report = json.loads((reports / f"{node.name}.json").read_text())
        except FileNotFoundError:
            report = [
                f"no report after at most {PREFLIGHT_TIMEOUT_S:.0f} s: the node did not start, "
                f"lacks this Python environment, or does not share the file system of {reports}"
            ]
        problems += [f"qurl: preflight of {node.name}: {problem}" for problem in report]
    print("\n".join(problems) or f"preflight passed on {len(plan.nodes)} nodes", flush=True)
    return not problems


def network_works(attempt: Attempt, plan: JobPlan, *groups: NodeGroup) -> bool:
    """Let the nodes exchange tensors as the run will; print how fast that was, and what failed."""
    reports = attempt.logs / "network"
    reports.mkdir()
    # Without a limit of srun's own: the nodes that are left say who is missing.
    command = ["--wait=0", *task("network", attempt.logs, free_port())]
    steps = [
        JobStep(attempt, f"network_{group.nodes[0]}", srun(group, len(group.nodes), command))
        for group in groups
    ]
    wait_for(steps, network.limit_s(plan.nodes))
    end_steps(steps)
    lines, works = network.summarize(plan, reports)
    print("\n".join(lines), flush=True)
    return works


def srun(group: NodeGroup, tasks: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs tasks, equally many on each node of a group.

    When the first task ends, the others have `SRUN_WAIT_S` to end too. So a rank that dies ends its
    side, and ranks that are done do not kill each other. `command` may begin with further options.
    """
    per_node = tasks // len(group.nodes)
    het_group = [] if group.het_group is None else [f"--het-group={group.het_group}"]
    return [
        "srun",
        *het_group,
        f"--nodelist={','.join(group.nodes)}",
        f"--nodes={len(group.nodes)}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={max(1, group.cpus // per_node)}",
        f"--wait={SRUN_WAIT_S}",
        "--kill-on-bad-exit=0",
        *command,
    ]


def task(*arguments: object) -> list[str]:
    """Return the command of `launch/slurm_task.py`, with srun's options for its container."""
    python = os.environ.get("QURL_PYTHON", "python")
    words = [
        *container_options(os.environ),
        *IGNORE_SIGNALS,
        python,
        "-m",
        "qurl_megatron.launch.slurm_task",
    ]
    return words + [str(argument) for argument in arguments]


def container_options(environment: Mapping[str, str]) -> list[str]:
    """Return srun's options for pyxis, if QURL_CONTAINER_IMAGE names an image.

    QURL_CONTAINER_MOUNTS has the form of --container-mounts.
    """
    image = environment.get("QURL_CONTAINER_IMAGE")
    mounts = environment.get("QURL_CONTAINER_MOUNTS")
    if not image:
        return []
    options = [f"--container-image={image}", "--no-container-mount-home"]
    return options + ([f"--container-mounts={mounts}"] if mounts else [])


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop sbatch's variables about tasks and GPUs, which srun would take as its own options."""
    dropped = re.compile(r"SLURM_(N?TASKS|NPROCS|GPUS|CPUS_PER_TASK|TRES_PER_TASK|DISTRIBUTION)")
    return {name: value for name, value in environment.items() if not dropped.match(name)}


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
    """Return True if a run that ended with this code is to go on: nothing is wrong with it.

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


def signal_lead_s(run_dir: Path) -> int:
    """Return how many seconds before its time limit a job must be asked to stop.

    That is the run's longest step with its evaluation, its longest save, and the minute by which
    Slurm may send the signal late.
    """
    steps = [
        sum(line.get(f"time_{phase}_s", 0.0) for phase in (*PHASES, "evaluation"))
        for line in read_json_lines(run_dir / "metrics.jsonl")
    ]
    saves = [line["time_write_s"] for line in read_json_lines(run_dir / "checkpoints.jsonl")]
    if not steps or not saves:
        return LEAD_UNMEASURED_S
    return round(LEAD_MARGIN_S + max(steps) + max(saves))


def job_end_time() -> float:
    """Return the Unix time of the job's time limit; infinity if it has none.

    It is infinity too if Slurm does not answer. That is asked once only, because a learner runs
    that must be watched meanwhile: ask again later.
    """
    job = os.environ["SLURM_JOB_ID"]
    end = (_ask("squeue", "--noheader", f"--jobs={job}", "--format=%e") or "").split()
    try:
        return datetime.fromisoformat(end[0]).timestamp()
    except (IndexError, ValueError):  # silent, or unlimited
        return float("inf")


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
    """Return what a command of Slurm prints; None, and print its message, if it fails."""
    done = subprocess.run(list(words), check=False, capture_output=True, text=True)
    if done.returncode:
        message = f"qurl: {shlex.join(words)} failed: {done.stderr.strip()}"
        print(message, file=sys.stderr, flush=True)
        return None
    return done.stdout


def main() -> None:
    """Run a job, or guard it: `python -m qurl_megatron.launch.slurm guard LOGS`."""
    command, *words = sys.argv[1:]
    if command == "guard":
        return guard(Path(*words))
    print(f"{datetime.now():%F %T} {shlex.join(sys.argv[1:])}", flush=True)
    recipe, *overrides = words
    with exit_on_bad_input():
        config, data_summary = prepare_resume_or_new(recipe, overrides)
    if is_finished(config.run_dir):
        print(f"{config.run_dir} is finished")
        return
    print(data_summary, end="", flush=True)
    sys.exit(run(config, int(os.environ["QURL_MAX_RESTARTS"])))


if __name__ == "__main__":
    main()
