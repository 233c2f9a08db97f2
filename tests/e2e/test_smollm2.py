"""A real model in a real run of its recipe: INT8 rollouts, what the run leaves, and adapters."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from e2e.running import Command, Start, metrics_of
from qurl_megatron.report.record import list_checkpoints

SHORT = [
    "prompts.options.size=200",
    "learner.data_parallel_size=1",
    "rollout.servers=1",
    "rollout.prompts_per_step=4",
    "rollout.completions_per_prompt=2",
    "rollout.max_completion_length=16",
    "evaluation.problems=0",
    "checkpoint.every_steps=0",
    "optimizer.learning_rate=1e-4",
    "optimizer.minibatches_per_step=1",
    "reward=mine.py:reward",
]
# Two answers to a question hardly ever have the same reward, right or not.
REWARD = """
def reward(completion, problem):
    return {"reward": len(completion) % 7, "accuracy": problem.answer in completion}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """Yield a finished run of two steps."""
    directory = tmp_path_factory.mktemp("smollm2")
    (directory / "mine.py").write_text(REWARD)
    words = ["steps=2", "quantization.smoothing=0.5", *SHORT, "checkpoint.every_steps=2"]
    run = Command(directory, "train", "smollm2", "name=run", *words)
    try:
        assert run.exit_code() == 0, run.text()
        yield run
    finally:
        run.end()


def test_the_int8_copy_of_a_real_model_differs_as_int8_does(trained: Command) -> None:
    steps = metrics_of(trained)
    assert len(steps) == 2
    for step in steps:  # 0.02 to 0.2 in longer runs
        assert 2e-3 < step["kl_behaviour_proximal_k3"] < 1
        assert step["grad_norm"] > 0
    assert trained.survivors() == []


def test_smoothed_servers_of_a_real_model_are_proven(trained: Command) -> None:
    found = re.search(
        r"smoothing of 0.5 by 64 prompts: the largest outlier is ([\d,]+) times its layer's "
        r"median, in the input of model.layers.11.mlp.down_proj.weight",
        trained.text(),
    )
    assert found and int(found[1].replace(",", "")) > 1000
    mismatch = json.loads((trained.run_dir / "mismatch.json").read_text())["rollout"]
    # Without the scales on both sides the servers would compute another model, by 1 nat or more.
    assert mismatch["kl_behaviour_proximal_k3"] < 0.2


def weights_of(directory: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in directory.glob("*.safetensors")]
    return {name: weight for file in files for name, weight in file.items()}


def test_the_trained_model_has_the_same_tensors_and_tokens(trained: Command) -> None:
    model, final = trained.run_dir / "model", trained.run_dir / "final_model"
    before, after = (weights_of(directory) for directory in (model, final))
    assert before.keys() == after.keys() and len(before) == 272
    num_moved = 0
    for name, weight in before.items():
        # Two updates at a rate of 1e-4, and a BF16 number may be the next one above or below.
        moved = (after[name].float() - weight.float()).abs()
        assert (moved <= 1e-3 + weight.float().abs() / 128).all()
        num_moved += int(moved.count_nonzero())
    assert num_moved
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (model / name).read_bytes() == (final / name).read_bytes()


def test_its_checkpoint_is_exported_and_its_model_quantized(
    trained: Command, start: Start, tmp_path: Path
) -> None:
    checkpoint = max(list_checkpoints(trained.run_dir))
    final = trained.run_dir / "final_model"
    assert start("export", checkpoint, "exported").exit_code() == 0
    weights = weights_of(final)
    exported = weights_of(tmp_path / "exported")
    assert exported.keys() == weights.keys()
    assert all(exported[name].equal(weight) for name, weight in weights.items())
    assert start("quantize", final, "quantized").exit_code() == 0
    quantized = weights_of(tmp_path / "quantized")
    for name in (name for name in weights if name.endswith("_proj.weight")):
        codes, scales = quantized[name], quantized[f"{name}_scale"]
        assert codes.dtype == torch.int8
        off = (codes.float() * scales.view(-1, 1) - weights[name].float()).abs()
        assert (off <= 0.51 * scales.view(-1, 1)).all(), name


def test_the_trained_model_answers_questions_in_int8(trained: Command, start: Start) -> None:
    directory = trained.run_dir.parents[1]
    questions = {"What is the capital of France?": "Paris", "What is 2 + 2?": "4"}
    lines = [json.dumps({"question": q, "answer": a}) for q, a in questions.items()]
    (directory / "problems.jsonl").write_text("\n".join(lines))
    words = [f"reward={directory / 'mine.py'}:reward", "format=int8", "output=eval"]
    words += ["smoothing=0.5"]  # as the run
    words += ["max_prompt_length=64", "max_completion_length=24", "server.max_running_requests=4"]
    run = start("eval", trained.run_dir / "final_model", directory / "problems.jsonl", *words)
    assert run.exit_code() == 0, run.text()
    answers = (run.output.parent / "eval" / "answers_0.jsonl").read_text()
    assert "Paris" in answers.splitlines()[0], answers


def test_adapters_are_trained_over_a_real_model(trained: Command, start: Start) -> None:
    given = [f"model={trained.run_dir / 'model'}", f"reward={trained.output.parent}/mine.py:reward"]
    run = start("train", "smollm2", "name=run", "steps=1", "adapters.rank=4", *SHORT, *given)
    assert run.exit_code() == 0, run.text()
    assert metrics_of(run)[0]["grad_norm"] > 0
    assert (run.run_dir / "final_adapters").is_dir()
