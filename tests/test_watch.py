"""Warnings of a run in training: each condition is told once, and again after it was over."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.report.watch import WINDOW, Watch

GOOD: dict[str, Any] = {field.name: 0.0 for field in dataclasses.fields(StepMetrics)} | {
    "entropy": 1.0,
    "kl_behaviour_proximal_k3": 1e-4,
    "reward_counts": [(0.0, 4), (1.0, 4)],
    "equal_reward_fraction": 0.5,
    "evaluation": None,
}
BAD: dict[str, dict[str, Any]] = {
    "no reward signal for 5 steps: every completion scores -1": {"reward_counts": [(-1.0, 8)]},
    "no reward signal for 5 steps: all groups equal": {"equal_reward_fraction": 1.0},
    "no reward signal for 5 steps: the rewards of 95%": {"equal_reward_fraction": 0.95},
    "entropy has collapsed to 0.05 nats, from 1": {"entropy": 0.05},
    "25% of completions are cut off": {"response_truncated_fraction": 0.25},
    "has grown to 2.0e-03, from 1.0e-04": {"kl_behaviour_proximal_k3": 2e-3},
    "10 verifier calls of this step failed": {"verifier_failures": 10},
}


def lines(steps: list[dict[str, Any]], config: Config | None = None) -> list[list[str]]:
    """Return the lines that each step adds, after `WINDOW` good steps that add none."""
    watch = Watch(config or Config())
    every: list[dict[str, Any]] = [{}] * WINDOW + steps
    told = [
        watch.update(StepMetrics(**(GOOD | step | {"step": number})))
        for number, step in enumerate(every, start=1)
    ]
    assert told[:WINDOW] == [[]] * WINDOW
    return told[WINDOW:]


@pytest.mark.parametrize("words", BAD)
def test_a_condition_is_told_once_when_it_has_lasted(words: str) -> None:
    *before, raised = lines([BAD[words]] * WINDOW)
    assert before == [[]] * (WINDOW - 1)
    (line,) = raised
    assert words in line and line.startswith(f"warning at step {2 * WINDOW}: ")
    assert lines([BAD[words]] * 40)[WINDOW:] == [[]] * (40 - WINDOW)


@pytest.mark.parametrize("words", BAD)
def test_a_condition_is_told_again_after_it_was_over(words: str) -> None:
    told = lines([BAD[words]] * WINDOW + [{}] * WINDOW + [BAD[words]] * WINDOW)
    first, over, second = told[WINDOW - 1], told[2 * WINDOW - 1], told[3 * WINDOW - 1]
    assert words in first[0] and words in second[0]
    assert over[0].startswith(f"over at step {3 * WINDOW}, after {WINDOW} steps without: ")
    assert sum(len(step) for step in told) == 3


@pytest.mark.parametrize("words", BAD)
def test_a_condition_that_comes_and_goes_is_not_told_at_each_change(words: str) -> None:
    assert lines([BAD[words], {}] * 20) == [[]] * 40
    raised = [BAD[words]] * WINDOW
    assert lines(raised + [{}, BAD[words]] * 20)[WINDOW:] == [[]] * 40


@pytest.mark.parametrize("name", ["loss", "grad_norm", "entropy", "kl_behaviour_proximal_k3"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_told_at_once(name: str, value: float) -> None:
    told = lines([{name: value}, {name: value}])
    assert f"{name} is not finite" in told[0][0] and told[1] == []


def test_a_critic_learns_from_prompts_with_equal_rewards() -> None:
    ppo = with_overrides(Config(), ["advantage_estimator=gae"])
    assert lines([{"equal_reward_fraction": 1.0}] * 9, ppo) == [[]] * 9
    assert lines([{"reward_counts": [(1.0, 8)]}] * 9, ppo)[WINDOW - 1] != []


def test_small_growth_of_a_tiny_divergence_is_not_told() -> None:
    watch = Watch(Config())
    for number in range(1, 30):
        kl = 1e-6 if number <= WINDOW else 9e-4
        step = GOOD | {"step": number, "kl_behaviour_proximal_k3": kl}
        assert watch.update(StepMetrics(**step)) == []


def test_a_resumed_run_repeats_the_warnings_that_stand() -> None:
    watch = Watch(Config())
    for number in range(1, 9):
        watch.update(StepMetrics(**(GOOD | {"step": number, "verifier_failures": 100})))
    (line,) = watch.raised
    assert line.startswith("warning at step 5: 100 verifier calls")
