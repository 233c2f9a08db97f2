"""Compare packed micro batches with padded ones: `python benchmarks/packing.py`.

A minibatch of 256 sequences (prompts of 256 tokens, lognormal responses) is divided over two
data-parallel ranks of four pipeline stages each, in several ways:

    rows     sequences sorted by length and dealt out in turn; a micro batch has 1, 4 or 8 of them,
             padded to its longest. Megatron's interleaved schedule needs micro batches of one
             shape and a multiple of the stages: all are padded to the longest sequence, and rows of
             padding fill the last ones up.
    packed   what the learner does (`learner/packing.py`): sequences one behind another, up to a
             number of tokens. The micro batches of a rank are padded to its fullest, because
             pipeline stages exchange tensors of one shape.

It prints for each, as medians over seeds:

    tokens          computed tokens, relative to those of the sequences
    micro batches   of one rank
    largest         tokens of the largest micro batch, which decide the memory for activations
    fullest rank    its work, relative to the mean of the ranks without padding
    time            until the last rank is done, relative to the same work without padding and
                    without idle stages, with [least, most]

Work is that of Qwen3-32B's layers (`Architecture.forward_flops`), the backward pass is twice the
forward pass, and stages are equal; the output layer and communication are left out. The time
follows from Megatron's two schedules, operation by operation. Nothing is measured.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from statistics import median
from typing import NamedTuple

import numpy as np

from qurl_megatron.learner import packing
from qurl_megatron.planning.rollout_time import ResponseLengths
from qurl_megatron.recipes.scaling_32b import ARCHITECTURES

MODEL = ARCHITECTURES["Qwen3-32B"]
SEQUENCES, PROMPT = 256, 256
LENGTHS = (ResponseLengths(2048, 8192, 1.0), ResponseLengths(8192, 32_768, 1.0))
TENSOR, RANKS, STAGES = 8, 2, 4
SCHEDULES = {"1F1B": 1, "interleaved, 2 virtual stages": 2}
SEEDS = 5


class MicroBatch(NamedTuple):
    tokens: int  # with padding
    work: float  # FLOPs of the forward pass


Divide = Callable[[list[int], int, int], list[list[MicroBatch]]]
"""(lengths of the sequences, limit, virtual stages) -> micro batches of each rank."""


class Operation(NamedTuple):
    """One pass of a pipeline stage over a micro batch."""

    backward: bool
    micro_batch: int
    chunk: int  # the virtual stage, counted over all pipeline stages


def padded(lengths: list[int], rows: int, virtual: int) -> list[list[MicroBatch]]:
    """Return the micro batches of each rank, of `rows` padded sequences."""
    by_rank = []
    for rank in range(RANKS):
        own = sorted(lengths)[rank::RANKS]
        longest = [max(own[start : start + rows]) for start in range(0, len(own), rows)]
        if virtual > 1:
            longest = [max(own)] * packing.round_up(len(longest), STAGES)
        by_rank.append([MicroBatch(rows * n, rows * MODEL.forward_flops(n)) for n in longest])
    return by_rank


def packed(lengths: list[int], budget: int, virtual: int) -> list[list[MicroBatch]]:
    """Return the micro batches of each rank, packed to `budget` tokens as the learner does."""
    plan = packing.plan(
        lengths,
        [MODEL.forward_flops(length) for length in lengths],
        budget=budget,
        ranks=RANKS,
        unit=STAGES if virtual > 1 else 1,
    )
    by_rank = []
    for rank in plan:
        real = [sum(lengths[number] for number in numbers) for numbers in rank]
        total = packing.round_up(max(real), TENSOR)
        work = [sum(MODEL.forward_flops(lengths[number]) for number in numbers) for numbers in rank]
        by_rank.append(
            # Padding is one more sequence.
            [
                MicroBatch(total, own + MODEL.forward_flops(total - tokens))
                for tokens, own in zip(real, work, strict=True)
            ]
        )
    return by_rank


def operations(stage: int, stages: int, virtual: int, micro_batches: int) -> list[Operation]:
    """Return what a pipeline stage computes, in the order of Megatron's schedule."""
    count = micro_batches * virtual
    warmup = stages - stage - 1
    if virtual > 1:
        warmup = 2 * warmup + (virtual - 1) * stages
    warmup = min(warmup, count)

    def operation(number: int, backward: bool) -> Operation:
        group, rest = divmod(number, stages * virtual)
        own_chunk, micro_batch = divmod(rest, stages)
        own_chunk = virtual - 1 - own_chunk if backward else own_chunk
        return Operation(backward, group * stages + micro_batch, own_chunk * stages + stage)

    order = [operation(number, False) for number in range(warmup)]
    for number in range(warmup, count):
        order += [operation(number, False), operation(number - warmup, True)]
    return order + [operation(number, True) for number in range(count - warmup, count)]


def pipeline_time(work: list[float], stages: int, virtual: int) -> float:
    """Return the time of a forward and backward pass over micro batches.

    Args:
        work: time of the forward pass of each micro batch through all stages.
    """
    last = stages * virtual - 1
    waiting = [
        operations(stage, stages, virtual, len(work))[::-1] for stage in range(stages)
    ]  # the next is the last
    clocks = [0.0] * stages
    ends: dict[Operation, float] = {}
    while any(waiting):
        for stage, remaining in enumerate(waiting):
            while remaining:
                backward, number, chunk = remaining[-1]
                # It needs the output of the chunk before, or the gradient of the chunk behind.
                needed = Operation(backward, number, chunk + 1 if backward else chunk - 1)
                if backward and chunk == last:
                    needed = Operation(False, number, last)
                is_first = not backward and chunk == 0
                if not is_first and needed not in ends:
                    break
                start = max(clocks[stage], ends.get(needed, 0.0))
                clocks[stage] = start + (2 if backward else 1) * work[number] / (stages * virtual)
                ends[remaining.pop()] = clocks[stage]
    return max(clocks)


def figures(by_rank: list[list[MicroBatch]], lengths: list[int], virtual: int) -> list[float]:
    """Return what a row of the table has of one schedule."""
    share = sum(MODEL.forward_flops(length) for length in lengths) / RANKS
    times = [pipeline_time([micro.work for micro in rank], STAGES, virtual) for rank in by_rank]
    return [
        sum(micro.tokens for rank in by_rank for micro in rank) / sum(lengths),
        len(by_rank[0]),
        max(micro.tokens for rank in by_rank for micro in rank),
        max(sum(micro.work for micro in rank) for rank in by_rank) / share,
        max(times) / (3 * share / STAGES),
    ]


def main() -> None:
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy "
        f"{version('numpy')}; seeds 0 to {SEEDS - 1}"
    )
    for distribution in LENGTHS:
        batches = []
        for seed in range(SEEDS):
            fractions = np.random.default_rng(seed).random(SEQUENCES)
            batches.append([PROMPT + round(distribution.quantile(f)) for f in fractions])
        longest = round(distribution.maximum) + PROMPT
        ways: list[tuple[str, Divide, int]]
        ways = [(f"{rows} row{'s'[: rows - 1]}, padded", padded, rows) for rows in (1, 4, 8)]
        ways += [(f"packed to {n:,}", packed, n) for n in (longest, 2 * longest)]
        print(
            f"\n{SEQUENCES} responses of {distribution.mean:,.0f} tokens on average and "
            f"{distribution.maximum:,.0f} at most, {RANKS} ranks of {STAGES} stages"
        )
        for schedule, virtual in SCHEDULES.items():
            print(f"\n   {schedule:30} tokens  micro batches  largest  fullest rank  time")
            for name, divide, limit in ways:
                samples = [
                    figures(divide(lengths, limit, virtual), lengths, virtual)
                    for lengths in batches
                ]
                tokens, count, largest, fullest, time = map(median, zip(*samples, strict=True))
                times = [sample[-1] for sample in samples]
                print(
                    f"   {name:30} {tokens:6.2f}  {count:13.0f}  {largest:7,.0f}  {fullest:12.2f}  "
                    f"{time:4.2f} [{min(times):.2f}, {max(times):.2f}]",
                    flush=True,
                )


if __name__ == "__main__":
    main()
