"""A run's log, step by step, and the directory of a whole run that was never run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import save
from qurl_megatron.report.metrics import Evaluation, StepMetrics
from qurl_megatron.report.run_log import RunLog

ZEROS: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(StepMetrics)}
ZEROS |= {"held_out_accuracy": None, "evaluation": None, "reward_counts": [(0.0, 1), (1.0, 3)]}
ZEROS |= {"verifier_failure": ""}


def evaluation(mean: float) -> Evaluation:
    average = {"mean": mean, "standard_error": 0.01}
    return Evaluation(mean, {"aime": {"Avg@1": average, "Avg@4 sampled": average}})


def write(log: RunLog, step: int, **measured: float) -> None:
    """Log one step, with an evaluation if its number is even."""
    values = ZEROS | {"step": step, "weight_version": step + 1} | measured
    log.write(StepMetrics(**values), evaluation(step / 10) if step % 2 == 0 else None)
    log.write_weights(step + 1, {"weight": {"code_flip_fraction": 0.5}})


BASE_STEP: dict[str, Any] = {field.name: 0.0 for field in dataclasses.fields(StepMetrics)} | {
    "kl_behaviour_proximal_k3": 1e-4,
    "ratio_proximal_behaviour_max": 1.2,
    "code_flip_fraction": 0.1,
    "weight_update_norm": 1e-5,
    "weight_quant_error": 5e-5,
    "publish_bytes": 300_000,
    "publish_full_bytes": 1_342_464,
    "grad_norm": 0.5,
    "learning_rate": 1e-6,
    "reward_counts": [[0.0, 3], [1.0, 1]],
    "held_out_accuracy": None,
    "evaluation": None,
}
PROJECTIONS = [f"self_attn.{x}_proj" for x in "qkvo"] + [
    f"mlp.{x}_proj" for x in ("gate", "up", "down")
]
WEIGHT_MEASURES = {
    "weight_update_norm": 1e-5,
    "weight_quant_error": 5e-5,
    "code_flip_fraction": 0.1,
}
NOISE = {
    "evaluation": {"kl_behaviour_proximal_k3": 2.5e-5},
    "rollout": {"kl_behaviour_proximal_k3": 1.3e-4},
}


def averages(mean: float) -> dict[str, dict[str, float]]:
    return {
        "Avg@1": {"mean": mean, "standard_error": 0.0625},
        "Avg@32 sampled": {"mean": mean / 2, "standard_error": 0.03125},
    }


def write_run(
    run_dir: Path, *, late: dict[str, Any] | None = None, config: Config | None = None
) -> Path:
    """Write a complete run of 40 steps, evaluated before RL, at step 20 and after RL.

    `late` replaces metrics of the last ten steps.
    """
    run_dir.mkdir()
    save(config or Config(), run_dir / "config.yaml")
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            line = BASE_STEP | {"step": step, "reward_mean": step / 50}
            if step == 20:
                line |= {"held_out_accuracy": 0.5, "evaluation": {"aime24": averages(0.3)}}
            file.write(json.dumps(line | (late or {}) if step > 30 else line) + "\n")
    names = [f"model.layers.{n}.{p}.weight" for n in range(3) for p in PROJECTIONS]
    publish = {"weight_version": 41, "weights": dict.fromkeys(names, WEIGHT_MEASURES)}
    (run_dir / "weights.jsonl").write_text(json.dumps(publish) + "\n")
    summary = {
        "held_out_accuracy_before": 0.25,
        "held_out_accuracy_after": 0.75,
        "evaluation_before": {"aime24": averages(0.2)},
        "evaluation_after": {"aime24": averages(0.4)},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "mismatch.json").write_text(json.dumps(NOISE))
    return run_dir
