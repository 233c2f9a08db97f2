"""`qurl train` as a user runs it: the real learner, real servers, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
import reasoning_gym
from transformers import AutoModelForCausalLM

from qurl_megatron.checkpoint import list_checkpoints, read_state
from qurl_megatron.config import load
from qurl_megatron.metrics import StepMetrics

QURL = Path(sys.executable).with_name("qurl")
SMALL = [
    "name=run",
    "steps=2",
    "rollout.prompts_per_step=8",
    "rollout.completions_per_prompt=4",
    "warmup.max_steps=0",
    "evaluation.problems=0",
]
TIMEOUT_S = 240.0
NOISE_BF16 = 0.005  # mean |behaviour - proximal|, in nats; measured 0.0023, and 0.010 with INT8


class Run:
    """A `qurl` command in a directory of its own, with every process it ever started."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.run_dir = directory / "runs" / "run"
        self.output = directory / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [QURL, *words], cwd=directory, stdout=output, stderr=subprocess.STDOUT
            )
        self.started: set[psutil.Process] = set()

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str) -> None:
        """Return when the output matches; fail when the run ends before."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.text()):
            assert self.poll() is None, f"ended before {pattern!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} in time:\n{self.text()}"
            time.sleep(0.1)

    def poll(self) -> int | None:
        if self.process.poll() is None:
            main = psutil.Process(self.process.pid)
            self.started.update(main.children(recursive=True))
        return self.process.returncode

    def exit_code(self) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while self.poll() is None:
            assert time.monotonic() < deadline, f"did not end:\n{self.text()}"
            time.sleep(0.1)
        return self.process.returncode

    def survivors(self) -> list[psutil.Process]:
        return [process for process in self.started if process.is_running()]

    def find(self, word: str) -> psutil.Process:
        """A process of this run with `word` in its name or command line."""
        self.poll()
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in process.name() or word in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no process {word!r}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    runs: list[Run] = []

    def starter(*words: str) -> Run:
        runs.append(Run(tmp_path, *words))
        return runs[-1]

    yield starter
    for run in runs:
        if run.poll() is None:
            run.process.terminate()
            run.process.wait(60)


def metrics_of(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_quickstart_runs_through_and_says_what_it_did(start) -> None:
    run = start(
        "train",
        "quickstart",
        *SMALL,
        "warmup.max_steps=4",
        "warmup.check_every_steps=2",
        "warmup.target_accuracy=0.99",
        "evaluation.problems=32",
        "evaluation.every_steps=2",
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
    weights = [json.loads(line) for line in (run.run_dir / "weights.jsonl").open()]
    assert [publish["weight_version"] for publish in weights] == [2, 3]
    down = weights[-1]["weights"]["model.layers.0.mlp.down_proj.weight"]
    assert 1e-6 < down["weight_quant_error"] < 1e-3 and 0 <= down["code_flip_fraction"] < 1
    trained = AutoModelForCausalLM.from_pretrained(run.run_dir / "final_model")
    assert trained.num_parameters() > 1e6
    for shown in (
        "warm-up step 4",
        "held-out accuracy after",
        "weight versions published",
        "bytes",
    ):
        assert shown in run.text()


def test_a_killed_run_goes_on_from_its_checkpoint_on_another_layout(start) -> None:
    words = ["optimizer.learning_rate=0.1", "optimizer.warmup_steps=0", "checkpoint.every_steps=2"]
    words += ["optimizer.weight_decay=1"]  # moves the weights fast, whatever the rewards are
    run = start("train", "quickstart", *SMALL, *words, "steps=1000")
    run.wait_for(r"step 5/")
    run.process.kill()
    psutil.wait_procs(run.survivors(), timeout=30)
    before = metrics_of(run)
    (*_, newest) = list_checkpoints(run.run_dir)
    done = read_state(newest).step
    assert 2 <= done <= len(before)

    steps = done + 2
    resumed = start("resume", "runs/run", f"steps={steps}", "learner.tensor_parallel_size=1")
    assert resumed.exit_code() == 0, resumed.text()
    assert f"going on after step {done}" in resumed.text()
    assert resumed.survivors() == []
    after = metrics_of(resumed)
    assert after[:done] == before[:done]
    assert [step["step"] for step in after] == list(range(1, steps + 1))
    assert [step["weight_version"] for step in after] == list(range(2, steps + 2))
    # The servers had the checkpoint's weights before their first prompt, and not the model's.
    assert after[done]["kl_behaviour_proximal_k3"] < 2 * max(
        step["kl_behaviour_proximal_k3"] for step in before
    )
    assert (run.run_dir / "logs" / "resumed_1" / "learner_rank0.log").exists()
    print(
        [step["kl_behaviour_proximal_k3"] for step in after],
        [step["kl_behaviour_proximal_k3"] for step in before],
    )
    assert [path.name for path in list_checkpoints(run.run_dir)][-1] == f"step_{steps:06}"


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
        "rollout.max_prompt_length=1024",
        "rollout.max_response_length=8",
        "rollout.server.mem_fraction_static=0.2",
        "rollout.server.max_total_tokens=16384",
    )
    assert run.exit_code() == 0, run.text()
    assert len(metrics_of(run)) == 2
    assert run.survivors() == []


def test_with_bf16_on_both_sides_only_engine_noise_is_left(start) -> None:
    run = start(
        "train",
        "quickstart",
        *SMALL,
        "steps=1",
        "learner.dtype=bfloat16",
        "learner.tensor_parallel_size=1",
        "quantization.format=bf16",
    )
    assert run.exit_code() == 0, run.text()
    (step,) = metrics_of(run)
    assert 0 < step["logprob_abs_diff"] < NOISE_BF16


@pytest.mark.parametrize("moment", ["run directory", r"step 1/"])
def test_ctrl_c_ends_every_process(start, moment: str) -> None:
    run = start("train", "quickstart", *SMALL, "steps=1000")
    run.wait_for(moment)
    os.kill(run.process.pid, signal.SIGINT)
    assert run.exit_code() == 130
    assert "interrupted" in run.text()
    assert run.survivors() == []


@pytest.mark.parametrize(
    ("victim", "reason"),
    [("sglang::scheduler", "server http://127.0.0.1"), ("qurl_megatron.train", "learner rank")],
)
def test_a_crash_of_either_side_ends_the_run_with_its_reason(
    start, victim: str, reason: str
) -> None:
    run = start("train", "quickstart", *SMALL, "steps=1000", "learner.tensor_parallel_size=1")
    run.wait_for(r"step 1/")
    run.find(victim).kill()
    assert run.exit_code() == 1
    assert reason in run.text()
    assert run.survivors() == []


def test_the_kernel_ends_every_process_of_a_killed_launcher(start) -> None:
    run = start("train", "quickstart", *SMALL)
    run.wait_for("run directory")
    time.sleep(5)  # servers and ranks are importing
    run.poll()
    assert len(run.started) >= 3
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs(run.survivors(), timeout=30)
    assert alive == []


def test_a_server_that_does_not_come_up_ends_the_run_with_its_log(start) -> None:
    run = start("train", "quickstart", *SMALL, "rollout.server.mem_fraction_static=0.000001")
    assert run.exit_code() == 1
    assert "server_rollout.log" in run.text()
    assert "memory" in run.text().lower()
    assert run.survivors() == []
