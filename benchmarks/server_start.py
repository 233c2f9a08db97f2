"""Measure what the start of a server without a GPU costs: `python benchmarks/server_start.py`.

Each round starts an INT8 server of the quickstart's shape three ways, one after the other:

- `imported`: by itself, each of its three processes importing SGLang;
- `first fork`: from a process that imports SGLang for it, that import included;
- `next fork`: from the same process, once more.

It prints CPU-seconds of all processes involved and wall time, until the server answers.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from qurl_megatron.config.schema import ServerConfig
from qurl_megatron.recipes import quickstart
from qurl_megatron.rollout.preload import preload
from qurl_megatron.rollout.server import ServerPlan, wait_ready

CONFIG = ServerConfig(mem_fraction_static=0.3, max_total_tokens=4096)


def cpu_s(root: psutil.Process) -> float:
    """Return user and system seconds of a process and all that it has started."""
    tree = [root, *root.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in tree)


def start(model: Path, directory: Path) -> tuple[float, float]:
    """Start a server and stop it once it answers; return CPU-seconds and wall seconds."""
    this_process = psutil.Process()
    before_s, begun_s = cpu_s(this_process), time.perf_counter()
    server = ServerPlan(
        model, CONFIG, "int8", context_length=64, log_file=directory / "server.log", seed=0
    ).start()
    try:
        wait_ready([server], timeout_s=600)
        return cpu_s(this_process) - before_s, time.perf_counter() - begun_s
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds: int = parser.parse_args().rounds
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "sglang")))
    measured: dict[str, list[tuple[float, float]]] = {
        "imported": [],
        "first fork": [],
        "next fork": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        quickstart.build_model(directory / "model", seed=0)
        for _ in range(rounds):
            measured["imported"].append(start(directory / "model", directory))
            begun_s, before_s = time.perf_counter(), cpu_s(psutil.Process())
            preload(directory / "preload.log")
            import_s = time.perf_counter() - begun_s
            import_cpu_s = cpu_s(psutil.Process()) - before_s
            for name in ("first fork", "next fork"):
                server_cpu_s, wall_s = start(directory / "model", directory)
                first = name == "first fork"
                measured[name].append(
                    (server_cpu_s + import_cpu_s * first, wall_s + import_s * first)
                )
    print(
        f"{'':12}{'CPU-seconds':>22}{'wall seconds':>22}   median (least to most), {rounds} rounds"
    )
    for name, values in measured.items():
        cells = [
            f"{median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in zip(*values, strict=True)
        ]
        print(f"{name:12}{cells[0]:>22}{cells[1]:>22}")
    base = measured["imported"]
    for name in ("first fork", "next fork"):
        ratios = [a[0] / b[0] for a, b in zip(measured[name], base, strict=True)]
        print(f"CPU-seconds, {name} / imported: {median(ratios):.3f} (median of the rounds)")


if __name__ == "__main__":
    main()
