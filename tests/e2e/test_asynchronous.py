"""`qurl train` with `rollout.max_staleness`: the servers sample while the learner trains."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil

from e2e.running import PER_STEP, QUICK, SMALL, Start, metrics_of, prompts_trained
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.learner.checkpoint import list_checkpoints, read_state

# Long answers, a few at a time: many of them run while weights are published.
LONG_ANSWERS = [
    *SMALL,
    "steps=4",
    "learner.tensor_parallel_size=1",
    "checkpoint.every_steps=1",
    "rollout.max_response_length=128",
    "rollout.server.max_running_requests=8",
]
STEPS = 4
MAX_STALENESS = 2


def test_tokens_are_at_most_as_old_as_allowed_and_their_logprobs_as_good_as_fresh_ones(
    start: Start,
) -> None:
    run = start(
        "train",
        *QUICK,
        f"steps={STEPS}",
        "learner.tensor_parallel_size=1",
        "checkpoint.every_steps=1",
        f"rollout.max_staleness={MAX_STALENESS}",
        # The groups of all three steps that are asked for at first begin before the first publish,
        # and long answers run through publishes.
        "rollout.server.max_running_requests=96",
        "rollout.max_response_length=128",
        "quantization.format=fp8",
        "learner.recompute=full",
        "optimizer.learning_rate=0",  # all versions are equal, so only errors make a difference
    )
    assert run.exit_code() == 0, run.text()
    steps = metrics_of(run)
    assert [step["weight_version"] for step in steps] == [2, 3, 4, 5]
    lags = [step["token_lag_max"] for step in steps]
    assert lags[:3] == [0, 1, 2] and lags[3] <= MAX_STALENESS
    assert all(
        (step["stale_token_fraction"] > 0) == (lag > 0)
        for step, lag in zip(steps, lags, strict=True)
    )
    ahead = [min(MAX_STALENESS, STEPS - step["step"]) * PER_STEP for step in steps]
    assert [step["groups_in_flight"] for step in steps] == ahead
    assert [step["groups_dropped"] for step in steps] == [0] * STEPS
    assert prompts_trained(run) == STEPS * PER_STEP
    fresh = json.loads((run.run_dir / "noise.json").read_text())["rollout"]
    for step in steps:
        for measure in ("kl_behaviour_proximal_k3", "logprob_abs_diff"):
            assert 0.5 * fresh[measure] < step[measure] < 2 * fresh[measure]
    assert run.survivors() == []


def test_a_run_that_is_killed_or_stopped_with_groups_in_flight_trains_every_prompt_once(
    start: Start,
) -> None:
    run = start("train", "quickstart", *LONG_ANSWERS, "steps=1000", "rollout.max_staleness=1")
    run.wait_for("step 3/")
    time.sleep(0.5)  # groups are in flight
    run.poll()
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs(run.survivors(), timeout=30)
    assert alive == []
    before = metrics_of(run)
    done = read_state(list_checkpoints(run.run_dir)[-1]).step
    assert prompts_trained(run) == done * PER_STEP

    resumed = start("resume", "runs/run")
    resumed.wait_for(rf"step {done + 2}/")
    os.kill(resumed.process.pid, signal.SIGUSR1)
    assert resumed.exit_code() == STOPPED_EARLY, resumed.text()
    assert f"resuming after step {done}" in resumed.text()
    assert resumed.survivors() == []
    after = metrics_of(resumed)
    assert after[:done] == before[:done]
    assert [step["step"] for step in after] == list(range(1, len(after) + 1))
    assert [step["weight_version"] for step in after] == list(range(2, len(after) + 2))
    # What was in flight was sampled again, with the weights of the checkpoint.
    lags = [step["token_lag_max"] for step in after]
    assert lags[0] == lags[done] == 0 and max(lags) == 1
    assert prompts_trained(resumed) == len(after) * PER_STEP

    again = start("resume", "runs/run")
    again.wait_for(rf"step {len(after) + 1}/")
    os.kill(again.process.pid, signal.SIGINT)
    assert again.exit_code() == 130
    assert again.survivors() == []


def test_a_server_that_dies_with_groups_in_flight_costs_no_prompt(start: Start) -> None:
    run = start(
        "train",
        "quickstart",
        *LONG_ANSWERS,
        "steps=6",
        "rollout.max_staleness=1",
        "rollout.servers=2",
        "optimizer.learning_rate=0",
    )
    run.wait_for("step 2/")
    run.find("sglang::scheduler").kill()
    assert run.exit_code() == 0, run.text()
    assert "is lost" in run.text()
    steps = metrics_of(run)
    assert [step["weight_version"] for step in steps] == [2, 3, 4, 5, 6, 7]
    assert max(step["token_lag_max"] for step in steps) == 1
    assert sum(step["groups_dropped"] for step in steps) == 0
    assert prompts_trained(run) == 6 * PER_STEP
    assert run.survivors() == []
