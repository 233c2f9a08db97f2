"""How far a run has come: from its directory, this machine's processes, and Slurm's queue."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path

import psutil

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.yaml_file import load
from qurl_megatron.files import PARTIAL, read_json_lines


def status(run_dir: Path) -> str:
    """One line: steps done, and whether the run is finished, is running, or can be gone on with.

    Raises:
        ConfigError: there is no such run, nor a job that is to begin it.
    """
    jobs = slurm_jobs(run_dir)
    if not (run_dir / "config.yaml").is_file():
        if not jobs:
            raise ConfigError(f"{run_dir}: not a run's directory, it has no config.yaml")
        return f"not begun; {', '.join(jobs)}"
    steps = read_json_lines(run_dir / "metrics.jsonl")
    done = int(steps[-1]["step"]) if steps else 0
    come = f"step {done} of {load(run_dir / 'config.yaml').steps}"
    if (run_dir / "summary.json").exists():
        return f"{come}, finished"
    saved = sorted(
        path.name for path in (run_dir / "checkpoints").glob("step_*") if path.suffix != PARTIAL
    )
    checkpoint = f"newest checkpoint {saved[-1]}" if saved else "no checkpoint"
    running = ", ".join(jobs) or ("running here" if is_running_here(run_dir) else "")
    return f"{come}, {checkpoint}, {running or f'not running; qurl resume {run_dir} goes on'}"


def slurm_jobs(run_dir: Path) -> list[str]:
    """Each of the user's jobs in the queue that is of this run: `job 12 running`.

    A job of `qurl launch` has the run's directory for its comment; any that has begun left its
    number with its logs.
    """
    if not shutil.which("squeue"):
        return []
    begun = {json.loads(path.read_text())["id"] for path in run_dir.glob("logs/**/job.json")}
    words = ["squeue", "--me", "--noheader", "--format=%i|%T|%r|%k"]
    asked = subprocess.run(words, capture_output=True, text=True)
    found: dict[str, str] = {}
    for line in asked.stdout.splitlines():
        number, state, reason, comment = line.split("|", 3)
        number = number.partition("+")[0]  # of a heterogeneous job, its first part's
        if number in begun or comment == str(run_dir.absolute()):
            why = f" ({reason})" if state == "PENDING" else ""
            found.setdefault(number, f"job {number} {state.lower()}{why}")
    return list(found.values())


def is_running_here(run_dir: Path) -> bool:
    """Whether a learner rank of this run is among this machine's processes."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            if "qurl_megatron.loop.train" in words:
                if Path(process.cwd(), words[-1]).resolve() == run_dir.resolve():
                    return True
    return False


def newest_logs(run_dir: Path) -> list[Path]:
    """Of the last time the run was started: the job's output if it was one, servers, ranks.

    Raises:
        ConfigError: the run has none.
    """
    logs = run_dir / "logs"
    resumed = sorted(logs.glob("resumed_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    newest = resumed[-1] if resumed else logs
    job = newest / "job.json"
    outputs = [Path(json.loads(job.read_text())["output"])] if job.exists() else []
    found = [path for path in [*outputs, *sorted(newest.glob("*.log"))] if path.is_file()]
    if not found:
        raise ConfigError(f"{run_dir}: no logs there")
    return found
