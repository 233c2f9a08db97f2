"""A real Slurm of several nodes on this machine: munged, slurmctld and one slurmd per node.

Every node has its own hostname, address and fake GPUs (character devices that no process opens) and
shares the rest of this machine. Nothing is written outside the cluster's directory. munged requires
that only root can write to the path of that directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from qurl_megatron.machine.network import free_port

INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare"]
NODES = ["n1", "n2", "n3", "n4"]
GPUS_PER_NODE = 2
START_TIMEOUT_S = 60.0
SMALL_DISK_BYTES = 300 * 2**20
T = TypeVar("T")


def reason_to_skip() -> str | None:
    """Return why Slurm cannot be started on this machine, or None if it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"Slurm is not installed (no {', '.join(missing)}): apt-get update && {INSTALL}"
    return None if os.geteuid() == 0 else "these tests start Slurm's daemons and need root"


@dataclass
class Job:
    """A submitted job; `id` is the number of its first component."""

    cluster: Cluster
    id: str
    output: Path

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def state(self) -> str:
        """Return the state of the first component: PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self.show("JobState")

    def exit_code(self) -> int:
        """Return the exit code of a job that has ended."""
        return int(self.show("ExitCode").partition(":")[0])

    def show(self, field: str) -> str:
        shown = self.cluster.call("scontrol", "show", "job", self.id).split()
        return next(word.partition("=")[2] for word in shown if word.startswith(f"{field}="))


class Cluster:
    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        """Start the cluster; every command and job has `environment`."""
        self.directory = directory
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {**environment, "SLURM_CONF": str(directory / "slurm.conf")}
        for name in ("state", "logs", "spool"):
            (directory / name).mkdir(parents=True)
        self.small_disk = directory / "small_disk"
        self.small_disk.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "none"]
        subprocess.run(["mount", *options, self.small_disk], check=True)  # before the nodes' own
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", ["slurmctld", "-D"])
            for node in NODES:
                self.start_node(node)
            self.wait_for(self._states, all_idle, what="up")
        except BaseException:
            self.close()
            raise

    def call(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        script: str = "",
        timeout_s: float = 60.0,
    ) -> str:
        done = subprocess.run(
            words,
            input=script,
            env=self._environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def submit(self, directory: Path, script: str, *options: str) -> Job:
        """Submit the script of the run `run` from a directory; its output goes to `logs` there."""
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        number = self.call("sbatch", "--parsable", *options, cwd=directory, script=script).strip()
        return Job(self, number, directory / "logs" / f"qurl.run-{number}.out")

    def wait_for(
        self,
        look: Callable[[], T],
        good: Callable[[T], bool],
        timeout_s: float = START_TIMEOUT_S,
        what: str = "",
    ) -> None:
        """Wait until `good(look())`; a failure shows the last value of `look()`."""
        deadline = time.monotonic() + timeout_s
        while not good(seen := look()):
            assert time.monotonic() < deadline, f"not {what} in {timeout_s} s:\n{seen}"
            time.sleep(0.2)

    def start_node(self, node: str) -> None:
        """Start a slurmd with its own hostname and a hosts file of all nodes."""
        script = (
            f"hostname {node} && mount --bind {self.directory}/hosts /etc/hosts "
            f"&& exec slurmd -D -N {node}"
        )
        # With --fork slurmd would be a child that outlives a killed unshare.
        self._start(node, ["unshare", "--uts", "--mount", "sh", "-c", script])

    def kill_node(self, node: str) -> None:
        """Kill slurmd and every process of the node at once, like a power loss."""
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._daemons.pop(node).wait()

    def processes(self, node: str) -> list[psutil.Process]:
        """Return the processes on a node: those in its hostname's namespace."""
        namespace = os.readlink(f"/proc/{self._daemons[node].pid}/ns/uts")
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.readlink(f"/proc/{process.pid}/ns/uts") == namespace:
                    processes.append(process)
        return processes

    def supervisors(self, node: str) -> list[psutil.Process]:
        """Return the supervisors on a node, without their child processes."""
        supervisors = []
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):  # it just ended
                parent = process.parent()
                if (
                    parent
                    and "slurmstepd" in parent.name()
                    and "qurl_megatron.launch.slurm_node" in process.cmdline()
                ):
                    supervisors.append(process)
        return supervisors

    def rank(self, node: str, rank: int) -> psutil.Process:
        """Return the process of a learner rank on a node without servers."""
        (supervisor,) = self.supervisors(node)
        return next(
            process
            for process in supervisor.children()
            if process.environ().get("RANK") == str(rank)
        )

    def left_over(self) -> list[str]:
        """Return the command lines of Python processes that jobs have left on the nodes."""
        left = []
        for node in NODES:
            for process in self.processes(node) if node in self._daemons else []:
                with contextlib.suppress(psutil.NoSuchProcess):  # it just ended
                    if "python" in process.name() or "sglang" in process.name():
                        left.append(" ".join(process.cmdline()))
        return left

    def cancel_all(self) -> None:
        """Cancel all jobs and restart killed nodes."""
        for node in NODES:
            if node not in self._daemons:
                self.start_node(node)
        self.call("scancel", "--user=root")
        self.wait_for(self._states, all_idle, 120, "idle")

    def close(self) -> None:
        """End every daemon and node process, which removes their mounts; unmount the small disk."""
        for node in NODES:
            if node in self._daemons:
                self.kill_node(node)
        for daemon in self._daemons.values():
            daemon.terminate()
            daemon.wait(30)
        subprocess.run(["umount", "--lazy", self.small_disk], check=True)

    def _states(self) -> list[str]:
        """Return the state of each node, once for each of its partitions."""
        return self.call("sinfo", "-h", "-N", "-o", "%t").split()

    def _configure(self) -> None:
        here, host = self.directory, socket.gethostname()
        addresses = {node: f"127.0.1.{number}" for number, node in enumerate(NODES, 1)}
        own = "".join(f"{address} {node}\n" for node, address in addresses.items())
        (here / "hosts").write_text(Path("/etc/hosts").read_text() + own)
        nodes = "".join(
            f"NodeName={node} NodeHostname={node} NodeAddr={address} Port={free_port()} CPUs=16 "
            f"RealMemory=4000 Gres=gpu:{GPUS_PER_NODE}\n"
            for node, address in addresses.items()
        )
        (here / "slurm.conf").write_text(f"""\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={here}/munge.sock,cred_expire=5
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/logs/slurmctld.log
SlurmdLogFile={here}/logs/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=30
KillWait=30
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={here}/logs/jobs.txt
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
""")
        devices = here / "devices"
        devices.mkdir()
        for number in range(GPUS_PER_NODE):
            os.mknod(devices / f"gpu{number}", 0o600 | 0o020000, os.makedev(1, 3))
        (here / "gres.conf").write_text(
            f"Name=gpu File={devices}/gpu[0-{GPUS_PER_NODE - 1}] Flags=nvidia_gpu_env\n"
        )

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        options = {
            "key-file": key,
            "socket": self.directory / "munge.sock",
            "pid-file": self.directory / "munged.pid",
            "log-file": self.directory / "logs" / "munged.log",
            "seed-file": self.directory / "munge.seed",
        }
        words = [f"--{name}={path}" for name, path in options.items()]
        self._start("munged", ["munged", "--foreground", "--force", *words])
        self.wait_for((self.directory / "munge.sock").exists, bool)

    def _start(self, name: str, words: list[str]) -> None:
        with (self.directory / "logs" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def all_idle(states: list[str]) -> bool:
    return set(states) == {"idle"}
