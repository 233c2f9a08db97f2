"""Time work on this machine's device: passes that alternate, with median and spread."""

import time
from collections.abc import Callable
from statistics import median

import torch

from qurl_megatron import device

# Minimum total size of rotated inputs: several times the last-level cache of a GPU.
ROTATED_BYTES = 512 * 2**20
# Cycles for which a GPU spins before a pass: 1 ms and, if the pass was queued too late, 20, 400.
SPIN_CYCLES = (2_000_000, 40_000_000, 800_000_000)


def take_turns(
    passes: dict[str, Callable[[int], object]], repetitions: int
) -> dict[str, dict[str, float]]:
    """Return the `summary` of each pass's seconds.

    The passes alternate, so that changes on the machine affect all of them. Each runs twice before
    its times count. A pass gets the number of its repetition, which is negative in the warm-up.
    """
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repetition in range(-2, repetitions):
        for name, run in passes.items():
            time_s = _time(run, repetition)
            if repetition >= 0:
                times[name].append(time_s)
    return {name: summary(seconds) for name, seconds in times.items()}


def summary(seconds: list[float]) -> dict[str, float]:
    """Return the median, the least and the most of `seconds`."""
    return {"median_s": median(seconds), "least_s": min(seconds), "most_s": max(seconds)}


def copies_to_rotate(num_bytes: int) -> int:
    """Return how many inputs of this size to rotate, so that no cache holds the next one."""
    return 1 if device.accelerator() == "cpu" else max(1, -(-ROTATED_BYTES // num_bytes))


def copy_bandwidth(num_bytes: int, repetitions: int = 9) -> float:
    """Return the median bytes per second, read plus written, of a copy of `num_bytes`."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device.device())
    target = torch.empty_like(source)
    times = take_turns({"copy": lambda _: target.copy_(source)}, repetitions)
    return 2 * num_bytes / times["copy"]["median_s"]


def _time(run: Callable[[int], object], repetition: int) -> float:
    """Return the seconds of one pass: on a GPU, of its kernels and not of the Python before them.

    Raises:
        RuntimeError: the pass waits for the device, so that its kernels cannot be timed alone.
    """
    if device.accelerator() == "cpu":
        start = time.perf_counter()
        run(repetition)
        return time.perf_counter() - start
    for spin_cycles in SPIN_CYCLES:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(spin_cycles)  # keeps the GPU busy until all kernels are queued
        begin.record()
        run(repetition)
        end.record()
        queued_in_time = not begin.query()
        end.synchronize()
        if queued_in_time:
            return begin.elapsed_time(end) / 1e3
    raise RuntimeError("the pass took longer to queue than the GPU spun, or waits for the GPU")
