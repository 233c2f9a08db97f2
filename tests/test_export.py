"""An exported policy computes the same in transformers as in the learner."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from batches import ragged, score, update
from distributed import run_ranks
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, UaqConfig
from tiny import build_tiny_model

TOKENS = torch.arange(3, 43).view(2, 20)


def load_and_export(source: Path, destination: Path, config: LearnerConfig) -> None:
    """Load and export with UAQ scales that are powers of two, which are undone exactly."""
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.quantization import uaq
    from qurl_megatron.weight_sync.export import export

    scaling = UaqConfig(2.0, layer_scales={1: 4.0}, through_value=True, through_up=True)
    learner = Learner(source, config, OptimizerConfig(), transform=uaq.transform(scaling))
    export(learner, source, destination, scaling)
    learner.close()


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("qwen2", LearnerConfig(tensor_parallel_size=4)),
        ("qwen3", LearnerConfig(tensor_parallel_size=2, data_parallel_size=2)),
        ("llama", LearnerConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)),
    ],
    ids=["qwen2, TP4", "qwen3, TP2xDP2", "llama, PP2 in 2 parts"],
)
def test_an_export_of_loaded_weights_is_the_source_bit_for_bit(
    architecture: Literal["qwen2", "qwen3", "llama"], config: LearnerConfig, tmp_path: Path
) -> None:
    source = build_tiny_model(
        tmp_path / "model", architecture, vocab_size=251, num_hidden_layers=4, dtype=torch.float32
    )
    run_ranks(load_and_export, config.world_size, source, tmp_path / "exported", config)
    stored = load_file(source / "model.safetensors")
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "exported").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name], tensor), name


def train_and_export(source: Path, destination: Path, config: LearnerConfig) -> torch.Tensor:
    """Update once under UAQ and export; return the learner's log-probs of TOKENS afterwards."""
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.loop.warmup import negative_log_likelihood
    from qurl_megatron.quantization import uaq
    from qurl_megatron.weight_sync.export import export

    learner = Learner(
        source,
        config,
        OptimizerConfig(learning_rate=1e-2),
        transform=uaq.transform(UaqConfig(1.5)),
    )
    weights = torch.full((TOKENS.numel(),), 1 / TOKENS.numel())
    update(learner, ragged(TOKENS), weights, negative_log_likelihood)
    export(learner, source, destination, UaqConfig(1.5))
    logprobs, _ = score(learner, TOKENS)
    learner.close()
    return logprobs


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        (LearnerConfig(dtype="float32"), True),
        (
            LearnerConfig(tensor_parallel_size=2, pipeline_parallel_size=2, dtype="float32"),
            False,
        ),
        (
            LearnerConfig(
                pipeline_parallel_size=2, layers_in_last_pipeline_stage=1, dtype="float32"
            ),
            True,
        ),
    ],
    ids=["one rank, tied", "TP2xPP2", "PP2 uneven, tied"],
)
def test_transformers_computes_what_the_learner_does(
    config: LearnerConfig, tied: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = build_tiny_model(tmp_path / "model", "qwen2", tied=tied, dtype=torch.float32)
    destination = tmp_path / "exported"
    logprobs, *_ = run_ranks(train_and_export, config.world_size, source, destination, config)
    model = AutoModelForCausalLM.from_pretrained(destination)
    assert model.dtype == torch.float32
    with torch.no_grad():
        all_logprobs = model(TOKENS).logits[:, :-1].log_softmax(-1)
    expected = all_logprobs.gather(2, TOKENS[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(logprobs[:, 1:], expected, rtol=0, atol=1e-5)
    before = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        moved = (before(TOKENS).logits.log_softmax(-1)[:, :-1] - all_logprobs).abs().max()
    assert moved > 0.01  # the export has the update
    AutoTokenizer.from_pretrained(destination)
    assert not (tmp_path / "exported.partial").exists()
