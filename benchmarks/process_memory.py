"""What the processes of a soak use, and whether it grows: `benchmarks/soak.py` prints the table.

A slope is fitted to each role's memory over the publishes. Samples in a row are not
independent of each other, so the fit is to the means of a dozen parts of each process's life.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import psutil

LEARNER = "learner, fleet, starter"  # the process of the soak
SETTLING = 10  # publishes, of each process, before its memory is measured
BLOCKS = 12  # means that a slope is fitted to
MIB = 2**20


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

    def table(self, quiet_from: int) -> list[str]:
        """Return a line for each role: processes, publishes, MiB, bytes per publish."""
        lines = [f"{'process':>22}  number  publishes     MiB  bytes per publish"]
        for role, processes in self.histories.items():
            settled = []
            for history in processes.values():
                begin = history[0][0] + SETTLING
                if role != LEARNER:
                    begin = max(begin, quiet_from)
                blocks = means([point for point in history if point[0] >= begin])
                if len(blocks) > 1:
                    settled.append(blocks)
            if sum(len(blocks) - 1 for blocks in settled) < 3:
                continue
            slope, error = slope_of(settled)
            publishes = sum(round(blocks[-1][0] - blocks[0][0]) for blocks in settled)
            used = fmean(blocks[-1][1] for blocks in settled) / MIB
            counts = f"{role:>22}  {len(settled):6}  {publishes:9}"
            lines.append(f"{counts}  {used:6.0f}  {slope:+.0f} ± {error:.0f}")
        return lines


def means(history: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """Return the means of at most BLOCKS equal parts of a process's history."""
    size = max(1, len(history) // BLOCKS)
    parts = [history[start : start + size] for start in range(0, len(history) - size + 1, size)]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


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
