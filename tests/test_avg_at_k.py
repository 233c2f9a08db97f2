"""Avg@1 and Avg@k against numbers worked out by hand."""

from __future__ import annotations

from math import sqrt

import pytest

from qurl_megatron.avg_at_k import Answer, Average, ProblemResult, averages


def result(greedy: float, *sampled: float) -> ProblemResult:
    answers = [Answer("", reward, False, False) for reward in (greedy, *sampled)]
    return ProblemResult("question", "answer", answers[0], answers[1:])


def test_averages_are_over_problems_with_their_standard_error() -> None:
    found = averages([result(1, 1, 1), result(0, 0, 1), result(1, 0, 0), result(1, 1, 0)])
    assert found["Avg@1"].mean == 0.75
    assert found["Avg@1"].standard_error == pytest.approx(0.5 / sqrt(4))
    # Shares of 1, 1/2, 0 and 1/2: sample standard deviation sqrt((1/4 + 1/4) / 3).
    assert found["Avg@2 sampled"].mean == 0.5
    assert found["Avg@2 sampled"].standard_error == pytest.approx(sqrt(1 / 6) / sqrt(4))


def test_without_samples_there_is_avg_at_1_alone() -> None:
    assert averages([result(1)]) == {"Avg@1": Average(1.0, 0.0)}
