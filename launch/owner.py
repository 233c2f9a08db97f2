"""A run's directory as its launchers see it: who works in it, its starts, and what continues it.

The owner is the one launcher that may work in the run's directory. It locks RUN/owner.json with
flock for as long as it works, and writes its host and process id there, for the message to a second
launcher. The kernel releases the lock when the owner ends, however it ends. The library filelock
would not do: it opens the file for writing even to ask, which fails for the run of another user.

A network file system may apply flock to each node alone (Lustre with `localflock`) or lack it. Then
a launcher on another node is not detected. Without flock, the recorded process is looked up, which
works on its own host only. An owner recorded on another host may have died with its node, so it
never stops a requeued job.
"""

import fcntl
import json
import os
import shlex
import socket
import time
from pathlib import Path
from typing import TextIO

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.files import read_json_object
from qurl_megatron.machine.output import qurl_command
from qurl_megatron.machine.processes import start_ticks
from qurl_megatron.report.record import list_checkpoints

OWNER_FILE = "owner.json"
JOB_SCRIPT = "job.sh"  # of the last Slurm job of a run, in its directory
CLAIM_TIMEOUT_S = 1.0
CLAIM_POLL_S = 0.02


def claim(run_dir: Path) -> TextIO:
    """Make this process the owner of a run directory until it closes the returned file.

    It tries for CLAIM_TIMEOUT_S, because `owner_of` has the lock for a moment.

    Raises:
        ConfigError: another launcher is the owner.
    """
    file = (run_dir / OWNER_FILE).open("a+")  # keeps the record of another owner
    deadline = time.monotonic() + CLAIM_TIMEOUT_S
    while (owner := _holder(file, fcntl.LOCK_EX)) and time.monotonic() < deadline:
        time.sleep(CLAIM_POLL_S)
    if owner:
        file.close()
        raise ConfigError(f"{run_dir}: {owner} works on this run; wait for it to end, or stop it")
    pid = os.getpid()
    record = {"host": socket.gethostname(), "pid": pid, "start_ticks": start_ticks(pid)}
    file.truncate(0)
    file.write(json.dumps(record) + "\n")
    file.flush()
    os.register_at_fork(after_in_child=file.close)  # else a fork would hold the lock too
    return file


def owner_of(run_dir: Path) -> str:
    """Return `process PID on HOST` of the launcher that works in a run directory.

    The text is empty if this machine can detect none.
    """
    try:
        with (run_dir / OWNER_FILE).open() as file:
            return _holder(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return ""


def _holder(file: TextIO, lock: int) -> str:
    """Take a lock of an owner's file; return an empty text, or the process that has it already."""
    has_flock = True
    try:
        fcntl.flock(file, lock | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        pass
    except OSError:
        has_flock = False
    owner = read_json_object(Path(file.name))
    if not owner.keys() >= {"host", "pid", "start_ticks"}:  # it is not written completely
        return "another process" if has_flock else ""
    may_run_here = owner["host"] == socket.gethostname() and owner["pid"] != os.getpid()
    runs_here = may_run_here and start_ticks(owner["pid"]) == owner["start_ticks"]
    return f"process {owner['pid']} on {owner['host']}" if has_flock or runs_here else ""


def how_to_resume(run_dir: Path) -> str:
    """Return what continues a run, and from where."""
    saved = list_checkpoints(run_dir)
    place = (
        f"resume after step {int(saved[-1].name.removeprefix('step_'))}" if saved else "start again"
    )
    script = run_dir / JOB_SCRIPT
    by_job = shlex.join(["sbatch", str(script)])
    return f"to {place}: {by_job if script.exists() else qurl_command('resume', run_dir)}"


def newest_attempt(run_dir: Path) -> int:
    """Return the number of the run's last start: 0, or N for its Nth resume."""
    names = (path.name.removeprefix("resumed_") for path in run_dir.glob("logs/resumed_*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def logs_of(run_dir: Path, attempt: int) -> Path:
    """Return the directory of logs of a start of a run."""
    logs = run_dir / "logs"
    return logs / f"resumed_{attempt}" if attempt else logs
