"""Timing of work on this machine's device: passes that take turns, medians and spread."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from qurl_megatron import device

# What rotating inputs hold together, at least: several times the last cache of a GPU.
ROTATED_BYTES = 512 * 2**20


def take_turns(passes: dict[str, Callable[[int], object]], repetitions: int) -> dict[str, dict]:
    """Seconds of each pass: median, least and most. A pass is told which repetition it is.

    The passes alternate, so that what changes on the machine meets them all; each runs twice before
    it counts.
    """
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repetition in range(-2, repetitions):
        for name, run in passes.items():
            took = _timed(run, repetition)
            if repetition >= 0:
                times[name].append(took)
    return {
        name: {"median_s": median(some), "least_s": min(some), "most_s": max(some)}
        for name, some in times.items()
    }


def copies_to_rotate(num_bytes: int) -> int:
    """How many inputs of this size to go round, so that none of them waits in a cache."""
    return 1 if device.accelerator() == "cpu" else max(1, -(-ROTATED_BYTES // num_bytes))


def wait_for_device() -> None:
    if device.accelerator() == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(num_bytes: int, repetitions: int = 9) -> float:
    """Bytes read and written a second by a copy of `num_bytes` on the device; the median."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device.device())
    target = torch.empty_like(source)
    times = take_turns({"copy": lambda _: target.copy_(source)}, repetitions)
    return 2 * num_bytes / times["copy"]["median_s"]


def _timed(run: Callable[[int], object], repetition: int) -> float:
    if device.accelerator() == "cpu":
        start = time.perf_counter()
        run(repetition)
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run(repetition)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
