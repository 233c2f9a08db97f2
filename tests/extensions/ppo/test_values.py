"""PPO's advantages, returns and value loss against numbers worked out by hand, and against verl."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl_megatron.extensions.ppo.values import generalized_advantages, value_loss

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


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=12))
def test_an_advantage_is_carried_over_observed_tokens_as_if_they_were_not_there(
    tokens: list[tuple[float, float, bool]],
) -> None:
    rewards, values, mask = map(torch.tensor, zip(*[*tokens, (1.0, 2.0, True)], strict=True))
    settings = {"discount": 0.9, "gae_lambda": 0.8}
    whole = generalized_advantages(rewards, values, mask, torch.tensor([len(mask)]), **settings)
    count = torch.tensor([int(mask.sum())])
    alone = generalized_advantages(rewards[mask], values[mask], mask[mask], count, **settings)
    for each, expected in zip(whole, alone, strict=True):
        assert torch.equal(each[mask], expected) and not each[~mask].any()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # (1 - 3)^2 / 2
        (1.5, 1.0, 3.0, 1.62, 0.0),  # clipped to 1.2, whose error is larger: no gradient
        (0.5, 1.0, 3.0, 3.125, -2.5),  # clipped to 0.8, whose error is smaller
        (1.1, 1.0, 0.0, 0.605, 1.1),  # within the clip
    ],
)
def test_value_loss_is_the_larger_error_of_the_value_and_the_clipped_value(
    value: float, old: float, target: float, loss: float, gradient: float
) -> None:
    values = torch.tensor([[value, math.nan]], requires_grad=True)
    output = value_loss(
        values,
        torch.tensor([[old, math.nan]]),
        torch.tensor([[target, math.inf]]),
        torch.tensor([[1.0, 0.0]]),
        value_clip=0.2,
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.tolist() == [[pytest.approx(gradient), 0.0]]
    assert output.stats["tokens"] == 1
    assert output.stats["clipped"] == float(gradient == 0.0)
