"""Advantages against hand-computed numbers."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


# Which tokens were sampled, their values, the place of a reward of 5 that does not count.
GAE = {
    "two prompt tokens": ([0, 0, 1, 1, 1, 0], [9.0, 9.0, 4.0, 2.0, 1.0, 9.0], 0),
    "a user's turn of two tokens": ([0, 1, 1, 0, 0, 1], [9.0, 4.0, 2.0, 7.0, 7.0, 1.0], 3),
}


@pytest.mark.parametrize("case", GAE)
def test_generalized_advantages_match_numbers_worked_out_by_hand(case: str) -> None:
    """Three sampled tokens; discount 1/2, lambda 1/2, reward 8 at the last of them.

    delta = [0 + 2/2 - 4, 0 + 1/2 - 2, 8 - 1] = [-3, -3/2, 7]; advantages from the last backward:
    7, -3/2 + 7/4, -3 + 1/16. Values and rewards of other tokens do not count, and they are not
    discounted for.
    """
    sampled, values, other = GAE[case]
    mask, rewards = torch.tensor(sampled, dtype=torch.bool), torch.zeros(6)
    rewards[other], rewards[mask.nonzero()[-1]] = 5.0, 8.0
    advantages, returns = generalized_advantages(
        rewards, torch.tensor(values), mask, torch.tensor([6]), discount=0.5, gae_lambda=0.5
    )
    assert advantages[mask].tolist() == [-2.9375, 0.25, 7.0]
    assert returns[mask].tolist() == [1.0625, 2.25, 8.0]
    assert not advantages[~mask].any() and not returns[~mask].any()


def verl_gae(
    rewards: list[float], values: list[float], mask: list[bool], discount: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    """Return one row's advantages and returns by verl's recursion, at the tokens of `mask`."""
    next_value = last = 0.0
    advantages: list[float] = []
    for reward, value, kept in reversed(list(zip(rewards, values, mask, strict=True))):
        delta = reward + discount * next_value - value
        candidate = delta + discount * gae_lambda * last
        next_value = value * kept + (1 - kept) * next_value
        last = candidate * kept + (1 - kept) * last
        advantages.insert(0, last)
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    pairs = (advantages, returns)
    return tuple([x * kept for x, kept in zip(row, mask, strict=True)] for row in pairs)  # type: ignore[return-value]


NUMBERS = st.floats(-8, 8, width=32)


@given(
    st.lists(
        st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=12),
        min_size=1,
        max_size=5,
    ),
    st.floats(0.5, 1),
    st.floats(0, 1),
)
def test_generalized_advantages_are_verls_for_sequences_of_every_mask_and_length(
    sequences: list[list[tuple[float, float, bool]]], discount: float, gae_lambda: float
) -> None:
    rewards, values, mask = zip(*itertools.chain.from_iterable(sequences), strict=True)
    results = generalized_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(mask),
        torch.tensor([len(sequence) for sequence in sequences]),
        discount=discount,
        gae_lambda=gae_lambda,
    )
    columns = [
        verl_gae(*map(list, zip(*sequence, strict=True)), discount, gae_lambda)  # type: ignore[arg-type,call-arg]
        for sequence in sequences
    ]
    for result, expected in zip(results, zip(*columns, strict=True), strict=True):
        flat_expected = list(itertools.chain.from_iterable(expected))
        assert result.tolist() == pytest.approx(flat_expected, rel=1e-12, abs=1e-12)


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
