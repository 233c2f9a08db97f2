"""Advantages against hand-computed numbers."""

import math

import pytest
import torch

from qurl_megatron.algorithm.advantages import (
    generalized_advantages,
    grpo_advantages,
    soft_overlong_penalty,
    whiten,
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


def test_generalized_advantages_match_numbers_worked_out_by_hand() -> None:
    """Two prompt tokens, three sampled; discount 1/2, lambda 1/2, reward 8 at the end.

    delta = [0 + 2/2 - 4, 0 + 1/2 - 2, 8 - 1] = [-3, -3/2, 7]; advantages from the last backward:
    7, -3/2 + 7/4, -3 + 1/16.
    """
    mask = torch.tensor([[False, False, True, True, True, False]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 8.0, 0.0]])
    values = torch.tensor([[9.0, 9.0, 4.0, 2.0, 1.0, 9.0]])  # 9 is outside the mask
    advantages, returns = generalized_advantages(
        rewards, values, mask, discount=0.5, gae_lambda=0.5
    )
    assert advantages.tolist() == [[0.0, 0.0, -2.9375, 0.25, 7.0, 0.0]]
    assert returns.tolist() == [[0.0, 0.0, 1.0625, 2.25, 8.0, 0.0]]


def test_with_lambda_and_discount_1_every_return_is_the_reward() -> None:
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, -1.0, 0.0, 0.0]])
    values = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    advantages, returns = generalized_advantages(
        rewards, values, mask, discount=1.0, gae_lambda=1.0
    )
    expected = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, -1.0, 0.0, 0.0]])
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, (expected - values) * mask)


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_mask() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    result = whiten(torch.tensor([[1.0, 2.0], [3.0, 50.0]]), mask, epsilon=0.0)
    assert result.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    with pytest.raises(ValueError, match="two tokens"):
        whiten(torch.ones(1, 2), torch.tensor([[True, False]]))
