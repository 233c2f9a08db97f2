"""How a learner's step grows: `python benchmarks/growth.py` prints time, memory and traffic.

A step takes a batch from global rank 0 to all ranks, scores it and updates on it, as the training
loop does. A tiny Qwen2 in float32 runs in real processes over gloo, with one thread each. One thing
grows at a time:

    layers   on one rank
    tokens   of a batch, on one rank, in micro batches of one size
    ranks    data-parallel, with one batch for all

For each it prints, as medians over steps with [least, most]: the CPU seconds of global rank 0 in a
step; wall seconds; by how much the peak of its resident memory exceeds what it held before the
first step; and the bytes that it sent. Slopes are those of straight lines through the logarithms of
all steps, with their standard errors: 1 is proportional, 0 does not grow.

The last table has the bytes that global rank 0 sends for every token of the batch, by the number of
ranks: the bytes of a step with a large batch less those with a small one, so that the traffic of
gradients and weights drops out. Divided by the number of other ranks, their slope is 0 if every
rank is sent the whole batch, a cost of ranks times batch, and -1 if each is sent a share of it.

Bytes are those that the process wrote to sockets, as the kernel counts them (/proc/self/io).
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import psutil

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY / "tests"))  # real learners and models to measure

from distributed import run_ranks  # noqa: E402
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack  # noqa: E402
from qurl_megatron.algorithm.objective import PolicyLoss, token_weights  # noqa: E402
from qurl_megatron.config.schema import LearnerConfig, ObjectiveConfig, OptimizerConfig  # noqa: E402
from qurl_megatron.learner.learner import Learner  # noqa: E402
from tiny import build_tiny_model  # noqa: E402

PROMPT, SHORTEST, LONGEST = 16, 32, 96  # tokens of a prompt, and of the responses
MICRO_BATCH = 1024  # tokens


class Step(NamedTuple):
    """What one step cost global rank 0."""

    size: int  # what is varied
    cpu_s: float
    wall_s: float
    peak_bytes: int  # of resident memory in all steps so far, beyond that before the first one
    sent_bytes: int


def groups(sequences: int) -> list[RolloutGroup]:
    """Return as many groups of one completion; the lengths of responses are spread evenly."""
    made = []
    for number in range(sequences):
        length = SHORTEST + number * 37 % (LONGEST - SHORTEST + 1)
        tokens = [2 + (number + place) % 250 for place in range(PROMPT + length)]
        prompt = Prompt(str(number), "", "", tokens[:PROMPT])
        logprobs = [-1.0 - place % 7 / 7 for place in range(length)]
        completion = Completion(tokens[PROMPT:], logprobs, "", False, [0] * length)
        made.append(RolloutGroup(prompt, [completion], [1.0]))
    return made


def train(learner: Learner, batch: TrainBatch) -> None:
    """Take the batch, which global rank 0 has, through one step of the training loop."""
    share = learner.share(batch)
    learner.score(share, ["proximal_logprobs", "entropy"], temperature=1.0)
    learner.update(share, PolicyLoss(ObjectiveConfig()), temperature=1.0)


def steps(model: Path, ranks: int, sequences: int, steps: int, size: int) -> list[Step]:
    """Measure this rank's steps after a first one that is not counted, but for its memory."""
    layout = LearnerConfig(
        data_parallel_size=ranks, dtype="float32", tokens_per_micro_batch=MICRO_BATCH
    )
    learner = Learner(model, layout, OptimizerConfig(learning_rate=1e-4))
    process, measured = psutil.Process(), []
    before = process.memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    for _ in range(1 + steps):
        batch = TrainBatch.empty()
        if os.environ["RANK"] == "0":
            advantages = [[number % 2 - 0.5] for number in range(sequences)]
            batch = pack(groups(sequences), advantages)
            batch.loss_weights = token_weights(batch.loss_mask, batch.lengths, "token_mean")
        sent, cpu, wall = process.io_counters().write_chars, time.process_time(), time.monotonic()
        train(learner, batch)
        step = Step(
            size,
            time.process_time() - cpu,
            time.monotonic() - wall,
            _peak_resident_bytes() - before,
            process.io_counters().write_chars - sent,
        )
        measured.append(step)
    learner.close()
    return measured[1:]


def _peak_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(peak)


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and standard error of the straight line through the logarithms of points."""
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    line = statistics.linear_regression(xs, ys)
    errors = [y - line.intercept - line.slope * x for x, y in zip(xs, ys, strict=True)]
    variance = sum(error**2 for error in errors) / max(1, len(xs) - 2)
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    return line.slope, math.sqrt(variance / spread)


def print_table(name: str, measured: list[Step]) -> None:
    """Print what was measured for each size, and the slopes."""
    print(f"\n   {name:>8} {'CPU s':>24} {'wall s':>24} {'peak MiB':>10} {'sent MiB':>10}")
    for size in sorted({step.size for step in measured}):
        own = [step for step in measured if step.size == size]
        cells = [_spread([step.cpu_s for step in own]), _spread([step.wall_s for step in own])]
        peak = max(step.peak_bytes for step in own) / 2**20
        sent = statistics.median(step.sent_bytes for step in own) / 2**20
        print(f"   {size:8} {cells[0]:>24} {cells[1]:>24} {peak:10.1f} {sent:10.2f}", flush=True)
    slopes = []
    for field in ("cpu_s", "wall_s", "peak_bytes"):
        value, error = slope([(step.size, getattr(step, field)) for step in measured])
        slopes.append(f"{value:.2f} ± {error:.2f}")
    print(f"   {'slope':>8} {slopes[0]:>24} {slopes[1]:>24} {slopes[2]:>10}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="number of measured steps of each")
    parser.add_argument("--sequences", type=int, default=128, help="of a batch")
    parser.add_argument("--layers", type=int, default=[2, 4, 8, 16], nargs="+")
    parser.add_argument("--ranks", type=int, default=[1, 2, 4, 8], nargs="+")
    arguments = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    )
    few = arguments.sequences
    with tempfile.TemporaryDirectory() as scratch:

        def measure(layers: int, ranks: int, sequences: int, size: int) -> list[Step]:
            model = Path(scratch) / f"{layers}_layers"
            if not model.exists():
                build_tiny_model(model, num_hidden_layers=layers)
            rounds = (model, ranks, sequences, arguments.steps, size)
            results: list[list[Step]] = run_ranks(steps, ranks, *rounds, timeout_s=300)
            return results[0]

        by_layers = [measure(n, 1, few, n) for n in arguments.layers]
        print_table("layers", sum(by_layers, []))
        by_tokens = [measure(2, 1, n, num_tokens(n)) for n in (few // 2, few, 2 * few, 4 * few)]
        print_table("tokens", sum(by_tokens, []))
        by_ranks = {n: measure(2, n, 4 * few, n) for n in arguments.ranks}
        print_table("ranks", sum(by_ranks.values(), []))
        print(f"\n   {'ranks':>8} {'bytes of rank 0 for a token':>30} {'and other rank':>16}")
        for_a_rank = []
        for ranks in sorted(set(by_ranks) - {1}):
            small = measure(2, ranks, few, ranks)
            more = statistics.median(step.sent_bytes for step in by_ranks[ranks])
            more -= statistics.median(step.sent_bytes for step in small)
            for_a_token = more / (num_tokens(4 * few) - num_tokens(few))
            for_a_rank.append((float(ranks), for_a_token / (ranks - 1)))
            print(f"   {ranks:8} {for_a_token:30.1f} {for_a_rank[-1][1]:16.1f}", flush=True)
        value, error = slope(for_a_rank)
        print(f"   {'slope':>8} {'':30} {f'{value:.2f} ± {error:.2f}':>16}")


def num_tokens(sequences: int) -> int:
    """Return the tokens of a batch."""
    made = groups(sequences)
    return sum(PROMPT + len(group.completions[0].token_ids) for group in made)


if __name__ == "__main__":
    main()
