"""Check the planned steady state of asynchronous rollout against hand-computed numbers."""

from __future__ import annotations

import dataclasses
import random
from statistics import fmean

import pytest

from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.planning.lengths import ResponseLengths
from qurl_megatron.planning.plan import plan
from qurl_megatron.planning.rollout_time import ServerLoad, steady_state
from qurl_megatron.planning.step_time import Workload
from qurl_megatron.recipes.scaling_32b import ARCHITECTURES, study

# 100 responses a step, 500 tokens on average and 1000 at most, a token every 10 ms.
LOAD = ServerLoad(
    token_s=lambda sequences, mean_age: 0.01,
    prompts_s=0.0,
    pause_s=lambda running: 0.0,
    sequences=100,
    slots=1000,
    lengths=ResponseLengths(500, 1000),
)


def test_a_slow_learner_determines_the_step() -> None:
    """100 x 500 tokens in 40 s are 1250 a second; at 100 a second each, 12.5 sequences run."""
    state = steady_state(LOAD, learner_s=40, max_staleness=1)
    assert (state.step_s, state.limit) == (40, "learner")
    assert state.running == pytest.approx(12.5)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_the_longest_response_and_the_learner_share_the_steps_it_spans(max_staleness: int) -> None:
    """The longest response takes 10 s and the learner 2 s."""
    state = steady_state(LOAD, learner_s=2, max_staleness=max_staleness)
    assert state.step_s == pytest.approx(12 / (max_staleness + 1))
    assert state.limit == "longest response"


def test_more_staleness_ends_at_the_learner() -> None:
    """(10 + 2) / 6 = 2."""
    assert steady_state(LOAD, learner_s=2, max_staleness=5).limit == "learner"


def test_few_slots_determine_the_step() -> None:
    """100 x 500 tokens of 10 ms in 20 slots take 25 s."""
    state = steady_state(dataclasses.replace(LOAD, slots=20), learner_s=2, max_staleness=4)
    assert (state.step_s, state.limit, state.running) == (pytest.approx(25), "servers", 20)


def test_a_pause_is_time_in_which_nothing_is_decoded() -> None:
    """Twenty running sequences pause for 3 s, prompts take 1 s."""
    load = dataclasses.replace(
        LOAD, slots=20, prompts_s=1.0, pause_s=lambda running: 3.0 * running / 20
    )
    assert steady_state(load, learner_s=2, max_staleness=4).step_s == pytest.approx(29)


@pytest.mark.parametrize("log_deviation", [None, 0.5, 1.5])
def test_lengths_have_their_mean_and_mean_age(log_deviation: float | None) -> None:
    lengths = ResponseLengths(2000, 8000, log_deviation)
    generator = random.Random(0)
    sample = [lengths.quantile(generator.random()) for _ in range(100_000)]
    assert max(sample) <= 8000
    assert fmean(sample) == pytest.approx(2000, rel=0.01)
    squares = fmean(length**2 for length in sample)
    assert lengths.mean_age == pytest.approx(squares / (2 * 2000), rel=0.02)
    for length in (500, 2000, 7900):
        longer = fmean(sampled > length for sampled in sample)
        assert lengths.fraction_longer(length) == pytest.approx(longer, abs=0.005)


def planned_step_s(*words: str) -> float:
    config = with_overrides(study("", 64, "int8"), list(words))
    workload = Workload(512, 2048, log_deviation=1.0)
    return plan(ARCHITECTURES["Qwen2.5-32B"], config, 64, workload=workload).total_s


def test_the_plan_of_a_stale_run_overlaps_rollout_and_learner() -> None:
    synchronous = planned_step_s()
    one_step_off = planned_step_s("rollout.max_staleness=1")
    assert synchronous / 2 < one_step_off < synchronous


def test_reading_contexts_again_takes_time_that_keeping_them_does_not() -> None:
    few_servers = [
        "rollout.max_staleness=4",
        "rollout.server.max_running_requests=64",
        "rollout.server.tensor_parallel_size=8",
    ]
    retract = planned_step_s(*few_servers, "rollout.pause_mode=retract")
    assert planned_step_s(*few_servers, "rollout.pause_mode=in_place") < retract
