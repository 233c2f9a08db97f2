"""Find out when an objective or UAQ matters: `python -m benchmarks.study run`, then `show`.

Small policies without attention learn from what their quantized copies sampled. There is no server,
no learner and no noise in what is measured: 64 seeds of a setting ("arm") are trained in one tensor
program, and their scores are computed exactly. What is compared is the project's own code: the
objective, the advantages, the quantizer, UAQ and the settings of the optimizer.

All arms of a task begin with the same policies and draw the same random numbers, so two arms are
compared seed by seed. `show` prints mean differences with their standard errors, and draws the
map. `run` skips the arms that benchmarks/results/study.jsonl has, so it can be interrupted.

    chapter            what differs between its arms
    map                objective x gap x staleness x minibatches per step
    lengths            sequence_tis and tis, by length of answers
    top_p              symbols drawn from a nucleus, the learner's log-probs over the same nucleus
    uaq                s, against a learning rate that is larger by the same factor, for updates
                       below and above a code's step
"""

import json
import os
import platform
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import machine
from benchmarks.study.figures import draw_map
from benchmarks.study.train import GAP_NAMES, Arm, Gap, run
from qurl_megatron.files import read_json_lines

RESULTS = Path(__file__).parents[1] / "results" / "study.jsonl"
PICTURES = Path(__file__).parents[2] / "docs" / "assets"
SEEDS, STEPS = 64, 100
OBJECTIVES = ("naive", "on_policy", "decoupled", "tis", "acr")
# Where the engine and the age of the weights both matter, and where neither does.
FAR = Arm(gap="int4", staleness=4, minibatches=4)
NEAR = Arm(gap="int8", staleness=0, minibatches=1)
UAQ_GAPS: tuple[Gap, ...] = ("int8", "int4")
# Minibatches, gap, staleness. Four minibatches show the gaps and ages; one and sixteen show what
# the number of minibatches changes at the gap where objectives differ.
MAP: tuple[tuple[int, Gap, tuple[int, ...]], ...] = (
    (4, "int4", (0, 1, 4, 16)),
    (4, "int8", (0, 1, 4, 16)),
    (4, "fp8", (0, 4)),
    (4, "int4x2", (0, 4)),
    (4, "none", (4, 16)),
    (1, "int4", (0, 4)),
    (16, "int4", (0, 4)),
    (16, "int8", (4,)),
)
# Symbols of an answer, gap, staleness.
LENGTHS: tuple[tuple[int, Gap, tuple[int, ...]], ...] = (
    (32, "int4", (0, 4, 16)),
    (32, "int4x2", (0, 4)),
    (32, "int8", (4,)),
    (128, "int4", (4, 16)),
    (128, "int4x2", (0,)),
    (512, "int4", (0, 4)),
    (512, "int8", (4,)),
)
TOP_P_GAPS: tuple[tuple[Gap, int], ...] = (("int8", 0), ("int4", 0), ("int4x2", 0), ("int4", 4))


def chapters() -> dict[str, dict[Arm, Arm]]:
    """Return the arms of each chapter, and the arm that each is compared with."""
    arms = {
        "map": [
            Arm(objective=objective, gap=gap, staleness=staleness, minibatches=minibatches)
            for minibatches, gap, ages in MAP
            for staleness in ages
            for objective in OBJECTIVES
            # With one minibatch R is 1, so nothing is clipped and acr is tis.
            if minibatches > 1 or objective != "acr"
        ],
        "lengths": [
            replace(FAR, length=length, gap=gap, staleness=staleness, objective=objective)
            for length, gap, ages in LENGTHS
            for staleness in ages
            for objective in ("tis", "sequence_tis")
        ],
        "top_p": [
            replace(FAR, gap=gap, staleness=staleness, objective=objective, top_p=top_p)
            for gap, staleness in TOP_P_GAPS
            for top_p in (1.0, 0.95, 0.9)
            for objective in ("naive", "tis")
        ],
    }
    compared = {
        chapter: {arm: replace(arm, objective="tis") for arm in of_chapter}
        for chapter, of_chapter in arms.items()
    }
    return compared | {"uaq": uaq_arms()}


def uaq_arms() -> dict[Arm, Arm]:
    """Return the arms with UAQ and its alternatives, each with its plain arm.

    Relative to W / s, Adam's step is s times as large; relative to the norm, an s-th. So
    `weight_rate=s, norm_rate=1 / s` without UAQ is what UAQ does to the steps of exact weights.
    """
    arms = {}
    for gap in UAQ_GAPS:
        for rate in (1e-4, 1e-3, 5e-3):
            plain = replace(NEAR, gap=gap, objective="tis", learning_rate=rate)
            for arm in (
                plain,
                *(replace(plain, uaq_scale=scale) for scale in (1.25, 1.5, 2.0)),
                replace(plain, weight_rate=2.0, norm_rate=0.5),
                replace(plain, learning_rate=2 * rate),
            ):
                arms[arm] = plain
    return arms


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("command", choices=("run", "show"))
    parser.add_argument("--chapters", nargs="+", choices=chapters(), default=list(chapters()))
    arguments = parser.parse_args()
    if arguments.command == "run":
        torch.set_num_threads(1)
        for chapter in arguments.chapters:
            for arm in chapters()[chapter]:
                run_once(arm)
        return
    outcomes = read()
    for chapter in arguments.chapters:
        show(chapter, outcomes)
    of_map = {arm: outcomes[arm] for arm in chapters()["map"] if arm in outcomes}
    if "map" in arguments.chapters and of_map:
        draw_map(of_map, PICTURES / "study_map.svg")


def run_once(arm: Arm) -> None:
    """Train an arm and append what it measured, unless the file has it."""
    if arm in read():
        return
    outcome = run(arm, SEEDS, STEPS)
    line = {
        "arm": asdict(arm),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": version("torch"),
        **asdict(outcome),
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(
        f"{arm.objective}, {describe(arm)}: {mean_and_error(outcome.after)} "
        f"({outcome.seconds:.0f} s)",
        flush=True,
    )


def read() -> dict[Arm, dict[str, Any]]:
    """Return the recorded outcomes."""
    return {Arm(**line["arm"]): line for line in read_json_lines(RESULTS)}


def show(chapter: str, outcomes: dict[Arm, dict[str, Any]]) -> None:
    """Print Markdown tables: gains in points over another arm of the cell, seed by seed.

    The first has the scores of the trained policies, the second those of their quantized copies.
    The arm that others are compared with has its score in place of a gain. The last table has the
    shares of tokens of that arm, and in its last column those of acr.
    """
    compared_with = {
        arm: base for arm, base in chapters()[chapter].items() if {arm, base} <= outcomes.keys()
    }
    cells = list(dict.fromkeys(compared_with.values()))
    variants = list(dict.fromkeys(difference(arm, base) for arm, base in compared_with.items()))
    for score in ["after", "after_quantized"] + ["after_nucleus"] * (chapter == "top_p"):
        table = {}
        for arm, base in compared_with.items():
            own, other = (of.get(score, of["after"]) for of in (outcomes[arm], outcomes[base]))
            gains = [a - b for a, b in zip(own, other, strict=True)]
            table[difference(arm, base), base] = (
                mean_and_error(own) if arm == base else mean_and_error(gains, sign="+")
            )
        rows = [["", *variants]]
        rows += [[describe(cell), *(table.get((v, cell), "") for v in variants)] for cell in cells]
        if len(cells) < len(variants):
            rows = [list(column) for column in zip(*rows, strict=True)]
        print(f"\n### {chapter}: {score}\n")
        print_table(rows)
    print(f"\n### {chapter}: tokens\n")
    header = ["", "KL k3", "largest rho", "above C", "clipped", "widened by acr"]
    print_table(
        [header]
        + [[describe(cell), *tokens(outcomes[cell]), widened(outcomes, cell)] for cell in cells]
    )


def tokens(outcome: dict[str, Any]) -> list[str]:
    """Return the distance to the engine, and the shares of tokens above C and clipped."""
    stats = outcome["stats"]
    return [
        f"{stats['kl_behaviour_proximal_k3']:.1e}",
        f"{stats['ratio_proximal_behaviour_max']:.3g}",
        f"{stats['tis_truncated_fraction']:.2%}",
        f"{stats['clipped']:.2%}",
    ]


def widened(outcomes: dict[Arm, dict[str, Any]], cell: Arm) -> str:
    """Return the share of tokens that keep their gradient only because of acr, if acr was run."""
    outcome = outcomes.get(replace(cell, objective="acr"))
    return f"{outcome['stats']['acr_widened']:.4%}" if outcome is not None else ""


def print_table(rows: list[list[str]]) -> None:
    """Print a Markdown table, whose header is the first row."""
    for cells in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        print(f"| {' | '.join(cells)} |")


def describe(arm: Arm) -> str:
    """Return the cell of an arm: gap, staleness, minibatches, and what is not the default."""
    default, names = asdict(Arm()), [GAP_NAMES[arm.gap]]
    for key, value in asdict(arm).items():
        always = key in ("staleness", "minibatches")
        if key not in ("objective", "gap") and (always or value != default[key]):
            names.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(names)


def difference(arm: Arm, base: Arm) -> str:
    """Return what sets an arm apart from the one that it is compared with."""
    other, names = asdict(base), []
    for key, value in asdict(arm).items():
        if key == "objective" and (value != other[key] or arm == base):
            names.append(value)
        elif key == "learning_rate" and value != other[key]:
            names.append(f"learning rate x {value / other[key]:g}")
        elif value != other[key]:
            names.append(f"{key.replace('_', ' ')} {value}")
    return ", ".join(names)


def mean_and_error(fractions: list[float], sign: str = "") -> str:
    """Return the mean in percent with its standard error."""
    points = [100 * fraction for fraction in fractions]
    return f"{fmean(points):{sign}.1f} ± {machine.standard_error(points):.1f}"


if __name__ == "__main__":
    main()
