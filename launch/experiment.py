"""Launch a run, or a sweep over one, on this machine or as Slurm jobs: `qurl launch`.

On this machine each run is `qurl train`, and the runs go one after the other. On Slurm each is a
job of its own: `JobOptions` is what the user asks of it, and the run decides the rest. The job's
script, whose words are all quoted, replaces its shell with the batch process, `launch/slurm.py`, so
that this process gets the signal before the time limit.
"""

import dataclasses
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from qurl_megatron import device
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.launch.placement import smallest_plan
from qurl_megatron.launch.prepare import default_name, prepare_new, prepare_resume_or_new
from qurl_megatron.launch.slurm import signal_lead_s
from qurl_megatron.launch.status import owner_of, slurm_jobs
from qurl_megatron.process import ending_signals

GPUS_PER_NODE = 8
OUTPUT = "logs/%x-%j.out"  # below the directory that the job is submitted from
# Of sbatch: minutes, minutes:seconds, h:m:s, days-hours, days-h:m, days-h:m:s, or no limit.
_TIME = r"\d{1,7}(:\d{1,2}){0,2}|\d{1,4}-\d{1,2}(:\d{1,2}){0,2}|infinite|unlimited"


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What the user asks of a job."""

    sbatch: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """sbatch's options, such as `qos`, and their values. They replace what the run decides, in a
    heterogeneous job for both groups. True: without a value. False: left out. None: not given."""

    gpus_per_node: int = GPUS_PER_NODE
    """Number of GPUs of a node."""

    heterogeneous: bool = False
    """Whether learner and servers each get a group of nodes, or are in one allocation."""

    container_image: str = ""
    """Image (pyxis) that the job's steps run in; its batch process does not. Empty: none."""

    container_mounts: Sequence[str] = ()
    """Mounts of the container, each HOST:CONTAINER or HOST:CONTAINER:FLAGS."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables that the job gets in addition to those of its submission."""

    setup_lines: str = ""
    """Lines of shell that run first, as they are."""

    max_restarts: int = 20
    """How often the job may be requeued."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that has been checked and is ready to start."""

    words: list[str]  # of `qurl train`: the recipe, and field=value, with name=
    config: Config  # the run's; a model that the recipe builds does not exist yet
    data_summary: str

    @property
    def command(self) -> list[str]:
        """The command that runs it on this machine."""
        return [str(Path(sys.executable).with_name("qurl")), "train", *self.words]


def launch(
    recipe: str,
    overrides: Sequence[str],
    sweeps: Sequence[str] = (),
    *,
    options: JobOptions | None = None,
    dry_run: bool = False,
) -> int:
    """Start a run, or all runs of a sweep, print where they are, and return an exit code.

    With `options` the runs are submitted as jobs. Without them the runs go one after the other on
    this machine, and the code is 0 if all succeeded. A dry run prints the scripts, or the commands,
    and starts nothing. A summary of the data goes to stderr, unless the runs on this machine print
    their own.

    Raises:
        ConfigError, DataError: one line that says what is wrong with a run; nothing has started.
    """
    on_slurm = options is not None
    if on_slurm and not dry_run:
        check_sbatch()
    checks_only = {"writes": False, "asks_servers": False}
    jobs = []
    for words in named_runs(recipe, overrides, sweeps):
        if on_slurm:
            prepared = prepare_resume_or_new(recipe, words, **checks_only)
        else:
            prepared = prepare_new(recipe, words, device.num_gpus(), **checks_only)
        jobs.append(Job([recipe, *words], *prepared))
    if options is None:
        scripts = [f"{shlex.join(job.command)}\n" for job in jobs]
    else:
        for job in jobs if "dependency" not in options.sbatch else ():
            check_unused(job.config.run_dir)
        scripts = [job_script(job.config, job.words, options) for job in jobs]
    if on_slurm or dry_run:
        # Runs of a sweep usually share a summary. stdout is for the scripts.
        print("".join(dict.fromkeys(job.data_summary for job in jobs)), end="", file=sys.stderr)
    if dry_run:
        print("".join(scripts), end="")
        return 0
    if not on_slurm:
        return run_here(jobs)
    submit({str(job.config.run_dir): script for job, script in zip(jobs, scripts, strict=True)})
    return 0


def named_runs(recipe: str, overrides: Sequence[str], sweeps: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep, with a name such as `sweep-acr-int8-1.5`.

    The axes of a sweep are given as `field=value,value`. A name begins with the `name=` among the
    `overrides`, or with the recipe's name, and ends with the values. Without sweeps there is one
    run; if it has no name, it gets the recipe's and the time.

    Raises:
        ConfigError: an axis has another form, or lists a value twice.
    """
    names = [word.removeprefix("name=") for word in overrides if word.startswith("name=")]
    name = names[-1] if names else ""
    if not sweeps:
        return [[*overrides] if name else [*overrides, f"name={default_name(recipe)}"]]
    axes = []
    for word in sweeps:
        field, _, values = word.partition("=")
        listed = values.split(",")
        if not all(listed) or len(set(listed)) < len(listed):
            raise ConfigError(f"--sweep {word}: not of the form field=value,value")
        axes.append([f"{field}={value}" for value in listed])
    runs = []
    for swept in itertools.product(*axes):
        parts = [name or f"{recipe}-sweep"]
        parts += [re.sub(r"[^\w.+-]+", "_", word.partition("=")[2]) for word in swept]
        runs.append([*overrides, *swept, f"name={'-'.join(parts)}"])
    return runs


def check_unused(run_dir: Path) -> None:
    """Check that no launcher works on a run and no job of it waits or runs.

    Raises:
        ConfigError: another job would be refused when it starts; the message names the first.
    """
    other = owner_of(run_dir) or next(iter(slurm_jobs(run_dir)), "")
    if other:
        raise ConfigError(
            f"{run_dir}: {other} works on this run; wait for it to end, or give "
            "--sbatch dependency=afterany:JOB"
        )


def job_script(config: Config, words: Sequence[str], options: JobOptions) -> str:
    """Return the script of the job that creates or resumes a run.

    `words` are a recipe and its overrides; `config` is the configuration that they lead to.

    Raises:
        ConfigError: the run does not fit on the nodes, or an option is malformed.
    """
    learner, rollout = smallest_plan(config, options.gpus_per_node)
    if options.heterogeneous:
        groups = [(len(side), max(node.gpus for node in side)) for side in (learner, rollout)]
    else:
        groups = [(len(learner) + len(rollout), options.gpus_per_node)]
    lines = [
        "#!/bin/bash",
        "# To be submitted from a directory that all nodes share and that has logs/.",
    ]
    for number, (num_nodes, gpus) in enumerate(groups):
        asked: dict[str, object] = {
            "job-name": f"qurl.{config.name}",
            "comment": config.run_dir.absolute(),  # `qurl status` finds the job by it
            "nodes": num_nodes,
            "gpus-per-node": gpus,
            "ntasks-per-node": 1,
            "exclusive": True,
            "requeue": True,
            "no-kill": True,  # the run goes on without a lost rollout node
            "open-mode": "append",
            "output": OUTPUT,
            "signal": f"B:USR1@{signal_lead_s(config.run_dir)}",
        }
        for name, value in options.sbatch.items():
            if value is not None:
                asked[name.replace("_", "-")] = value
        if str(asked["nodes"]).isdecimal() and int(str(asked["nodes"])) < num_nodes:
            raise ConfigError(f"nodes={asked['nodes']}: too few; the run takes {num_nodes} of them")
        lines += ["#SBATCH hetjob"] if number else []
        lines += [_sbatch_line(name, value) for name, value in asked.items() if value is not False]
    lines += [_export(name, value) for name, value in options.environment.items()]
    lines += [options.setup_lines] if options.setup_lines else []
    lines += [_export(name, value) for name, value in _variables(options).items()]
    command = [sys.executable, "-m", "qurl_megatron.launch.slurm", "run", *words]
    lines += [f"exec {shlex.join(command)}"]
    return "\n".join(lines) + "\n"


def _sbatch_line(name: str, value: object) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ConfigError(f"--sbatch {name}={value}: not an sbatch option, such as qos=high")
    if not str(value).isprintable():
        raise ConfigError(
            f"{name}={value!r}: an sbatch option must not have a line break or another control "
            "character"
        )
    if name == "time" and not re.fullmatch(_TIME, str(value), re.IGNORECASE):
        raise ConfigError(
            f"time={value}: not a time limit of Slurm; give MINUTES, HH:MM:SS or D-HH:MM:SS"
        )
    return f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")


def _export(name: str, value: object) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"env_vars {name}: not the name of an environment variable")
    return f"export {name}={shlex.quote(str(value))}"


def _variables(options: JobOptions) -> dict[str, object]:
    """Return the variables that the batch process reads."""
    for text in (options.container_image, *options.container_mounts):
        if not text.isprintable():
            raise ConfigError(f"container {text!r}: must not have a line break")
    for mount in options.container_mounts:
        if not re.fullmatch(r"[^:,]+:[^:,]+(:[^:,]+)?", mount):
            raise ConfigError(f"--container-mounts {mount}: not of the form HOST:CONTAINER")
    python = "python" if options.container_image else sys.executable  # the steps' Python
    variables: dict[str, object] = {
        "QURL_PYTHON": os.environ.get("QURL_PYTHON", python),
        "QURL_MAX_RESTARTS": options.max_restarts,
    }
    if options.container_image:
        variables["QURL_CONTAINER_IMAGE"] = options.container_image
        variables["QURL_CONTAINER_MOUNTS"] = ",".join(options.container_mounts)
    return variables


def command_script(words: Sequence[str], gpus: int, sbatch: Mapping[str, object]) -> str:
    """Return the script of a job that runs a `qurl` command on one node, from this directory.

    Raises:
        ConfigError: an option of sbatch is malformed.
    """
    asked: dict[str, object] = {
        "job-name": f"qurl.{words[1]}",
        "chdir": Path.cwd(),
        "nodes": 1,
        "gpus-per-node": gpus or False,
        "exclusive": True,
        "mem": 0,  # all of the node's; a cluster's default may be a few gigabytes
        "output": OUTPUT,
    }
    asked |= {name: value for name, value in sbatch.items() if value is not None}
    lines = [_sbatch_line(name, value) for name, value in asked.items() if value is not False]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join(words)}"]) + "\n"


def check_sbatch() -> None:
    """Check that jobs can be submitted from this machine; raise ConfigError if they cannot."""
    if not shutil.which("sbatch"):
        raise ConfigError("--executor slurm: this machine has no sbatch; submit from a login node")


def submit(scripts: Mapping[str, str]) -> None:
    """Submit scripts, and print the number of each one's job with its title.

    Raises:
        ConfigError: sbatch refused a script; the text is its last line.
    """
    Path(OUTPUT).parent.mkdir(exist_ok=True)
    for title, script in scripts.items():
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["sbatch failed"]
            raise ConfigError(lines[-1])
        number = done.stdout.strip().partition(";")[0]  # before the name of a cluster
        print(f"{title}: job {number}", flush=True)


def run_here(jobs: Sequence[Job]) -> int:
    """Run one after the other, print what became of each, and return the exit code of `launch`.

    Signals go on to the current run, whose processes are a session of their own. All but USR1 also
    end the sweep, once that run has ended.
    """
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        for child in psutil.Process().children():
            child.send_signal(number)

    for number in ending_signals() | {signal.SIGUSR1}:
        signal.signal(number, forward)
    states: dict[Path, str] = {}
    for job in jobs:
        code = subprocess.run(job.command, start_new_session=True).returncode
        states[job.config.run_dir] = "failed" if code else "succeeded"
        if ending := [number for number in received if number != signal.SIGUSR1]:
            return 128 + ending[0]
    for run_dir, state in states.items():
        print(f"{run_dir}: {state}")
    return int("failed" in states.values())
