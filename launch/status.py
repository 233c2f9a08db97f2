"""Tell what works on a run and how far it has come, from its directory and Slurm's queue."""

import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.servers import server_specs
from qurl_megatron.config.text import load
from qurl_megatron.files import read_json_lines, read_json_object
from qurl_megatron.launch.owner import (
    JOB_SCRIPT,
    how_to_resume,
    logs_of,
    newest_attempt,
    owner_of,
)
from qurl_megatron.machine.output import CONSOLE_LOG
from qurl_megatron.report.console import STEPS_LOG
from qurl_megatron.report.metrics import accuracy_and_error
from qurl_megatron.report.record import check_run, list_checkpoints

SQUEUE_TIMEOUT_S = 30.0
FOLLOW_POLL_S = 1.0


def status(run_dir: Path) -> str:
    """Return one line: the steps done, and whether the run is finished, running or resumable.

    Raises:
        ConfigError: there is no such run, and no job in the queue that will create it.
    """
    jobs = slurm_jobs(run_dir)
    if jobs and not (run_dir / "config.yaml").is_file():
        return f"not started; {', '.join(jobs)}"
    check_run(run_dir)
    steps = read_json_lines(run_dir / "metrics.jsonl", _Progress)
    done = steps[-1]["step"] if steps else 0
    config = load(run_dir / "config.yaml")
    progress = f"step {done} of {config.steps}"
    saved = list_checkpoints(run_dir)
    checkpoint = f"newest checkpoint {saved[-1].name}" if saved else "no checkpoint"
    best = run_dir / "checkpoints" / "best"
    if best.is_symlink():
        checkpoint += f", best {best.readlink()}"
        if scored := read_json_object(best / "state.json", _Scored):
            accuracy = accuracy_and_error(scored["accuracy"], scored.get("standard_error"))
            checkpoint += f" ({' '.join(filter(None, (config.checkpoint.best_by, accuracy)))})"
    running = ", ".join(jobs) or ("running here" if owner_of(run_dir) else "")
    running += server_counts(run_dir) if running else ""
    if is_finished(run_dir) and not running:
        return f"{progress}, {checkpoint}, finished"
    return f"{progress}, {checkpoint}, {running or f'not running; {how_to_resume(run_dir)}'}"


@dataclass
class _Progress:
    """The part of a line of metrics.jsonl that tells a run's progress, in every version."""

    step: int


@dataclass
class _Scored:
    """The part of a best checkpoint's state.json that tells its score, in every version."""

    accuracy: float
    standard_error: float | None = None


@dataclass
class _Ending:
    """The part of summary.json that tells how a run ended, in every version."""

    steps: int
    time_s: float
    reached: dict[str, float] = field(default_factory=dict)


def is_finished(run_dir: Path) -> bool:
    """Return True if the run has come to its end.

    A run that was given more steps or time, or a higher `stop_above`, is not finished any more.
    """
    summary = read_json_object(run_dir / "summary.json", _Ending)
    config = load(run_dir / "config.yaml")
    if not summary:
        return False
    is_out_of_time = config.time_limit_s is not None and summary["time_s"] > config.time_limit_s
    has_reached = any(
        value > config.stop_above.get(name, math.inf)
        for name, value in summary.get("reached", {}).items()
    )
    return summary["steps"] >= config.steps or is_out_of_time or has_reached


def server_counts(run_dir: Path) -> str:
    """Return how many of a running run's servers are left, and how often servers were restarted.

    Return an empty string before the servers are started.
    """
    logs = logs_of(run_dir, newest_attempt(run_dir))
    rosters = list(logs.glob("servers_*.json"))
    if not rosters:
        return ""
    servers = [read_json_object(path, dict[str, dict[str, Any]]) for path in rosters]
    left = sum(len(members) for one in servers for members in one.values())
    restarts = len(list(logs.glob("server_*_restarted_*.log")))
    needed = len(server_specs(load(run_dir / "config.yaml")))
    return f", servers {left} of {needed}, restarts {restarts}"


def slurm_jobs(run_dir: Path) -> list[str]:
    """Return the user's queued and running jobs of this run, each as `job 12 running`.

    A job from `qurl launch` has the run's directory as its comment. A job that has started has
    written its number to a job.json beside its logs.

    Raises:
        ConfigError: Slurm does not tell, and jobs have worked on this run.
    """
    if not shutil.which("squeue"):
        return []
    files = run_dir.glob("logs/**/job.json")
    started = {read_json_object(path, dict[str, str]).get("id") for path in files}
    command = ["squeue", "--me", "--noheader", "--format=%i|%T|%r|%k"]
    limits: dict[str, Any] = {"timeout": SQUEUE_TIMEOUT_S, "check": (run_dir / JOB_SCRIPT).exists()}
    try:
        queue = subprocess.run(command, capture_output=True, text=True, **limits)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        silent = f"no answer in {SQUEUE_TIMEOUT_S:.0f} s"
        said = error.stderr if isinstance(error.stderr, str) else silent
        reason = " ".join(said.split())
        raise ConfigError(f"{run_dir}: its jobs are not known: {reason}; ask again") from None
    jobs: dict[str, str] = {}
    for line in queue.stdout.splitlines():
        if line.count("|") < 3:  # of a comment with a line break
            continue
        number, state, reason, comment = line.split("|", 3)
        number = number.partition("+")[0]  # a heterogeneous job lists each component
        if number in started or comment == str(run_dir.absolute()):
            detail = f" ({reason})" if state == "PENDING" else ""
            jobs.setdefault(number, f"job {number} {state.lower()}{detail}")
    return list(jobs.values())


def newest_logs(run_dir: Path) -> list[Path]:
    """Return the logs of the run's last attempt: of its Slurm job, its servers and its ranks.

    The first log is of what no attempt could print.

    Raises:
        ConfigError: the run has no logs.
    """
    newest = logs_of(run_dir, newest_attempt(run_dir))
    output = read_json_object(newest / "job.json", dict[str, str]).get("output")
    outputs = [run_dir / CONSOLE_LOG, run_dir / STEPS_LOG, *([Path(output)] if output else [])]
    paths = [path for path in [*outputs, *sorted(newest.glob("*.log"))] if path.is_file()]
    if not paths:
        raise ConfigError(f"{run_dir}: the run has no logs")
    return paths


def follow(run_dir: Path, lines: int) -> Iterator[str]:
    """Yield the last lines that a run printed on its steps, then what it adds, until its end.

    Raises:
        ConfigError: the run has printed nothing yet.
    """
    path = run_dir / STEPS_LOG
    if not path.exists():
        raise ConfigError(f"{run_dir}: the run has printed nothing yet")
    with path.open(errors="replace") as file:
        yield "".join(file.readlines()[-lines:])
        while not is_finished(run_dir):
            time.sleep(FOLLOW_POLL_S)
            yield file.read()
        yield file.read()
