"""The table of memory that `benchmarks/soak.py` prints."""

from __future__ import annotations

import ctypes
import random

import pytest

from benchmarks.process_memory import ALLOCATED, LEARNER, MIB, Memory, slope_of, table


def test_a_slope_of_memory_is_that_of_least_squares_over_levels_of_their_own() -> None:
    noise = [0.0, 3.0, -3.0, 0.0]
    first = [(x, 1000.0 + 5 * x + noise[x]) for x in range(4)]
    second = [(x, -70.0 + 5 * x - noise[x]) for x in range(4)]
    slope, error = slope_of([first, second])
    assert slope == pytest.approx(5)
    # Sum of squares 2 * 18 less what a slope explains, over 8 - 3 degrees of freedom, over 2 * 5.
    assert error == pytest.approx((36 / 5 / 10) ** 0.5)


@pytest.mark.parametrize(
    ("publishes", "kilobytes", "verdict"),
    [
        (1000, 0, "flat"),
        (1000, 3, "flat"),
        (1000, 20, "grows"),
        (60, 5, "unclear"),
        (120, 900, "unclear"),
    ],
)
def test_temporary_memory_hides_neither_what_is_kept_nor_that_nothing_is(
    publishes: int, kilobytes: int, verdict: str
) -> None:
    numbers = random.Random(1)
    memory = Memory()
    for publish in range(0, publishes, 3):
        at_work = numbers.expovariate(1 / (5 * MIB))
        settling = MIB * min(publish, publishes // 5)
        used = 600 * MIB + settling + 1000 * kilobytes * publish + at_work
        memory.histories[LEARNER].setdefault(1, []).append((publish, round(used)))
    (growth,) = memory.growths(quiet_from=0)
    assert growth.verdict == verdict
    assert table([growth])[1].endswith(verdict)
    assert growth.least < 1000 * kilobytes < growth.most


def test_servers_are_measured_only_after_the_faults() -> None:
    memory = Memory()
    for publish in range(400):
        used = 600 * MIB + 10**5 * min(publish, 300)
        memory.histories["scheduler 0"].setdefault(1, []).append((publish, used))
    (quiet,), (whole,) = memory.growths(quiet_from=200), memory.growths(quiet_from=0)
    assert quiet.slope == 0 != whole.slope


def test_what_was_allocated_and_not_freed_is_exact() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    memory = Memory()
    memory.measure_own(0)
    pieces = [libc.malloc(100_000) for _ in range(100)] + [libc.malloc(40 * MIB)]
    memory.measure_own(1)
    for piece in pieces:
        libc.free(piece)
    memory.measure_own(2)
    before, with_pieces, after = (used for _, used in memory.histories[ALLOCATED][0])
    assert with_pieces - before == pytest.approx(100 * 100_000 + 40 * MIB, rel=0.01)
    assert after == pytest.approx(before, abs=100_000)
