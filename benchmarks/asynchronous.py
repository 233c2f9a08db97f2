"""Compare asynchronous with synchronous rollout: `python benchmarks/asynchronous.py`.

Each round runs `qurl train quickstart` once for every `max_staleness`, with the round's number as
seed and in another order each time. The learner has one core and the server has another, as they
have GPUs of their own elsewhere. The table has medians over the rounds, [least, most]:

    steps/s     of RL steps, without the first two
    ratio       of steps/s to the synchronous run of the same round
    tokens/s    sampled
    waited      fraction of a step in which the learner waited for completions
    after       held-out accuracy after the last step
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

QURL = Path(sys.executable).with_name("qurl")
CORES = {"qurl_megatron.loop.train": 0, "sglang::": 1}  # by the start of a process's title
WARM_STEPS = 2


@dataclass
class Outcome:
    """What one run measured."""

    steps_per_s: float
    tokens_per_s: float
    waited_fraction: float
    accuracy_after: float


def run(max_staleness: int, seed: int, steps: int, directory: Path) -> Outcome:
    """Run the quickstart and return what it measured."""
    name = f"staleness{max_staleness}-seed{seed}"
    words = [
        f"name={name}",
        f"output_dir={directory}",
        f"seed={seed}",
        f"steps={steps}",
        f"rollout.max_staleness={max_staleness}",
        "learner.tensor_parallel_size=1",
    ]
    with (directory / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(
            [QURL, "train", "quickstart", *words], stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            pin(psutil.Process(process.pid))
            time.sleep(0.5)
    if process.returncode:
        raise SystemExit((directory / f"{name}.out").read_text())
    lines = (directory / name / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines][WARM_STEPS:]
    summary = json.loads((directory / name / "summary.json").read_text())
    seconds = [step_s(step) for step in measured]
    sampled = [step["rollout_tokens_per_s"] for step in measured]
    return Outcome(
        steps_per_s=1 / fmean(seconds),
        tokens_per_s=fmean(sampled),
        waited_fraction=sum(step["time_waited_s"] for step in measured) / sum(seconds),
        accuracy_after=summary["held_out_accuracy_after"],
    )


def step_s(step: dict[str, Any]) -> float:
    """Return the seconds of a step."""
    phases = ("rollout", "proximal", "critic", "update", "publish")
    return sum(step[f"time_{phase}_s"] for phase in phases)


def pin(launcher: psutil.Process) -> None:
    """Give learner ranks and servers a core each, as soon as they run."""
    try:
        for process in launcher.children(recursive=True):
            title = " ".join(process.cmdline())
            for start, core in CORES.items():
                if title.startswith(start):
                    process.cpu_affinity([core])
    except psutil.NoSuchProcess:
        pass  # it has ended meanwhile


def spread(values: Sequence[float], form: str) -> str:
    """Return the median of `values` and their range."""
    return f"{median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    arguments = parser.parse_args()
    if 0 not in arguments.staleness:
        parser.error("--staleness needs 0, the synchronous run that the others are compared with")
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "megatron-core")))
    outcomes: dict[int, list[Outcome]] = {staleness: [] for staleness in arguments.staleness}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            shift = number % len(arguments.staleness)
            for staleness in arguments.staleness[shift:] + arguments.staleness[:shift]:
                outcome = run(staleness, number, arguments.steps, Path(directory))
                outcomes[staleness].append(outcome)
                print(f"round {number}, max_staleness {staleness}: {outcome}", flush=True)
    synchronous = outcomes[0]
    print(
        f"\n{'max_staleness':>13}  {'steps/s':>21}  {'ratio':>18}  {'tokens/s':>18}  "
        f"{'waited':>15}  {'after':>21}"
    )
    for staleness, measured in outcomes.items():
        pairs = zip(measured, synchronous, strict=True)
        ratios = [own.steps_per_s / other.steps_per_s for own, other in pairs]
        print(
            f"{staleness:13}  {spread([each.steps_per_s for each in measured], '.3f'):>21}  "
            f"{spread(ratios, '.2f'):>18}  "
            f"{spread([each.tokens_per_s for each in measured], '.0f'):>18}  "
            f"{spread([each.waited_fraction for each in measured], '.0%'):>15}  "
            f"{spread([each.accuracy_after for each in measured], '.1%'):>21}"
        )


if __name__ == "__main__":
    main()
