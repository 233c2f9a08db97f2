"""`qurl train` with a model and problems given by path, and with two BF16 servers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import reasoning_gym

from e2e.running import SMALL, Start, metrics_of
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.learner.checkpoint import list_checkpoints, read_state

NOISE_BF16 = 0.005  # mean |behaviour - proximal|, in nats; measured 0.0023, and 0.010 with INT8


def test_grpo_trains_a_model_and_problems_given_by_path(start: Start, tmp_path: Path) -> None:
    from recipes import quickstart

    quickstart.build_model(tmp_path / "model", seed=0)
    tasks = reasoning_gym.create_dataset("number_sorting", size=500, seed=0, max_numbers=3)
    with (tmp_path / "problems.jsonl").open("w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in tasks)
    run = start(
        "train",
        "grpo",
        f"model={tmp_path / 'model'}",
        f"data={tmp_path / 'problems.jsonl'}",
        "reward=reasoning_gym",
        *SMALL,
        "quantization.format=fp8",
        "learner.dtype=float32",
        "learner.recompute=full",
        "rollout.max_prompt_length=1024",
        "rollout.max_response_length=8",
        "rollout.server.mem_fraction_static=0.2",
        "rollout.server.max_total_tokens=16384",
    )
    assert run.exit_code() == 0, run.text()
    steps = metrics_of(run)
    assert len(steps) == 2
    assert all(
        0 <= step["kl_reference"] < 1e-6 for step in steps
    )  # without rewards the policy does not change
    assert run.survivors() == []


def test_two_bf16_servers_have_engine_noise_only_and_the_run_stops_early_on_sigusr1(
    start: Start,
) -> None:
    run = start(
        "train",
        "quickstart",
        *SMALL,
        "steps=1000",
        "learner.dtype=bfloat16",
        "learner.tensor_parallel_size=1",
        "quantization.format=bf16",
        "rollout.servers=2",
        "rollout.server.mem_fraction_static=0.6",
        "checkpoint.every_steps=1000",
    )
    run.wait_for("step 1/")
    assert 0 < metrics_of(run)[0]["logprob_abs_diff"] < NOISE_BF16
    assert list_checkpoints(run.run_dir) == []  # the schedule saves none
    os.kill(run.process.pid, signal.SIGUSR1)
    assert run.exit_code() == STOPPED_EARLY == 75
    (saved,) = list_checkpoints(run.run_dir)
    assert read_state(saved).step == len(metrics_of(run)) >= 1
    assert "stopped early" in run.text()
    assert not (run.run_dir / "summary.json").exists()
    assert run.survivors() == []
