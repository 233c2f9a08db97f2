"""Launch runs as a nemo-run experiment, on this machine or as Slurm jobs: `qurl launch`.

Several runs in one experiment are a sweep. On this machine each task is `qurl train`, and the tasks
run one after the other. On Slurm nemo-run's SlurmExecutor writes each job's script, submits it and
records its number, but its srun lines cannot run a job: a process inside a step gets neither the
signal of `--signal=B:USR1@N` nor, on preemption, the time to end both sides in order, and
nemo-run's script ends the job when the first side ends. So the script's set-up lines `exec` the
batch process of the sbatch scripts beside this file, `python -m qurl_megatron.launch.slurm run`.
It replaces the shell, and the lines after it never run.

    executor = run.SlurmExecutor(account="a", gpus_per_node=8, heterogeneous=True)
    jobs = [
        make_job("grpo", ["model=DIR", "data=FILE", *overrides])
        for overrides in sweep_combinations(sweeps)
    ]
    with experiment("sweep", jobs, executor) as sweep:
        sweep.run(detach=True)

No user input reaches a shell unquoted. nemo-run quotes neither the path of a job's script, nor line
breaks in sbatch options, nor the values of `env_vars`. So unsafe paths and options are refused, and
the values are quoted here.

nemo_run takes seconds to import and reads NEMORUN_HOME on import; `launch` sets that first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from qurl_megatron import device
from qurl_megatron.config.disk import check_disk
from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.launch.owner import owner_of
from qurl_megatron.launch.placement import place_servers, smallest_plan
from qurl_megatron.launch.prepare import (
    DATA_SUMMARY,
    default_name,
    prepare_resume_or_new,
    run_exists_error,
)
from qurl_megatron.launch.slurm import signal_lead_s
from qurl_megatron.launch.status import slurm_jobs
from qurl_megatron.process import ending_signals

if TYPE_CHECKING:
    import nemo_run as run

GPUS_PER_NODE = 8  # unless the executor sets it
# Of sbatch: minutes, minutes:seconds, h:m:s, days-hours, days-h:m, days-h:m:s, or no limit.
_TIME = r"\d{1,7}(:\d{1,2}){0,2}|\d{1,4}-\d{1,2}(:\d{1,2}){0,2}|infinite|unlimited"


@dataclass(frozen=True)
class Job:
    """A run that has been checked and is ready to start."""

    recipe: str
    overrides: list[str]  # field=value, with name=
    config: Config  # the run's; a model that the recipe builds does not exist yet
    data_summary: str

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return self.config.run_dir


def make_job(recipe: str, overrides: Sequence[str]) -> Job:
    """Check a run that will be created or resumed, and name it if it has no name. Write nothing.

    Raises:
        ConfigError, DataError: one line that says what is wrong.
    """
    given = dict(word.split("=", 1) for word in overrides if "=" in word)
    overrides = list(overrides)
    if not given.get("name"):
        given["name"] = default_name(recipe)
        overrides.append(f"name={given['name']}")
    place = [f"{field}={given[field]}" for field in ("name", "output_dir") if field in given]
    run_dir = with_overrides(Config(), place).run_dir  # refuses unsafe names before they are used
    with tempfile.TemporaryDirectory() as scratch:
        if (run_dir / "config.yaml").is_file():
            (Path(scratch) / run_dir.name).mkdir()
            shutil.copy(run_dir / "config.yaml", Path(scratch) / run_dir.name)
        elif run_dir.exists():
            raise ConfigError(f"name={run_dir.name}: {run_dir} exists and is not a run")
        config = prepare_resume_or_new(
            recipe, [*overrides, f"output_dir={scratch}"], checks_disk=False
        )
        data_summary = (config.run_dir / DATA_SUMMARY).read_text()
        # Within this block, because a model that the recipe builds is in the scratch directory.
        check_disk(dataclasses.replace(config, output_dir=str(run_dir.parent)))
    config.output_dir = str(run_dir.parent)
    return Job(recipe, overrides, config, data_summary)


def sweep_combinations(sweeps: Sequence[str]) -> list[list[str]]:
    """Return the overrides of every run of a sweep, whose axes are given as `field=value,value`.

    Without sweeps there is one run with no overrides.

    Raises:
        ConfigError: an axis has another form, or lists a value twice.
    """
    axes = []
    for word in sweeps:
        field, _, values = word.partition("=")
        listed = values.split(",")
        if not all(listed) or len(set(listed)) < len(listed):
            raise ConfigError(f"--sweep {word}: not of the form field=value,value")
        axes.append([f"{field}={value}" for value in listed])
    return [list(combination) for combination in itertools.product(*axes)]


def sweep_name(base: str, overrides: Sequence[str]) -> str:
    """Return the name of a run in a sweep, such as `sweep-acr-int8-1.5`, from its values."""
    values = (re.sub(r"[^\w.+-]+", "_", word.partition("=")[2]) for word in overrides)
    return "-".join([base, *values])


@contextlib.contextmanager
def experiment(
    title: str,
    jobs: Sequence[Job],
    executor: run.Executor,
    *,
    max_restarts: int | None = None,
    base_dir: Path | None = None,
) -> Iterator[run.Experiment]:
    """Enter an experiment with one task per run, or two for a heterogeneous job.

    A SlurmExecutor keeps its options except those that follow from the run: nodes, tasks and GPUs
    per node, the signal, requeueing, and the container, which is for the job's steps and not for
    its batch process. With `heterogeneous` the learner and the servers get separate groups of
    nodes; otherwise the job is one allocation of equal nodes. `base_dir` is where nemo-run keeps
    its files; None: nemo-run's home.

    Raises:
        ConfigError: a run does not fit on the nodes, or an option is unsafe in a job's script.
    """
    import nemo_run as run

    executors = [_executors_for(job, executor, max_restarts) for job in jobs]
    with run.Experiment(
        title,
        executor=executor,
        base_dir=str(base_dir) if base_dir else None,
        log_level="WARN",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
        serialize_metadata_for_scripts=False,
    ) as exp:
        for job, parts in zip(jobs, executors, strict=True):
            if isinstance(executor, run.SlurmExecutor):
                task = run.Script(inline="# qurl_megatron.launch.slurm has replaced the shell")
            else:
                command = [str(Path(sys.executable).with_name("qurl")), "train", job.recipe]
                task = run.Script(inline=f"exec {shlex.join([*command, *job.overrides])}")
            name = job.config.name
            if len(parts) == 1:
                exp.add(task, parts[0], name, tail_logs=True)
            else:
                exp.add([task] * len(parts), parts, name)
        yield exp


def _executors_for(
    job: Job, executor: run.Executor, max_restarts: int | None
) -> list[run.Executor]:
    """Return one executor for each task of a run, with the options that follow from the run."""
    import nemo_run as run

    if not isinstance(executor, run.SlurmExecutor):
        return [executor]
    if "dependency" not in (executor.additional_parameters or {}):
        _check_unused(job.run_dir)
    gpus = executor.gpus_per_node or GPUS_PER_NODE
    plans = smallest_plan(job.config, gpus)
    groups = [(len(nodes), max(node.gpus for node in nodes)) for nodes in plans]
    if not executor.heterogeneous:
        groups = [(sum(num_nodes for num_nodes, _ in groups), gpus)]
    parts = []
    for num_nodes, gpus_of_node in groups:
        part = executor.clone()
        part.nodes, part.gpus_per_node, part.ntasks_per_node = num_nodes, gpus_of_node, 1
        part.exclusive = True
        part.job_name_prefix = "qurl."
        part.comment = str(job.run_dir.absolute())  # `qurl status` finds the job by it
        part.signal = f"B:USR1@{signal_lead_s(job.run_dir)}"
        part.additional_parameters = {
            "requeue": True,
            "no-kill": True,  # the run goes on without a lost rollout node
            **(executor.additional_parameters or {}),
        }
        part.setup_lines = _setup_lines(job, executor, max_restarts)
        part.container_image, part.container_mounts = None, []
        part.env_vars = {name: shlex.quote(str(value)) for name, value in part.env_vars.items()}
        part.packager = run.Packager()  # copy nothing: the package is on the cluster
        part.poll_estimated_start_time = False
        _check_script(job, part)
        parts.append(part)
    return parts


def _check_unused(run_dir: Path) -> None:
    """Check that no launcher works on a run and no job of it waits or runs.

    Raises:
        ConfigError: another job would be refused when it starts; the message names the first.
    """
    others = [owner_of(run_dir), *slurm_jobs(run_dir)]
    other = next((name for name in others if name), None)
    if other:
        raise ConfigError(
            f"{run_dir}: {other} works on this run; wait for it to end, or give "
            "--sbatch dependency=afterany:JOB"
        )


def _check_script(job: Job, executor: run.SlurmExecutor) -> None:
    """Check what nemo-run writes to a job's script or runs in a shell without quoting it.

    Raises:
        ConfigError: an option has a line break, or a path has characters special to a shell or a
            part that nemo-run replaces.
    """
    from nemo_run.config import RUNDIR_NAME, get_nemorun_home

    options = {name: getattr(executor, name, None) for name in executor.SBATCH_FLAGS}
    options |= executor.additional_parameters
    for name, value in options.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
            raise ConfigError(f"--sbatch {name}={value}: not an sbatch option, such as qos=high")
        if not str(value).isprintable():
            raise ConfigError(
                f"{name}={value!r}: an sbatch option must not have a line break or another control "
                "character"
            )
    time = options.get("time")
    if time and not re.fullmatch(_TIME, str(time), re.IGNORECASE):
        raise ConfigError(
            f"time={time}: not a time limit of Slurm; give MINUTES, HH:MM:SS or D-HH:MM:SS"
        )
    for name in executor.env_vars:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"env_vars {name}: not the name of an environment variable")
    home = executor.tunnel.job_dir or get_nemorun_home()
    if home != shlex.quote(home):
        raise ConfigError(
            f"{home!r}: nemo-run passes this path to a shell unquoted; set NEMORUN_HOME or "
            "output_dir to a path of letters, digits and @ % + = : , . / _ - only"
        )
    for text in (home, executor.comment, sys.executable, *job.overrides):
        if f"/{RUNDIR_NAME}" in text:
            raise ConfigError(
                f"{text}: nemo-run replaces /{RUNDIR_NAME} in job scripts; use a path without it"
            )


def _setup_lines(job: Job, executor: run.SlurmExecutor, max_restarts: int | None) -> str:
    """Return the set-up lines that replace the script's shell with the batch process.

    Raises:
        ConfigError: the container's image or mounts are malformed.
    """
    python = "python" if executor.container_image else sys.executable  # the steps' Python
    exports = {"QURL_PYTHON": os.environ.get("QURL_PYTHON", python)}
    for text in (executor.container_image or "", *executor.container_mounts):
        if not text.isprintable():
            raise ConfigError(f"container {text!r}: must not have a line break")
    for mount in executor.container_mounts:
        if not re.fullmatch(r"[^:,]+:[^:,]+(:[^:,]+)?", mount):
            raise ConfigError(f"--container-mounts {mount}: not of the form HOST:CONTAINER")
    if executor.container_image:
        exports["QURL_CONTAINER_IMAGE"] = executor.container_image
        exports["QURL_CONTAINER_MOUNTS"] = ",".join(executor.container_mounts)
    command = [sys.executable, "-m", "qurl_megatron.launch.slurm", "run"]
    command += ["--max-restarts", str(max_restarts)] if max_restarts is not None else []
    lines = [executor.setup_lines] if executor.setup_lines else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines += ["unset SLURM_UNBUFFEREDIO  # it would give the steps a terminal"]
    lines += ["# The next line replaces this shell; the lines after it never run."]
    lines += [f"exec {shlex.join([*command, job.recipe, *job.overrides])}"]
    return "\n".join(lines)


def launch(
    recipe: str,
    overrides: Sequence[str],
    sweeps: Sequence[str] = (),
    *,
    slurm_options: Mapping[str, Any] | None = None,
    max_restarts: int | None = None,
    dry_run: bool = False,
) -> int:
    """Start a run, or all runs of a sweep, print where they are, and return an exit code.

    With `slurm_options` (SlurmExecutor's arguments) the runs are submitted as jobs. Without them
    the runs go one after the other on this machine, and the code is 0 if all succeeded. A dry run
    prints the scripts and starts nothing. A summary of the data goes to stderr, unless the runs on
    this machine print their own.

    Raises:
        ConfigError, DataError: one line that says what is wrong with a run; nothing has started.
    """
    on_slurm = slurm_options is not None
    if on_slurm and not dry_run and not shutil.which("sbatch"):
        raise ConfigError("--executor slurm: this machine has no sbatch; submit from a login node")
    jobs = _make_jobs(recipe, overrides, sweeps)
    for job in () if on_slurm else jobs:
        place_servers(job.config, device.num_gpus())
        if job.run_dir.exists():
            raise run_exists_error(job.config)
    home = os.environ.setdefault(
        "NEMORUN_HOME", str(Path(jobs[0].config.output_dir).absolute() / ".nemo_run")
    )
    import nemo_run as run

    executor: run.Executor = run.LocalExecutor()
    if slurm_options is not None:
        tunnel = run.LocalTunnel(job_dir=f"{home}/experiments")
        executor = run.SlurmExecutor(tunnel=tunnel, **slurm_options)
    title = _sweep_title(recipe, overrides) if sweeps else jobs[0].config.name
    if not dry_run:
        return start(title, jobs, executor, max_restarts=max_restarts, base_dir=Path(home))
    with tempfile.TemporaryDirectory() as scratch:
        settings: dict[str, Any] = {"max_restarts": max_restarts, "base_dir": Path(scratch)}
        with experiment(title, jobs, executor, **settings) as exp:
            _print_data_summaries(jobs)
            print("\n".join(job_scripts(exp, Path(scratch))))
    return 0


def start(title: str, jobs: Sequence[Job], executor: run.Executor, **settings: Any) -> int:
    """Start an experiment, print each run's job or result, and return the exit code of `launch`.

    Raises:
        ConfigError: a run does not fit on the nodes, or sbatch refuses a script.
    """
    import nemo_run as run

    on_slurm = isinstance(executor, run.SlurmExecutor)
    with experiment(title, jobs, executor, **settings) as exp:
        if on_slurm:
            _print_data_summaries(jobs)
            _submit(exp)
        else:
            _forward_signals()
            exp.run(sequential=True)
    for job, task in zip(jobs, exp.jobs, strict=True):
        state = f"job {_job_number(task)}" if on_slurm else task.state.name.lower()
        print(f"{job.run_dir}: {state}")
    return int(not on_slurm and any(task.state.name != "SUCCEEDED" for task in exp.jobs))


def _print_data_summaries(jobs: Sequence[Job]) -> None:
    """Print each summary once; runs of a sweep usually share it. stdout is for the scripts."""
    print("".join(dict.fromkeys(job.data_summary for job in jobs)), end="", file=sys.stderr)


def job_scripts(exp: run.Experiment, base_dir: Path) -> list[str]:
    """Return the script of each job, or the command of each run, in an experiment in `base_dir`."""
    exp.dryrun(log=False, delete_exp_dir=False)
    paths = sorted(base_dir.glob("experiments/*/*/*_sbatch.sh"))
    return [path.read_text() for path in paths or sorted(base_dir.glob("**/scripts/*.sh"))]


def _make_jobs(recipe: str, overrides: Sequence[str], sweeps: Sequence[str]) -> list[Job]:
    if not sweeps:
        return [make_job(recipe, overrides)]
    title = _sweep_title(recipe, overrides)
    return [
        make_job(recipe, [*overrides, *swept, f"name={sweep_name(title, swept)}"])
        for swept in sweep_combinations(sweeps)
    ]


def _sweep_title(recipe: str, overrides: Sequence[str]) -> str:
    """Return a sweep's `name=`, or a name from its recipe."""
    names = [word.partition("=")[2] for word in overrides if word.startswith("name=")]
    return (names or [f"{recipe}-sweep"])[-1]


def _forward_signals() -> None:
    """Forward signals to the current run, because nemo-run would leave it running.

    All but USR1 also end the sweep: the exception waits in nemo-run's threads until that run has
    ended.
    """

    def forward(number: int, _: object) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)
        if number != signal.SIGUSR1:
            sys.exit(128 + number)

    for number in ending_signals() | {signal.SIGUSR1}:
        signal.signal(number, forward)


def _submit(exp: run.Experiment) -> None:
    """Submit an experiment's jobs.

    Raises:
        ConfigError: sbatch refused a script; the text is its last line.
    """
    from invoke.exceptions import UnexpectedExit

    try:
        exp.run(detach=True)
    except UnexpectedExit as error:
        lines = error.result.stderr.strip().splitlines() or ["sbatch failed"]
        raise ConfigError(lines[-1]) from None


def _job_number(task: Any) -> str:
    """Return Slurm's number of the job of a task, or of a group of tasks."""
    handle = task.handle if hasattr(task, "handle") else task.handles[0]
    return str(handle).rpartition("/")[2]
