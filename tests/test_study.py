"""The study's policies, exact scores and rivals; what it compares is tested with the project."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.study.__main__ import chapters, difference
from benchmarks.study.policy import STATES, SYMBOLS, Engine, logprob_table, new_parameters
from benchmarks.study.rivals import rival_loss
from benchmarks.study.tasks import Bandit, Chain
from benchmarks.study.train import Arm, clip_gradients, gap_estimate, run, scaled, taken
from qurl_megatron.algorithm.objective import policy_objective

SETTINGS: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28, "ratio_cap": 2.0}


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


def test_stochastic_rounding_picks_a_neighbour_and_is_right_on_average() -> None:
    weight = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))
    nearest = Engine("int4")
    engine = Engine("int4", dither=torch.Generator().manual_seed(1))
    step = nearest.quantized(weight).scale
    draws = torch.stack([engine.weights(weight) for _ in range(4000)])
    assert ((draws - weight).abs() < step).all()
    assert ((draws.mean(0) - weight).abs() < 0.04 * step).all()
    assert ((nearest.weights(weight) - weight).abs() > 0.04 * step).any()


def test_straight_through_computes_with_codes_and_passes_gradients() -> None:
    parameters = new_parameters(1, torch.Generator().manual_seed(5))
    for parameter in parameters.values():
        parameter.requires_grad_()
    table = logprob_table(parameters, Engine("int8"), straight_through=True)
    torch.testing.assert_close(table, logprob_table(parameters, Engine("int8")))
    table[:, :, 0].sum().backward()
    gradient = parameters["model.layers.0.mlp.gate_proj.weight"].grad
    assert gradient is not None and gradient.abs().sum() > 0


@pytest.mark.parametrize("task", [Chain(6), Bandit()])
def test_an_exact_score_is_what_samples_tend_to(task: Chain | Bandit, table: Tensor) -> None:
    # New prompts differ from the held-out ones, so the policies must do equally well on all.
    policy = table
    if isinstance(task, Chain):
        states = torch.arange(STATES)
        right = (states // SYMBOLS + states % SYMBOLS) % SYMBOLS
        policy = torch.full_like(table, math.log(0.1 / (SYMBOLS - 1)))
        policy[:, states, right] = math.log(0.9)
    rewards = task.sample(policy, 4000, 1, torch.Generator().manual_seed(0)).rewards.mean(-1)
    best = task.chances.amax(-1).mean() if isinstance(task, Bandit) else 1.0
    torch.testing.assert_close(task.score(policy) * best, rewards, atol=0.03, rtol=0)


def test_the_best_policy_of_the_bandit_scores_one() -> None:
    task = Bandit()
    best = torch.full((1, STATES, SYMBOLS), -1e9)
    best[0, torch.arange(STATES), task.chances.argmax(-1)] = 0
    assert task.score(best).item() == pytest.approx(1.0)


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


def test_masters_of_bfloat16_lose_small_updates() -> None:
    arm = Arm(objective="tis", gap="int8", length=4, learning_rate=1e-5)
    exact = run(arm, seeds=2, steps=4)
    rounded = run(replace(arm, masters="bfloat16"), seeds=2, steps=4)
    assert exact.stats["code_flips"] > 10 * rounded.stats["code_flips"]


def rival(objective: str, current: Tensor, log_rho: Tensor, advantage: float) -> Tensor:
    """Return the gradient of the loss in `current`, with proximal log-probs of -1."""
    current = current.clone().requires_grad_()
    proximal = torch.full_like(current, -1.0)
    ones = torch.ones_like(current)
    loss, _ = rival_loss(
        current, proximal, proximal - log_rho, advantage * ones, ones, objective=objective,
        **SETTINGS,
    )  # fmt: skip
    loss.backward()
    assert current.grad is not None
    return current.grad


def test_rivals_weigh_tokens_as_their_papers_say() -> None:
    rho = torch.tensor([[0.4, 1.5, 3.0]])  # the product is 1.8
    current = torch.full((1, 3), -1.0)
    expected = {
        "icepop": [0.0, -1.5, -3.0],  # 0.4 is below the range
        "mis": [-0.4, -1.5, 0.0],  # 3 is above C
        "sequence_mis": [-1.8, -1.8, -1.8],
        "cispo": [-0.4, -1.5, -2.0],
    }
    for objective, gradient in expected.items():
        actual = rival(objective, current, rho.log(), advantage=1.0)
        torch.testing.assert_close(actual, torch.tensor([gradient]), atol=1e-5, rtol=0)


def test_sequences_with_a_large_product_are_masked() -> None:
    rho = torch.tensor([[2.0, 2.0]])
    current = torch.full((1, 2), -1.0)
    assert rival("sequence_mis", current, rho.log(), 1.0).abs().sum() == 0


def test_gspo_clips_the_mean_ratio_of_a_sequence() -> None:
    current = torch.tensor([[-1.0 + 2e-4, -1.0], [-1.0 + 2e-3, -1.0]])
    gradient = rival("gspo", current, torch.zeros(2, 2), advantage=1.0)
    # Ratios of exp(1e-4) and exp(1e-3): the second is above 1 + 4e-4. Each token has the gradient
    # of both terms of its sequence, over two tokens.
    torch.testing.assert_close(gradient[0], torch.full((2,), -math.exp(1e-4)))
    assert gradient[1].abs().sum() == 0


def test_tbpo_keeps_falling_sequences_within_a_band_and_weighs_with_a_capped_mean_ratio() -> None:
    moved = torch.tensor([[6e-4], [8e-4], [-4e-4]])  # of R: inside, above and below the band
    current, log_rho = -1.0 + moved.expand(3, 2), torch.tensor([0.6, 0.0]).expand(3, 2)
    falling = rival("tbpo", current, log_rho, advantage=-1.0)
    # The mean of log rho is 0.3. Each token has the gradient of both terms, over two tokens.
    torch.testing.assert_close(falling[0], torch.full((2,), math.exp(0.3) * math.exp(6e-4)))
    assert falling[1:].abs().sum() == 0
    rising = rival("tbpo", current, 2 * torch.ones(3, 2), advantage=1.0)
    assert rising[:2].abs().sum() == 0
    torch.testing.assert_close(rising[2], torch.full((2,), -2 * math.exp(-4e-4)))  # exp(2) > C


def test_ais_mixes_by_sample_size_divergence_and_variation() -> None:
    # rho is 1/2 and 3/2: mean 1, mean square 5/4, standard deviation 1/2.
    rho = torch.tensor([[[0.5, 1.5]]])
    divergence = -(math.log(0.5) + math.log(1.5)) / 2
    mix = 1 / 1.25 * divergence / (divergence + 0.01) / 1.5
    gradient = rival("ais", torch.full((1, 1, 2), -1.0), rho.log(), advantage=1.0)
    expected = torch.tensor([[[-(1 - 0.5 * mix), -(1 + 0.5 * mix)]]])
    torch.testing.assert_close(gradient, expected)


def test_ctpo_clips_the_product_so_far_within_bounds_that_widen() -> None:
    # The product is exp(0.04), exp(0.08), exp(0.06), and its upper bound exp(0.05 sqrt(t)) is
    # exp(0.05), exp(0.0707), exp(0.0866): only the second is clipped.
    moved = torch.tensor([[[0.04, 0.04, -0.02]]])
    expected = torch.tensor([[[-math.exp(0.04), 0.0, -math.exp(0.06)]]])
    no_gap = torch.zeros(1, 1, 3)
    torch.testing.assert_close(rival("ctpo", -1 + moved, no_gap, 1.0), expected)
    # What the engine has moved counts as moved; for the other it is a weight.
    still = torch.full((1, 1, 3), -1.0)
    torch.testing.assert_close(rival("ctpo", still, moved, 1.0), expected)
    weighted = rival("ctpo_sequence", -1 + moved, torch.tensor([[[0.5, -0.1, 0.0]]]), 1.0)
    torch.testing.assert_close(weighted, math.exp(0.4) * expected)
    # Falling, the lower bounds are exp(-0.025 sqrt(t)).
    falling = rival("ctpo", -1 - torch.tensor([[[0.03, 0.0, 0.01]]]), no_gap, -1.0)
    expected = torch.tensor([[[0.0, math.exp(-0.03), math.exp(-0.04)]]])
    torch.testing.assert_close(falling, expected)


def test_own_candidates_truncate_other_products() -> None:
    rho = torch.tensor([[[0.5, 1.5, 2.0, 0.8]]])  # the product is 1.2
    expected = {
        "prefix_tis": [0.5, 0.75, 1.5, 1.2],
        "suffix_tis": [1.2, 2.0, 1.6, 0.8],  # the second is 2.4, above C
        "mixed_tis": [0.6**0.5, 1.8**0.5, 2.4**0.5, 0.96**0.5],
        "root_tis": [1.2**0.5] * 4,
        "mipu_step_1": [1.2**0.25] * 4,
    }
    for objective, weights in expected.items():
        gradient = rival(objective, torch.full((1, 1, 4), -1.0), rho.log(), advantage=1.0)
        torch.testing.assert_close(gradient, -torch.tensor([[weights]]), msg=objective)


def test_tempered_products_have_a_bounded_spread() -> None:
    still, log_rho = torch.full((2, 2, 1), -1.0), torch.tensor([[[2.0], [-2.0]], [[0.5], [-0.5]]])
    # The first seed's logarithms are halved, and exp(1) is above C. The second's are as they are.
    expected = [[[2.0], [math.exp(-1)]], [[math.exp(0.5)], [math.exp(-0.5)]]]
    gradient = rival("tempered_tis", still, log_rho, 1.0)
    torch.testing.assert_close(gradient, -torch.tensor(expected))


def test_mipu_estimates_how_much_a_copy_is_better_than_its_policy() -> None:
    # In every state the copy is right with 1/2 and the policy with 1/4; chance is 1/12. An answer
    # of the copy that is right has the ratio 1/2, a wrong one 3/2.
    states = torch.arange(STATES)
    right = (states // SYMBOLS + states % SYMBOLS) % SYMBOLS

    def knows(share: float) -> Tensor:
        table = torch.full((1, STATES, SYMBOLS), math.log((1 - share) / (SYMBOLS - 1)))
        table[:, states, right] = math.log(share)
        return table

    better, worse, generator = knows(0.5), knows(0.25), torch.Generator().manual_seed(0)
    # Half of the answers are right: their advantages are about 1 and -1.
    assert gap_estimate(Chain(1), worse, better, generator).item() == pytest.approx(0.5, abs=0.06)
    assert gap_estimate(Chain(1), better, worse, generator).item() < -0.2
    assert gap_estimate(Chain(1), better, better, generator).item() == 0


def test_mipu_takes_back_what_its_estimate_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = Arm(objective="mipu", length=4)

    def refuse_one(*_: object) -> Tensor:
        return torch.tensor([1.0, -1.0])

    monkeypatch.setattr("benchmarks.study.train.gap_estimate", refuse_one)
    refused = run(arm, seeds=2, steps=2)
    accepted = run(replace(arm, objective="mipu_step_1"), seeds=2, steps=2)
    assert refused.after[0] == accepted.after[0]
    assert refused.after[1] == refused.before[1]
    assert refused.stats["rejected"] == 0.5


def test_rivals_are_tis_where_no_token_is_above_a_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    current = -1 - torch.rand(4, 5, generator=generator)
    proximal = current + 0.1 * torch.randn(4, 5, generator=generator)
    behaviour = proximal + 0.1 * torch.randn(4, 5, generator=generator)
    advantages = torch.randn(4, 5, generator=generator)
    weights = torch.full((4, 5), 1 / 20)
    tensors = (current, proximal, behaviour, advantages, weights)
    tis = policy_objective(*tensors, objective="tis", **SETTINGS)
    for objective in ("icepop", "mis"):
        loss, stats = rival_loss(*tensors, objective=objective, **SETTINGS)
        torch.testing.assert_close(loss, tis.loss)
        assert stats["clipped"] == tis.stats["clipped"]


def test_what_an_arm_of_a_chapter_is_compared_with_belongs_to_the_chapter() -> None:
    for chapter, arms in chapters().items():
        assert set(arms.values()) <= arms.keys(), chapter
        assert all(difference(arm, base) for arm, base in arms.items())
        of_cell = [(difference(arm, base), base) for arm, base in arms.items()]
        assert len(set(of_cell)) == len(of_cell), chapter
