"""How a learner's step grows: `python -m benchmarks.growth`.

A step takes a batch from global rank 0 to all ranks, scores it and updates on it, as the training
loop does. A tiny Qwen2 in float32 runs in real processes over gloo, with one thread each. One thing
grows at a time:

    layers   on one rank
    tokens   of a batch, on one rank, in micro batches of one size
    ranks    data-parallel, with one batch for all

For each it prints, as medians over steps with [least, most]: the CPU seconds of global rank 0 in a
step; by how much the peak of its resident memory exceeds what it held before the first step; and
the bytes that it sent. Slopes are those of straight lines through the logarithms of all steps, with
their standard errors: 1 is proportional, 0 does not grow.

Bytes are those that the process wrote to sockets, as the kernel counts them (/proc/self/io).
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from scipy.stats import linregress

from benchmarks import machine
from benchmarks.machine import MIB
from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import PolicyLoss, token_weights
from qurl_megatron.config.schema import LearnerConfig, ObjectiveConfig, OptimizerConfig
from qurl_megatron.learner.learner import Learner
from qurl_megatron.recipes import quickstart

DIMENSIONS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPT, SHORTEST, LONGEST = 16, 32, 96  # tokens of a prompt, and of the responses
MICRO_BATCH = 1024  # tokens


class Step(NamedTuple):
    """What one step cost global rank 0."""

    cpu_s: float
    peak_bytes: int  # of resident memory in all steps so far, beyond that before the first one
    sent_bytes: int


def make_batch(sequences: int) -> TrainBatch:
    """Return a batch of so many sequences; the lengths of responses are spread evenly."""
    numbers = torch.arange(sequences)
    lengths = PROMPT + SHORTEST + numbers * 37 % (LONGEST - SHORTEST + 1)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    places = torch.arange(len(starts)) - starts  # of each token in its sequence
    mask = places >= PROMPT
    return TrainBatch(
        lengths=lengths,
        tokens=(2 + places % 250).int(),
        loss_mask=mask,
        behaviour_logprobs=-1.0 - places % 7 / 7,
        advantages=(numbers % 2 - 0.5).repeat_interleave(lengths),
        loss_weights=token_weights(mask, lengths, "token_mean"),
    )


def train(learner: Learner, batch: TrainBatch) -> None:
    """Take the batch, which global rank 0 has, through one step of the training loop."""
    share = learner.share(batch)
    learner.score(share, ["proximal_logprobs", "entropy"], temperature=1.0)
    learner.update(share, PolicyLoss(ObjectiveConfig()), temperature=1.0)


def steps(model: Path, ranks: int, sequences: int, number: int) -> list[Step]:
    """Measure this rank's steps after a first one that is not counted, but for its memory."""
    layout = LearnerConfig(
        data_parallel_size=ranks, dtype="float32", tokens_per_micro_batch=MICRO_BATCH
    )
    learner = Learner(model, layout, OptimizerConfig(learning_rate=1e-4))
    process, measured, before = psutil.Process(), [], machine.held_bytes()
    machine.reset_peak()
    for _ in range(1 + number):
        batch = make_batch(sequences) if device.rank() == 0 else TrainBatch.empty()
        sent, cpu = process.io_counters().write_chars, time.process_time()
        train(learner, batch)
        step = Step(
            time.process_time() - cpu,
            machine.peak_bytes() - before,
            process.io_counters().write_chars - sent,
        )
        measured.append(step)
    learner.close()
    return measured[1:]


def slope(points: list[tuple[float, float]]) -> str:
    """Return slope and standard error of the straight line through the logarithms of points."""
    line = linregress(*np.log(points).T)
    return f"{line.slope:.2f} ± {line.stderr:.2f}"


def print_table(name: str, by_size: dict[int, list[Step]]) -> None:
    """Print what was measured for each size, and the slopes."""
    print(f"\n   {name:>8} {'CPU s':>24} {'peak MiB':>14} {'sent MiB':>10}")
    for size, own in by_size.items():
        cpu_s = machine.spread([step.cpu_s for step in own], ".3f")
        peak = max(step.peak_bytes for step in own) / MIB
        sent = median(step.sent_bytes for step in own) / MIB
        print(f"   {size:8} {cpu_s:>24} {peak:14.1f} {sent:10.2f}", flush=True)
    measured = [(size, step) for size, own in by_size.items() for step in own]
    of_cpu = slope([(size, step.cpu_s) for size, step in measured])
    of_peak = slope([(size, step.peak_bytes) for size, step in measured])
    print(f"   {'slope':>8} {of_cpu:>24} {of_peak:>14}")


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--steps", type=int, default=5, help="number of measured steps of each")
    parser.add_argument("--sequences", type=int, default=128, help="of a batch")
    parser.add_argument("--layers", type=int, default=[2, 4, 8, 16], nargs="+")
    parser.add_argument("--ranks", type=int, default=[1, 2, 4, 8], nargs="+")
    arguments = parser.parse_args()
    machine.print_machine("torch", "megatron-core")
    few = arguments.sequences
    with tempfile.TemporaryDirectory() as scratch:

        def measure(layers: int, ranks: int, sequences: int) -> list[Step]:
            model = Path(scratch) / f"{layers}_layers"
            if not model.exists():
                quickstart.build_model(model, seed=0, num_hidden_layers=layers, **DIMENSIONS)
            return machine.run_ranks(steps, ranks, model, ranks, sequences, arguments.steps)

        print_table("layers", {n: measure(n, 1, few) for n in arguments.layers})
        numbers = (few // 2, few, 2 * few, 4 * few)
        print_table("tokens", {len(make_batch(n).tokens): measure(2, 1, n) for n in numbers})
        print_table("ranks", {n: measure(2, n, 4 * few) for n in arguments.ranks})


if __name__ == "__main__":
    main()
