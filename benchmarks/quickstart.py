"""Measure what a quickstart learns, over several seeds: `python benchmarks/quickstart.py`.

Each seed is one complete `qurl train quickstart`, or of the recipe that `--recipe` names. The seeds
run one after the other. The README quotes the resulting table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev

QURL = Path(sys.executable).with_name("qurl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--recipe", choices=["quickstart", "quickstart_experts"], default="quickstart"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-dir", default="runs")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "megatron-core")))
    print("seed  before   after    gain  steps  RL time  whole command  mean publish")
    gains = []
    for seed in arguments.seeds:
        name = f"{arguments.recipe}-seed{seed}-{time.strftime('%H%M%S')}"
        start = time.perf_counter()
        overrides = [f"seed={seed}", f"name={name}", f"output_dir={arguments.output_dir}"]
        subprocess.run(
            [QURL, "train", arguments.recipe, *overrides],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        command_s = time.perf_counter() - start
        summary = json.loads((Path(arguments.output_dir) / name / "summary.json").read_text())
        before, after = summary["held_out_accuracy_before"], summary["held_out_accuracy_after"]
        gains.append(100 * (after - before))
        print(
            f"{seed:4}  {before:6.1%}  {after:6.1%}  {gains[-1]:+6.1f}  {summary['steps']:5}  "
            f"{summary['time_s']:5.0f} s  {command_s:11.0f} s  "
            f"{summary['time_publish_s_mean']:10.3f} s",
            flush=True,
        )
    spread = f", standard deviation {stdev(gains):.1f}" if len(gains) > 1 else ""
    print(f"mean gain {fmean(gains):+.1f} points{spread}, minimum {min(gains):+.1f}")


if __name__ == "__main__":
    main()
