"""Tell whether the memory of a soak's process grows; `benchmarks/soak.py` prints a line for each.

At any moment a process uses what it keeps, and what it works with just then. So a line is fitted to
the least memory that it used in each of a dozen parts of its life. A process is

    flat     if it is 97.5 % sure to grow by less than FLAT of its memory in 1,000 publishes
    grows    if it is 97.5 % sure to grow by more
    unclear  otherwise: it was measured for too short a time

The first half of a process's life is left out: caches fill up in it, and an HTTP process takes what
the first dozen full queues need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from scipy import stats

from benchmarks.machine import MIB

SETTLING = 1 / 2  # of each process's life, which is left out
BLOCKS = 12  # parts of the rest
FLAT = 0.01  # of its memory, by which a flat process may grow in 1,000 publishes
ENOUGH = 200  # publishes that a verdict needs; before them a process still warms up


@dataclass(frozen=True)
class Growth:
    """How the memory of one process grows."""

    publishes: float  # over which it was measured
    used: float  # bytes, at the end
    slope: float  # bytes per publish
    least: float  # bounds of the slope's 95 % interval
    most: float

    @property
    def verdict(self) -> Literal["flat", "grows", "unclear"]:
        """Whether the process is flat, as this module's docstring defines it."""
        limit = FLAT * self.used / 1000
        if self.publishes < ENOUGH or self.least <= limit <= self.most:
            return "unclear"
        return "flat" if self.most < limit else "grows"

    def __str__(self) -> str:
        interval = f"[{self.least / 1e3:+.2f}, {self.most / 1e3:+.2f}]"
        return (
            f"{self.used / MIB:.0f} MiB, {self.slope / 1e3:+.2f} {interval} kB a publish over "
            f"{self.publishes:.0f} publishes: {self.verdict}"
        )


def growth_of(history: Sequence[tuple[int, int]]) -> Growth | None:
    """Return how the memory of `(publish, bytes)` grows; None for a history that is too short."""
    settled = history[round(SETTLING * len(history)) :]
    size = max(1, len(settled) // BLOCKS)
    blocks = [settled[start : start + size] for start in range(0, len(settled) - size + 1, size)]
    if len(blocks) < 3:
        return None
    middles = [fmean(publish for publish, _ in block) for block in blocks]
    floors = [min(used for _, used in block) for block in blocks]
    line = stats.linregress(middles, floors)
    error = line.stderr if len(set(floors)) > 1 else 0.0  # scipy finds none for equal values
    reach = stats.t.ppf(0.975, len(blocks) - 2) * error
    return Growth(
        publishes=middles[-1] - middles[0],
        used=floors[-1],
        slope=line.slope,
        least=line.slope - reach,
        most=line.slope + reach,
    )
