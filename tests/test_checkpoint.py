"""Checkpoints: a run goes on as if it had not stopped, on any layout, and only from whole ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from distributed import run_ranks
from qurl_megatron.config.schema import Config, CriticConfig, LearnerConfig, OptimizerConfig
from qurl_megatron.config.yaml_file import save
from qurl_megatron.learner.checkpoint import (
    CheckpointError,
    list_checkpoints,
    read_config,
    read_state,
)
from tiny import build_tiny_model

QURL = Path(sys.executable).with_name("qurl")
STEPS = 4
TOKENS = torch.arange(3, 43).view(2, 20)


def config_of(directory: Path, dtype: str, layout: tuple[int, ...]) -> Config:
    config = Config(model=str(directory / "model"), output_dir=str(directory), name="run")
    config.learner = LearnerConfig(*layout, dtype=dtype, micro_batch_size=2)  # type: ignore[arg-type]
    config.optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=3, weight_decay=0.1)
    config.critic = CriticConfig(
        tensor_parallel_size=1, pipeline_parallel_size=1, optimizer=config.optimizer
    )
    return config


def train(
    directory: Path,
    dtype: str,
    layout: tuple[int, ...],
    steps: range,
    killed_at: int | None = None,
) -> list[float]:
    """Losses, gradient norm and rate of `steps`; each step begins while the last is being saved.

    A critic, in a layout of its own, learns beside the policy. Goes on from the newest
    checkpoint, if there is one.
    """
    from qurl_megatron.algorithm.batch import TrainBatch
    from qurl_megatron.learner.checkpoint import Checkpoints, RunState
    from qurl_megatron.learner.critic import Critic
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.loop.warmup import negative_log_likelihood
    from qurl_megatron.quantization import uaq

    config = config_of(directory, dtype, layout)
    transform = uaq.transform(config.quantization.uaq)
    learner = Learner(Path(config.model), config.learner, config.optimizer, transform=transform)
    critic = Critic(config)
    checkpoints = Checkpoints(config, learner, critic)
    if newest := checkpoints.newest():
        checkpoints.restore(newest)
    seen = []
    for step in steps:
        tokens = torch.randint(2, 90, (8, 12), generator=torch.Generator().manual_seed(step))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        nothing = torch.zeros(tokens.shape)
        rewards = (tokens > 45).float()
        batch = TrainBatch(tokens, mask, nothing, rewards, nothing)
        value_loss = critic.step(batch).value_loss
        update = learner.update(batch, mask / mask.sum(), negative_log_likelihood, temperature=1.0)
        seen += [update.loss, update.grad_norm, update.learning_rate, value_loss]
        checkpoints.poll()
        checkpoints.save(RunState(step, step + 1, 0.0, {}, {"position": step}))
        if step == killed_at:
            (directory / "manager").write_text(str(checkpoints._manager._process.pid))
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.poll(wait=True)
    logprobs, _ = learner.logprobs_and_entropy(TOKENS, temperature=1.0)
    torch.save(logprobs, directory / "logprobs.pt")
    checkpoints.close()
    critic.close()
    learner.close()
    return seen


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_takes_the_steps_it_would_have_taken(dtype: str, tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model")
    straight, _ = run_ranks(train, 2, tmp_path, dtype, (2,), range(1, STEPS + 1))
    assert names(tmp_path) == ["step_000003", "step_000004"]  # older ones are removed
    assert read_state(tmp_path / "run" / "checkpoints" / "step_000003").prompts == {"position": 3}
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")
    resumed, _ = run_ranks(train, 2, tmp_path, dtype, (2,), range(4, STEPS + 1))
    assert resumed == straight[-4:]
    assert straight[-8] != straight[-4] and straight[-5] != straight[-1]  # the losses do move


@pytest.mark.parametrize(
    ("tied", "layouts"),
    [(True, [(1, 2, 1, 2), (2,)]), (False, [(2, 2), (1, 1, 2)])],
    ids=["tied, PP2xVPP2 to TP2", "untied, TP2xPP2 to DP2"],
)
def test_any_layout_goes_on_from_another(
    tied: bool, layouts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    # 250 rows of vocabulary: padded differently from layout to layout.
    build_tiny_model(tmp_path / "model", tied=tied, num_hidden_layers=4, vocab_size=250)
    straight, *_ = run_ranks(train, 1, tmp_path, "float32", (1,), range(1, 5))
    shutil.rmtree(tmp_path / "run")
    resumed: list[float] = []
    for first, layout in zip((1, 3), layouts, strict=True):
        ranks = config_of(tmp_path, "float32", layout).learner.world_size
        steps = range(first, first + 2)
        resumed += run_ranks(train, ranks, tmp_path, "float32", layout, steps)[0]
    assert resumed == pytest.approx(straight, rel=1e-4)


def test_what_a_killed_save_leaves_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model")
    run_ranks(train, 1, tmp_path, "float32", (1,), range(1, 2))
    with pytest.raises(RuntimeError, match="died without a word"):
        run_ranks(train, 1, tmp_path, "float32", (1,), range(2, 3), 2)
    assert names(tmp_path) == ["step_000001", "step_000002.partial"]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step_000001"]
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "manager").read_text())).wait(timeout=10)
    run_ranks(train, 1, tmp_path, "float32", (1,), range(2, 3))
    assert names(tmp_path) == ["step_000001", "step_000002"]


@pytest.mark.parametrize(
    ("dtype", "layout", "tied"),
    [("float32", (2, 2), False), ("bfloat16", (2,), True)],
    ids=["float32 TP2xPP2 untied", "bfloat16 TP2 tied"],
)
def test_transformers_computes_what_the_learner_did(
    dtype: str, layout: tuple[int, ...], tied: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored = torch.float32
    build_tiny_model(tmp_path / "model", tied=tied, vocab_size=250, dtype=stored)
    config = config_of(tmp_path, dtype, layout)
    run_ranks(train, config.learner.world_size, tmp_path, dtype, layout, range(1, 3))
    source, destination = tmp_path / "run" / "checkpoints" / "step_000002", tmp_path / "exported"
    shutil.rmtree(tmp_path / "model")  # a checkpoint has all it takes
    done = subprocess.run([QURL, "export", source, destination], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    AutoTokenizer.from_pretrained(destination)
    model = AutoModelForCausalLM.from_pretrained(destination)
    assert model.dtype == stored
    with torch.no_grad():
        whole = model(TOKENS).logits[:, :-1].log_softmax(-1)
    logprobs = whole.gather(2, TOKENS[:, 1:, None]).squeeze(2)
    learner = torch.load(tmp_path / "logprobs.pt")[:, 1:]
    tolerance = 1e-5 if dtype == "float32" else 0.1  # the learner computed in BF16
    torch.testing.assert_close(learner, logprobs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("left", ["nothing", "config.yaml"])
def test_what_is_no_checkpoint_is_refused_by_what_it_lacks(left: str, tmp_path: Path) -> None:
    if left == "config.yaml":
        save(Config(), tmp_path / "config.yaml")
    with pytest.raises(CheckpointError, match="not a checkpoint, it lacks megatron"):
        read_config(tmp_path)
