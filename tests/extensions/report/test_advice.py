"""Rules on a run's metrics: warnings while it trains, told once and again after they were over,
and advice in its report."""

import math
from typing import Any

import pytest

from logs import GOOD
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.report.page import advice
from qurl_megatron.report.console import FINITE, WINDOW, Watch
from qurl_megatron.report.record import RunRecord

BAD: dict[str, dict[str, Any]] = {
    "no reward signal: every completion scores -1": {"reward_counts": [(-1.0, 8)]},
    "no reward signal: the rewards of 95%": {"equal_reward_fraction": 0.95},
    "the gradient is 0: the rewards of each prompt": {"grad_norm": 0.0},
    "the learning rate is 0; raise": {"learning_rate": 0.0},
    "each publish changes 0.0010% of the quantized codes": {"code_flip_fraction": 1e-5},
    "entropy has collapsed to 0.05 nats, from 1": {"entropy": 0.05},
    "25% of completions are cut off": {"completion_truncated_fraction": 0.25},
    "has grown to 2.0e-03, from 1.0e-04 in the first steps, and 2.0% of tokens": {
        "kl_behaviour_proximal_k3": 2e-3
    },
    "2.0% of verifier calls fail": {"verifier_failures": 10},  # of 64 x 8
}


def lines(steps: list[dict[str, Any]], config: Config | None = None) -> list[list[str]]:
    """Return the lines that each step adds, after `WINDOW` good steps that add none."""
    watch = Watch(config or Config())
    every: list[dict[str, Any]] = [{}] * WINDOW + steps
    told = [watch.update(GOOD | step | {"step": n}) for n, step in enumerate(every, start=1)]
    assert told[:WINDOW] == [[]] * WINDOW
    return told[WINDOW:]


def advised(
    late: dict[str, Any], *words: str, mismatch: dict[str, dict[str, float]] | None = None
) -> str:
    """Return the only sentence on a run of 40 steps, of which the last ten differ."""
    steps = [GOOD | (late if number > 30 else {}) | {"step": number} for number in range(1, 41)]
    config = with_overrides(Config(), list(words))
    (sentence,) = advice(RunRecord("run", config, steps, {}, {}, mismatch or {}, []))
    return sentence


@pytest.mark.parametrize("words", BAD)
def test_a_rule_is_told_once_when_it_has_held_for_some_steps_and_in_the_report(words: str) -> None:
    *before, raised = lines([BAD[words]] * WINDOW)
    assert before == [[]] * (WINDOW - 1)
    (line,) = raised
    assert words in line and line.startswith(f"warning at step {2 * WINDOW}: ")
    assert lines([BAD[words]] * 40)[WINDOW:] == [[]] * (40 - WINDOW)
    sentence = advised(BAD[words])
    assert words in sentence and "(rule: " in sentence
    assert sentence.startswith("Warning at step 35: ") and sentence.endswith(").")


def test_a_rule_is_told_again_after_it_was_over_but_not_at_each_change() -> None:
    for words, bad in BAD.items():
        told = lines([bad] * WINDOW + [{}] * WINDOW + [bad] * WINDOW)
        first, over, second = told[WINDOW - 1], told[2 * WINDOW - 1], told[3 * WINDOW - 1]
        assert words in first[0] and words in second[0]
        assert over[0].startswith(f"over at step {3 * WINDOW}, after {WINDOW} steps without: ")
        assert sum(len(step) for step in told) == 3
        assert lines([bad, {}] * 20) == [[]] * 40
        assert lines([bad] * WINDOW + [{}, bad] * 20)[WINDOW:] == [[]] * 40


def test_a_metric_that_is_not_finite_is_told_at_once() -> None:
    for name in FINITE:
        for value in (math.nan, math.inf):
            told = lines([{name: value}, {name: value}])
            assert f"{name} is not finite: stop the run" in told[0][0] and told[1] == []
            assert f"Warning at step 31: {name} is not finite" in advised({name: value})


def test_a_critic_learns_from_prompts_with_equal_rewards() -> None:
    ppo = with_overrides(Config(), ["objective.advantage_estimator=gae"])
    assert lines([{"equal_reward_fraction": 1.0}] * 9, ppo) == [[]] * 9
    assert lines([{"reward_counts": [(1.0, 8)]}] * 9, ppo)[WINDOW - 1] != []


def test_failures_are_counted_by_the_completions_of_their_stage() -> None:
    stage = "rollout.stages.2={max_completion_length: 9, completions_per_prompt: 2}"
    failing = [{"verifier_failures": 2}] * WINDOW  # of 64 x 8, or of 64 x 2
    assert lines(failing)[-1] == []
    assert "1.6% of verifier calls" in lines(failing, with_overrides(Config(), [stage]))[-1][0]


def test_small_growth_of_a_tiny_divergence_is_not_told() -> None:
    watch = Watch(Config())
    for number in range(1, 30):
        kl = 1e-6 if number <= WINDOW else 9e-4
        step = GOOD | {"step": number, "kl_behaviour_proximal_k3": kl}
        assert watch.update(step) == []


def test_a_resumed_run_repeats_the_warnings_that_stand() -> None:
    watch = Watch(Config())
    for number in range(1, 9):
        watch.update(GOOD | {"step": number, "verifier_failures": 100})
    (line,) = watch.raised
    assert line.startswith("warning at step 5: 19.5% of verifier calls fail")


def test_the_report_says_if_nothing_is_wrong() -> None:
    good = advised({"kl_behaviour_proximal_k3": 9e-4})
    assert good.startswith("No sign that quantized rollouts harm this run: no warning stands at")
    assert "went from 1.0e-04 to 9.0e-04, and 2.00% of tokens" in good
    in_bf16 = advised({"code_flip_fraction": 0.0}, "quantization.format=bf16")
    assert in_bf16.startswith("No sign that BF16 rollouts harm this run: ")


def test_the_report_sets_the_mismatch_beside_the_predicted_one() -> None:
    proof = {
        "rollout": {"kl_behaviour_proximal_k3": 4e-2, "predicted_kl_behaviour_proximal_k3": 5e-2}
    }
    far = [GOOD | {"step": number, "kl_behaviour_proximal_k3": 4e-2} for number in range(1, 41)]

    def verdict(*words: str) -> str:
        config = with_overrides(Config(), list(words))
        (sentence,) = advice(RunRecord("run", config, far, {}, {}, proof, []))
        return sentence

    sentence = verdict()
    assert sentence.startswith("The quantized rollouts are far from the policy, which acr corrects")
    assert "went from 4.0e-02 to 4.0e-02 (5.0e-02 was expected before training), and" in sentence
    assert "which on_policy does not correct for" in verdict("objective.objective=on_policy")
    near = advised({}, mismatch=proof)
    assert near.startswith("No sign that quantized") and "(5.0e-02 was expected" in near
    proof["rollout"]["accepted"] = 1.0
    assert advised({}, mismatch=proof).startswith("Servers failed their proof, and rollout.accept_")


def test_an_update_that_rounding_hides_is_told_only_if_nearest_rounding_was_asked_for() -> None:
    hidden = [{"update_shown_fraction": 0.09}] * WINDOW
    assert lines(hidden)[-1] == []
    nearest = with_overrides(Config(), ["optimizer.rounding=nearest"])
    (line,) = lines(hidden, nearest)[-1]
    assert "BF16 values show 9% of what the learner has changed" in line
    assert lines([{"update_shown_fraction": None}] * WINDOW, nearest)[-1] == []


def test_only_the_naive_objective_is_warned_of_a_large_divergence_from_the_start() -> None:
    for objective, count in {"naive": 1, "acr": 0}.items():
        watch = Watch(with_overrides(Config(), [f"objective.objective={objective}"]))
        for number in range(1, 9):
            watch.update(GOOD | {"step": number, "kl_behaviour_proximal_k3": 6e-3})
        assert sum("the naive objective does not" in each for each in watch.raised) == count


def test_the_report_on_a_run_of_few_steps_has_the_rules_that_held_at_all_of_them() -> None:
    cut = GOOD | {"completion_truncated_fraction": 1.0}
    steps = [cut | {"step": 1}, cut | {"step": 2, "learning_rate": 0.0}]
    (sentence,) = advice(RunRecord("run", Config(), steps, {}, {}, {}, []))
    assert sentence.startswith("100% of completions are cut off")
