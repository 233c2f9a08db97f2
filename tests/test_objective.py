"""The objectives against hand-computed numbers.

All hand-worked cases use eps_low 0.2, eps_high 0.28 (clip to [0.8, 1.28]) and C = 2.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import (
    STALENESS_BUCKETS,
    ObjectiveOutput,
    PolicyLoss,
    add_up,
    minibatches,
    mismatch_sums,
    policy_objective,
    rollout_statistics,
    statistics_by_staleness,
    token_weights,
)
from qurl_megatron.config.schema import Config, Objective, ObjectiveConfig
from qurl_megatron.config.text import with_overrides

torch.set_num_threads(1)
OBJECTIVES: tuple[str, ...] = get_args(Objective)
CLIPPING = tuple(each for each in OBJECTIVES if each != "cispo")
SETTINGS: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28, "ratio_cap": 2.0}


def sum_over_rows(values: Tensor) -> Tensor:
    """Return for each token the sum over its row."""
    return values.sum(-1, keepdim=True).expand_as(values)


def differentiate(
    batch: dict[str, Any], objective: str, **changes: Any
) -> tuple[ObjectiveOutput, Tensor]:
    """Return the objective of a batch and dJ/d(log current)."""
    current = batch["current_logprobs"].clone().requires_grad_()
    inputs = {"sum_over_sequences": sum_over_rows, **batch, **SETTINGS, **changes}
    inputs["current_logprobs"] = current
    output = policy_objective(objective=objective, **inputs)
    output.loss.backward()
    assert current.grad is not None
    return output, -current.grad


def of_logprobs(
    objective: str, logprobs: list[Tensor], advantage: float, **changes: Any
) -> tuple[ObjectiveOutput, Tensor]:
    """Return J and dJ/d(log current) of one token of weight 1.

    Its log-probs are those of current, proximal and behaviour.
    """
    names = ("current_logprobs", "proximal_logprobs", "behaviour_logprobs")
    batch = dict(zip(names, logprobs, strict=True))
    batch |= {"advantages": torch.tensor([[advantage]]), "loss_weights": torch.ones(1, 1)}
    return differentiate(batch, objective, **changes)


def one_token(
    objective: str,
    current: float,
    proximal: float,
    behaviour: float,
    advantage: float,
    **changes: Any,
) -> tuple[ObjectiveOutput, Tensor]:
    """Return J and dJ/d(log current) of one token of weight 1, given probabilities."""
    logprobs = [torch.tensor([[each]]).log() for each in (current, proximal, behaviour)]
    return of_logprobs(objective, logprobs, advantage, **changes)


# current, proximal, behaviour, advantage -> J of each objective, by hand. With p and b for proximal
# and behaviour: R = current / p, rho = p / b, and naive's ratio is current / b.
HAND_WORKED = {
    # R = 1.1, rho = 1.25, naive ratio 1.375 > 1.28: only naive clips
    "rho below C, positive": (
        (0.275, 0.25, 0.2, 1.0),
        {"naive": 1.28, "on_policy": 1.1, "decoupled": 1.375, "tis": 1.375, "acr": 1.375},
    ),
    # R = 1.5 is clipped to 1.28; rho = 1.25
    "rho below C, positive, R above the bound": (
        (0.375, 0.25, 0.2, 2.0),
        {"naive": 2.56, "on_policy": 2.56, "decoupled": 3.2, "tis": 3.2, "acr": 3.2},
    ),
    # R = 0.6 is clipped to 0.8; rho = 1.25; naive ratio 0.75 clipped to 0.8
    "rho below C, negative, R below the bound": (
        (0.15, 0.25, 0.2, -1.0),
        {"naive": -0.8, "on_policy": -0.8, "decoupled": -1.0, "tis": -1.0, "acr": -1.0},
    ),
    # R = 1.5 with a negative advantage is never clipped; rho = 0.5, naive ratio 0.75 clipped to 0.8
    "rho below 1, negative, R above the bound": (
        (0.375, 0.25, 0.5, -1.0),
        {"naive": -0.8, "on_policy": -1.5, "decoupled": -0.75, "tis": -0.75, "acr": -0.75},
    ),
    # rho = 4, r = 1/2: acr's bound is 2.56, so R = 1.5 passes there and is clipped elsewhere
    "rho above C, positive, R between the bounds": (
        (0.6, 0.4, 0.1, 1.0),
        {"naive": 1.28, "on_policy": 1.28, "decoupled": 5.12, "tis": 2.56, "acr": 3.0},
    ),
    # rho = 5, r = 0.4: acr's bound is 3.2, R = 4 is past it too
    "rho above C, positive, R above both bounds": (
        (0.8, 0.2, 0.04, 1.0),
        {"naive": 1.28, "on_policy": 1.28, "decoupled": 6.4, "tis": 2.56, "acr": 6.4},
    ),
    # rho = 4, R = 0.5: acr's lower bound stays 0.8
    "rho above C, negative, R below the bound": (
        (0.2, 0.4, 0.1, -1.0),
        {"naive": -2.0, "on_policy": -0.8, "decoupled": -3.2, "tis": -1.6, "acr": -1.6},
    ),
    # rho = 4, R = 1.5, advantage -1: nothing clips
    "rho above C, negative, R above the bound": (
        (0.6, 0.4, 0.1, -1.0),
        {"naive": -6.0, "on_policy": -1.5, "decoupled": -6.0, "tis": -3.0, "acr": -3.0},
    ),
}


for _, values in HAND_WORKED.values():
    values["sequence_tis"] = values["gspo"] = values["tis"]  # of a sequence of one token


@pytest.mark.parametrize("objective", CLIPPING)
@pytest.mark.parametrize("case", HAND_WORKED)
def test_objective_has_the_value_worked_out_by_hand(case: str, objective: str) -> None:
    probabilities, expected = HAND_WORKED[case]
    output, _ = one_token(objective, *probabilities)
    assert -output.loss.item() == pytest.approx(expected[objective], rel=1e-6)


# The objectives that clip the token of each case, by hand.
CLIPPED = {
    "rho below C, positive": {"naive"},
    "rho below C, positive, R above the bound": set(OBJECTIVES),
    "rho below C, negative, R below the bound": set(OBJECTIVES),
    "rho below 1, negative, R above the bound": {"naive"},
    "rho above C, positive, R between the bounds": set(OBJECTIVES) - {"acr"},
    "rho above C, positive, R above both bounds": set(OBJECTIVES),
    "rho above C, negative, R below the bound": set(OBJECTIVES) - {"naive"},
    "rho above C, negative, R above the bound": set(),
}


@pytest.mark.parametrize("objective", CLIPPING)
@pytest.mark.parametrize("case", HAND_WORKED)
def test_clipped_tokens_are_counted_and_have_no_gradient(case: str, objective: str) -> None:
    probabilities, expected = HAND_WORKED[case]
    output, gradient = one_token(objective, *probabilities)
    is_clipped = objective in CLIPPED[case]
    assert output.stats["clipped"].item() == is_clipped
    # Unclipped, J is proportional to R, so its gradient in log R is J itself.
    expected_gradient = 0.0 if is_clipped else expected[objective]
    assert gradient.item() == pytest.approx(expected_gradient, rel=1e-6)


@pytest.mark.parametrize("case", HAND_WORKED)
def test_acr_widened_counts_tokens_that_tis_clips_and_acr_does_not(case: str) -> None:
    probabilities, _ = HAND_WORKED[case]
    widened = {
        name: one_token(name, *probabilities)[0].stats["acr_widened"].item() for name in OBJECTIVES
    }
    assert widened["acr"] == (case == "rho above C, positive, R between the bounds")
    assert not any(widened[name] for name in OBJECTIVES if name != "acr")


# current, proximal, behaviour, advantage -> J of each objective with dual clip at 3, by hand, and
# the objectives whose token it leaves without a gradient.
DUAL_CLIP = {
    # rho = 2, R = 4, naive ratio 8: J = -3 * weight
    "R above 3": (
        (0.8, 0.2, 0.1, -1.0),
        {"naive": -3.0, "on_policy": -3.0, "decoupled": -6.0, "tis": -6.0, "acr": -6.0},
        set(OBJECTIVES),
    ),
    # rho = 4, r = 1/2, R = 2, naive ratio 8. r * R = 1 plays no part, and the weight comes after.
    "R below 3, rho above C": (
        (0.8, 0.4, 0.1, -2.0),
        {"naive": -6.0, "on_policy": -4.0, "decoupled": -16.0, "tis": -8.0, "acr": -8.0},
        {"naive"},
    ),
    # rho = 1/4, R = 4, naive ratio 1: weight times R is 1, and yet R is above 3
    "R above 3, weighted ratio below": (
        (0.8, 0.2, 0.8, -1.0),
        {"naive": -1.0, "on_policy": -3.0, "decoupled": -0.75, "tis": -0.75, "acr": -0.75},
        set(OBJECTIVES) - {"naive"},
    ),
    # rho = 5, R = 4: a positive advantage knows the usual bounds only, 1.28 and acr's 3.2
    "R above 3, positive": (
        (0.8, 0.2, 0.04, 1.0),
        {"naive": 1.28, "on_policy": 1.28, "decoupled": 6.4, "tis": 2.56, "acr": 6.4},
        set(),
    ),
}


for case in DUAL_CLIP.values():
    case[1]["sequence_tis"] = case[1]["gspo"] = case[1]["tis"]


@pytest.mark.parametrize("objective", CLIPPING)
@pytest.mark.parametrize("case", DUAL_CLIP)
def test_dual_clip_bounds_the_policy_ratio_of_negative_advantages(
    case: str, objective: str
) -> None:
    (current, proximal, behaviour, advantage), expected, stopped = DUAL_CLIP[case]
    output, gradient = one_token(objective, current, proximal, behaviour, advantage, dual_clip=3.0)
    assert -output.loss.item() == pytest.approx(expected[objective], rel=1e-6)
    assert output.stats["dual_clipped"].item() == (objective in stopped)
    assert output.stats["clipped"].item() == (advantage > 0)
    has_gradient = advantage < 0 and objective not in stopped
    assert gradient.item() == pytest.approx(expected[objective] if has_gradient else 0.0, rel=1e-6)


@pytest.mark.parametrize("case", HAND_WORKED)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_dual_clip_changes_no_bit_of_a_token_below_it(objective: str, case: str) -> None:
    probabilities, _ = HAND_WORKED[case]
    off, off_gradient = one_token(objective, *probabilities)
    on, on_gradient = one_token(objective, *probabilities, dual_clip=50.0)
    assert torch.equal(on.loss, off.loss) and torch.equal(on_gradient, off_gradient)
    assert on.stats == off.stats and off.stats["dual_clipped"] == 0


def random_batch(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a batch in which every case of clipping and truncation occurs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(std: float) -> torch.Tensor:
        return std * torch.randn(8, 16, generator=generator, dtype=torch.float64)

    proximal = -1.5 + normal(0.5)
    loss_mask = torch.rand(8, 16, generator=generator) < 0.7
    batch = {
        "current_logprobs": proximal + normal(0.4),
        "proximal_logprobs": proximal,
        "behaviour_logprobs": proximal + normal(0.8),
        "advantages": normal(1.0),
        "loss_weights": weights_of(loss_mask, "sequence_mean"),
    }
    return {name: value.to(dtype) for name, value in batch.items()}


# The rho of a sequence's tokens, None for one that the policy did not sample -> the weight of each
# sampled token, by hand.
PRODUCTS: dict[str, tuple[list[float | None], float]] = {
    "below C": ([2.0, 0.25, 3.0], 1.5),  # 3 alone is above C
    "at C": ([2.0, 0.5, 2.0], 2.0),
    "above C": ([1.5, 1.2, 1.6], 2.0),  # 2.88, and no token is above C
    "far below 1": ([0.1, 0.1, 0.1], 1e-3),
    "tokens between turns": ([2.0, None, None, 0.75], 1.5),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_sequence_tis_weighs_a_sequences_tokens_with_the_capped_product_of_their_ratios(
    case: str,
) -> None:
    """In the first pass and in later ones, beside another sequence. R is 1.1, the advantage 2."""
    ratios, weight = PRODUCTS[case]
    mask = torch.tensor([ratio is not None for ratio in ratios] + [True])
    rho = torch.tensor([1.0 if ratio is None else ratio for ratio in ratios] + [1.75])
    behaviour = torch.linspace(-2, -1, len(rho)).where(mask, math.nan)
    proximal, lengths = behaviour + rho.log(), [len(ratios), 1]
    for moved in (0.0, math.log(1.1)):
        current = (proximal + moved).requires_grad_()
        rows = TrainBatch(
            torch.tensor(lengths),
            torch.zeros(len(rho)),
            mask,
            behaviour_logprobs=behaviour,
            advantages=torch.full_like(rho, 2.0),
            proximal_logprobs=proximal if moved else None,
            entropy=torch.zeros_like(rho),
        )
        loss = PolicyLoss(ObjectiveConfig("sequence_tis", eps_high=0.28, ratio_cap=2.0))
        value, _ = loss(
            current, torch.zeros_like(rho), rows, mask.float(), sum_over(torch.tensor(lengths))
        )
        value.backward()
        assert current.grad is not None
        expected = torch.tensor([weight] * len(ratios) + [1.75]).where(mask, 0.0)
        torch.testing.assert_close(-current.grad, 2 * math.exp(moved) * expected)


@pytest.mark.parametrize("objective", ["sequence_tis", "gspo"])
def test_an_objective_of_sequences_without_the_sums_is_refused(objective: str) -> None:
    with pytest.raises(ValueError, match=f"{objective} needs sum_over_sequences"):
        policy_objective(**random_batch(seed=4), objective=objective, **SETTINGS)


def of_completions(seed: int, *, moved: float) -> dict[str, Tensor]:
    """Return a batch in float64 whose advantages are those of its rows.

    `moved` divides the distance of current from proximal.
    """
    batch = random_batch(seed, torch.float64)
    batch["advantages"] = batch["advantages"][:, :1].expand(8, 16)
    proximal, current = batch["proximal_logprobs"], batch["current_logprobs"]
    return {**batch, "current_logprobs": proximal + (current - proximal) / moved}


@pytest.mark.parametrize("corrects", [False, True])
def test_gspo_clips_the_mean_ratio_of_each_sequence(corrects: bool) -> None:
    """Its paper's Eq. 5 to 7 with log-probs of the engine that equal the learner's, else Eq. 13."""
    batch = of_completions(seed=9, moved=20)
    if not corrects:
        batch["behaviour_logprobs"] = batch["proximal_logprobs"]
    eps = {"eps_low": 3e-3, "eps_high": 4e-3}
    output, gradient = differentiate(batch, "gspo", **eps)

    current = batch["current_logprobs"].clone().requires_grad_()
    gains, clipped = [], 0
    for row in range(8):
        kept = batch["loss_weights"][row] > 0
        new, old = current[row, kept], batch["proximal_logprobs"][row, kept]
        ratio = (new - old).mean().exp()
        rho = (old - batch["behaviour_logprobs"][row, kept]).exp().clamp(max=2)
        if corrects:
            ratio = ratio.detach() * (new - new.detach()).exp()
        advantage = batch["advantages"][row, 0]
        low, high = ratio * advantage, ratio.clamp(1 - 3e-3, 1 + 4e-3) * advantage
        gains.append((rho * torch.minimum(low, high)).mean())
        clipped += int(kept.sum()) * bool(high.flatten()[0] < low.flatten()[0])
    total = torch.stack(gains).mean()
    total.backward()
    torch.testing.assert_close(-output.loss, total.detach())
    torch.testing.assert_close(gradient, current.grad)
    assert 0 < clipped < output.stats["tokens"] and output.stats["clipped"] == clipped


def test_cispo_weighs_the_log_prob_of_every_token_with_its_capped_ratio() -> None:
    """Its paper's Eq. 4, times min(rho, C); no token is without a gradient."""
    batch = of_completions(seed=10, moved=1)
    output, gradient = differentiate(batch, "cispo")
    counted = batch["loss_weights"] > 0
    ratio = (batch["current_logprobs"] - batch["proximal_logprobs"]).exp()
    rho = (batch["proximal_logprobs"] - batch["behaviour_logprobs"]).exp()
    expected = rho.clamp(max=2) * ratio.clamp(max=1.28) * batch["advantages"]
    expected = expected * batch["loss_weights"]
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(-output.loss, (expected * batch["current_logprobs"]).sum())
    assert gradient[counted].all() and output.stats["clipped"] == (counted & (ratio > 1.28)).sum()
    assert (counted & (ratio > 1.28) & (batch["advantages"] > 0)).any()


def sum_over(lengths: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a tensor over each sequence, for each of its tokens."""
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths)

    def sums(values: Tensor) -> Tensor:
        return torch.zeros(len(lengths)).index_add(0, numbers, values)[numbers]

    return sums


def test_acr_equals_tis_where_no_ratio_exceeds_the_cap() -> None:
    batch = random_batch(seed=1)
    rho = (batch["proximal_logprobs"] - batch["behaviour_logprobs"]).exp()
    highest = rho.max().item()
    for ratio_cap, are_equal in ((highest, True), (1.0, False)):
        tis, tis_gradient = differentiate(batch, "tis", ratio_cap=ratio_cap)
        acr, acr_gradient = differentiate(batch, "acr", ratio_cap=ratio_cap)
        assert torch.equal(tis.loss, acr.loss) == are_equal
        assert torch.equal(tis_gradient, acr_gradient) == are_equal


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.3])
@pytest.mark.parametrize("objective", [each for each in CLIPPING if each != "gspo"])
def test_gradient_agrees_with_finite_differences(objective: str, kl_coefficient: float) -> None:
    batch = random_batch(seed=2, dtype=torch.float64)
    reference = batch["proximal_logprobs"] + 0.3

    def loss(current: torch.Tensor) -> torch.Tensor:
        return policy_objective(
            **{**batch, "current_logprobs": current},
            sum_over_sequences=sum_over_rows,
            objective=objective,
            kl_coefficient=kl_coefficient,
            reference_logprobs=reference,
            **SETTINGS,
        ).loss

    assert torch.autograd.gradcheck(
        loss, batch["current_logprobs"].clone().requires_grad_(), eps=1e-6, atol=1e-8, rtol=1e-6
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_positions_never_contribute_even_if_not_finite(
    objective: str, garbage: float
) -> None:
    clean = random_batch(seed=3)
    clean["reference_logprobs"] = clean["proximal_logprobs"] - 0.1
    masked = clean["loss_weights"] == 0
    assert masked.any() and not masked.all()
    dirty = {
        name: value if name == "loss_weights" else value.masked_fill(masked, garbage)
        for name, value in clean.items()
    }
    clean_output, clean_gradient = differentiate(clean, objective, kl_coefficient=0.1)
    dirty_output, dirty_gradient = differentiate(dirty, objective, kl_coefficient=0.1)
    assert torch.equal(clean_output.loss, dirty_output.loss)
    assert torch.equal(clean_gradient, dirty_gradient)
    assert clean_output.stats == dirty_output.stats
    assert clean_output.stats["tokens"] == (~masked).sum()


def test_nan_in_an_unmasked_token_reaches_the_loss() -> None:
    output, _ = one_token("acr", math.nan, 0.2, 0.2, 1.0)
    assert output.loss.isnan()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratios_beyond_float32_stay_finite(objective: str, advantage: float) -> None:
    for values in [(0.0, -90.0, -180.0), (-180.0, -90.0, 0.0)]:
        logprobs = [torch.tensor([[value]]) for value in values]
        output, gradient = of_logprobs(objective, logprobs, advantage)
        assert output.loss.isfinite() and gradient.isfinite().all()


def test_kl_penalty_is_k3_between_current_and_reference() -> None:
    """current 0.5, reference 0.25: x = 1/2, k3 = 1/2 - 1 + log 2."""
    k3 = 0.5 - 1 + math.log(2)
    reference = torch.tensor([[0.25]]).log()
    output, _ = one_token(
        "acr", 0.5, 0.5, 0.5, 3.0, kl_coefficient=0.1, reference_logprobs=reference
    )
    assert output.loss.item() == pytest.approx(-3.0 + 0.1 * k3, rel=1e-6)
    assert output.stats["kl_reference"].item() == pytest.approx(k3, rel=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "k3", "gradient"),
    [
        (0.0, 0.0, 0.0),
        (2.0, math.exp(2) - 3, 1 - math.exp(2)),  # 4.39 is below 10
        (3.0, 10.0, 0.0),  # e^3 - 4 = 16.1
        (19.9, 10.0, 0.0),  # 4.4e8 unbounded
        (60.0, 10.0, 0.0),
        (-2.0, math.exp(-2) + 1, 1 - math.exp(-2)),
        (-12.0, 10.0, 0.0),  # e^-12 + 11
    ],
)
def test_kl_penalty_of_a_token_is_at_most_10_and_has_no_gradient_beyond(
    log_ratio: float, k3: float, gradient: float
) -> None:
    """log_ratio is log(reference / current); the gradient is that of k3 in log current."""
    current, reference = torch.tensor([[-70.0]]), torch.tensor([[-70.0 + log_ratio]])
    output, of_gain = of_logprobs(
        "acr", [current] * 3, 0.0, kl_coefficient=1.0, reference_logprobs=reference
    )
    assert output.loss.item() == pytest.approx(k3, rel=1e-5)
    assert output.stats["kl_reference"].item() == pytest.approx(k3, rel=1e-5)
    assert -of_gain.item() == pytest.approx(gradient, rel=1e-5)


def test_the_entropy_bonus_raises_j_by_its_multiple_of_the_entropy_of_trained_tokens() -> None:
    batch = random_batch(seed=4)
    entropy = torch.rand(batch["advantages"].shape).masked_fill(
        batch["loss_weights"] == 0, math.nan
    )
    entropy.requires_grad_()
    plain, plain_gradient = differentiate(batch, "acr")
    output, gradient = differentiate(batch, "acr", entropy_coefficient=0.3, entropy=entropy)
    mean = (batch["loss_weights"] * entropy.detach().nan_to_num()).sum()
    torch.testing.assert_close(plain.loss - output.loss, 0.3 * mean)
    torch.testing.assert_close(entropy.grad, -0.3 * batch["loss_weights"])
    assert torch.equal(gradient, plain_gradient) and output.stats == plain.stats
    with pytest.raises(ValueError, match="entropy_coefficient 0.3 needs entropy"):
        differentiate(batch, "acr", entropy_coefficient=0.3)


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference_logprobs"):
        policy_objective(**random_batch(seed=4), objective="acr", kl_coefficient=0.1, **SETTINGS)


MASK = torch.tensor([[False, True, True, False], [True, True, True, True], [False] * 4])


def weights_of(loss_mask: Tensor, aggregation: str) -> Tensor:
    """Return `token_weights` of rows [batch, time], as such rows."""
    batch, time = loss_mask.shape
    lengths = torch.full((batch,), time)
    flat = loss_mask.flatten()
    return token_weights(TrainBatch(lengths, flat.int(), flat), aggregation).view(batch, time)


def test_sequence_mean_gives_every_sequence_the_same_weight() -> None:
    weights = weights_of(MASK, "sequence_mean")
    expected = torch.tensor([[0, 1 / 4, 1 / 4, 0], [1 / 8] * 4, [0.0] * 4])
    torch.testing.assert_close(weights, expected, rtol=1e-7, atol=0)


def test_token_mean_gives_every_token_the_same_weight() -> None:
    torch.testing.assert_close(weights_of(MASK, "token_mean"), MASK.float() / 6, rtol=1e-7, atol=0)


def test_dr_grpo_divides_by_completions_and_their_longest_length() -> None:
    weights = token_weights(
        TrainBatch(torch.tensor([4, 4, 4]), MASK.flatten().int(), MASK.flatten()), "dr_grpo", 5
    )
    torch.testing.assert_close(weights.view(3, 4), MASK.float() / 15, rtol=1e-7, atol=0)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "dr_grpo"])
def test_what_is_left_out_weighs_nothing(aggregation: str) -> None:
    """Of three completions of two tokens, one and then all; an empty minibatch has a loss of 0."""
    mask = torch.ones(6, dtype=torch.bool)
    batch = TrainBatch(torch.tensor([2, 2, 2]), mask.int(), mask)
    batch.left_out = torch.tensor([0, 0, 1, 1, 0, 0], dtype=torch.bool)
    share = 1 / 6 if aggregation == "dr_grpo" else 1 / 4
    weights = token_weights(batch, aggregation, 2)
    torch.testing.assert_close(weights, share * torch.tensor([1.0, 1, 0, 0, 1, 1]))
    batch.left_out = mask
    weights = token_weights(batch, aggregation, 2)
    assert not weights.any() and batch.loss_mask.all()
    rows = dict.fromkeys(("behaviour_logprobs", "advantages", "proximal_logprobs"), mask.float())
    current = torch.zeros(6, requires_grad=True)
    loss, stats = PolicyLoss(ObjectiveConfig())(
        current, current, dataclasses.replace(batch, entropy=mask.float(), **rows), weights
    )
    loss.backward()
    assert loss == 0 and current.grad is not None and not current.grad.any()
    assert all(value == 0 for value in stats.values())


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5))
def test_weights_of_ragged_sequences_are_those_of_padded_rows(masks: list[list[bool]]) -> None:
    if not any(map(any, masks)):
        masks[0][0] = True
    rows = [torch.tensor(mask) for mask in masks]
    lengths = torch.tensor([len(row) for row in rows])
    for aggregation in ("sequence_mean", "token_mean"):
        flat = torch.cat(rows)
        weights = token_weights(TrainBatch(lengths, flat.int(), flat), aggregation)
        expected = weights_of(torch.nn.utils.rnn.pad_sequence(rows, True, False), aggregation)
        is_real = torch.arange(expected.shape[1]) < lengths[:, None]
        assert torch.equal(weights, expected[is_real])
        assert weights.sum().item() == pytest.approx(1, rel=1e-5)


def test_losses_of_the_parts_of_a_batch_add_up_to_its_loss() -> None:
    batch = random_batch(seed=5, dtype=torch.float64)

    def loss(rows: slice) -> float:
        part = {name: value[rows] for name, value in batch.items()}
        return policy_objective(**part, objective="acr", **SETTINGS).loss.item()

    assert loss(slice(0, 3)) + loss(slice(3, 8)) == pytest.approx(loss(slice(0, 8)), rel=1e-12)


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="no token"):
        weights_of(torch.zeros(2, 3, dtype=torch.bool), "token_mean")


def floats(sums: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def test_rollout_statistics_match_numbers_worked_out_by_hand() -> None:
    """The ratios proximal / behaviour are 2.5, 0.5 and 1, and a masked NaN."""
    proximal = torch.tensor([[0.5, 0.25, 0.3, math.nan]]).log()
    behaviour = torch.tensor([[0.2, 0.5, 0.3, 0.1]]).log()
    mask = torch.tensor([[True, True, True, False]])
    statistics = rollout_statistics(floats(mismatch_sums(proximal, behaviour, mask, 2.0)))
    log_up, log_down = math.log(2.5), math.log(0.5)
    assert statistics == pytest.approx(
        {
            "kl_behaviour_proximal": -(log_up + log_down) / 3,
            "kl_behaviour_proximal_k3": (1.5 - log_up - 0.5 - log_down) / 3,
            "logprob_abs_diff": (log_up - log_down) / 3,
            "ratio_proximal_behaviour_max": 2.5,
            "tis_truncated_fraction": 1 / 3,
        },
        rel=1e-6,
    )


def stale_batch(mask: Tensor) -> TrainBatch:
    """Return eight tokens of every bucket of staleness, of which the second has a ratio of 4."""
    ratios = torch.tensor([[1.0, 4.0, 3.0, 0.5, 2.5, 1.5, 6.0, 1.0]])
    behaviour = torch.full_like(ratios, 0.1).log()
    return TrainBatch(
        lengths=torch.tensor([8]),
        tokens=torch.zeros(1, 8, dtype=torch.int32),
        loss_mask=mask,
        behaviour_logprobs=behaviour,
        advantages=torch.ones_like(ratios),
        loss_weights=mask / mask.sum(),
        proximal_logprobs=behaviour + ratios.log(),
        entropy=torch.full_like(ratios, 0.5),
        token_staleness=torch.tensor([[0, 0, 1, 2, 3, 4, 5, 9]], dtype=torch.int32),
    )


def stats_of(batch: TrainBatch) -> dict[str, float]:
    """Return the policy loss's statistics of `batch`, whose policy has not moved."""
    assert batch.proximal_logprobs is not None and batch.loss_weights is not None
    loss = PolicyLoss(ObjectiveConfig(ratio_cap=2.0), by_staleness=True)
    _, stats = loss(batch.proximal_logprobs, torch.zeros(1, 8), batch, batch.loss_weights)
    return floats(stats)


def test_statistics_by_staleness_are_those_of_its_tokens() -> None:
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[0, 1] = False  # its ratio of 4 must not show
    by_staleness = statistics_by_staleness(stats_of(stale_batch(mask)))
    assert list(by_staleness) == ["0", "1", "2", "3-4", "5+"]
    assert [
        by_staleness[staleness]["ratio_proximal_behaviour_max"] for staleness in by_staleness
    ] == pytest.approx([1.0, 3.0, 0.5, 2.5, 6.0])
    assert (
        by_staleness["3-4"]["tis_truncated_fraction"]
        == by_staleness["5+"]["tis_truncated_fraction"]
        == 0.5
    )
    assert by_staleness["3-4"]["token_fraction"] == pytest.approx(2 / 7)
    assert all(
        staleness["clip_fraction"] == staleness["acr_widened_fraction"] == 0
        for staleness in by_staleness.values()
    )
    mask[0, 3] = False
    assert "2" not in statistics_by_staleness(stats_of(stale_batch(mask)))


def test_log_rho_is_added_up_by_the_sign_of_the_advantage() -> None:
    """Of ratios 1, 4, 3, 0.5, 2.5, 1.5, 6 and 1; the second is masked, the last has neither."""
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[0, 1] = False
    batch = stale_batch(mask)
    batch.advantages = torch.tensor([[1.0, 1.0, -1.0, 0.5, -2.0, 1.0, -1.0, 0.0]])
    stats = stats_of(batch)
    assert (stats["tokens/positive"], stats["tokens/negative"]) == (3, 3)
    assert stats["log_rho/positive"] == pytest.approx(math.log(0.5 * 1.5))
    assert stats["log_rho/negative"] == pytest.approx(math.log(3 * 2.5 * 6), rel=1e-6)


def test_statistics_of_the_parts_of_a_batch_add_up_to_its_statistics() -> None:
    whole = stats_of(stale_batch(torch.ones(1, 8, dtype=torch.bool)))
    halves = []
    for half in (slice(0, 4), slice(4, 8)):
        mask = torch.zeros(1, 8, dtype=torch.bool)
        mask[0, half] = True
        halves.append(stats_of(stale_batch(mask)))
    assert add_up(halves) == pytest.approx(whole, rel=1e-12)
    assert whole["largest_ratio"] == pytest.approx(6) and whole["entropy"] == 4


def test_in_the_first_pass_current_logprobs_are_the_proximal_ones() -> None:
    batch = stale_batch(torch.ones(1, 8, dtype=torch.bool))
    assert batch.proximal_logprobs is not None and batch.loss_weights is not None
    loss, entropy = PolicyLoss(ObjectiveConfig()), torch.full((1, 8), 0.25)
    results = []
    for proximal in (batch.proximal_logprobs, None):
        current = batch.proximal_logprobs.clone().requires_grad_()
        entropy.requires_grad_(proximal is None)
        given = dataclasses.replace(batch, proximal_logprobs=proximal, entropy=entropy)
        value, stats = loss(current, entropy, given, batch.loss_weights)
        value.backward()
        assert current.grad is not None and current.grad.any()
        results.append((value.item(), current.grad.tolist(), floats(stats)))
        assert given.proximal_logprobs is not None and not given.proximal_logprobs.requires_grad
        assert torch.equal(given.proximal_logprobs, batch.proximal_logprobs)
        assert given.entropy is not None and not given.entropy.requires_grad
    assert results[0] == results[1]


def test_every_setting_of_a_run_reaches_its_loss() -> None:
    batch = random_batch(seed=8)
    batch["reference_logprobs"] = batch["proximal_logprobs"] + 0.3
    weights, current = batch["loss_weights"], batch["current_logprobs"]
    names = ("proximal_logprobs", "behaviour_logprobs", "reference_logprobs", "advantages")
    zeros = torch.zeros_like(current)
    rows = TrainBatch(
        torch.tensor([128]), zeros, weights > 0, entropy=zeros, **{n: batch[n] for n in names}
    )
    config = ObjectiveConfig(
        "tis", 0.05, 0.5, 1.2, kl_coefficient=0.7, entropy_coefficient=0.1, dual_clip=1.5
    )
    settings = dataclasses.asdict(config)
    del settings["aggregation"], settings["advantage_estimator"]
    entropy = torch.rand_like(current)
    expected = policy_objective(**batch, entropy=entropy, **settings).loss
    assert torch.equal(PolicyLoss(config)(current, entropy, rows, weights)[0], expected)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("sequence_mean", [0, 1 / 2, 0, 1 / 6, 1 / 6, 1 / 6]),
        ("token_mean", [0, 1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]),
        ("dr_grpo", [0, 1 / 14, 0, 1 / 14, 1 / 14, 1 / 14]),
    ],
)
def test_the_weights_of_each_minibatch_follow_the_aggregation(
    aggregation: str, weights: list[float]
) -> None:
    words = [f"objective.aggregation={aggregation}", "optimizer.minibatches_per_step=2"]
    words += ["rollout.max_completion_length=7"]
    mask = torch.tensor([0, 1, 0, 1, 1, 1] * 2, dtype=torch.bool)
    zeros = torch.zeros(12)
    batch = TrainBatch(
        torch.tensor([2, 4] * 2), zeros, mask, behaviour_logprobs=zeros, advantages=zeros
    )
    parts = list(minibatches(with_overrides(Config(), words), batch))
    assert len(parts) == 2
    for part in parts:
        assert part.loss_weights is not None
        assert part.loss_weights.tolist() == pytest.approx(weights)


def test_clipped_and_widened_tokens_are_counted_by_staleness_and_change_nothing_else() -> None:
    batch = random_batch(seed=6)
    staleness = torch.randint(
        0, 7, batch["advantages"].shape, generator=torch.Generator().manual_seed(1)
    )
    plain = policy_objective(**batch, objective="acr", **SETTINGS)
    counted = policy_objective(**batch, objective="acr", **SETTINGS, token_staleness=staleness)
    assert torch.equal(plain.loss, counted.loss)
    for name in ("tokens", "clipped", "acr_widened"):
        by_staleness = {
            staleness: counted.stats[f"{name}/{staleness}"] for staleness in STALENESS_BUCKETS
        }
        assert sum(by_staleness.values()) == plain.stats[name]
    of_one = counted.stats["tokens/1"]
    assert of_one == ((staleness == 1) & (batch["loss_weights"] > 0)).sum()


def test_k1_and_k3_both_estimate_the_kl_from_behaviour_to_proximal() -> None:
    """Tokens occur as often as behaviour samples them, so both means are the exact KL."""
    behaviour = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    proximal = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    sampled = torch.tensor([[0] * 7 + [1] * 2 + [2]])
    sums = mismatch_sums(proximal.log()[sampled], behaviour.log()[sampled], sampled >= 0, 2.0)
    statistics = rollout_statistics(floats(sums))
    exact = (behaviour * (behaviour / proximal).log()).sum().item()
    assert statistics["kl_behaviour_proximal"] == pytest.approx(exact, rel=1e-12)
    assert statistics["kl_behaviour_proximal_k3"] == pytest.approx(exact, rel=1e-12)
