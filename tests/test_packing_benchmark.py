"""Check the pipeline schedules that `benchmarks/packing.py` compares, against times by hand."""

from __future__ import annotations

import pytest

from benchmarks.packing import RANKS, packed, padded, pipeline_time


@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (4, 1), (4, 2), (2, 3)])
def test_equal_micro_batches_have_the_bubble_of_the_formula(stages: int, virtual: int) -> None:
    """A stage works for 3 x 8 x 12 / stages, and idles for the (stages - 1) / (8 virtual) of it."""
    work = 3 * 8 * 12 / stages
    bubble = 1 + (stages - 1) / (8 * virtual)
    assert pipeline_time([12.0] * 8, stages, virtual) == pytest.approx(work * bubble)


def test_unequal_micro_batches_wait_for_each_other() -> None:
    """Forward passes of 1 and 2 on two stages.

    Stage 0: forward 0 to 1 and 1 to 3, backward 4 to 6 and 10 to 14.
    Stage 1: forward 1 to 2, backward 2 to 4, forward 4 to 6, backward 6 to 10.
    """
    assert pipeline_time([2.0, 4.0], stages=2, virtual=1) == pytest.approx(14)


def test_rows_are_padded_to_the_longest_of_a_micro_batch_or_of_all() -> None:
    """Sequences 1 to 4 tokens are dealt out in turn: 1 and 3, 2 and 4."""
    by_rank = padded([4, 1, 3, 2], rows=1, virtual=1)
    assert [[micro.tokens for micro in rank] for rank in by_rank] == [[1, 3], [2, 4]]
    by_rank = padded([4, 1, 3, 2], rows=2, virtual=1)
    assert [[micro.tokens for micro in rank] for rank in by_rank] == [[6], [8]]
    interleaved = padded([4, 1, 3, 2], rows=2, virtual=2)
    assert [[micro.tokens for micro in rank] for rank in interleaved] == [[6] * 4, [8] * 4]


def test_packed_micro_batches_of_a_rank_have_one_shape() -> None:
    lengths = [7, 40, 25, 9, 33, 16]
    for virtual in (1, 2):
        by_rank = packed(lengths, 48, virtual)
        assert len(by_rank) == RANKS
        for rank in by_rank:
            (tokens,) = {micro.tokens for micro in rank}
            assert tokens <= 48 and tokens % 8 == 0
