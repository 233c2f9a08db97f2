"""The study's policies and scores; what it compares is tested with the project."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.study.__main__ import chapters, difference
from benchmarks.study.policy import STATES, SYMBOLS, Engine, logprob_table, new_parameters
from benchmarks.study.tasks import Chain
from benchmarks.study.train import Arm, clip_gradients, run, scaled, taken


@pytest.fixture(scope="module")
def table() -> Tensor:
    return logprob_table(new_parameters(3, torch.Generator().manual_seed(5)))


def test_a_table_holds_the_distribution_of_every_state(table: Tensor) -> None:
    assert table.shape == (3, STATES, SYMBOLS)
    torch.testing.assert_close(table.exp().sum(-1), torch.ones(3, STATES))


def test_a_seed_does_not_see_the_others() -> None:
    parameters = new_parameters(3, torch.Generator().manual_seed(5))
    changed = {name: parameter.clone() for name, parameter in parameters.items()}
    for parameter in changed.values():
        parameter[1] *= 1.5
    for engine in (None, Engine("int4")):
        before, after = logprob_table(parameters, engine), logprob_table(changed, engine)
        assert torch.equal(before[[0, 2]], after[[0, 2]])
        assert not torch.equal(before[1], after[1])


def test_uaq_does_not_change_the_policy() -> None:
    parameters = new_parameters(2, torch.Generator().manual_seed(5))
    torch.testing.assert_close(
        logprob_table(scaled(parameters, 1.5)), logprob_table(parameters), atol=1e-5, rtol=0
    )
    assert not torch.equal(
        scaled(parameters, 1.5)["model.layers.0.mlp.up_proj.weight"],
        parameters["model.layers.0.mlp.up_proj.weight"],
    )


def test_an_engine_with_twice_the_error_is_twice_as_far_from_the_weights() -> None:
    weight = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))
    once, twice = Engine("int4").weights(weight), Engine("int4", error=2.0).weights(weight)
    torch.testing.assert_close(twice - weight, 2 * (once - weight))


def test_an_exact_score_is_what_samples_tend_to(table: Tensor) -> None:
    # New prompts differ from the held-out ones, so the policies must do equally well on all.
    task, states = Chain(6), torch.arange(STATES)
    right = (states // SYMBOLS + states % SYMBOLS) % SYMBOLS
    policy = torch.full_like(table, math.log(0.1 / (SYMBOLS - 1)))
    policy[:, states, right] = math.log(0.9)
    rewards = task.sample(policy, 4000, 1, torch.Generator().manual_seed(0)).rewards.mean(-1)
    torch.testing.assert_close(task.score(policy), rewards, atol=0.03, rtol=0)


def test_samples_are_scored_where_they_were_sampled(table: Tensor) -> None:
    rollouts = Chain(5).sample(table, 2, 3, torch.Generator().manual_seed(0))
    logprobs = taken(table, rollouts.states, rollouts.symbols)
    assert logprobs.shape == (3, 6, 5)
    seed, row, time = 2, 4, 3
    state, symbol = rollouts.states[seed, row, time], rollouts.symbols[seed, row, time]
    assert logprobs[seed, row, time] == table[seed, state, symbol]


def test_gradients_are_clipped_seed_by_seed() -> None:
    weight = torch.zeros(2, 3, requires_grad=True)
    weight.grad = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0]])
    clip_gradients({"weight": weight}, 1.0)
    torch.testing.assert_close(weight.grad, torch.tensor([[0.6, 0.8, 0.0], [0.3, 0.4, 0.0]]))


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_an_engine_without_error_has_ratios_of_one_and_one_minibatch_clips_nothing(
    top_p: float,
) -> None:
    outcome = run(Arm(objective="tis", gap="none", length=4, top_p=top_p), seeds=2, steps=10)
    assert outcome.stats["ratio_proximal_behaviour_max"] == 1.0
    assert outcome.stats["clipped"] == 0.0
    assert len(outcome.after) == 2
    assert sum(outcome.after) > sum(outcome.before)


def test_uaq_is_a_larger_learning_rate_for_weights_and_a_smaller_one_for_norms() -> None:
    plain = Arm(objective="tis", gap="int4", length=4, learning_rate=1e-4)
    like_uaq = replace(plain, weight_rate=2.0, norm_rate=0.5)
    scores = {
        arm: torch.tensor(run(arm, seeds=3, steps=4).after)
        for arm in (plain, like_uaq, replace(plain, uaq_scale=2.0))
    }
    of_plain, of_rates, of_uaq = scores.values()
    torch.testing.assert_close(of_uaq, of_rates, atol=1e-5, rtol=0)
    assert (of_uaq - of_plain).abs().max() > 1e-4


def test_what_an_arm_of_a_chapter_is_compared_with_belongs_to_the_chapter() -> None:
    for chapter, arms in chapters().items():
        assert set(arms.values()) <= arms.keys(), chapter
        assert all(difference(arm, base) for arm, base in arms.items())
        of_cell = [(difference(arm, base), base) for arm, base in arms.items()]
        assert len(set(of_cell)) == len(of_cell), chapter
