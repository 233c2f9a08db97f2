"""The arguments and the result file that all GPU benchmarks share.

A result file holds machine, versions, date and command beside its rows. Results of a GPU and of a
rehearsal never mix: they have separate directories, and every file says which it is. A part refuses
to add to a file of the other kind, of another machine or of other versions.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from qurl_megatron import device
from qurl_megatron.files import write_whole

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "megatron-core", "transformer-engine")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every part takes."""
    common = machine.parser(description)
    common.add_argument(
        "--rehearsal", action="store_true", help="run the same code on small shapes, without a GPU"
    )
    common.add_argument("--results", type=Path, help="directory of the JSON files")
    return common


class Record:
    """One part's result file. It is written after every row, so that a later call can resume."""

    def __init__(self, part: str, arguments: argparse.Namespace) -> None:
        """Open the result file. Exit with one line if the file or machine does not match.

        Exit with code 0 if the part is complete.
        """
        self.rehearsal: bool = arguments.rehearsal
        if self.rehearsal != (device.accelerator() == "cpu"):
            sys.exit(
                f"{part}: this machine has no GPU; use --rehearsal"
                if device.accelerator() == "cpu"
                else f"{part}: this machine has a GPU; drop --rehearsal"
            )
        directory = arguments.results or RESULTS / ("rehearsal" if self.rehearsal else "gpu")
        directory.mkdir(parents=True, exist_ok=True)
        self.path: Path = directory / f"{part}.json"
        self.log_dir: Path = directory / "logs"
        self.log_dir.mkdir(exist_ok=True)
        self._head = {
            "part": part,
            "rehearsal": self.rehearsal,
            "machine": machine_info(),
            "versions": {
                "python": platform.python_version(),
                "cuda": torch.version.cuda or "none",
                **machine.package_versions(PACKAGES),
            },
        }
        self.rows: dict[str, Any] = {}
        self._start = time.perf_counter()
        self._earlier_s = 0.0
        if self.path.exists():
            earlier = json.loads(self.path.read_text())
            for key, value in self._head.items():
                if earlier[key] != value:
                    sys.exit(
                        f"{self.path}: written with another {key}; move it away or pass --results"
                    )
            self.rows, self._earlier_s = earlier["rows"], earlier["time_s"]
            if earlier["complete"]:
                print(f"{part}: complete in {self.path}; move the file away to measure again")
                sys.exit(0)

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Add a row and write the file at once, so that a kill does not lose it."""
        self.rows[key] = row
        values = ", ".join(
            f"{name} {_format(value)}"
            for name, value in row.items()
            if not isinstance(value, (list, dict))
        )
        print(f"{self._head['part']} {key}: {values}", flush=True)
        self._write(complete=False)

    def finish(self) -> None:
        """Mark the part as complete."""
        self._write(complete=True)

    def _write(self, *, complete: bool) -> None:
        tree = {
            **self._head,
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": shlex.join(sys.orig_argv),
            "time_s": round(self._earlier_s + time.perf_counter() - self._start, 1),
            "complete": complete,
            "rows": self.rows,
        }
        write_whole(self.path, json.dumps(tree, indent=1) + "\n")


def machine_info() -> dict[str, Any]:
    """Return the processor, the number of usable cores and the GPUs."""
    gpus = [
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, "
        f"compute capability {gpu.major}.{gpu.minor}"
        for gpu in device.gpu_properties()
    ]
    cores = len(os.sched_getaffinity(0))
    return {"processor": machine.processor(), "cores": cores, "gpus": gpus}


def _format(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
