"""What the parts share: their arguments, where results go, and rows that survive a kill.

A result file holds machine, versions, date and command beside its rows. Rows of a GPU and of a
rehearsal never meet: each kind has a directory of its own, says which it is in every file, and
refuses to go on with a file of the other kind, of another machine or of other versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qurl_megatron import device
from qurl_megatron.files import write_whole

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "megatron-core", "transformer-engine")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments that every part takes."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--rehearsal", action="store_true", help="the same code on small shapes, without a GPU"
    )
    made.add_argument("--results", type=Path, help="directory of the JSON files")
    return made


class Record:
    """One part's result file. Its rows are written as they come; a later call goes on from them."""

    def __init__(self, part: str, arguments: argparse.Namespace) -> None:
        """Ends the program with one line where the machine is not what was asked for."""
        self.rehearsal: bool = arguments.rehearsal
        if self.rehearsal != (device.accelerator() == "cpu"):
            sys.exit(
                f"{part}: this machine has no GPU; rehearse with --rehearsal"
                if device.accelerator() == "cpu"
                else f"{part}: this machine has a GPU; leave --rehearsal out"
            )
        directory = arguments.results or RESULTS / ("rehearsal" if self.rehearsal else "gpu")
        directory.mkdir(parents=True, exist_ok=True)
        self.path: Path = directory / f"{part}.json"
        self.log_dir: Path = directory / "logs"
        self.log_dir.mkdir(exist_ok=True)
        self._head = {
            "part": part,
            "rehearsal": self.rehearsal,
            "machine": machine(),
            "versions": versions(),
        }
        self.rows: dict[str, Any] = {}
        self._began = time.perf_counter()
        self._spent_s = 0.0
        if self.path.exists():
            before = json.loads(self.path.read_text())
            for key, value in self._head.items():
                if before[key] != value:
                    sys.exit(f"{self.path}: is of another {key}; move it away, or use --results")
            self.rows, self._spent_s = before["rows"], before["time_s"]
            if before["complete"]:
                print(f"{part}: complete in {self.path}; move it away to measure again")
                sys.exit(0)

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Keep a row, also should the next moment be the last."""
        self.rows[key] = row
        shown = ", ".join(
            f"{name} {_short(value)}"
            for name, value in row.items()
            if not isinstance(value, (list, dict))
        )
        print(f"{self._head['part']} {key}: {shown}", flush=True)
        self._write(complete=False)

    def finish(self) -> None:
        self._write(complete=True)

    def _write(self, *, complete: bool) -> None:
        tree = {
            **self._head,
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": command(),
            "time_s": round(self._spent_s + time.perf_counter() - self._began, 1),
            "complete": complete,
            "rows": self.rows,
        }
        write_whole(self.path, json.dumps(tree, indent=1) + "\n")


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [],
    }
    for index in range(device.num_gpus()):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append(
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
            f"{properties.major}.{properties.minor}"
        )
    return found


def versions() -> dict[str, str]:
    """Of Python, CUDA, this repository and the packages that are installed."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def command() -> str:
    module = Path(sys.argv[0]).stem
    return shlex.join(["python", "-m", f"benchmarks.gpu.{module}", *sys.argv[1:]])


def run(words: list[str], log_file: Path, **environment: str) -> int:
    """Run a command of this Python in the repository's root, its output in `log_file`."""
    with log_file.open("ab") as log:
        return subprocess.run(
            [sys.executable, *words],
            cwd=REPOSITORY,
            env=device.child_environment(environment),
            stdout=log,
            stderr=subprocess.STDOUT,
        ).returncode


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
