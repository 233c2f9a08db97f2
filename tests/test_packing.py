"""Check how sequences are packed into micro batches."""

import numpy as np
from hypothesis import given, settings
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


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=24))
@settings(deadline=None)
def test_no_rank_has_more_work_where_prompts_are_shared(sequences: list[tuple[int, int]]) -> None:
    """Each sequence is in one micro batch of at most 40; the four prompts have a cost of 5 each."""
    sizes = [size for size, _ in sequences]
    costs = [5.0 + size for size in sizes]
    prompts = [(prompt, 5.0) for _, prompt in sequences]

    def slowest(dealt: list[list[list[int]]]) -> float:
        return max(
            sum(
                sum(sizes[row] for row in micro_batch)
                + 5.0 * len({prompts[row] for row in micro_batch})
                for micro_batch in rank
            )
            for rank in dealt
        )

    apart = plan(sizes, costs, budget=40, ranks=2)
    dealt = plan(sizes, costs, prompts, budget=40, ranks=2)
    packed = sorted(row for rank in dealt for micro_batch in rank for row in micro_batch)
    assert packed == [row for row, size in enumerate(sizes) if size]
    for rank in dealt:
        for micro_batch in rank:
            assert sum(sizes[row] for row in micro_batch) <= 40
    of_apart = max(sum(costs[row] for micro in rank for row in micro) for rank in apart)
    assert slowest(dealt) <= of_apart


def test_sequences_of_a_prompt_stay_together_as_far_as_ranks_stay_busy() -> None:
    groups = [number // 4 for number in range(16)]
    sizes, costs = [1] * 16, [10.0] * 16
    prompts = [(group, 8.0) for group in groups]
    together = plan(sizes, costs, prompts, budget=4, ranks=2)
    assert all(len({groups[row] for row in micro}) == 1 for rank in together for micro in rank)
    # Two ranks share a group's work; each then computes its prompt.
    assert plan(sizes[:4], costs[:4], prompts[:4], budget=4, ranks=2) == [[[0, 1]], [[2, 3]]]
    # Micro batches of two: as much as fits.
    assert plan(sizes[:3], costs[:3], prompts[:3], budget=2, ranks=1) == [[[0, 1], [2]]]
