"""What ends a run before it trains: another distribution than the policy's, equal answers."""

from math import log

import pytest
import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import Completion, Episode, TrainBatch
from qurl_megatron.algorithm.proof import (
    ENOUGH,
    LEAST,
    WrongRollouts,
    added,
    check_differ,
    check_mismatch,
    evidence,
)

TEMPERATURE = 0.6
TOKENS = 250  # eight short answers
# Standard deviation of what a format adds to a logit; the largest is INT4's on SmolLM2-135M.
NOISES = (1e-3, 0.05, 0.3, 1.0)


def rollouts(
    noise: float,
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    drawn_at: float = TEMPERATURE,
    reported_at: float | None = None,
    fault: float = 0.0,
    is_chaotic: bool = True,
) -> TrainBatch:
    """Return tokens drawn from a quantized policy, with what the learner makes of them.

    The server and the learner's prediction add noise to the same logits, of the same size, and
    otherwise have nothing in common if single tokens are chaotic; else it is the same noise.
    `fault` is further noise, of the server alone.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(deviation: float) -> Tensor:
        return deviation * torch.randn(tokens, 60, generator=generator)

    exact = normal(2.0)
    predicted = exact + normal(noise)
    served = (exact + normal(noise) if is_chaotic else predicted) + normal(fault)
    drawn = (served / drawn_at).softmax(-1).multinomial(1, generator=generator)

    def logprobs(logits: Tensor, temperature: float) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(1, drawn).view(1, -1)

    distribution = (predicted / TEMPERATURE).softmax(-1)
    return TrainBatch(
        lengths=torch.tensor([tokens]),
        tokens=drawn.view(1, -1).int(),
        loss_mask=torch.ones(1, tokens, dtype=torch.bool),
        behaviour_logprobs=logprobs(served, reported_at or drawn_at),
        proximal_logprobs=logprobs(exact, TEMPERATURE),
        predicted_logprobs=logprobs(predicted, TEMPERATURE),
        entropy=-(distribution * distribution.log()).sum(-1)[None],
    )


def sums_of(rows: TrainBatch) -> dict[str, float]:
    return {name: float(value) for name, value in evidence(rows).items()}


def check(
    rows: TrainBatch, *, quantizes_activations: bool = True, has_experts: bool = False
) -> None:
    check_mismatch(
        "rollout",
        "int8",
        {"rollout_0": sums_of(rows)},
        quantizes_activations=quantizes_activations,
        has_experts=has_experts,
    )


@pytest.mark.parametrize("noise", NOISES)
def test_right_rollouts_pass_however_coarse_their_format(noise: float) -> None:
    for seed in range(200):
        check(rollouts(noise, seed=seed))
    check(rollouts(noise, tokens=20_000))


@pytest.mark.parametrize("noise", NOISES)
def test_another_temperature_does_not(noise: float) -> None:
    for drawn_at in (0.75 * TEMPERATURE, 1.0):
        with pytest.raises(WrongRollouts, match="the rollout servers' log-probs are not those"):
            check(rollouts(noise, drawn_at=drawn_at, tokens=1000))


@pytest.mark.parametrize("noise", NOISES)
def test_log_probs_of_another_distribution_than_tokens_were_drawn_from_do_not(
    noise: float,
) -> None:
    with pytest.raises(WrongRollouts):
        check(rollouts(noise, reported_at=1.0, tokens=1000))


def test_a_server_that_computes_something_else_does_not() -> None:
    check(rollouts(0.3, fault=0.1))
    for noise in NOISES[:3]:
        with pytest.raises(
            WrongRollouts, match="expects of int8 by .* on average, and .* is explained"
        ):
            check(rollouts(noise, fault=1.0))


def test_weights_alone_are_predicted_token_by_token() -> None:
    """So INT4, the coarsest format, hides no fault."""
    for seed in range(200):
        right = rollouts(1.0, is_chaotic=False, fault=0.01, seed=seed)
        check(right, quantizes_activations=False)
    wrong = rollouts(1.0, is_chaotic=False, fault=0.3)
    check(wrong)
    with pytest.raises(WrongRollouts, match="0.05 is explained"):
        check(wrong, quantizes_activations=False)


def test_each_of_three_properties_ends_a_run_alone() -> None:
    with pytest.raises(WrongRollouts, match="differ from what the learner expects"):
        check(rollouts(0.05, fault=1.0))
    with pytest.raises(WrongRollouts, match="mean of proximal / behaviour is 1"):
        check(rollouts(0.3, reported_at=0.8, tokens=1000))
    with pytest.raises(WrongRollouts, match="less likely than they should be"):
        check(rollouts(1.0, drawn_at=0.8, tokens=1000))


def test_an_engine_may_round_and_routers_explain_more() -> None:
    check(rollouts(0.0, fault=0.03))
    check(rollouts(0.0, fault=0.1), has_experts=True)
    with pytest.raises(WrongRollouts):
        check(rollouts(0.0, fault=0.1, tokens=1000))


def check_servers(servers: list[dict[str, float]]) -> None:
    by_server = {f"rollout_{index}": sums for index, sums in enumerate(servers)}
    facts = {"quantizes_activations": True, "has_experts": False}
    check_mismatch("rollout", "int8", by_server, **facts)


def test_a_wrong_server_is_found_among_right_ones_by_its_own_tokens() -> None:
    """Its mean distance is 3 times the predicted one, and that of all four 1.5 times."""
    right = [sums_of(rollouts(0.3, seed=seed)) for seed in range(3)]
    wrong = sums_of(rollouts(0.3, fault=0.8, seed=3))
    assert wrong["difference"] > 2.9 * wrong["predicted"]
    check_servers([added([*right, wrong])])
    with pytest.raises(WrongRollouts, match="server rollout_3's log-probs are not those"):
        check_servers([*right, wrong])
    with pytest.raises(WrongRollouts, match="the rollout servers' log-probs are not those"):
        check_servers([wrong, wrong])


def test_too_few_tokens_are_not_judged_and_add_up() -> None:
    wrong = sums_of(rollouts(0.3, fault=3.0, tokens=LEAST // 2))
    check_servers([wrong])
    with pytest.raises(WrongRollouts, match="the rollout servers'"):
        check_servers([wrong, wrong])
    with pytest.raises(WrongRollouts, match=f"on {LEAST} tokens"):
        check_servers([added([wrong, wrong])])
    for noise in NOISES:
        for seed in range(200):
            check_servers([sums_of(rollouts(noise, tokens=LEAST, seed=seed))])


def test_enough_tokens_tell_a_server_of_twice_the_predicted_distance() -> None:
    """Chance has a part in the predicted distance too; of `LEAST` tokens not all are told."""

    def told(tokens: int) -> int:
        wrong = 0
        for seed in range(50):
            try:
                check(rollouts(0.3, fault=0.8, tokens=tokens, seed=seed))
            except WrongRollouts:
                wrong += 1
        return wrong

    assert told(LEAST) < 50 == told(ENOUGH)


def test_a_log_prob_that_is_no_number_is_wrong() -> None:
    rows = rollouts(0.05)
    assert rows.behaviour_logprobs is not None
    rows.behaviour_logprobs[0, 3] = float("nan")
    with pytest.raises(WrongRollouts, match="by nan nats"):
        check(rows)


def group(logprob: float, *texts: str) -> list[Completion]:
    """Return answers, each of whose tokens has this log-prob."""
    return [
        Completion(list(text.encode()), [logprob] * len(text), text, False, [1] * len(text))
        for text in texts
    ]


def test_equal_answers_are_wrong_where_their_log_probs_say_so() -> None:
    # Three more answers of four tokens: probability 1/2 ** 12, and one group that could be chosen.
    check_differ([group(log(1 / 2), "same", "same", "same", "same")])
    with pytest.raises(WrongRollouts, match="for 1 of 1 prompts, .* probability of 1e-11"):
        check_differ([group(log(1 / 8), "same", "same", "same", "same")])
    check_differ([group(log(1 / 8), "same", "same", "same", "some")])


def test_groups_add_up_and_those_that_differ_excuse_few() -> None:
    equal, differing = group(log(1 / 8), "ab", "ab"), group(log(1 / 8), "ab", "cd")
    check_differ([equal] * 3)  # 1/8 ** 6 is 4e-6, and there are 2 ** 3 choices
    with pytest.raises(WrongRollouts, match="for 6 of 6 prompts"):
        check_differ([equal] * 6 + [[], equal[:1]])
    with pytest.raises(WrongRollouts, match="for 8 of 16 prompts"):
        check_differ([equal] * 8 + [differing] * 8)
    check_differ([equal] * 4 + [differing] * 12)


def test_sure_answers_may_be_equal() -> None:
    check_differ([group(-1e-4, "the same long answer", "the same long answer")] * 100)


def test_episodes_are_equal_if_all_their_branches_are() -> None:
    def episode(text: str, branch: str) -> Completion:
        (ending,), (other,) = group(-5.0, text), group(-5.0, branch)
        made = Episode([1], [True] * len(text), branches=[other])
        return Completion(ending.token_ids, ending.behaviour_logprobs, "", False, [], episode=made)

    check_differ([[episode("end", "one"), episode("end", "two")]])
    with pytest.raises(WrongRollouts):
        check_differ([[episode("end", "one"), episode("end", "one")]])
