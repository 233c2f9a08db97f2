"""What each objective learns from the same start: `python benchmarks/objectives.py`.

Every arm of a seed begins with the same warmed-up model of the quickstart and is a whole
`qurl train quickstart` with its own objective, format and s. Two settings:

    quickstart   the quickstart's task and learning rate, 8-bit rollouts
    large_gap    4-bit codes in the same INT8 layers and twice the learning rate, so that the
                 quantized policy is as far from the learner as in the paper's late training

Each run's figures go into benchmarks/results/ as it ends. Called again, it goes on where it was: a
run whose figures are there is not made again, one that was cut off is resumed. It ends with a table
and a page that overlays the runs of the first seed that are all still there.
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

PLAIN = "quantization.uaq.scale=1"
UAQ = "quantization.uaq.scale=1.5"


def arm(objective: str, weight_format: str, uaq: str = PLAIN) -> list[str]:
    return [f"objective.objective={objective}", f"quantization.format={weight_format}", uaq]


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
# One rank learns while the server waits, and the other way round: two runs share two cores.
COMMON = ["learner.tensor_parallel_size=1", "checkpoint.keep_last=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/objectives"))
    arguments = parser.parse_args()
    arms, words = SETTINGS[arguments.setting]
    results = Results(arguments.setting)

    owed = [
        (seed, name) for seed in arguments.seeds for name in arms if not results.has(name, seed)
    ]

    def finish(key: tuple[int, str]) -> None:
        seed, name = key
        run_dir = run_directory(arguments.output_dir, arguments.setting, name, seed)
        start = start_directory(arguments.output_dir, seed) / "final_model"
        own = [f"model={start}", "warmup.max_steps=0", f"seed={seed}", f"steps={STEPS}"]
        complete(run_dir, [*COMMON, *own, *words, *arms[name]])
        results.add(name, seed, summarize(run_dir))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = sorted({seed for seed, _ in owed})
        list(pool.map(lambda seed: make_start(arguments.output_dir, seed), seeds))
        list(pool.map(finish, owed))
    results.show(list(arms), arguments.seeds)
    for seed in arguments.seeds:
        shown = [
            run_directory(arguments.output_dir, arguments.setting, name, seed) for name in arms
        ]
        if all(run_dir.exists() for run_dir in shown):
            page = arguments.output_dir / f"{arguments.setting}.html"
            subprocess.run([QURL, "report", *shown, "--output", page], check=True)
            break


def run_directory(output_dir: Path, setting: str, name: str, seed: int) -> Path:
    return output_dir / f"{setting}-{name.replace(' ', '-')}-{seed}"


class Results:
    """The JSON file of one setting, whole after every run."""

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
        """A table; the second mean is of differences to the first arm's run of the same seed."""

        def column(name: str, metric: str) -> list[float]:
            return [self._tree["runs"][f"{name}, seed {seed}"][metric] for seed in seeds]

        def points(values: list[float]) -> str:
            error = f" ± {stdev(values) / sqrt(len(values)):.1f}" if len(values) > 1 else ""
            return f"{fmean(values):.1f}{error}"

        baseline = column(arms[0], "held_out_accuracy")
        print(
            f"| arm | held-out, %, by seed | mean ± s.e. | over {arms[0]}, points | steps "
            "| collapsed | KL k3 | max ratio | above C |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for name in arms:
            after = column(name, "held_out_accuracy")
            gained = [100 * (mine - its) for mine, its in zip(after, baseline, strict=True)]
            cells = (
                name,
                ", ".join(f"{value:.1%}"[:-1] for value in after),
                points([100 * value for value in after]),
                points(gained) if name != arms[0] else "",
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
    """The quickstart's model after its warm-up: a run of one step that changes nothing."""
    complete(
        start_directory(output_dir, seed),
        [f"seed={seed}", "steps=1", "optimizer.learning_rate=0"],
    )


def complete(run_dir: Path, words: list[str]) -> None:
    if (run_dir / "summary.json").exists():
        return
    command = [QURL, "resume", run_dir]
    if not run_dir.exists():
        where = [f"name={run_dir.name}", f"output_dir={run_dir.parent}"]
        command = [QURL, "train", "quickstart", *words, *where]
    log = run_dir.parent / f"{run_dir.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}; see {log}")


def summarize(run_dir: Path) -> dict[str, float]:
    """What a run came to; means over its last tenth of steps unless they say otherwise."""
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
    """Whether the reward ended below half of its best, both as means over a tenth of the run."""
    tenth = max(1, len(rewards) // 10)
    starts = range(0, len(rewards) - tenth + 1, tenth)
    means = [fmean(rewards[start : start + tenth]) for start in starts]
    return means[-1] < max(means) / 2


if __name__ == "__main__":
    main()
