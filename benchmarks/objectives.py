"""Compare what each objective learns from the same start: `python benchmarks/objectives.py`.

All arms of a seed start from the same warmed-up quickstart model. Each arm is one complete
`qurl train quickstart` with its own objective, weight format and UAQ scale. The arms compare
truncated importance sampling (TIS), adaptive clipping range (ACR) and update-aware quantization
(UAQ) with BF16 rollouts and with the uncorrected objectives. There are two settings:

    quickstart   the quickstart's task and learning rate, 8-bit rollouts
    large_gap    4-bit codes in the same INT8 layers and twice the learning rate, so that the
                 quantized policy is as far from the learner as in the paper's late training

The figures of a run are written to benchmarks/results/ when the run ends. A second call skips the
runs that have figures and resumes the runs that were interrupted. At the end it prints a table, and
writes a report that overlays the runs of the first seed whose run directories all still exist.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from threading import Lock
from typing import Any

from qurl_megatron.files import read_json_lines, write_whole

QURL = Path(sys.executable).with_name("qurl")
RESULTS = Path(__file__).parent / "results"
STEPS = 50

NO_UAQ = "quantization.uaq.scale=1"
UAQ = "quantization.uaq.scale=1.5"


def arm(objective: str, weight_format: str, uaq: str = NO_UAQ) -> list[str]:
    """Return the config overrides of one arm."""
    return [f"objective.objective={objective}", f"quantization.format={weight_format}", uaq]


# Setting -> (arm name -> overrides of the arm, overrides of every arm).
SETTINGS: dict[str, tuple[dict[str, list[str]], list[str]]] = {
    "quickstart": (
        {
            "bf16": arm("on_policy", "bf16"),
            "naive int8": arm("naive", "int8"),
            "on_policy int8": arm("on_policy", "int8"),
            "tis int8": arm("tis", "int8"),
            "acr int8": arm("acr", "int8"),
            "acr+uaq int8": arm("acr", "int8", UAQ),
            "tis fp8": arm("tis", "fp8"),
            "acr fp8": arm("acr", "fp8"),
        },
        [],
    ),
    "large_gap": (
        {
            "bf16": arm("on_policy", "bf16"),
            "naive int4": arm("naive", "int4"),
            "on_policy int4": arm("on_policy", "int4"),
            "tis int4": arm("tis", "int4"),
            "acr int4": arm("acr", "int4"),
            "acr+uaq int4": arm("acr", "int4", UAQ),
        },
        ["optimizer.learning_rate=3e-4"],
    ),
}
# With one learner rank, the learner waits while the server samples, and the reverse. So a run keeps
# about one core busy, and two runs share two cores.
COMMON_OVERRIDES = ["learner.tensor_parallel_size=1", "checkpoint.keep_last=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/objectives"))
    arguments = parser.parse_args()
    arms, setting_overrides = SETTINGS[arguments.setting]
    results = Results(arguments.setting)

    missing = [
        (seed, name) for seed in arguments.seeds for name in arms if not results.has(name, seed)
    ]

    def run_arm(key: tuple[int, str]) -> None:
        seed, name = key
        run_dir = run_directory(arguments.output_dir, arguments.setting, name, seed)
        start = start_directory(arguments.output_dir, seed) / "final_model"
        overrides = [f"model={start}", "warmup.max_steps=0", f"seed={seed}", f"steps={STEPS}"]
        complete_run(run_dir, [*COMMON_OVERRIDES, *overrides, *setting_overrides, *arms[name]])
        results.add(name, seed, summarize(run_dir))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = sorted({seed for seed, _ in missing})
        list(pool.map(lambda seed: make_start(arguments.output_dir, seed), seeds))
        list(pool.map(run_arm, missing))
    results.show(list(arms), arguments.seeds)
    for seed in arguments.seeds:
        run_dirs = [
            run_directory(arguments.output_dir, arguments.setting, name, seed) for name in arms
        ]
        if all(run_dir.exists() for run_dir in run_dirs):
            page = arguments.output_dir / f"{arguments.setting}.html"
            subprocess.run([QURL, "report", *run_dirs, "--output", page], check=True)
            break


def run_directory(output_dir: Path, setting: str, name: str, seed: int) -> Path:
    return output_dir / f"{setting}-{name.replace(' ', '-')}-{seed}"


class Results:
    """The JSON file of one setting, rewritten after every run."""

    def __init__(self, setting: str) -> None:
        self._path = RESULTS / f"objectives_{setting}.json"
        self._lock = Lock()
        self._tree: dict[str, Any] = {
            "command": f"python benchmarks/objectives.py --setting {setting}",
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "sglang", "megatron-core")},
            "steps": STEPS,
            "runs": {},
        }
        if self._path.exists():
            self._tree |= {"runs": json.loads(self._path.read_text())["runs"]}

    def has(self, name: str, seed: int) -> bool:
        return f"{name}, seed {seed}" in self._tree["runs"]

    def add(self, name: str, seed: int, row: dict[str, float]) -> None:
        with self._lock:
            self._tree["runs"][f"{name}, seed {seed}"] = {
                "date": date.today().isoformat(),
                **row,
            }
            self._path.parent.mkdir(exist_ok=True)
            write_whole(self._path, json.dumps(self._tree, indent=2) + "\n")
            print(f"{name}, seed {seed}: {row['held_out_accuracy']:.1%}", flush=True)

    def show(self, arms: list[str], seeds: list[int]) -> None:
        """Print a Markdown table of all arms.

        The gain is the mean difference to the first arm's run of the same seed.
        """

        def column(name: str, metric: str) -> list[float]:
            return [self._tree["runs"][f"{name}, seed {seed}"][metric] for seed in seeds]

        def mean_and_error(values: list[float]) -> str:
            error = f" ± {stdev(values) / sqrt(len(values)):.1f}" if len(values) > 1 else ""
            return f"{fmean(values):.1f}{error}"

        baseline = column(arms[0], "held_out_accuracy")
        print(
            f"| arm | held-out, %, by seed | mean ± s.e. | gain over {arms[0]}, points "
            "| fewest steps | collapsed | KL k3 | max ratio | truncated by TIS |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for name in arms:
            after = column(name, "held_out_accuracy")
            gains = [100 * (a - b) for a, b in zip(after, baseline, strict=True)]
            cells = (
                name,
                ", ".join(f"{value:.1%}"[:-1] for value in after),
                mean_and_error([100 * value for value in after]),
                mean_and_error(gains) if name != arms[0] else "",
                f"{min(column(name, 'steps')):.0f}",
                f"{sum(column(name, 'collapsed')):.0f} of {len(seeds)}",
                f"{fmean(column(name, 'kl_behaviour_proximal_k3')):.1e}",
                f"{max(column(name, 'ratio_proximal_behaviour_max')):.1f}",
                f"{fmean(column(name, 'tis_truncated_fraction')):.2%}",
            )
            print(f"| {' | '.join(cells)} |")


def start_directory(output_dir: Path, seed: int) -> Path:
    return output_dir / f"start-{seed}"


def make_start(output_dir: Path, seed: int) -> None:
    """Write the quickstart model after its warm-up, with a run of one step at learning rate 0."""
    complete_run(
        start_directory(output_dir, seed),
        [f"seed={seed}", "steps=1", "optimizer.learning_rate=0"],
    )


def complete_run(run_dir: Path, overrides: list[str]) -> None:
    """Start or resume a run, and wait for its end. Return at once if it has a summary.

    Raises:
        RuntimeError: the run failed; the message names its log file.
    """
    if (run_dir / "summary.json").exists():
        return
    command: list[str | Path] = [QURL, "resume", run_dir]
    if not run_dir.exists():
        location = [f"name={run_dir.name}", f"output_dir={run_dir.parent}"]
        command = [QURL, "train", "quickstart", *overrides, *location]
    log = run_dir.parent / f"{run_dir.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        process = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if process.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))} exited with {process.returncode}; see {log}"
        )


def summarize(run_dir: Path) -> dict[str, float]:
    """Return the figures of a finished run.

    The figures that `means` names are means over the last tenth of the steps.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = read_json_lines(run_dir / "metrics.jsonl")
    late = steps[-max(1, len(steps) // 10) :]
    means = (
        "reward_mean",
        "kl_behaviour_proximal_k3",
        "tis_truncated_fraction",
        "acr_widened_fraction",
        "clip_fraction",
        "code_flip_fraction",
    )
    return {
        "held_out_accuracy_before": summary["held_out_accuracy_before"],
        "held_out_accuracy": summary["held_out_accuracy_after"],
        "steps": len(steps),
        "collapsed": collapsed([step["reward_mean"] for step in steps]),
        "ratio_proximal_behaviour_max": max(step["ratio_proximal_behaviour_max"] for step in steps),
        **{metric: fmean(step[metric] for step in late) for metric in means},
    }


def collapsed(rewards: list[float]) -> bool:
    """Check whether the reward ended below half of its best; both are means of a tenth of a run."""
    tenth = max(1, len(rewards) // 10)
    starts = range(0, len(rewards) - tenth + 1, tenth)
    means = [fmean(rewards[start : start + tenth]) for start in starts]
    return means[-1] < max(means) / 2


if __name__ == "__main__":
    main()
