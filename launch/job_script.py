"""The script of a Slurm job, whose words are all quoted.

`JobOptions` is what the user asks for; the run decides the rest. The script replaces its shell with
the job's batch process, `launch/slurm.py`, so that this process gets the signal before the time
limit.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.launch.placement import smallest_plan
from qurl_megatron.launch.slurm import signal_lead_s

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
