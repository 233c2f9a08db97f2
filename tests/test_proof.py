"""What ends a run before it trains: another mismatch than the format explains, equal answers."""

from math import log

import pytest

from qurl_megatron.algorithm.batch import Completion, Episode
from qurl_megatron.algorithm.proof import LARGEST_KL, WrongRollouts, check_differ, check_mismatch

# The largest k3 that was measured with right rollouts: docs/method.md#proof.
MEASURED = {"bf16": 5e-5, "int8": 1.5e-4, "fp8": 1.4e-3, "int4": 2.2e-2}
WRONG = 0.42  # log-probs without the temperature of 0.5 that tokens were drawn at


@pytest.mark.parametrize("format", MEASURED)
def test_what_was_measured_passes_and_other_log_probs_do_not(format: str) -> None:
    for kl in (0.0, 9 * MEASURED[format], LARGEST_KL[format]):  # type: ignore[index]
        check_mismatch("rollout", format, False, kl)  # type: ignore[arg-type]
    for kl in (1.01 * LARGEST_KL[format], WRONG, float("nan")):  # type: ignore[index]
        with pytest.raises(WrongRollouts, match=f"{kl:.1e}, and {format} explains"):
            check_mismatch("rollout", format, False, kl)  # type: ignore[arg-type]


def test_int4_explains_nothing_if_the_learner_multiplies_the_same_codes() -> None:
    check_mismatch("rollout", "int4", False, 0.02)
    with pytest.raises(WrongRollouts, match="int4 explains 5.0e-03 at most"):
        check_mismatch("rollout", "int4", False, 0.02, shares_base=True)


def test_routers_explain_more_in_bf16() -> None:
    check_mismatch("evaluation", "bf16", True, 0.02)  # 2.6e-4 was measured, and 3.8e-3 in INT8
    with pytest.raises(WrongRollouts, match="the evaluation servers' log-probs"):
        check_mismatch("evaluation", "bf16", False, 0.02)


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
