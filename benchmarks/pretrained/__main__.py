"""Measure on SmolLM2-135M-Instruct: `python -m benchmarks.pretrained --chapter rounding`.

    chapter     what differs between its arms
    rounding    how float32 masters become BF16, supervised training at learning rates of RL
    codes       of what codes are made: masters, or BF16 values of them
    cost        how masters become BF16, by the seconds that it takes
    smoothing   the format of a served copy, and the exponent of its smoothing
    yardsticks  finer scales than servers have, beside smoothing
    aware       the format that the learner computes in: time, and how near it can come
    proof       right starts of the recipe `smollm2`, none of which its proof may end

An arm that benchmarks/results/pretrained.jsonl has is not repeated: a chapter can be interrupted.
The rows are printed as a table in the end.
"""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.pretrained import aware, codes, cost, proof, rounding, smoothing, yardsticks
from qurl_megatron.files import read_json_lines

RESULTS = Path(__file__).parents[1] / "results" / "pretrained.jsonl"
CHAPTERS: dict[str, Any] = {
    "rounding": rounding,
    "codes": codes,
    "cost": cost,
    "smoothing": smoothing,
    "yardsticks": yardsticks,
    "aware": aware,
    "proof": proof,
}


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--chapter", choices=CHAPTERS, required=True)
    parser.add_argument("--model", type=Path, help="its directory; else the package's is written")
    arguments = parser.parse_args()
    chapter = CHAPTERS[arguments.chapter]
    machine.print_machine("torch", "megatron-core")
    measured = [row["arm"] for row in read_rows(arguments.chapter)]
    if missing := [arm for arm in chapter.ARMS if arm not in measured]:
        with machine.real_model(arguments.model) as model:
            for arm in missing:
                words = {"chapter": arguments.chapter, "arm": arm, "torch": torch.__version__}
                words["machine"] = f"{machine.processor()} ({machine.instructions()})"
                row = words | chapter.measure(model, **arm)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(chapter.table(read_rows(arguments.chapter)))


def read_rows(chapter: str) -> list[dict[str, Any]]:
    """Return the rows of a chapter that have been measured."""
    return [row for row in read_json_lines(RESULTS) if row["chapter"] == chapter]


if __name__ == "__main__":
    main()
