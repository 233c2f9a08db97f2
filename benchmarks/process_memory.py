"""What the processes of a soak use, and whether it grows: `benchmarks/soak.py` prints the table.

What a process uses at a moment is what it keeps, and what it works with just then. So a line is
fitted to the least that it used in each of a dozen parts of its life. A process is

    flat     if it is 97.5 % sure to grow by less than FLAT of its memory in 1,000 publishes
    grows    if it is 97.5 % sure to grow by more
    unclear  otherwise: it was measured for too short a time

The first half of a process's life is left out: caches fill up in it, and an HTTP process takes what
the first dozen full queues need.

A process may also grow because what it has freed lies in pieces between what it uses. So there is a
line for what the process of the soak has allocated and not freed, which is exact.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import psutil

LEARNER = "learner, fleet, starter"  # the process of the soak
ALLOCATED = "allocated by the learner"  # and not freed
OWN = {LEARNER, ALLOCATED}
PYTHON_BLOCK = 64  # bytes of a small Python object, about
SETTLING = 1 / 2  # of each process's life, which is left out
BLOCKS = 12  # parts of the rest
FLAT = 0.01  # of its memory, which a flat process may take in 1,000 publishes
ENOUGH = 200  # publishes that a verdict needs; before them a process still warms up
# Student's t for an interval that a value lies above with a probability of 2.5 %, and below with
# the same, by degrees of freedom.
STUDENT = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
STUDENT_ABOVE = 2.23  # for 10 and more
MIB = 2**20


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns; `uordblks` and `hblkhd` are the bytes in use."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Memory:
    """What the processes use, by their role: each process's (publish, bytes)."""

    def __init__(self) -> None:
        self.histories: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(dict)

    def measure(self, publish: int, roles: dict[str, psutil.Process]) -> None:
        """Note the resident memory of each process, without pages of files.

        Those the kernel drops and reads again as it likes. What a fork shares with its parent
        counts. Otherwise every page that a server is the first to write to would look like growth.
        """
        for role, process in roles.items():
            with contextlib.suppress(psutil.Error):  # it has ended
                memory = process.memory_info()
                used = memory.rss - memory.shared
                self.histories[role].setdefault(process.pid, []).append((publish, used))

    def measure_own(self, publish: int) -> None:
        """Note what this process has allocated and not freed, by malloc and for Python's objects.

        Python's arenas, of 1 MiB each, are not malloc's; their blocks are counted.
        """
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = Mallinfo
        malloc = mallinfo2()
        used = malloc.uordblks + malloc.hblkhd + PYTHON_BLOCK * sys.getallocatedblocks()
        self.histories[ALLOCATED].setdefault(0, []).append((publish, used))

    def growths(self, quiet_from: int) -> list[Growth]:
        """Return how each role's memory grows; roles that were measured too briefly are missing.

        Args:
            quiet_from: the publish from which on servers are measured.
        """
        growths = []
        for role, processes in self.histories.items():
            lives = []
            for history in processes.values():
                if role not in OWN:
                    history = [point for point in history if point[0] >= quiet_from]
                blocks = floors(history[round(SETTLING * len(history)) :])
                if len(blocks) > 1:
                    lives.append(blocks)
            if sum(len(blocks) - 1 for blocks in lives) > 1:
                growths.append(Growth.of(role, lives))
        return growths


@dataclass(frozen=True)
class Growth:
    """How the memory of the processes of one role grows."""

    role: str
    processes: int
    publishes: int  # that they were measured for, together
    used: float  # bytes, at the end
    slope: float  # bytes per publish
    least: float  # bounds of the slope's 95 % interval
    most: float

    @classmethod
    def of(cls, role: str, lives: Sequence[Sequence[tuple[float, float]]]) -> Growth:
        """Fit a line to `(publish, bytes)` of processes with levels of their own."""
        slope, error = slope_of(lives)
        freedom = sum(map(len, lives)) - len(lives) - 1
        reach = STUDENT.get(freedom, STUDENT_ABOVE) * error
        publishes = sum(round(life[-1][0] - life[0][0]) for life in lives)
        used = fmean(life[-1][1] for life in lives)
        return cls(role, len(lives), publishes, used, slope, slope - reach, slope + reach)

    @property
    def verdict(self) -> Literal["flat", "grows", "unclear"]:
        """Whether the role's memory is flat, by what this module's docstring says."""
        if self.publishes < ENOUGH:
            return "unclear"
        limit = FLAT * self.used / 1000
        if self.most < limit:
            return "flat"
        return "grows" if self.least > limit else "unclear"


def table(growths: Sequence[Growth]) -> list[str]:
    """Return a line for each role."""
    lines = [f"{'process':>24}  number  publishes  MiB   kB per publish, 95 % interval"]
    for each in growths:
        counts = f"{each.role:>24}  {each.processes:6}  {each.publishes:9}"
        interval = f"{each.slope / 1e3:+.2f} [{each.least / 1e3:+.2f}, {each.most / 1e3:+.2f}]"
        lines.append(f"{counts}  {each.used / MIB:4.0f}  {interval} {each.verdict}")
    return lines


def floors(history: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Return for at most BLOCKS equal parts of a history the middle, and the least bytes."""
    size = max(1, len(history) // BLOCKS)
    parts = [history[start : start + size] for start in range(0, len(history) - size + 1, size)]
    return [(fmean(x for x, _ in part), min(y for _, y in part)) for part in parts]


def slope_of(histories: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """Return the common slope of histories with levels of their own, and its standard error."""
    centred = []
    for history in histories:
        x_mean, y_mean = fmean(x for x, _ in history), fmean(y for _, y in history)
        centred += [(x - x_mean, y - y_mean) for x, y in history]
    squares = sum(x * x for x, _ in centred)
    slope = sum(x * y for x, y in centred) / squares
    residual = sum((y - slope * x) ** 2 for x, y in centred)
    return slope, math.sqrt(residual / (len(centred) - len(histories) - 1) / squares)
