"""Rewards of a user's own in a whole run and in `qurl eval`, on real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.running import SMALL, Start, metrics_of

REWARD = """
def reward(completion, problem):
    if completion.startswith("e"):
        raise ValueError("it begins with e")
    is_right = completion.strip() == problem.answer
    return {"reward": is_right - 0.5, "accuracy": is_right, "length": len(completion)}
"""


def test_a_reward_function_trains_and_evaluates(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    words = [*SMALL, "data_options.size=200", "learner.tensor_parallel_size=1"]
    run = start("train", "quickstart", *words, "reward=mine.py:reward", "reward_wrong=-2")
    assert run.exit_code() == 0, run.text()
    steps: list[dict[str, Any]] = list(metrics_of(run))
    assert len(steps) == 2
    for step in steps:
        assert step["reward_parts"]["length"] > 0
        assert 0 <= step["reward_parts"]["accuracy"] <= 1
        assert -2 <= step["reward_mean"] <= 0.5
        failures = step["verifier_failures"]
        assert step["verifier_timeouts"] == 0
        assert ("ValueError: it begins with e" in step["verifier_failure"]) == (failures > 0)
        # Failed responses have no parts; the others have 0.5 below their accuracy.
        scored = 32 - failures
        right = step["reward_parts"]["accuracy"] * scored
        assert abs(step["reward_mean"] * 32 - (right - 0.5 * scored - 2 * failures)) < 1e-6
    assert run.survivors() == []

    data = tmp_path / "problems.jsonl"
    data.write_text(json.dumps({"question": "Spell abc backward", "answer": "cba"}) + "\n")
    settings = ["max_prompt_length=64", "max_response_length=8", f"output={tmp_path / 'eval'}"]
    settings += ["server.max_total_tokens=4096", "server.mem_fraction_static=0.3"]
    evaluation = start(
        "eval", run.run_dir / "final_model", data, "reward=mine.py:reward", *settings
    )
    assert evaluation.exit_code() == 0, evaluation.text()
    (answer,) = [json.loads(line) for line in (tmp_path / "eval" / "answers_0.jsonl").open()]
    greedy = answer["greedy"]
    if greedy["failure"]:
        assert (greedy["reward"], greedy["failure"]) == (0, "ValueError: it begins with e")
    else:
        assert greedy["reward"] == greedy["accuracy"] - 0.5
