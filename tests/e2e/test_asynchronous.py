"""`qurl train` with `rollout.max_staleness`: the servers sample while the learner trains.

Runs that are killed with groups in flight are in `test_kills.py`, servers in `test_faults.py`.
"""

import json

from e2e.running import PER_STEP, QUICK, Start, metrics_of, prompts_trained

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
        "rollout.max_completion_length=128",
        "rollout.top_p=0.9",
        "quantization.format=fp8",
        "learner.recompute=full",
        "optimizer.learning_rate=0",  # all versions are equal, so only errors make a difference
    )
    assert run.exit_code() == 0, run.text()
    steps = metrics_of(run)
    assert [step["weight_version"] for step in steps] == [2, 3, 4, 5]
    staleness = [step["token_staleness_max"] for step in steps]
    assert staleness[:3] == [0, 1, 2] and staleness[3] <= MAX_STALENESS
    assert all(
        (step["stale_token_fraction"] > 0) == (staleness > 0)
        for step, staleness in zip(steps, staleness, strict=True)
    )
    ahead = [min(MAX_STALENESS, STEPS - step["step"]) * PER_STEP for step in steps]
    assert [step["groups_in_flight"] for step in steps] == ahead
    assert [step["groups_dropped"] for step in steps] == [0] * STEPS
    assert prompts_trained(run) == STEPS * PER_STEP
    fresh = json.loads((run.run_dir / "mismatch.json").read_text())["rollout"]
    for step in steps:
        for measure in ("kl_behaviour_proximal_k3", "logprob_abs_diff"):
            assert 0.5 * fresh[measure] < step[measure] < 2 * fresh[measure]
    assert run.survivors() == []
