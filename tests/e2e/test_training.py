"""`qurl train` as a user runs it: the real learner and real servers, from start to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reasoning_gym
from running import QURL, SMALL, curve_steps, metrics_of
from transformers import AutoModelForCausalLM

from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.config.yaml_file import load
from qurl_megatron.learner.checkpoint import list_checkpoints, read_state
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.report.run_log import evaluation_directory

NOISE_BF16 = 0.005  # mean |behaviour - proximal|, in nats; measured 0.0023, and 0.010 with INT8


def test_quickstart_runs_through_and_says_what_it_did(start, tmp_path: Path) -> None:
    words = reasoning_gym.create_dataset(
        "spell_backward", size=16, seed=0, min_word_len=4, max_word_len=4
    )
    pq.write_table(pa.Table.from_pylist(list(words)), tmp_path / "words.parquet")
    run = start(
        "train",
        "quickstart",
        *SMALL,
        "warmup.max_steps=4",
        "warmup.check_every_steps=2",
        "warmup.target_accuracy=0.99",
        "evaluation.problems=32",
        "evaluation.every_steps=2",
        f"evaluation.data.words={tmp_path / 'words.parquet'}",
        "evaluation.k=2",
        "rollout.stages.2={max_response_length: 10, completions_per_prompt: 6}",
    )
    assert run.exit_code() == 0, run.text()
    assert run.survivors() == []
    assert load(run.run_dir / "config.yaml").steps == 2

    steps = metrics_of(run)
    assert [step["step"] for step in steps] == [1, 2]
    assert [step["weight_version"] for step in steps] == [2, 3]
    assert [step["held_out_accuracy"] is None for step in steps] == [True, False]
    for step in steps:
        assert step.keys() == {field.name for field in fields(StepMetrics)}
        assert step["current_proximal_abs_diff"] < 1e-5
        assert 0 < step["logprob_abs_diff"] < 0.1
        assert 1e-6 < step["weight_quant_error"] < 1e-3
        assert step["publish_bytes"] > 1_000_000
    # The second step is in another stage: 6 completions to each of 8 prompts, and not 4.
    for step, completions in zip(steps, (32, 48), strict=True):
        sampled_tokens = step["rollout_tokens_per_s"] * step["time_rollout_s"]
        assert round(sampled_tokens / step["response_length_mean"], 6) == completions

    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert steps[0]["evaluation"] is None
    assert summary["evaluation_after"] == steps[1]["evaluation"]
    assert sorted(path.name for path in (run.run_dir / "evaluation").iterdir()) == [
        "step_000000",
        "step_000002",
    ]
    for step, when in ((0, "before"), (2, "after")):
        measured = summary[f"evaluation_{when}"]["words"]
        answers = evaluation_directory(run.run_dir, step)
        held_out = [json.loads(line) for line in (answers / "held_out.jsonl").open()]
        assert len(held_out) == 32
        right = fmean(answer["greedy"]["reward"] for answer in held_out)
        assert summary[f"held_out_accuracy_{when}"] == right
        found = [json.loads(line) for line in (answers / "words.jsonl").open()]
        assert [answer["question"] for answer in found] == [word["question"] for word in words]
        right = fmean(one["reward"] for answer in found for one in answer["sampled"])
        assert measured["Avg@2 sampled"]["mean"] == pytest.approx(right)
        assert all(len(answer["sampled"]) == 2 for answer in found)
    assert curve_steps(run, "loss") == [1, 2]
    assert curve_steps(run, "evaluation/words/Avg@1/mean") == [0, 2]

    noise = json.loads((run.run_dir / "noise.json").read_text())
    engine, rollout = (noise[name]["logprob_abs_diff"] for name in ("evaluation", "rollout"))
    assert 0 < engine < rollout < 0.1  # INT8 adds to what BF16 shows on the same prompts
    weights = [json.loads(line) for line in (run.run_dir / "weights.jsonl").open()]
    assert [publish["weight_version"] for publish in weights] == [2, 3]
    down = weights[-1]["weights"]["model.layers.0.mlp.down_proj.weight"]
    assert 1e-6 < down["weight_quant_error"] < 1e-3 and 0 <= down["code_flip_fraction"] < 1
    trained = AutoModelForCausalLM.from_pretrained(run.run_dir / "final_model")
    assert trained.num_parameters() > 1e6
    report = (run.run_dir / "report" / "index.html").read_text()
    assert "Layer by layer" in report and "Evaluation: words" in report
    (checkpoint,) = list_checkpoints(run.run_dir)
    assert checkpoint.name == "step_000002"
    for shown in (
        "warm-up step 4",
        "held-out accuracy after",
        "words Avg@2 sampled after",
        "weight versions published",
        "bytes",
    ):
        assert shown in run.text()

    # A server of its own, with the checkpoint as it is exported, gives the answers of the run's.
    files = [tmp_path / "words.parquet", tmp_path / "first.parquet"]
    pq.write_table(pa.Table.from_pylist(list(words)[:4]), files[1])
    settings = ["reward=reasoning_gym", "max_prompt_length=6", "max_response_length=10"]
    settings += ["server.mem_fraction_static=0.3", "server.max_total_tokens=4096"]
    settings += [f"output={tmp_path / 'eval'}"]
    done = subprocess.run(
        [QURL, "eval", checkpoint, *files, *settings], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "eval" / "summary.json").read_text())["results"]
    assert [*results] == [str(file) for file in files]
    answers = evaluation_directory(run.run_dir, 2) / "words.jsonl"
    texts = [json.loads(line)["greedy"]["text"] for line in answers.open()]
    for number, expected in enumerate((texts, texts[:4])):
        found = [
            json.loads(line) for line in (tmp_path / "eval" / f"answers_{number}.jsonl").open()
        ]
        assert [answer["greedy"]["text"] for answer in found] == expected


def test_grpo_trains_a_model_and_problems_given_by_path(start, tmp_path: Path) -> None:
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
        "learner.recompute_activations=true",
        "rollout.max_prompt_length=1024",
        "rollout.max_response_length=8",
        "rollout.server.mem_fraction_static=0.2",
        "rollout.server.max_total_tokens=16384",
    )
    assert run.exit_code() == 0, run.text()
    steps = metrics_of(run)
    assert len(steps) == 2
    assert all(0 <= step["kl_reference"] < 1e-6 for step in steps)  # no reward, so nothing moved
    assert run.survivors() == []


def test_bf16_on_two_servers_leaves_engine_noise_only_and_stops_early_when_asked(start) -> None:
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
    assert list_checkpoints(run.run_dir) == []  # none is due for long
    os.kill(run.process.pid, signal.SIGUSR1)
    assert run.exit_code() == STOPPED_EARLY == 75
    (saved,) = list_checkpoints(run.run_dir)
    assert read_state(saved).step == len(metrics_of(run)) >= 1
    assert "stopped early" in run.text()
    assert not (run.run_dir / "summary.json").exists()
    assert run.survivors() == []
