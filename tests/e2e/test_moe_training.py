"""`qurl train` with a mixture of experts: learner, converter, servers and recorded routing."""

from __future__ import annotations

import json
from pathlib import Path

import reasoning_gym
from safetensors.torch import load_file

from e2e.running import SMALL, Start, metrics_of
from tiny import build_tiny_model


def test_two_steps_of_a_mixture_of_experts(start: Start, tmp_path: Path) -> None:
    """The servers verify every expert's tensors at each publish, or the run would end."""
    model = build_tiny_model(
        tmp_path / "model", "qwen3_moe", max_position_embeddings=2048, num_hidden_layers=1
    )
    tasks = reasoning_gym.create_dataset("number_sorting", size=100, seed=0, max_numbers=3)
    with (tmp_path / "problems.jsonl").open("w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in tasks)
    run = start(
        "train",
        "grpo",
        f"model={model}",
        f"data={tmp_path / 'problems.jsonl'}",
        "reward=reasoning_gym",
        *SMALL,
        "quantization.format=int8",
        "quantization.publish=delta",
        "learner.dtype=float32",
        "rollout.routing=compare",
        "rollout.max_prompt_length=1024",
        "rollout.max_response_length=8",
        "rollout.server.mem_fraction_static=0.2",
        "rollout.server.max_total_tokens=16384",
    )
    assert run.exit_code() == 0, run.text()
    steps = metrics_of(run)
    assert len(steps) == 2
    # The learner in full precision and the server in INT8 differ, and little.
    assert all(0 < step["logprob_abs_diff"] < 0.2 for step in steps)
    # Its router chooses other experts for a few tokens.
    assert all(0 < step["routing_changed_fraction"] < 0.3 for step in steps)
    exported = [load_file(file) for file in (run.run_dir / "final_model").glob("*.safetensors")]
    names = sorted(name for tensors in exported for name in tensors)
    assert names == sorted(load_file(model / "model.safetensors"))
    assert run.survivors() == []
