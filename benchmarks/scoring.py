"""Measure how long math answers take to score: `python benchmarks/scoring.py`.

There are as many answers as in a step of DAPO: 512 problems of 16 responses each. A response is up
to two pages of reasoning with formulas and ends with a box, one in ten without. Each round scores
all of them in this process, then in one worker process and in two.

It prints, in seconds:

- `all`: from the first answer to the last score, with the workers ready;
- `main thread`: CPU time of this process in that time, which training cannot use;
- `start`: from the start of the workers until one can score.

It also looks for unreadable ones among 40,000 right answers, as the data of a run is read: two
thirds are whole numbers, a tenth intervals, which math-verify has to read, the others fractions.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import time
from importlib.metadata import version

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.score import Question
from qurl_megatron.config.schema import Config
from qurl_megatron.data.rewards import load
from qurl_megatron.data.scoring import Scorer, unverifiable

REASONING = (
    "We have $a_{%d} = \\frac{%d}{%d}$, so the sum of the first %d terms is at most %d. "
    "Multiplying both sides by %d gives \\[ x^2 - %d x + %d = 0 \\] and its roots are real. "
)


def problem(draw: random.Random, completions: int) -> tuple[Prompt, list[Completion]]:
    """Return a problem and as many responses to it; about half are right."""
    answer = draw.randint(1, 999_999)
    kind = draw.random()
    if kind < 2 / 3:
        gold = f"{answer}"
    else:
        gold = f"\\frac{{{2 * answer + 1}}}{{2}}" if kind < 0.9 else f"[{answer},{answer + 3})"
    return Prompt(f"{answer}", "How many?", gold, [1]), [
        Completion([1], [0.0], response(draw, gold), False, [1]) for _ in range(completions)
    ]


def asked(prompt: Prompt) -> Question:
    return Question(prompt.question, prompt.answer, prompt.metadata)


def response(draw: random.Random, gold: str) -> str:
    numbers = tuple(draw.randint(1, 99) for _ in range(REASONING.count("%d")))
    text = REASONING % numbers * draw.randint(2, 20)
    answer = gold if draw.random() < 0.5 else f"{draw.randint(1, 999)}"
    return text + (f"It is $\\boxed{{{answer}}}$." if draw.random() < 0.9 else f"It is {answer}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--golds", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    config = Config(reward="math")
    draw = random.Random(0)
    groups = [problem(draw, arguments.completions) for _ in range(arguments.problems)]
    number = arguments.problems * arguments.completions
    print(
        f"{number:,} answers; math-verify {version('math-verify')}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    reward = load(config)
    for _ in range(arguments.rounds):
        begin, cpu = time.perf_counter(), time.process_time()
        expected = [
            list(
                reward.score(
                    [c.text for c in completions], Question("How many?", prompt.answer, {})
                )
            )
            for prompt, completions in groups
        ]
        print_line("this process", begin, cpu)
        for workers in (1, 2):
            begin = time.perf_counter()
            with Scorer(config, workers) as scorer:
                scorer.wait_ready()
                start_s = time.perf_counter() - begin
                begin, cpu = time.perf_counter(), time.process_time()
                futures = [scorer.submit(*group) for group in groups]
                scores = [future.result() for future in futures]
                print_line(f"{workers} workers", begin, cpu, f"  start {start_s:.1f}")
            assert scores == expected
    golds = [problem(draw, 0)[0] for _ in range(arguments.golds)]
    begin, cpu = time.perf_counter(), time.process_time()
    assert not any(unverifiable(config, [asked(gold) for gold in golds]))
    print_line(f"{arguments.golds:,} right answers looked at", begin, cpu)


def print_line(name: str, begin: float, cpu: float, rest: str = "") -> None:
    all_s, main_s = time.perf_counter() - begin, time.process_time() - cpu
    print(f"{name:30} all {all_s:6.1f}  main thread {main_s:6.1f}{rest}", flush=True)


if __name__ == "__main__":
    main()
