"""`qurl train` with BF16 servers and a reward of the user's own, and with experts."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from e2e.running import COMPLETIONS, PER_STEP, QUICK, Command, Start, metrics_of
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.learner.checkpoint import read_state
from qurl_megatron.report.record import list_checkpoints
from tiny import build_tiny_model

NOISE_BF16 = 0.005  # mean |behaviour - proximal|, in nats; measured 0.0023, and 0.010 with INT8
AS_SERVED = ["learner.quantized_forward=all", "quantization.format=int4"]
AS_SERVED += ["quantization.group_size=32"]
REWARD = """
def reward(completion, problem):
    if completion.startswith("e"):
        raise ValueError("it begins with e")
    is_right = completion.strip() == problem.answer
    return {"reward": is_right - 0.5, "accuracy": is_right, "length": len(completion)}
"""
TEN_LINES = """
recipe: grpo
name: run
model: model
data: train.jsonl
reward: gsm8k
epochs: 2
stop_above: {weight_version: 2}
learner: {dtype: float32, tensor_parallel_size: 2}
rollout: {prompts_per_step: 8, completions_per_prompt: 4, max_completion_length: 8, retire_after: 1}
evaluation: {problems: 0}
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Yield a run that was told to stop in its third step or later, and has ended."""
    directory = tmp_path_factory.mktemp("training")
    (directory / "mine.py").write_text(REWARD)
    run = Command(
        directory,
        "train",
        *QUICK,
        "steps=1000",
        "learner.dtype=bfloat16",
        "learner.tensor_parallel_size=1",
        "quantization.format=bf16",
        "rollout.servers=2",
        "rollout.top_p=0.9",
        "rollout.server.mem_fraction_static=0.6",
        "checkpoint.every_steps=1000",
        "reward=mine.py:reward",
        "scoring.wrong=-2",
    )
    try:
        run.wait_for("step 2/")
        saved = [path.name for path in list_checkpoints(run.run_dir)]
        assert saved in ([], ["step_000001"])  # the schedule saves no other
        run.process.send_signal(signal.SIGUSR1)
        run.exit_code()
        yield run
    finally:
        run.end()


def test_a_run_stops_early_on_sigusr1_with_a_checkpoint(stopped: Command) -> None:
    assert stopped.exit_code() == STOPPED_EARLY == 75, stopped.text()
    assert "stopped early" in stopped.text()
    (*_, saved) = list_checkpoints(stopped.run_dir)
    assert read_state(saved).step == len(metrics_of(stopped)) >= 2
    assert not (stopped.run_dir / "summary.json").exists()
    assert stopped.survivors() == []


def test_two_bf16_servers_have_engine_noise_only(stopped: Command) -> None:
    assert 0 < metrics_of(stopped)[0]["logprob_abs_diff"] < NOISE_BF16


def test_a_reward_function_is_trained_on(stopped: Command) -> None:
    steps: list[dict[str, Any]] = list(metrics_of(stopped))
    for step in steps:
        assert step["reward_parts"]["length"] > 0
        assert 0 <= step["reward_parts"]["accuracy"] <= 1
        assert -2 <= step["reward_mean"] <= 0.5
        failures = step["verifier_failures"]
        assert step["verifier_timeouts"] == 0
        assert ("ValueError: it begins with e" in step["verifier_failure"]) == (failures > 0)
        # Failed completions have no parts; the others have 0.5 below their accuracy.
        num_completions = PER_STEP * COMPLETIONS
        scored = num_completions - failures
        right = step["reward_parts"]["accuracy"] * scored
        total = right - 0.5 * scored - 2 * failures
        assert abs(step["reward_mean"] * num_completions - total) < 1e-6


def test_servers_that_report_other_log_probs_end_a_run_before_it_trains(stopped: Command) -> None:
    """They sample at the temperature, and report what the log-probs would be without it."""
    steps = len(metrics_of(stopped))
    variable = "rollout.server.environment.SGLANG_RETURN_ORIGINAL_LOGPROB=1"
    words = ["rollout.temperature=0.5", "rollout.top_p=1", variable]
    run = Command(stopped.run_dir.parents[1], "resume", "runs/run", *words)
    try:
        assert run.exit_code() == 1
        assert "the rollout servers' log-probs are not those of the policy" in run.text()
        assert len(metrics_of(run)) == steps
        assert run.survivors() == []
    finally:
        run.end()


def test_a_run_whose_time_is_up_saves_its_last_step_of_a_policy_in_int4(stopped: Command) -> None:
    words = ["time_limit_s=0.1", "checkpoint.every_steps=1000", "rollout.temperature=1"]
    words += ["rollout.server.environment.SGLANG_RETURN_ORIGINAL_LOGPROB=0"]
    run = Command(stopped.run_dir.parents[1], "resume", "runs/run", *words, *AS_SERVED)
    try:
        assert run.exit_code() == 0, run.text()
        assert run.survivors() == []
    finally:
        run.end()
    saved = max(list_checkpoints(run.run_dir))
    assert read_state(saved).step == len(metrics_of(run))
    # All servers hold INT4. The learner computes with their codes, so no more than noise is left.
    assert 0 < metrics_of(run)[-1]["logprob_abs_diff"] < NOISE_BF16
    assert (run.run_dir / "summary.json").exists()


def peak_bytes(process: psutil.Process) -> int:
    """Return the most memory that a process has had, with pages that it shares."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def test_grpo_trains_experts_with_a_large_vocabulary_on_a_file_and_says_nothing_of_memory(
    start: Start, tmp_path: Path
) -> None:
    """The servers verify every expert's tensors at each publish, or the run would end.

    Prompt and completion may be as long as the model's positions.
    """
    sizes = {"vocab_size": 150_000, "max_position_embeddings": 1032, "num_hidden_layers": 1}
    model = build_tiny_model(tmp_path / "model", "qwen3_moe", **sizes)
    problems = [
        {
            "question": f"Ann has {n} eggs and buys 2 more. How many?",
            "answer": f"{n}+2\n#### {n + 2}",
        }
        for n in range(100)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    (tmp_path / "my.yaml").write_text(TEN_LINES)
    run = start("train", "my.yaml", "rollout.routing=compare", "quantization.publish=delta")
    run.wait_for("step 1/")
    server = psutil.Process(run.server_pid("rollout", 0))
    peaks = [peak_bytes(process) for process in (server, *server.children())]
    assert len(peaks) == 3 and max(peaks) < 1.5e9, peaks
    assert run.exit_code() == 0, run.text()
    steps = metrics_of(run)
    assert [step["prompts_retired"] for step in steps] == [8, 16]
    # The learner in full precision and the server in INT8 differ, and little.
    assert all(0 < step["logprob_abs_diff"] < 0.2 for step in steps)
    # Its router chooses other experts for a few tokens.
    assert all(0 < step["routing_changed_fraction"] < 0.3 for step in steps)
    # Without rewards the policy does not change.
    assert all(0 <= step["kl_reference"] < 1e-6 for step in steps)
    exported = [load_file(file) for file in (run.run_dir / "final_model").glob("*.safetensors")]
    names = sorted(name for tensors in exported for name in tensors)
    assert names == sorted(load_file(model / "model.safetensors"))
    assert run.survivors() == []
