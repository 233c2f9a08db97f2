"""Check what `qurl mismatch` recommends against real runs: `python benchmarks/mismatch.py MODEL`.

MODEL is the final model of a quickstart. For each format, `qurl mismatch` answers 900 words of five
letters with it and recommends layers to keep in BF16. Then runs of one step at learning rate 0
measure their mismatch (`mismatch.json`) on 1,024 completions, without and with
`quantization.keep`, in pairs of the same seed.

It prints two Markdown tables. The first has what `qurl mismatch` says: exact KL in nats a token, of
which the fall is measured on completions that the layers were not chosen on. The second has the
runs' k3 estimates, as means over seeds with standard errors; "BF16" is what remains between the
learner and a server that quantizes nothing. Commands that are done are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from qurl_megatron.data.problems import read_problems
from qurl_megatron.files import write_whole

QURL = Path(sys.executable).with_name("qurl")
FORMATS = ("int8", "fp8", "int4")
BUDGET = 0.2  # largest growth of a server's weights: these models are small, their scales are not


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="number of commands at the same time")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/mismatch"))
    arguments = parser.parse_args()
    model, directory = arguments.model.absolute(), arguments.output_dir.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    words = write_words(directory / "words.jsonl")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        tables = dict(
            zip(
                arguments.formats,
                pool.map(lambda name: predict(model, words, name, directory), arguments.formats),
                strict=True,
            )
        )
        arms: list[tuple[str, str, list[str], int]] = [
            (weight_format, name, keep, seed)
            for weight_format in arguments.formats
            for seed in arguments.seeds
            for name, keep in (("all", []), ("keep", tables[weight_format]["keep"]))
        ]
        mismatches = list(pool.map(lambda arm: measure(model, directory, *arm), arms))

    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "megatron-core"))
    )
    show_tables(tables)
    show_runs(arguments.formats, mismatches, len(arguments.seeds))


def write_words(path: Path) -> Path:
    """Write the words to spell backward, and return `path`."""
    options = {"min_word_len": 5, "max_word_len": 5, "size": 1000}
    problems = read_problems("reasoning_gym:spell_backward", options, seed=7).problems
    lines = [json.dumps({"question": each.question, "answer": each.answer}) for each in problems]
    write_whole(path, "".join(line + "\n" for line in lines))
    return path


def predict(model: Path, words: Path, weight_format: str, directory: Path) -> dict[str, Any]:
    """Return what `qurl mismatch` writes."""
    output = directory / f"{weight_format}.json"
    if not output.exists():
        options = ["--format", weight_format, "--prompts", "900", "--max-response", "8"]
        options += ["--budget", str(BUDGET), "--output", str(output)]
        call(["mismatch", str(model), str(words), *options], output.with_suffix(".log"))
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def measure(
    model: Path, directory: Path, weight_format: str, arm: str, keep: Sequence[str], seed: int
) -> dict[str, dict[str, float]]:
    """Return the mismatch that a run with these layers in BF16 measures before its first step."""
    name = f"{weight_format}-{arm}-{seed}"
    if not (directory / name / "summary.json").exists():
        overrides = {
            "model": model,
            "output_dir": directory,
            "name": name,
            "seed": seed,
            "steps": 1,
            "warmup.max_steps": 0,
            "optimizer.learning_rate": 0,
            "evaluation.problems": 16,
            "rollout.prompts_per_step": 1024,
            "rollout.completions_per_prompt": 2,
            "learner.tensor_parallel_size": 1,
            "quantization.format": weight_format,
            "quantization.uaq.scale": 1,
            "quantization.keep": f"[{','.join(keep)}]",
        }
        words = [f"{key}={value}" for key, value in overrides.items()]
        call(["train", "quickstart", *words], directory / f"{name}.log")
    mismatch: dict[str, dict[str, float]] = json.loads(
        (directory / name / "mismatch.json").read_text()
    )
    return mismatch


def call(words: list[str], log: Path) -> None:
    with log.open("w") as output:
        process = subprocess.run([QURL, *words], stdout=output, stderr=subprocess.STDOUT)
    if process.returncode:
        raise RuntimeError(f"qurl {' '.join(words)} exited with {process.returncode}; see {log}")


def show_tables(tables: dict[str, dict[str, Any]]) -> None:
    """Print what `qurl mismatch` says, one format a column."""
    results = list(tables.values())

    def row(title: str, cells: list[str]) -> None:
        print(f"| {' | '.join([title, *cells])} |")

    def largest_layer(result: dict[str, Any]) -> str:
        layer = max(result["by_layer"], key=lambda each: each["gain"])
        return f"{', '.join(layer['names'])}: {layer['gain'] / result['kl']:.0%}"

    def shares(kind: str, first: float) -> list[str]:
        """Say which part of tokens and KL is where the value is at least `first`."""
        cells = []
        for result in results:
            rows = [each for each in result["by_token"][kind] if each["first"] >= first]
            tokens, of_kl = (sum(each[key] for each in rows) for key in ("tokens", "of_kl"))
            cells.append(f"{tokens:.0%} of tokens, {of_kl:.0%} of the KL")
        return cells

    row("", [name.upper() for name in tables])
    row("---", ["---"] * len(tables))
    row("KL with all layers quantized", [f"{each['kl_before']:.2e}" for each in results])
    row("with the recommended in BF16", [f"{each['kl_after']:.2e}" for each in results])
    row(
        "fall, ± standard error",
        [
            f"{each['tried']['gain']:.1e} ± {each['tried']['standard_error']:.1e}"
            for each in results
        ],
    )
    row("fall", [f"{1 - each['kl_after'] / each['kl_before']:.0%}" for each in results])
    row(
        "growth of a server's weights",
        [f"{each['added_bytes'] / each['server_bytes']:.1%}" for each in results],
    )
    row("kept", [", ".join(each["keep"]) for each in results])
    row("largest single layer", [largest_layer(each) for each in results])
    row("entropy of 0.5 nats or more", shares("entropy", 0.5))
    row("fifth token or later", shares("position", 4))
    row("not the likeliest token", shares("rank", 2))
    print()


def show_runs(
    formats: Sequence[str], mismatches: list[dict[str, dict[str, float]]], num_seeds: int
) -> None:
    """Print the runs' estimates, given by format and seed, each without and with layers."""

    def mean_and_error(values: list[float]) -> str:
        error = f" ± {stdev(values) / sqrt(len(values)):.1e}" if len(values) > 1 else ""
        return f"{fmean(values):.2e}{error}"

    print("| | all layers quantized | with the recommended in BF16 | fall by seed | BF16 |")
    print(f"|{'---|' * 5}")
    metric = "kl_behaviour_proximal_k3"
    for index, weight_format in enumerate(formats):
        chosen = mismatches[2 * num_seeds * index : 2 * num_seeds * (index + 1)]
        before, after = (
            [mismatch["rollout"][metric] for mismatch in chosen[arm::2]] for arm in (0, 1)
        )
        falls = ", ".join(f"{1 - b / a:.0%}" for a, b in zip(before, after, strict=True))
        floor = mean_and_error([mismatch["evaluation"][metric] for mismatch in chosen])
        cells = (weight_format.upper(), mean_and_error(before), mean_and_error(after), falls, floor)
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
