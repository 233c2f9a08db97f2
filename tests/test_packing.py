"""Check how sequences are packed into micro batches."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from qurl_megatron.learner.packing import plan, zigzag

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 4), st.integers(1, 3))
def test_every_sequence_is_in_one_micro_batch_and_every_rank_has_as_many(
    lengths: list[int], budget: int, ranks: int, unit: int
) -> None:
    dealt = plan(lengths, lengths, budget=budget, ranks=ranks, unit=unit)
    packed = sorted(row for rank in dealt for micro_batch in rank for row in micro_batch)
    assert packed == [row for row, length in enumerate(lengths) if length]
    counts = {len(rank) for rank in dealt}
    assert len(dealt) == ranks and len(counts) == 1
    assert counts.pop() % unit == 0
    for rank in dealt:
        for micro_batch in rank:
            assert sum(lengths[row] for row in micro_batch) <= budget or len(micro_batch) == 1


def test_the_plan_is_the_one_worked_out_by_hand() -> None:
    """Two micro batches of at most 10: 7 goes first, then 5 and 4 into the other, then 3."""
    assert plan([4, 5, 3, 7], [4, 5, 3, 7], budget=10, ranks=1) == [[[3, 2], [1, 0]]]


def test_the_rank_with_the_costliest_of_one_turn_has_the_cheapest_of_the_next() -> None:
    assert plan([1] * 4, [8, 4, 2, 1], budget=1, ranks=2) == [[[0], [3]], [[1], [2]]]


def test_sequences_can_be_counted_instead_of_tokens() -> None:
    dealt = plan([1, 1, 1, 1, 0], [9, 1, 1, 1, 5], budget=2, ranks=2)
    assert dealt == [[[0, 3]], [[1, 2]]]


def test_ranks_have_about_the_same_work() -> None:
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(7.3, 0.8, 1024), 8192).astype(int).tolist()
    dealt = plan(lengths, [n * (8192 + n) for n in lengths], budget=16384, ranks=4)
    work = [
        sum(lengths[row] * (8192 + lengths[row]) for micro_batch in rank for row in micro_batch)
        for rank in dealt
    ]
    assert max(work) / (sum(work) / 4) < 1.01
    sizes = [sum(lengths[row] for row in micro_batch) for rank in dealt for micro_batch in rank]
    assert max(sizes) <= 16384
    assert sum(sizes) / (16384 * len(sizes)) > 0.9


def test_context_parallel_ranks_share_a_sequence_from_both_ends() -> None:
    assert zigzag(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert zigzag(12, 1, 3).tolist() == [2, 3, 8, 9]
    assert zigzag(5, 0, 1).tolist() == [0, 1, 2, 3, 4]
