"""Decide which sequences share a micro batch; pure and deterministic.

Micro batches are planned for the whole batch and dealt out to data-parallel ranks, so that

- none is larger than the budget, unless one sequence alone is;
- every rank has the same number of them, a multiple of `unit`;
- they cost about the same, and so do the ranks.

The most costly sequence goes first, and each goes into the cheapest micro batch with room for it.
If one finds no room, all ranks get more micro batches. This is within 4/3 of the best balance
(Graham, "Bounds on multiprocessing timing anomalies", 1969).

Sequences of one prompt compute it once in a micro batch. The more of them stay together, the less
there is to compute, but the worse the balance. So whole groups are tried, then halves, and so on
down to single sequences. The plan whose slowest rank has the least work is taken.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

Sequences = list[int]
"""Numbers of the sequences in a micro batch."""


def plan(
    sizes: Sequence[int],
    costs: Sequence[float],
    prompts: Sequence[tuple[Hashable, float]] | None = None,
    *,
    budget: int,
    ranks: int,
    unit: int = 1,
) -> list[list[Sequences]]:
    """Return the micro batches of each data-parallel rank.

    Args:
        sizes: of each sequence, in the unit of `budget`: its tokens, or 1 to count sequences. A
            sequence of size 0 is in no micro batch.
        costs: work of each sequence, in any unit.
        prompts: each sequence's prompt and its part of `costs`, which sequences of an equal prompt
            share in a micro batch. None: nothing is shared.
        budget: largest sum of sizes in a micro batch.
        ranks: number of data-parallel ranks.
        unit: divides the number of micro batches of every rank.
    """
    prompts = prompts or [(number, 0.0) for number in range(len(sizes))]
    groups: dict[Hashable, Sequences] = {}
    for number, size in enumerate(sizes):
        if size:
            groups.setdefault(prompts[number][0], []).append(number)
    least, best = math.inf, []
    together = 2 * max(map(len, groups.values()), default=1)
    while together > 1:
        together = -(-together // 2)
        bundles = [
            group[first : first + together]
            for group in groups.values()
            for first in range(0, len(group), together)
        ]
        bundle_sizes = [sum(sizes[n] for n in bundle) for bundle in bundles]
        bundle_costs = [
            sum(costs[n] - prompts[n][1] for n in bundle) + prompts[bundle[0]][1]
            for bundle in bundles
        ]
        if together == 1 or max(bundle_sizes) <= budget:
            dealt = _deal(bundle_sizes, bundle_costs, budget, ranks, unit)
            slowest = max(sum(bundle_costs[b] for micro in rank for b in micro) for rank in dealt)
            if slowest < least:
                least = slowest
                best = [
                    [[n for b in micro for n in bundles[b]] for micro in rank] for rank in dealt
                ]
    return best


def _deal(
    sizes: Sequence[int], costs: Sequence[float], budget: int, ranks: int, unit: int
) -> list[list[Sequences]]:
    """Return `plan` of sequences that share nothing, all of a size above 0."""
    all_sizes, all_costs = np.asarray(sizes, dtype=np.int64), np.asarray(costs, dtype=np.float64)
    # Equal costs keep their order, which makes the plan deterministic.
    sequences = np.argsort(-all_costs, kind="stable")
    step = ranks * unit
    count = round_up(max(1, -(-int(all_sizes.sum()) // budget)), step)
    while (filled := _fill(sequences, all_sizes, all_costs, budget, count)) is None:
        count += step
    micro_batches, totals = filled
    dealt: list[list[Sequences]] = [[] for _ in range(ranks)]
    for turn, start in enumerate(range(0, count, ranks)):
        chosen = np.argsort(-totals, kind="stable")[start : start + ranks]
        # In turn and back: the rank with the costliest of one turn gets the cheapest of the next.
        for rank, number in enumerate(chosen if turn % 2 == 0 else reversed(chosen)):
            dealt[rank].append(micro_batches[number])
    return dealt


def _fill(
    sequences: np.ndarray, sizes: np.ndarray, costs: np.ndarray, budget: int, count: int
) -> tuple[list[Sequences], np.ndarray] | None:
    """Return `count` micro batches and their costs, or None if a sequence finds no room."""
    micro_batches: list[Sequences] = [[] for _ in range(count)]
    used, totals = np.zeros(count, dtype=np.int64), np.zeros(count)
    for sequence in sequences:
        has_room = (used + sizes[sequence] <= budget) | (used == 0)
        best = int(np.where(has_room, totals, np.inf).argmin())
        if not has_room[best]:
            return None
        micro_batches[best].append(int(sequence))
        used[best] += sizes[sequence]
        totals[best] += costs[sequence]
    return micro_batches, totals


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def zigzag(length: int, rank: int, size: int) -> np.ndarray:
    """Return the positions of a sequence that a context-parallel rank holds, in its order.

    The sequence is cut into 2 x `size` pieces. A rank has one from the front and one from the back,
    as in Megatron and Transformer Engine, so causal attention costs all ranks the same.

    Args:
        length: number of tokens, a multiple of 2 x `size`; with `size` 1 any number.
    """
    if size == 1:
        return np.arange(length)
    pieces = np.arange(length).reshape(2 * size, length // (2 * size))
    return np.concatenate([pieces[rank], pieces[2 * size - 1 - rank]])
