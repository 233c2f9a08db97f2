"""Launch a run, or a sweep over one, on this machine or as Slurm jobs: `qurl launch`.

On this machine each run is `qurl train`, and the runs go one after the other. On Slurm each is a
job of its own: `JobOptions` is what the user asks of it, and the run decides the rest. The job's
script, whose words are all quoted, replaces its shell with the batch process, `launch/slurm.py`, so
that this process gets the signal before the time limit. The script also holds the run's
configuration, as YAML, which this process reads on stdin; so does `qurl train`.
"""

import contextlib
import csv
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
from importlib.metadata import version
from pathlib import Path

import psutil

from qurl_megatron import device
from qurl_megatron.config import extensions
from qurl_megatron.config.gpus import H100, node_of
from qurl_megatron.config.schema import STOPPED_EARLY, Config, ConfigError
from qurl_megatron.config.text import with_overrides
from qurl_megatron.data.entries import parts_of
from qurl_megatron.launch.code_copy import LOGS, PACKAGE, copies, keep_code, place_of, read_code
from qurl_megatron.launch.nodes import make_plan, smallest_plan
from qurl_megatron.launch.owner import JOB_SCRIPT, owner_of
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.recipe import STDIN, Recipe, default_name, load_recipe, name_prefix
from qurl_megatron.launch.resume import prepare_resume_or_new
from qurl_megatron.launch.slurm import time_limit_s
from qurl_megatron.launch.sources import snapshots, sources
from qurl_megatron.launch.status import slurm_jobs
from qurl_megatron.machine.environment import THREAD_PLACES
from qurl_megatron.machine.processes import die_with_parent, ending_signals
from qurl_megatron.model.repository import snapshot_of

GPUS_PER_NODE = 8
SIGNAL_LEAD_S = 600  # from Slurm's signal to the time limit, for a job whose own clock failed
SINFO_TIMEOUT_S = 10.0
OUTPUT = f"{LOGS}/%x-%j.out"
# Why a script asks for what an administrator may wonder at.
REASONS = {
    "comment": "`qurl status` finds the job by it.",
    "ntasks-per-node": "A supervisor starts all else on its node.",
    "requeue": "A requeued job resumes the run.",
    "no-kill": "The run goes on without a lost node of servers only.",
    "open-mode": "A requeued job goes on in the same log.",
    "signal": "The batch process then saves, ends with code 75 and requeues the job.",
    "chdir": "Paths are relative to it, from wherever the script is submitted.",
    "exclusive": "Whole nodes; --sbatch exclusive=false shares them.",
    "mem": "All memory of a node; the cluster's default may be a few gigabytes.",
}
GPU_OPTIONS = ("gres", "gpus", "gpus-per-task", "gpus-per-socket", "tres-per-node")
# Options that clusters may require, and sbatch's variables that stand for them.
DEFAULTS = {
    "time": "SBATCH_TIMELIMIT",
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
}
# Further ones of sbatch's variables whose names do not follow from the option.
VARIABLES = DEFAULTS | {"mem": "SBATCH_MEM_PER_NODE", "requeue": "SBATCH_NO_REQUEUE"}
OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # which are not about a job


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What the user asks of a job."""

    sbatch: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """sbatch's options, such as `qos`, and their values. They replace what the run decides, in a
    heterogeneous job for both groups. True: without a value. False: left out. None: not given."""

    gpus_per_node: int = GPUS_PER_NODE
    """Number of GPUs of a node."""

    gpu: str = H100.name
    """Kind of GPU, by which the plan of the run judges the job."""

    heterogeneous: bool = False
    """Whether learner and servers each get a group of nodes; else both are in one allocation."""

    container_image: str = ""
    """Image (pyxis) that the job's steps run in; its batch process does not. Empty: none."""

    container_mounts: Sequence[str] = ()
    """Mounts of the container, each HOST:CONTAINER or HOST:CONTAINER:FLAGS."""

    container_env: Sequence[str] = ()
    """Names of variables that the container takes from the job and not from its image. It always
    takes those of `environment`."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables that the job gets in addition to those of its submission."""

    setup_lines: str = ""
    """Lines of shell that run first, as they are."""

    srun_args: Sequence[str] = ()
    """Further options of srun, for each step of the job."""

    max_restarts: int = 20
    """How often the job may be requeued."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that has been checked and is ready to start."""

    recipe: Recipe
    config: Config  # the run's; a model that the recipe builds does not exist yet
    data_summary: str

    @property
    def command(self) -> list[str]:
        """The command that runs it on this machine, with the recipe on stdin."""
        return [str(Path(sys.executable).with_name("qurl")), "train", STDIN]


def launch(
    recipe: str | Recipe,
    overrides: Sequence[str] = (),
    sweeps: Sequence[str] = (),
    *,
    layouts: Path | None = None,
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
    if options and not dry_run:
        check_sbatch()
    node = node_of(options.gpu, options.gpus_per_node) if options else None
    jobs = []
    read = load_recipe(recipe, overrides)
    for words in named_runs(read.name, read.config.name, sweeps, layouts):
        run = load_recipe(read, words)
        if node:
            prepared = prepare_resume_or_new(run, node, writes=False, asks_servers=False)
        else:
            prepared = prepare_new(
                run, num_gpus=device.num_gpus(), writes=False, asks_servers=False
            )
        found = snapshots(prepared[0])  # a job downloads nothing, and a branch may move on
        jobs.append(Job(load_recipe(run, found), *prepared))
    if options:
        for job in jobs if "dependency" not in options.sbatch else ():
            check_unused(job.config.run_dir)
        return launch_jobs(jobs, options, dry_run=dry_run)
    if not dry_run:
        return run_here(jobs)
    print_summaries(jobs)
    for job in jobs:
        print(f"{shlex.join(job.command)} {_here(job.recipe)}")
    return 0


def launch_jobs(jobs: Sequence[Job], options: JobOptions, *, dry_run: bool) -> int:
    """Submit jobs, or print their scripts; print what their plans say against them."""
    code = read_code(job.config for job in jobs)
    place = place_of(code)
    scripts = {}
    for job in jobs:
        own = copies(job.config, place)
        config, recipe = with_overrides(job.config, own), load_recipe(job.recipe, own)
        scripts[str(config.run_dir)] = job_script(config, recipe, options, place)
    say_defaults(options)
    _say_objections(jobs, options)
    print_summaries(jobs)
    if dry_run:
        print("".join(scripts.values()), end="")
    else:
        Path(LOGS).mkdir(exist_ok=True)
        keep_code(code, place)
        submit(scripts)
    return 0


def _say_objections(jobs: Sequence[Job], options: JobOptions) -> None:
    """Print what plans say against the jobs, where runs can be planned."""
    planned = extensions.find("planning", "job")
    if planned is None:
        return
    node = node_of(options.gpu, options.gpus_per_node)
    limit_s, max_jobs = _limit_s(options), options.max_restarts + 1
    for job in jobs:
        idle = [] if options.heterogeneous else planned.idle_gpus(job.config, node)
        for objection in (*idle, *planned.objections(job.config, node, limit_s, max_jobs)):
            print(f"qurl: {job.config.name}: warning: {objection}", file=sys.stderr)


def print_summaries(jobs: Sequence[Job]) -> None:
    """Print each summary of data once, though runs of a sweep share it; stdout is for scripts."""
    print("".join(dict.fromkeys(job.data_summary for job in jobs)), end="", file=sys.stderr)


def named_runs(
    recipe: str, name: str, sweeps: Sequence[str], layouts: Path | None = None
) -> list[list[str]]:
    """Return the words of each run of a sweep, with a name such as `sweep-acr-int8-1.5`.

    An axis of a sweep is given as `field=value,value`, where a value may be a list in brackets; an
    axis of layouts is given as a table of `qurl plan --output FILE.csv`. A name begins with `name`,
    or if it is empty with the recipe's, and ends with the values and the numbers of GPUs. Without
    sweeps there is one run; if it has no name, it gets the recipe's and the time.

    Raises:
        ConfigError: an axis has another form or lists a value twice, or two runs have one name.
    """
    if not sweeps and not layouts:
        return [[f"name={name or default_name(recipe)}"]]
    axes = [_planned_layouts(layouts)] if layouts else []
    for word in sweeps:
        field, _, values = word.partition("=")
        listed = re.split(r",(?![^\[{]*[\]}])", values)  # not within brackets
        if not all(listed):
            raise ConfigError(f"--sweep {word}: not of the form field=value,value")
        if len(set(listed)) < len(listed):
            raise ConfigError(f"--sweep {word}: lists a value twice")
        axes.append({value: [f"{field}={value}"] for value in listed})
    name = name or f"{name_prefix(recipe)}-sweep"
    runs: dict[str, list[str]] = {}  # by name
    for chosen in itertools.product(*axes):
        swept = [word for axis, value in zip(axes, chosen, strict=True) for word in axis[value]]
        parts = [re.sub(r"[^\w.+-]+", "_", value) for value in chosen]
        own = "-".join([name, *parts])
        if own in runs:
            raise ConfigError(
                f"--sweep: the runs of {' '.join(runs[own])} and of {' '.join(swept)} would both "
                f"be called {own}; launch one of them by itself, with a name"
            )
        runs[own] = swept
    return [[*swept, f"name={own}"] for own, swept in runs.items()]


def _planned_layouts(table: Path) -> dict[str, list[str]]:
    """Return the overrides of each layout in a table of `qurl plan`, by its number of GPUs."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.DictReader(file) if not row["run"]]  # else a measured one
        layouts = {f"{row['gpus']}gpus": row["layout"].split() for row in rows}
    except (OSError, UnicodeError, KeyError, AttributeError, csv.Error) as error:
        raise ConfigError(
            f"--layouts {table}: not a table of `qurl plan --output FILE.csv` ({error})"
        ) from None
    if not layouts or len(layouts) < len(rows):
        raise ConfigError(f"--layouts {table}: must have one layout for each number of GPUs")
    return layouts


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


def job_script(
    config: Config, recipe: Recipe, options: JobOptions, code: Path = PACKAGE.parent
) -> str:
    """Return the script of the job that creates or resumes a run.

    `config` is the configuration that the recipe leads to. `code` is the directory of the package
    that the job runs.

    Raises:
        ConfigError: the run does not fit on the nodes, or an option is malformed.
    """
    if options.heterogeneous and config.rollout.placement == "colocated":
        raise ConfigError(
            "rollout.placement=colocated: a heterogeneous job has two groups of nodes, and learner "
            "and servers share one; leave --heterogeneous out"
        )
    learner, rollout = smallest_plan(
        config, options.gpus_per_node, heterogeneous=options.heterogeneous
    )
    has_gpu_gres = knows_gpus(options.sbatch.get("partition"))
    if options.heterogeneous:
        groups = [(len(side), max(node.gpus for node in side)) for side in (learner, rollout)]
    else:
        groups = [(len(learner) + len(rollout), options.gpus_per_node)]
    # Where Slurm counts no GPUs, a job has those of its whole nodes.
    uncounted = {} if has_gpu_gres else {"QURL_GPUS_PER_NODE": options.gpus_per_node}
    run_dir = config.run_dir.absolute()
    script = shlex.quote(str(run_dir / JOB_SCRIPT))
    lines = _header(
        f"run {run_dir}, recipe {', '.join(recipe.files) or recipe.package}",
        f"sbatch {script}, or `qurl launch` with name={config.name}",
        # A step takes minutes, and scancel gives it Slurm's KillWait.
        "To end it: scancel JOB; it saves if its step and the save end in KillWait, usually 30 s",
        "To let it save and queue again: scancel --signal=USR1 --batch JOB; then scancel ends it",
    )
    for number, (num_nodes, gpus) in enumerate(groups):
        asked: dict[str, object] = {
            "job-name": f"qurl.{config.name}",
            "comment": run_dir,
            "nodes": num_nodes,
            "gpus-per-node": gpus if has_gpu_gres else False,
            "ntasks-per-node": 1,
            "requeue": True,
            "no-kill": True,
            "open-mode": "append",
            # A short job gets it at half its time.
            "signal": f"B:USR1@{min(SIGNAL_LEAD_S, _limit_s(options) / 2):.0f}",
        }
        nodes = str(options.sbatch.get("nodes"))
        if nodes.isdecimal() and int(nodes) < num_nodes:
            raise ConfigError(f"nodes={nodes}: too few; the run takes {num_nodes} of them")
        if nodes.isdecimal() and int(nodes) > num_nodes:
            _check_more_nodes(config, options, int(nodes), len(learner))
        lines += ["#SBATCH hetjob"] if number else []
        of_group = _sbatch_lines(asked, options)
        lines += [line for line in of_group if line.startswith("#SBATCH") or not number]
    missing = shlex.quote(f"qurl: {code} is missing; launch the run again")
    lines += ["# The job runs the code as it was submitted."]
    lines += [f"test -d {shlex.quote(str(code))} || {{ echo {missing} >&2; exit 2; }}"]
    lines += _first_lines(options)
    lines += ["# Python does not prefer the working directory, which may be a checkout."]
    lines += ["export PYTHONSAFEPATH=1"]
    lines += [f'export PYTHONPATH={shlex.quote(str(code))}"${{PYTHONPATH:+:$PYTHONPATH}}"']
    lines += ["# With these, every process of a node would run on its first CPU."]
    lines += [f"unset {' '.join(THREAD_PLACES)}"]
    variables = _variables(config, options, code) | uncounted
    lines += ["# For the batch process, which takes the shell's place, so that signals reach it."]
    lines += [_export(name, value) for name, value in variables.items()]
    command = [sys.executable, "-m", "qurl_megatron.launch.slurm", "run"]
    lines += [f'exec {shlex.join(command)} "$0" {_here(recipe)}']
    return "\n".join(lines) + "\n"


def _check_more_nodes(config: Config, options: JobOptions, nodes: int, learner: int) -> None:
    """Check that a job has work for so many nodes, which are more than the run needs.

    `learner` is the number of nodes that the learner has in a job of equal nodes.

    Raises:
        ConfigError: it would be refused when it starts, or leave nodes idle.
    """
    names = [f"node{number}" for number in range(nodes)]
    sides = (names, names) if options.heterogeneous else (names[:learner], names[learner:])
    if config.rollout.placement == "colocated":
        raise ConfigError(f"nodes={nodes}: too many; the run takes {learner} of them")
    try:
        make_plan(config, 0, *sides, 0, None if options.heterogeneous else options.gpus_per_node)
    except ConfigError as error:
        raise ConfigError(f"nodes={nodes}: too many: {error}") from None


def _here(recipe: Recipe) -> str:
    """Return the words of the shell that give a command a recipe on stdin."""
    return f"<<< {shlex.quote(recipe.as_file().rstrip())}"


def knows_gpus(partition: object) -> bool:
    """Return whether Slurm here counts GPUs (GRES), in a partition if one is named.

    Without it a job gets whole nodes, and must not ask for GPUs. A machine without `sinfo` can only
    show a script; its cluster is assumed to count them.
    """
    command = ["sinfo", "--noheader", "--format=%G"]
    command += [f"--partition={partition}"] if partition else []
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=SINFO_TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return True
    return bool(shown.returncode) or "gpu" in shown.stdout


def _check_mounts(config: Config, options: JobOptions, code: Path) -> None:
    """Check that the container has the run's paths in the same places as this machine.

    Raises:
        ConfigError: it lacks one; the message names the first.
    """
    mounts = [(*mount.split(":"), "")[:3] for mount in options.container_mounts]
    needed = [("this directory", Path.cwd()), ("the code", code)]
    needed += [("output_dir", Path(config.output_dir))]
    files = {
        **sources(config),
        "reward": config.reward,
        "rollout.servers_key_file": config.rollout.servers_key_file,
    }
    for what, part in [(what, part) for what, text in files.items() for part in parts_of(text)]:
        for name in (part, part.partition(":")[0]):  # DIR:SPLIT and FILE.py:NAME count
            if Path(name).exists():  # unlike a generated task
                # The files of a snapshot are links to others beside it.
                path = Path(name).parents[1] if snapshot_of(name) else Path(name)
                needed.append((what, path))
    for what, path in needed:
        for place in (Path(os.path.abspath(path)), path.resolve()):  # a link, and its target
            covering = [mount for mount in mounts if place.is_relative_to(mount[1])]
            host, inside, flags = covering[-1] if covering else ("", "/", "")
            if Path(host) != Path(inside):
                raise ConfigError(
                    f"--container-mounts: the container would not have {what}, {place}; add "
                    f"{place}:{place}, or a directory above it"
                )
            if what == "output_dir" and "ro" in flags.split("+"):
                raise ConfigError(f"--container-mounts: {what}, {place}, would be read only")


def _first_lines(options: JobOptions) -> list[str]:
    """Return what a job does before anything else: the user's variables and lines of shell."""
    lines = [_export(name, value) for name, value in options.environment.items()]
    back = f"cd {shlex.quote(str(Path.cwd()))}"  # the user's lines may have left it
    return lines + ([options.setup_lines, back] if options.setup_lines else [])


def _limit_s(options: JobOptions) -> float:
    """Return the time limit of a job in seconds; infinity if the partition sets it."""
    given = options.sbatch.get("time") or os.environ.get(DEFAULTS["time"])
    with contextlib.suppress(ConfigError):  # `_sbatch_line` refuses a malformed limit
        return time_limit_s(str(given))
    return float("inf")


def _header(what: str, again: str, *ends: str) -> list[str]:
    """Return the first lines of a script, for who reads it."""
    lines = [
        f"# Made by qurl-megatron {version('qurl-megatron')}: {what}",
        f"# To run or resume it: {again}",
        *(f"# {line}" for line in ends),
    ]
    return ["#!/bin/bash", *(line if line.isprintable() else ascii(line)[1:-1] for line in lines)]


def _sbatch_lines(asked: Mapping[str, object], options: JobOptions) -> list[str]:
    """Return the lines of a group of nodes; a given option replaces what the run asks for.

    Raises:
        ConfigError: an option is malformed, or asks for GPUs beside the run's own request.
    """
    given = {name: value for name, value in options.sbatch.items() if value is not None}
    named = {name.replace("_", "-"): value for name, value in given.items()}
    takes_whole = named.get("exclusive", True) is not False
    has_memory = any(name.startswith("mem-per-") for name in named)  # which exclude "mem"
    everywhere = {
        "chdir": Path.cwd(),
        "exclusive": True,
        "mem": 0 if takes_whole and not has_memory else False,
        "output": OUTPUT,
    }
    chosen = everywhere | dict(asked) | named
    number = str(chosen.get("gpus-per-node")).rpartition(":")[2]
    for name, value in named.items() if number.isdecimal() else ():
        counts_gpus = name.startswith("gpus") or "gpu" in str(value)
        if name == "gpus-per-node" and asked[name] and number != str(asked[name]):
            raise ConfigError(f"{name}={value}: the run is laid out for --gpus-per-node, set that")
        if name in GPU_OPTIONS and counts_gpus:
            raise ConfigError(
                f"{name}={value}: the job asks for --gpus-per-node={number}; leave {name} out, or "
                "add --sbatch gpus-per-node=false"
            )
    lines = []
    for name, value in chosen.items():
        if value is not False:
            lines += [f"# {REASONS[name]}"] if name in REASONS and name not in named else []
            lines.append(_sbatch_line(name, value))
    return lines


def say_defaults(options: JobOptions) -> None:
    """Print which usual options of sbatch are missing, and what a job without whole nodes lacks."""
    given = {name for name, value in options.sbatch.items() if value not in (None, False)}
    missing = [
        f"--{name}"
        for name, variable in DEFAULTS.items()
        if name not in given and variable not in os.environ
    ]
    if missing:
        print(f"qurl: without {', '.join(missing)} the cluster's defaults hold", file=sys.stderr)
    of_nodes = [name for name in given if name.replace("_", "-").startswith(("mem", "cpus"))]
    if options.sbatch.get("exclusive") is False and not of_nodes:
        print(
            "qurl: without exclusive a job gets the cluster's default memory and CPUs; give "
            "--sbatch mem=... and --sbatch cpus-per-task=... if they are too few",
            file=sys.stderr,
        )


def _sbatch_line(name: str, value: object) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ConfigError(f"--sbatch {name}={value}: not an sbatch option, such as qos=high")
    if not str(value).isprintable():
        raise ConfigError(
            f"{name}={value!r}: an sbatch option must not have a line break or another control "
            "character"
        )
    if name == "time":
        time_limit_s(str(value))
    return f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")


def _export(name: str, value: object) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"--env {name}: not the name of an environment variable")
    return f"export {name}={shlex.quote(str(value))}"


def _variables(config: Config, options: JobOptions, code: Path) -> dict[str, object]:
    """Return the variables that the batch process reads."""
    python = "python" if options.container_image else sys.executable  # the steps' Python
    variables: dict[str, object] = {
        "QURL_PYTHON": os.environ.get("QURL_PYTHON", python),
        "QURL_MAX_RESTARTS": options.max_restarts,
        "QURL_GPU": options.gpu,
        "QURL_SRUN_ARGS": shlex.join(options.srun_args),
        "QURL_CONTAINER_OPTIONS": shlex.join(_container_options(config, options, code)),
    }
    return {name: value for name, value in variables.items() if value != ""}


def _container_options(config: Config, options: JobOptions, code: Path) -> list[str]:
    """Return srun's options for pyxis; none without an image.

    Raises:
        ConfigError: the container would lack something, or an option is malformed.
    """
    for text in (options.container_image, *options.container_mounts):
        if not text.isprintable():
            raise ConfigError(f"container {text!r}: must not have a line break")
    for mount in options.container_mounts:
        if not re.fullmatch(r"[^:,]+:[^:,]+(:[^:,]+)?", mount):
            raise ConfigError(f"--container-mounts {mount}: not of the form HOST:CONTAINER")
    if not options.container_image:
        if options.container_mounts:
            raise ConfigError("--container-mounts: give --container-image too")
        return []
    _check_mounts(config, options, code)
    words = [f"--container-image={options.container_image}", "--no-container-mount-home"]
    words += [f"--container-workdir={Path.cwd()}"]
    words += [f"--container-mounts={','.join(options.container_mounts)}"]
    # An image may have a PYTHONPATH of its own.
    names = ["PYTHONPATH", "PYTHONSAFEPATH", *options.container_env, *options.environment]
    return [*words, f"--container-env={','.join(dict.fromkeys(names))}"]


def command_script(words: Sequence[str], gpus: int, options: JobOptions) -> str:
    """Return the script of a job that runs a `qurl` command on one node, from this directory.

    Raises:
        ConfigError: an option of sbatch is malformed.
    """
    asked: dict[str, object] = {
        "job-name": f"qurl.{words[1]}",
        "nodes": 1,
        "gpus-per-node": gpus if gpus and knows_gpus(options.sbatch.get("partition")) else False,
    }
    title = shlex.join(["qurl", *words[1:]])
    lines = _header(title, "sbatch THIS_FILE", "To end it without its result: scancel JOB")
    lines += _sbatch_lines(asked, options)
    # sbatch reads no options after a command, and the user's lines might contain some.
    lines += [":", *_first_lines(options), f"exec {shlex.join(words)}"]
    return "\n".join(lines) + "\n"


def check_sbatch() -> None:
    """Check that jobs can be submitted from this machine; raise ConfigError if they cannot."""
    if not shutil.which("sbatch"):
        raise ConfigError("--executor slurm: this machine has no sbatch; submit from a login node")


def submit(scripts: Mapping[str, str]) -> None:
    """Submit scripts, and print the number of each one's job with its title.

    Raises:
        ConfigError: sbatch refused a script; the text has what it and a site's own rules say, and
            how many jobs have been submitted.
    """
    Path(LOGS).mkdir(exist_ok=True)
    for before, (title, script) in enumerate(scripts.items()):
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            capture_output=True,
            text=True,
            env=submission_environment(script, os.environ),
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["sbatch failed"]
            said = [line for line in lines if line.startswith("sbatch: ")] or lines[-1:]
            said += [f"{before} of {len(scripts)} jobs have been submitted"] if before else []
            raise ConfigError(f"{title}: {'; '.join(said)}")
        number = done.stdout.strip().partition(";")[0]  # before the name of a cluster
        print(f"{title}: job {number}", flush=True)


def submission_environment(script: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which sbatch submits a script as it stands.

    It lacks the variables by which sbatch would replace options of the script, and those of a job
    that this process is in, which the new job would take for its own.
    """
    options = re.findall(r"^#SBATCH --([a-z0-9-]+)", script, re.MULTILINE)
    dropped = {VARIABLES.get(each, f"SBATCH_{each.upper().replace('-', '_')}") for each in options}
    if "SLURM_JOB_ID" in environment:
        dropped |= {name for name in environment if name.startswith("SLURM_")} - {*OF_CLUSTER}
    return {name: value for name, value in environment.items() if name not in dropped}


def run_here(jobs: Sequence[Job]) -> int:
    """Run one job after the other, print how each ended, and return the exit code of `launch`.

    Signals are passed on to the current run, whose processes are a session of their own. All but
    USR1 also end the sweep, once that run has ended.
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
        given = job.recipe.as_file().encode()
        code = subprocess.run(
            job.command, input=given, start_new_session=True, preexec_fn=die_with_parent
        ).returncode
        known = {0: "succeeded", STOPPED_EARLY: "stopped early"}
        states[job.config.run_dir] = known.get(code, "failed")
        if ending := [number for number in received if number != signal.SIGUSR1]:
            return 128 + ending[0]
    for run_dir, state in states.items():
        print(f"{run_dir}: {state}")
    if "failed" in states.values():
        return 1
    return STOPPED_EARLY if "stopped early" in states.values() else 0
