"""Advantages against hand-computed numbers."""

import math

import pytest

from qurl_megatron.algorithm.advantages import (
    grpo_advantages,
    soft_overlong_penalty,
)


def test_advantages_are_rewards_normalized_within_their_group() -> None:
    """Mean 1/4, sample standard deviation sqrt((9/16 + 3/16) / 3) = 1/2."""
    [advantages] = grpo_advantages([[1.0, 0.0, 0.0, 0.0]], epsilon=0.0)
    assert advantages == [1.5, -0.5, -0.5, -0.5]


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    [advantages] = grpo_advantages([[1.0, 0.0]], epsilon=0.5)
    assert advantages == pytest.approx(
        [0.5 / (math.sqrt(0.5) + 0.5), -0.5 / (math.sqrt(0.5) + 0.5)]
    )


@pytest.mark.parametrize("group", [[0.0] * 8, [1.0] * 8, [0.1] * 3, [1.0]])
def test_zero_variance_group_has_advantages_of_exactly_0(group: list[float]) -> None:
    assert grpo_advantages([group], epsilon=0.0) == [[0.0] * len(group)]


def test_advantages_of_a_group_do_not_depend_on_other_groups() -> None:
    groups = [[1.0, 0.0], [5.0, 5.0], [3.0, 1.0, 2.0]]
    together = grpo_advantages(groups, epsilon=1e-6)
    assert together == [grpo_advantages([group], epsilon=1e-6)[0] for group in groups]
    assert together[2] == pytest.approx([1, -1, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0)]
)
def test_overlong_penalty_falls_from_0_to_minus_1_over_the_last_tokens(
    length: int, penalty: float
) -> None:
    assert soft_overlong_penalty(length, max_length=100, soft_tokens=20) == penalty
    assert soft_overlong_penalty(length, max_length=100, soft_tokens=0) == 0.0
