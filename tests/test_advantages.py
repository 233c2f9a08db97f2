"""Advantages against hand-computed numbers."""

import math

import pytest
import torch

from qurl_megatron.algorithm.advantages import (
    WHITENED,
    group_advantages,
    soft_overlong_penalty,
    whiten,
)


def test_advantages_are_rewards_normalized_within_their_group() -> None:
    """Mean 1/4, sample standard deviation sqrt((9/16 + 3/16) / 3) = 1/2."""
    [advantages] = group_advantages([[1.0, 0.0, 0.0, 0.0]], "grpo", epsilon=0.0)
    assert advantages == [1.5, -0.5, -0.5, -0.5]


def test_epsilon_is_added_to_the_standard_deviation() -> None:
    [advantages] = group_advantages([[1.0, 0.0]], "grpo", epsilon=0.5)
    assert advantages == pytest.approx(
        [0.5 / (math.sqrt(0.5) + 0.5), -0.5 / (math.sqrt(0.5) + 0.5)]
    )


# Of rewards 3, 1 and 2, and of 1 and 0.
ESTIMATES = {
    "grpo": [[1.0, -1.0, 0.0], [math.sqrt(0.5), -math.sqrt(0.5)]],
    "dr_grpo": [[1.0, -1.0, 0.0], [0.5, -0.5]],
    "rloo": [[1.5, -1.5, 0.0], [1.0, -1.0]],  # less 1.5, 2.5 and 2; less 0 and 1
    "reinforce_plus_plus": [[3.0, 1.0, 2.0], [1.0, 0.0]],
    "reinforce_plus_plus_baseline": [[1.0, -1.0, 0.0], [0.5, -0.5]],
}


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_each_estimator_gives_the_advantages_worked_out_by_hand(estimator: str) -> None:
    """Whatever other groups there are."""
    groups = [[3.0, 1.0, 2.0], [5.0, 5.0], [1.0, 0.0]]
    first, equal, last = group_advantages(groups, estimator, epsilon=0.0)
    assert [pytest.approx(first), pytest.approx(last)] == ESTIMATES[estimator]
    assert equal == ([5.0, 5.0] if estimator == "reinforce_plus_plus" else [0.0, 0.0])


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_each_estimator_is_that_of_verl_on_random_batches(estimator: str) -> None:
    """As verl states them, in float64 over a padded matrix of completions and tokens."""
    torch.manual_seed(0)
    for _ in range(20):
        sizes = torch.randint(2, 9, (5,))
        groups = [torch.randn(n, dtype=torch.float64) for n in sizes.tolist()]
        mask = torch.arange(12) < torch.randint(1, 13, (int(sizes.sum()), 1))
        found = torch.tensor(sum(group_advantages([g.tolist() for g in groups], estimator), []))
        of_tokens = (found.double()[:, None] * mask).float()
        centred = torch.cat([g - g.mean() for g in groups])
        deviations = torch.cat([g.std().expand(len(g)) for g in groups])
        n = sizes.repeat_interleave(sizes)
        scores = {
            "grpo": centred / (deviations + 1e-6),
            "dr_grpo": centred,
            "rloo": torch.cat(groups) * n / (n - 1) - (torch.cat(groups) - centred) * n / (n - 1),
            "reinforce_plus_plus": torch.cat(groups),
            "reinforce_plus_plus_baseline": centred,
        }[estimator]
        expected = scores[:, None] * mask
        if estimator in WHITENED:
            of_tokens = whiten(of_tokens, mask)
            mean = expected.sum() / mask.sum()
            variance = ((expected - mean) ** 2 * mask).sum() / (mask.sum() - 1)
            expected = (expected - mean) * torch.rsqrt(variance + 1e-8) * mask
        torch.testing.assert_close(of_tokens.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("estimator", [each for each in ESTIMATES if each != "reinforce_plus_plus"])
@pytest.mark.parametrize("group", [[0.0] * 8, [1.0] * 8, [0.1] * 3, [1.0], []])
def test_zero_variance_group_has_advantages_of_exactly_0(
    group: list[float], estimator: str
) -> None:
    assert group_advantages([group], estimator, epsilon=0.0) == [[0.0] * len(group)]


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0)]
)
def test_overlong_penalty_falls_from_0_to_minus_1_over_the_last_tokens(
    length: int, penalty: float
) -> None:
    assert soft_overlong_penalty(length, max_length=100, soft_tokens=20) == penalty
    assert soft_overlong_penalty(length, max_length=100, soft_tokens=0) == 0.0


def test_whitened_advantages_have_mean_0_and_variance_1_over_the_mask() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    result = whiten(torch.tensor([[1.0, 2.0], [3.0, 50.0]]), mask, epsilon=0.0)
    assert result.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    with pytest.raises(ValueError, match="two tokens"):
        whiten(torch.ones(1, 2), torch.tensor([[True, False]]))


def test_epsilon_of_whitening_is_added_to_the_variance() -> None:
    """Mean 2, variance ((1)^2 + (1)^2) / 1 = 2; sqrt(2 + 2) = 2."""
    both = torch.tensor([[True, True]])
    result = whiten(torch.tensor([[1.0, 3.0]]), both, epsilon=2.0)
    assert result.tolist() == [[-0.5, 0.5]]


def test_advantages_that_are_all_equal_stay_close_to_0_in_float32() -> None:
    """Rounding noise of the mean, about 1e-7 of the value, is divided by no less than 1e-4."""
    row = torch.full((1, 1000), 0.1)
    assert whiten(row, row > 0).abs().max() < 2e-3
