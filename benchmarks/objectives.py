"""Compare what each objective learns from the same start: `python benchmarks/objectives.py`.

All arms of a seed start from the same warmed-up model. Each arm is one complete `qurl train
quickstart` with its own objective, weight format and UAQ scale. The arms compare truncated
importance sampling (TIS), adaptive clipping range (ACR) and update-aware quantization (UAQ) with
BF16 rollouts and with the uncorrected objectives.

    setting        what differs from the quickstart's 50 steps with 8-bit rollouts
    quickstart     nothing
    large_gap      4-bit codes in the same INT8 layers and twice the learning rate, so that the
                   quantized policy is as far from the learner as in the paper's late training
    asynchronous   the large gap, and servers that sample up to four steps ahead
    long           4-bit codes, and answers of 64 tokens: four digits are continued by 64 more, each
                   the sum modulo 10 of the one before and the fourth before. An answer is right if
                   all of them are. 32 x 8 answers a step, at two thirds of the learning rate
    experts        a mixture of experts, and 8-bit or 4-bit rollouts whose choice of experts the
                   learner compares with its own, or replays

The figures of a run are appended to benchmarks/results/objectives.jsonl when it ends. A second call
skips the runs that have figures and resumes the runs that were interrupted; `--runs 1` ends after
one. Once no run is missing it prints a table, and writes a report that overlays the runs of the
first seed whose run directories all still exist.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from threading import Lock

from qurl_megatron.files import read_json_lines, write_whole

QURL = Path(sys.executable).with_name("qurl")
RESULTS = Path(__file__).parent / "results" / "objectives.jsonl"
STEPS = 50
DIGITS = 64

NO_UAQ = "quantization.uaq.scale=1"
UAQ = "quantization.uaq.scale=1.5"


@dataclass(frozen=True)
class Setting:
    """Arms that start from the same models."""

    arms: dict[str, list[str]]  # name -> overrides of the arm; the others are compared to the first
    overrides: list[str] = field(default_factory=list)  # of every arm
    adds_digits: bool = False  # False: the quickstart's task
    recipe: str = "quickstart"


def arm(objective: str, weight_format: str, uaq: str = NO_UAQ) -> list[str]:
    """Return the config overrides of one arm."""
    return [f"objective.objective={objective}", f"quantization.format={weight_format}", uaq]


def int4_arms(*objectives: str) -> dict[str, list[str]]:
    """Return an arm with 4-bit codes for each objective."""
    return {f"{objective} int4": arm(objective, "int4") for objective in objectives}


BF16 = {"bf16": arm("on_policy", "bf16")}
TWICE_THE_RATE = "optimizer.learning_rate=3e-4"
SETTINGS = {
    "quickstart": Setting(
        BF16
        | {f"{name} int8": arm(name, "int8") for name in ("naive", "on_policy", "tis", "acr")}
        | {
            "acr+uaq int8": arm("acr", "int8", UAQ),
            "tis fp8": arm("tis", "fp8"),
            "acr fp8": arm("acr", "fp8"),
        }
    ),
    "large_gap": Setting(
        BF16
        | int4_arms("naive", "on_policy", "tis", "acr")
        | {"acr+uaq int4": arm("acr", "int4", UAQ)},
        [TWICE_THE_RATE],
    ),
    # on_policy is refused where tokens are stale: it corrects for nothing.
    "asynchronous": Setting(
        {"bf16": arm("tis", "bf16")} | int4_arms("naive", "decoupled", "tis", "acr"),
        [TWICE_THE_RATE, "rollout.max_staleness=4"],
    ),
    "long": Setting(
        BF16 | int4_arms("naive", "tis", "acr"),
        ["optimizer.learning_rate=1e-4"],
        adds_digits=True,
    ),
    "experts": Setting(
        {"compare bf16": [*arm("tis", "bf16"), "rollout.routing=compare"]}
        | {
            f"{routing} {weight_format}": [*arm("tis", weight_format), f"rollout.routing={routing}"]
            for weight_format in ("int8", "int4")
            for routing in ("compare", "replay")
        },
        recipe="quickstart_experts",
    ),
}
# With one learner rank, the learner waits while the server samples, and the reverse. So a run keeps
# about one core busy, and two runs share two cores.
ONE_RANK = ["learner.tensor_parallel_size=1", "learner.expert_parallel_size=1"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", choices=SETTINGS, default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time")
    parser.add_argument("--runs", type=int, help="end after so many of the missing runs")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/objectives"))
    arguments = parser.parse_args()
    setting = SETTINGS[arguments.setting]
    results = Results(arguments.setting)
    output_dir = arguments.output_dir.absolute()

    missing = [
        (seed, name)
        for seed in arguments.seeds
        for name in setting.arms
        if not results.has(name, seed)
    ]
    chosen = missing[: arguments.runs]

    def run_arm(key: tuple[int, str]) -> None:
        seed, name = key
        run_dir = run_directory(output_dir, arguments.setting, name, seed)
        start = start_directory(output_dir, setting, seed) / "final_model"
        words = [*recipe(output_dir, setting), *overrides(setting, name, seed)]
        complete_run(run_dir, [*words, f"model={start}"])
        results.add(name, seed, summarize(run_dir))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        seeds = sorted({seed for seed, _ in chosen})
        list(pool.map(lambda seed: make_start(output_dir, setting, seed), seeds))
        list(pool.map(run_arm, chosen))
    if chosen != missing:
        print(f"{len(missing) - len(chosen)} runs are missing", flush=True)
        return
    results.show(list(setting.arms), arguments.seeds)
    for seed in arguments.seeds:
        run_dirs = [
            run_directory(output_dir, arguments.setting, name, seed) for name in setting.arms
        ]
        if all(run_dir.exists() for run_dir in run_dirs):
            page = output_dir / f"{arguments.setting}.html"
            subprocess.run([QURL, "report", *run_dirs, "--output", page], check=True)
            break


def run_directory(output_dir: Path, setting: str, name: str, seed: int) -> Path:
    return output_dir / f"{setting}-{name.replace(' ', '-')}-{seed}"


class Results:
    """The runs of one setting in the file of results, one per line."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._lock = Lock()
        self._runs = {
            (line["arm"], line["seed"]): line
            for line in read_json_lines(RESULTS)
            if line["setting"] == setting
        }

    def has(self, name: str, seed: int) -> bool:
        return (name, seed) in self._runs

    def add(self, name: str, seed: int, row: dict[str, float]) -> None:
        line = {
            "setting": self._setting,
            "arm": name,
            "seed": seed,
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "sglang", "megatron-core")},
            **row,
        }
        with self._lock:
            self._runs[name, seed] = line
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{name}, seed {seed}: {row['held_out_accuracy']:.1%}", flush=True)

    def show(self, arms: list[str], seeds: list[int]) -> None:
        """Print a Markdown table of all arms.

        The gain is the mean difference to the first arm's run of the same seed.
        """

        def column(name: str, metric: str) -> list[float]:
            return [self._runs[name, seed][metric] for seed in seeds]

        def mean_and_error(values: list[float]) -> str:
            error = f" ± {stdev(values) / sqrt(len(values)):.1f}" if len(values) > 1 else ""
            return f"{fmean(values):.1f}{error}"

        baseline = column(arms[0], "held_out_accuracy")
        print(
            f"| arm | held-out, %, by seed | mean ± s.e. | gain over {arms[0]}, points "
            "| fewest steps | collapsed | KL k3 | max ratio | above C | clipped | widened "
            "| other experts |"
        )
        print(f"|{'---|' * 12}")
        for name in arms:
            changed = "routing_changed_fraction"
            knows_experts = all(changed in self._runs[name, seed] for seed in seeds)
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
                f"{fmean(column(name, 'clip_fraction')):.2%}",
                f"{fmean(column(name, 'acr_widened_fraction')):.3%}",
                f"{fmean(column(name, changed)):.2%}" if knows_experts else "",
            )
            print(f"| {' | '.join(cells)} |")


def start_directory(output_dir: Path, setting: Setting, seed: int) -> Path:
    task = "digits" if setting.adds_digits else setting.recipe
    return output_dir / f"start-{task}-{seed}"


def recipe(output_dir: Path, setting: Setting) -> list[str]:
    """Return the recipe of the setting's task and its overrides; write problems of its own."""
    if not setting.adds_digits:
        return [setting.recipe]
    path = output_dir / "digits.jsonl"
    if not path.exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(json.dumps(problem) + "\n" for problem in rows_of_digits()))
    return [
        "quickstart",
        f"data={path}",
        "data_options={}",
        "reward=exact",
        "rollout.max_prompt_length=4",
        f"rollout.max_response_length={DIGITS + 1}",
        "rollout.prompts_per_step=32",
        "evaluation.problems=256",
    ]


def overrides(setting: Setting, name: str, seed: int) -> list[str]:
    """Return the overrides of an arm's run, the model aside."""
    run = ["warmup.max_steps=0", f"seed={seed}", f"steps={STEPS}", "checkpoint.keep_last=1"]
    return [*run, *ONE_RANK, *setting.overrides, *setting.arms[name]]


def rows_of_digits() -> Iterator[dict[str, str]]:
    """Yield four digits as a question and the next 64 as its answer, for all four digits."""
    for start in itertools.product(range(10), repeat=4):
        row = list(start)
        while len(row) < len(start) + DIGITS:
            row.append((row[-1] + row[-len(start)]) % 10)
        text = "".join(map(str, row))
        yield {"question": text[: len(start)], "answer": text[len(start) :]}


def make_start(output_dir: Path, setting: Setting, seed: int) -> None:
    """Write the model after its warm-up, with a run of one step at learning rate 0."""
    directory = start_directory(output_dir, setting, seed)
    words = [f"seed={seed}", "steps=1", "optimizer.learning_rate=0", *ONE_RANK]
    complete_run(directory, [*recipe(output_dir, setting), *words])


def complete_run(run_dir: Path, words: list[str]) -> None:
    """Start a run with `words` after `qurl train`, or resume it, and wait for its end.

    Return at once if it has a summary.

    Raises:
        RuntimeError: the run failed; the message names its log file.
    """
    if (run_dir / "summary.json").exists():
        return
    command: list[str | Path] = [QURL, "resume", run_dir]
    if not run_dir.exists():
        location = [f"name={run_dir.name}", f"output_dir={run_dir.parent}"]
        command = [QURL, "train", *words, *location]
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
        "routing_changed_fraction",  # only in a mixture of experts
    )
    return {
        "held_out_accuracy_before": summary["held_out_accuracy_before"],
        "held_out_accuracy": summary["held_out_accuracy_after"],
        "steps": len(steps),
        "collapsed": collapsed([step["reward_mean"] for step in steps]),
        "ratio_proximal_behaviour_max": max(step["ratio_proximal_behaviour_max"] for step in steps),
        **{
            metric: fmean(step[metric] for step in late)
            for metric in means
            if late[0][metric] is not None
        },
    }


def collapsed(rewards: list[float]) -> bool:
    """Check whether the reward ended below half of its best; both are means of a tenth of a run."""
    tenth = max(1, len(rewards) // 10)
    starts = range(0, len(rewards) - tenth + 1, tenth)
    means = [fmean(rewards[start : start + tenth]) for start in starts]
    return means[-1] < max(means) / 2


if __name__ == "__main__":
    main()
