"""What `benchmarks/soak.py` says of the memory of a process."""

import random

import pytest

from benchmarks.machine import MIB
from benchmarks.process_memory import growth_of


def test_a_line_is_fitted_to_the_later_half_of_a_life() -> None:
    noise = [0, 3, -3, 0]
    history = [(x, 10**6 * x) for x in range(4)]
    history += [(4 + x, 1000 + 5 * x + noise[x]) for x in range(4)]
    growth = growth_of(history)
    assert growth is not None and growth.publishes == 3
    # The noise has a slope of -3 / 5, which explains 9 / 5 of its 18 squares.
    assert growth.slope == pytest.approx(5 - 3 / 5)
    # Student's t for two degrees of freedom, times the error of the slope.
    assert growth.most - growth.slope == pytest.approx(4.303 * ((18 - 9 / 5) / 2 / 5) ** 0.5, 1e-3)
    assert growth_of(history[:4]) is None


def test_a_process_that_always_uses_the_same_is_flat() -> None:
    growth = growth_of([(publish, 600 * MIB) for publish in range(1000)])
    assert growth is not None and growth.verdict == "flat"


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
    history = []
    for publish in range(0, publishes, 3):
        at_work = numbers.expovariate(1 / (5 * MIB))
        settling = MIB * min(publish, publishes // 5)
        used = 600 * MIB + settling + 1000 * kilobytes * publish + at_work
        history.append((publish, round(used)))
    growth = growth_of(history)
    assert growth is not None and growth.verdict == verdict
    assert growth.least < 1000 * kilobytes < growth.most
