"""The table of memory that `benchmarks/soak.py` prints."""

from __future__ import annotations

import pytest

from benchmarks.process_memory import slope_of


def test_a_slope_of_memory_is_that_of_least_squares_over_levels_of_their_own() -> None:
    noise = [0.0, 3.0, -3.0, 0.0]
    first = [(x, 1000.0 + 5 * x + noise[x]) for x in range(4)]
    second = [(x, -70.0 + 5 * x - noise[x]) for x in range(4)]
    slope, error = slope_of([first, second])
    assert slope == pytest.approx(5)
    # Sum of squares 2 * 18 less what a slope explains, over 8 - 3 degrees of freedom, over 2 * 5.
    assert error == pytest.approx((36 / 5 / 10) ** 0.5)
