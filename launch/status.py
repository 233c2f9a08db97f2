"""Report the progress of a run from its directory, its owner and Slurm's queue."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.text import load
from qurl_megatron.files import list_checkpoints, read_json_lines, read_json_object
from qurl_megatron.launch.owner import owner_of
from qurl_megatron.launch.placement import server_specs


def status(run_dir: Path) -> str:
    """Return one line: the steps done, and whether the run is finished, running or resumable.

    Raises:
        ConfigError: there is no such run, and no job in the queue that will create it.
    """
    jobs = slurm_jobs(run_dir)
    if not (run_dir / "config.yaml").is_file():
        if not jobs:
            raise ConfigError(f"{run_dir}: not a run's directory, it has no config.yaml")
        return f"not started; {', '.join(jobs)}"
    steps = read_json_lines(run_dir / "metrics.jsonl")
    done = int(steps[-1]["step"]) if steps else 0
    progress = f"step {done} of {load(run_dir / 'config.yaml').steps}"
    saved = list_checkpoints(run_dir)
    checkpoint = f"newest checkpoint {saved[-1].name}" if saved else "no checkpoint"
    best = run_dir / "checkpoints" / "best"
    if best.is_symlink():
        checkpoint += f", best {best.readlink()}"
    running = ", ".join(jobs) or ("running here" if owner_of(run_dir) else "")
    running += server_counts(run_dir) if running else ""
    if is_finished(run_dir) and not running:
        return f"{progress}, {checkpoint}, finished"
    return f"{progress}, {checkpoint}, {running or f'not running; {how_to_resume(run_dir)}'}"


def is_finished(run_dir: Path) -> bool:
    """Return True if the run has come to its end.

    A run that was given more steps or more time after its end is not finished any more.
    """
    summary, config = read_json_object(run_dir / "summary.json"), load(run_dir / "config.yaml")
    if not summary:
        return False
    is_out_of_time = config.time_limit_s is not None and summary["time_s"] > config.time_limit_s
    return summary["steps"] >= config.steps or is_out_of_time


def how_to_resume(run_dir: Path, command: str = "") -> str:
    """Return what continues a run, and from where; `command` replaces `qurl resume RUN`."""
    saved = list_checkpoints(run_dir)
    place = (
        f"resume after step {int(saved[-1].name.removeprefix('step_'))}" if saved else "start again"
    )
    return f"to {place}: {command or f'qurl resume {shlex.quote(str(run_dir))}'}"


def server_counts(run_dir: Path) -> str:
    """Return how many of a running run's servers are left, and how often servers were restarted.

    Return an empty string before the servers are started.
    """
    logs = newest_attempt(run_dir)
    rosters = list(logs.glob("servers_*.json")) or list(run_dir.glob("servers.json"))
    if not rosters:
        return ""
    servers = [json.loads(path.read_text()) for path in rosters]
    left = sum(len(members) for one in servers for members in one.values())
    restarts = len(list(logs.glob("server_*_restarted_*.log")))
    needed = len(server_specs(load(run_dir / "config.yaml")))
    return f", servers {left} of {needed}, restarts {restarts}"


def newest_attempt(run_dir: Path) -> Path:
    """Return the directory of logs of the run's last start."""
    logs = run_dir / "logs"
    resumed = sorted(logs.glob("resumed_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return resumed[-1] if resumed else logs


def slurm_jobs(run_dir: Path) -> list[str]:
    """Return the user's queued and running jobs of this run, each as `job 12 running`.

    A job from `qurl launch` has the run's directory as its comment. A job that has started has
    written its number to a job.json beside its logs.
    """
    if not shutil.which("squeue"):
        return []
    started = {json.loads(path.read_text())["id"] for path in run_dir.glob("logs/**/job.json")}
    command = ["squeue", "--me", "--noheader", "--format=%i|%T|%r|%k"]
    queue = subprocess.run(command, capture_output=True, text=True)
    jobs: dict[str, str] = {}
    for line in queue.stdout.splitlines():
        number, state, reason, comment = line.split("|", 3)
        number = number.partition("+")[0]  # a heterogeneous job lists each component
        if number in started or comment == str(run_dir.absolute()):
            detail = f" ({reason})" if state == "PENDING" else ""
            jobs.setdefault(number, f"job {number} {state.lower()}{detail}")
    return list(jobs.values())


def newest_logs(run_dir: Path) -> list[Path]:
    """Return the logs of the run's last attempt: of its Slurm job, its servers and its ranks.

    Raises:
        ConfigError: the run has no logs.
    """
    newest = newest_attempt(run_dir)
    job = newest / "job.json"
    outputs = [Path(json.loads(job.read_text())["output"])] if job.exists() else []
    paths = [path for path in [*outputs, *sorted(newest.glob("*.log"))] if path.is_file()]
    if not paths:
        raise ConfigError(f"{run_dir}: the run has no logs")
    return paths
