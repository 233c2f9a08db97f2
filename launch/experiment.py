"""Runs as a nemo-run experiment, on this machine or as Slurm jobs; several of them are a sweep.

On this machine a task is `qurl train`, one after the other. On Slurm nemo-run's SlurmExecutor
writes each job's script, submits it and keeps its number, but its own srun lines are of no use: a
process inside a step gets neither the signal of `--signal=B:USR1@N` nor, on preemption, the chance
to end both sides in order, and nemo-run's script takes the first part that ends for the whole job.
So the script's set-up line puts `python -m launch.slurm run`, the batch process of the sbatch
scripts beside this file, in the place of the shell by `exec`, and what follows is never reached.

    executor = run.SlurmExecutor(account="a", gpus_per_node=8, heterogeneous=True)
    jobs = [check("grpo", ["model=DIR", "data=FILE", *words]) for words in combinations(sweeps)]
    with experiment("sweep", jobs, executor) as sweep:
        sweep.run(detach=True)

nemo_run takes seconds to import and reads NEMORUN_HOME while it does; `launch` sets that first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from launch import slurm
from launch.attempt import wanted_servers
from launch.placement import place_servers
from launch.slurm import NodePlan
from qurl_megatron import device
from qurl_megatron.config.schema import Config, ConfigError

if TYPE_CHECKING:
    import nemo_run as run

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Job:
    """A run that was looked at and is ready to start."""

    recipe: str
    words: list[str]  # field=value, its name among them
    config: Config  # what they come to; a model that the recipe builds is not there yet

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir


def check(recipe: str, words: Sequence[str]) -> Job:
    """A run of these words, begun or gone on with; without a name it gets one. Writes nothing.

    Raises:
        ConfigError, DataError: what is wrong, in one line.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    words = list(words)
    if not given.get("name"):
        words.append(f"name={recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
        given["name"] = words[-1].partition("=")[2]
    run_dir = Path(given.get("output_dir", Config.output_dir)) / given["name"]
    with tempfile.TemporaryDirectory() as scratch:
        if (run_dir / "config.yaml").is_file():
            (Path(scratch) / run_dir.name).mkdir()
            shutil.copy(run_dir / "config.yaml", Path(scratch) / run_dir.name)
        elif run_dir.exists():
            raise ConfigError(f"name={run_dir.name}: {run_dir} exists and is not a run")
        config = slurm.prepared(recipe, [*words, f"output_dir={scratch}"])
    config.output_dir = str(run_dir.parent)
    return Job(recipe, words, config)


def combinations(sweeps: Sequence[str]) -> list[list[str]]:
    """Every combination of `field=value,value` words, as `field=value` words; one without any.

    Raises:
        ConfigError: a word of another form, or a value that is there twice.
    """
    axes = []
    for word in sweeps:
        field, _, values = word.partition("=")
        listed = values.split(",")
        if not all(listed) or len(set(listed)) < len(listed):
            raise ConfigError(f"--sweep {word}: not of the form field=value,value")
        axes.append([f"{field}={value}" for value in listed])
    return [list(words) for words in itertools.product(*axes)]


def name_of(base: str, words: Sequence[str]) -> str:
    """Of a run in a sweep: `sweep-acr-int8-1.5`, its values in the order of the sweep's fields."""
    values = (re.sub(r"[^\w.+-]+", "_", word.partition("=")[2]) for word in words)
    return "-".join([base, *values])


def nodes_of(config: Config, gpus_per_node: int) -> tuple[list[NodePlan], list[NodePlan]]:
    """As few learner nodes and rollout nodes as hold a run's ranks and servers, a GPU for each.

    Raises:
        ConfigError: a server that no node holds, or ranks that do not divide into nodes.
    """
    learner = [f"learner{n}" for n in range(-(-config.learner.world_size // gpus_per_node))]
    wanted = wanted_servers(config)
    for one in wanted:
        if one.server.tensor_parallel_size > gpus_per_node:
            raise ConfigError(
                f"{one.set_name}.server.tensor_parallel_size={one.server.tensor_parallel_size}: "
                f"a server lies within one node, of --gpus-per-node={gpus_per_node}"
            )
    for count in range(1, len(wanted) + 1):
        rollout = [f"rollout{n}" for n in range(count)]
        nodes = slurm.make_plan(config, 0, learner, rollout, port=0).nodes
        if max(node.gpus for node in nodes) <= gpus_per_node:
            break
    return nodes[: len(learner)], nodes[len(learner) :]


@contextlib.contextmanager
def experiment(
    title: str,
    jobs: Sequence[Job],
    executor: run.Executor,
    *,
    max_restarts: int | None = None,
    base_dir: Path | None = None,
) -> Iterator[run.Experiment]:
    """An experiment, entered, with a task for each run: two of a job of two kinds of nodes.

    Of a SlurmExecutor everything is kept but what follows from the run: nodes, tasks and GPUs a
    node, the signal, requeueing, and the container, in which the job's steps run and not its batch
    process. `heterogeneous` asks for two kinds of nodes, else it is one allocation of equal ones.
    `base_dir` is nemo-run's home unless given.

    Raises:
        ConfigError: a run that fits no nodes.
    """
    import nemo_run as run

    executors = [_parts(job, executor, max_restarts) for job in jobs]
    with run.Experiment(
        title,
        executor=executor,
        base_dir=str(base_dir) if base_dir else None,
        log_level="WARN",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
        serialize_metadata_for_scripts=False,
    ) as made:
        for job, parts in zip(jobs, executors, strict=True):
            if isinstance(executor, run.SlurmExecutor):
                task = run.Script(inline="# launch.slurm has taken the shell's place")
            else:
                words = [str(Path(sys.executable).with_name("qurl")), "train", job.recipe]
                task = run.Script(inline=f"exec {shlex.join([*words, *job.words])}")
            name = job.config.name
            if len(parts) == 1:
                made.add(task, parts[0], name, tail_logs=True)
            else:
                made.add([task] * len(parts), parts, name)
        yield made


def _parts(job: Job, executor: run.Executor, max_restarts: int | None) -> list[run.Executor]:
    """The executors of a run's task, or tasks, with what follows from the run."""
    import nemo_run as run

    if not isinstance(executor, run.SlurmExecutor):
        return [executor]
    gpus = executor.gpus_per_node or GPUS_PER_NODE
    sides = nodes_of(job.config, gpus)
    both = [(len(side), max(node.gpus for node in side)) for side in sides]
    if not executor.heterogeneous:
        both = [(sum(nodes for nodes, _ in both), gpus)]
    parts = []
    for nodes, gpus_of_node in both:
        part = executor.clone()
        part.nodes, part.gpus_per_node, part.ntasks_per_node = nodes, gpus_of_node, 1
        part.exclusive = True
        part.job_name_prefix = "qurl."
        part.comment = str(job.run_dir.absolute())  # by which `qurl status` knows the job
        part.signal = f"B:USR1@{slurm.signal_lead_s(job.run_dir)}"
        part.additional_parameters = {"requeue": True, **(executor.additional_parameters or {})}
        part.setup_lines = _batch_process(job, executor, max_restarts)
        part.container_image, part.container_mounts = None, []
        part.packager = run.Packager()  # the package is on the cluster, and nothing is copied there
        part.poll_estimated_start_time = False
        parts.append(part)
    return parts


def _batch_process(job: Job, executor: run.SlurmExecutor, max_restarts: int | None) -> str:
    """The set-up lines that put the batch process in the place of the script's shell."""
    python = "python" if executor.container_image else sys.executable  # of the steps
    exports = {"QURL_PYTHON": os.environ.get("QURL_PYTHON", python)}
    if executor.container_image:
        exports["QURL_CONTAINER_IMAGE"] = executor.container_image
        exports["QURL_CONTAINER_MOUNTS"] = ",".join(executor.container_mounts)
    words = [sys.executable, "-m", "launch.slurm", "run"]
    words += ["--max-restarts", str(max_restarts)] if max_restarts is not None else []
    lines = [executor.setup_lines] if executor.setup_lines else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines += ["unset SLURM_UNBUFFEREDIO  # it gives the steps a terminal"]
    lines += ["# Nothing after this line is reached."]
    lines += [f"exec {shlex.join([*words, job.recipe, *job.words])}"]
    return "\n".join(lines)


def launch(
    recipe: str,
    words: Sequence[str],
    sweeps: Sequence[str] = (),
    *,
    slurm_options: Mapping[str, Any] | None = None,
    max_restarts: int | None = None,
    dry_run: bool = False,
) -> int:
    """Start a run, or every run of a sweep, and say where they are; returns an exit code.

    With `slurm_options`, SlurmExecutor's, it returns once all are submitted; without, they run on
    this machine, one after the other, and it returns 0 if all went well. A dry run prints scripts.

    Raises:
        ConfigError, DataError: what is wrong with any of them, in one line; nothing has started.
    """
    on_slurm = slurm_options is not None
    if on_slurm and not dry_run and not shutil.which("sbatch"):
        raise ConfigError("--executor slurm: no sbatch here; submit from a login node")
    jobs = _checked(recipe, list(words), sweeps)
    for job in () if on_slurm else jobs:
        place_servers(job.config, device.num_gpus())
        if job.run_dir.exists():
            raise ConfigError(
                f"name={job.config.name}: {job.run_dir} exists; choose another name, or go on with "
                f"it: qurl resume {job.run_dir}"
            )
    home = os.environ.setdefault(
        "NEMORUN_HOME", str(Path(jobs[0].config.output_dir).absolute() / ".nemo_run")
    )
    import nemo_run as run

    executor: run.Executor = run.LocalExecutor()
    if slurm_options is not None:
        tunnel = run.LocalTunnel(job_dir=f"{home}/experiments")
        executor = run.SlurmExecutor(tunnel=tunnel, **slurm_options)
    title = _title(recipe, words) if sweeps else jobs[0].config.name
    if not dry_run:
        return start(title, jobs, executor, max_restarts=max_restarts, base_dir=Path(home))
    with tempfile.TemporaryDirectory() as scratch:
        settings: dict[str, Any] = {"max_restarts": max_restarts, "base_dir": Path(scratch)}
        with experiment(title, jobs, executor, **settings) as made:
            print("\n".join(scripts(made, Path(scratch))))
    return 0


def start(title: str, jobs: Sequence[Job], executor: run.Executor, **settings: Any) -> int:
    """Start an experiment and say what came of each run; as `launch` does, its exit code.

    Raises:
        ConfigError: a run that fits no nodes, or what sbatch says to a script.
    """
    import nemo_run as run

    on_slurm = isinstance(executor, run.SlurmExecutor)
    with experiment(title, jobs, executor, **settings) as made:
        if on_slurm:
            _submit(made)
        else:
            _hand_on_signals()
            made.run(sequential=True)
    for job, task in zip(jobs, made.jobs, strict=True):
        came_to = f"job {_job_number(task)}" if on_slurm else task.state.name.lower()
        print(f"{job.run_dir}: {came_to}")
    return int(not on_slurm and any(task.state.name != "SUCCEEDED" for task in made.jobs))


def scripts(made: run.Experiment, base_dir: Path) -> list[str]:
    """What an experiment under `base_dir` would start: each job's script, or each run's command."""
    made.dryrun(log=False, delete_exp_dir=False)
    paths = sorted(base_dir.glob("experiments/*/*/*_sbatch.sh"))
    return [path.read_text() for path in paths or sorted(base_dir.glob("**/scripts/*.sh"))]


def _checked(recipe: str, words: Sequence[str], sweeps: Sequence[str]) -> list[Job]:
    if not sweeps:
        return [check(recipe, words)]
    title = _title(recipe, words)
    return [
        check(recipe, [*words, *swept, f"name={name_of(title, swept)}"])
        for swept in combinations(sweeps)
    ]


def _title(recipe: str, words: Sequence[str]) -> str:
    """Of a sweep: its name=, else its recipe."""
    names = [word.partition("=")[2] for word in words if word.startswith("name=")]
    return (names or [f"{recipe}-sweep"])[-1]


def _hand_on_signals() -> None:
    """To the run that is going on, which nemo-run would leave behind; Ctrl-C and TERM end a sweep.

    The exception waits in nemo-run's threads until that run has ended.
    """

    def hand_on(number: int, _: object) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)
        if number != signal.SIGUSR1:
            sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hand_on)


def _submit(made: run.Experiment) -> None:
    """Raises ConfigError with what sbatch says to a script."""
    from invoke.exceptions import UnexpectedExit

    try:
        made.run(detach=True)
    except UnexpectedExit as error:
        said = error.result.stderr.strip().splitlines() or ["sbatch failed"]
        raise ConfigError(said[-1]) from None


def _job_number(task: Any) -> str:
    """Slurm's, of a task or of a task group."""
    handle = task.handle if hasattr(task, "handle") else task.handles[0]
    return str(handle).rpartition("/")[2]
