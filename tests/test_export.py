"""An exported policy computes the same in transformers as in the learner."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batches import ragged, score, update
from distributed import run_ranks
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, Rounding, UaqConfig
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.transformers_model import checkpoint_tensors
from qurl_megatron.weight_sync.bucket import Bucket
from sent import tensors_in
from tiny import Family, build_published_model, build_tiny_model

TOKENS = torch.arange(3, 43).view(2, 20)


def run_and_export(
    source: Path,
    destination: Path,
    config: LearnerConfig,
    scaling: UaqConfig,
    updates: int,
    file_bytes: int = 0,
) -> torch.Tensor:
    """Load, update and export; return the learner's log-probs of TOKENS afterwards."""
    from batches import negative_log_likelihood
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.quantization import uaq
    from qurl_megatron.weight_sync import export

    optimizer = OptimizerConfig(learning_rate=1e-2)
    is_hybrid = Architecture.from_directory(source).is_hybrid
    transform = uaq.transform(scaling, is_hybrid=is_hybrid)
    learner = Learner(source, config, optimizer, transform=transform)
    if file_bytes:
        export.FILE_BYTES = file_bytes
    weights = torch.full((TOKENS.numel(),), 1 / TOKENS.numel())
    for _ in range(updates):
        update(learner, ragged(TOKENS), weights, negative_log_likelihood)
    export.export(learner, source, destination, scaling, "{{ messages }}")
    logprobs, _ = score(learner, TOKENS)
    learner.close()
    return logprobs


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("qwen2", LearnerConfig(tensor_parallel_size=4)),
        ("qwen3", LearnerConfig(tensor_parallel_size=2, data_parallel_size=2)),
        ("llama", LearnerConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2)),
        (
            "qwen3_moe",
            LearnerConfig(tensor_parallel_size=2, data_parallel_size=2, expert_parallel_size=2),
        ),
        ("qwen3_5_text", LearnerConfig(tensor_parallel_size=2, pipeline_parallel_size=2)),
        ("qwen3_5_moe_text", LearnerConfig(tensor_parallel_size=2, expert_parallel_size=2)),
    ],
    ids=[
        *("qwen2, TP4", "qwen3, TP2xDP2", "llama, PP2 in 2 parts", "experts, TP2xDP2, EP2"),
        *("hybrid, TP2xPP2", "hybrid with experts, TP2, EP2"),
    ],
)
def test_an_export_of_loaded_weights_is_the_source_bit_for_bit(
    architecture: Family, config: LearnerConfig, tmp_path: Path
) -> None:
    source = build_tiny_model(
        tmp_path / "model", architecture, vocab_size=251, num_hidden_layers=4, dtype=torch.float32
    )
    # Powers of two are undone exactly.
    scaling = UaqConfig(2.0, layer_scales={1: 4.0}, through_value=True, through_up=True)
    run_ranks(run_and_export, config.world_size, source, tmp_path / "exported", config, scaling, 0)
    stored = load_file(source / "model.safetensors")
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "exported").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        if "qwen3_5" in architecture and name.endswith("layernorm.weight"):
            torch.testing.assert_close(exported[name], tensor, rtol=0, atol=2e-7)  # 1 + it is
        else:
            assert torch.equal(exported[name], tensor), name


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
    logprobs, *_ = run_ranks(
        run_and_export, config.world_size, source, destination, config, UaqConfig(1.5), 1
    )
    model = AutoModelForCausalLM.from_pretrained(destination)
    assert model.dtype == torch.float32
    with torch.no_grad():
        all_logprobs = model(TOKENS).logits[:, :-1].log_softmax(-1)
    expected = all_logprobs.gather(2, TOKENS[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(logprobs[:, 1:], expected, rtol=0, atol=1e-5)
    assert (destination / "chat_template.jinja").read_text() == "{{ messages }}"
    stages = config.pipeline_parallel_size
    files = sorted(path.name for path in destination.glob("*.safetensors*"))
    of = [f"model-{number:05}-of-{stages:05}.safetensors" for number in range(1, stages + 1)]
    index = "model.safetensors.index.json"
    assert files == (["model.safetensors"] if stages == 1 else [*of, index])
    before = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        moved = (before(TOKENS).logits.log_softmax(-1)[:, :-1] - all_logprobs).abs().max()
    assert moved > 0.01  # the export has the update
    AutoTokenizer.from_pretrained(destination)
    assert not (tmp_path / "exported.partial").exists()


def export_and_send(
    source: Path, destination: Path, layout: dict[str, Any], dtype: Any, rounding: Rounding
) -> dict[str, torch.Tensor]:
    """Train, export to files of BF16, and return what BF16 servers get of this rank."""
    from batches import negative_log_likelihood
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.export import export
    from qurl_megatron.weight_sync.reshard import Converter

    optimizer = OptimizerConfig(learning_rate=1e-4, rounding=rounding)
    learner = Learner(source, LearnerConfig(**layout, dtype=dtype), optimizer)
    weights = torch.full((TOKENS.numel(),), 1 / TOKENS.numel())
    for _ in range(2):
        update(learner, ragged(TOKENS), weights, negative_log_likelihood)
    export(learner, source, destination, UaqConfig())
    sent: list[Bucket] = []
    Converter(learner, "bf16", 2**20).convert(sent.append)
    learner.close()
    return tensors_in(sent)


@pytest.mark.parametrize("rounding", ["unbiased", "nearest"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_holds_the_bf16_values_that_servers_get(
    dtype: str, rounding: Rounding, tmp_path: Path
) -> None:
    source = build_tiny_model(tmp_path / "model", "qwen3", vocab_size=251)
    layout = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    destination = tmp_path / "exported"
    sent, *_ = run_ranks(export_and_send, 4, source, destination, layout, dtype, rounding)
    exported: dict[str, torch.Tensor] = {}
    for file in destination.glob("*.safetensors"):
        exported |= load_file(file)
    before = load_file(source / "model.safetensors")
    assert exported.keys() == sent.keys() == before.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in sent.items())
    changed = sum(int((exported[name] != tensor).sum()) for name, tensor in before.items())
    assert changed > sum(tensor.numel() for tensor in before.values()) / 20


def test_an_export_is_cut_into_files_of_bounded_size(tmp_path: Path) -> None:
    source = build_tiny_model(tmp_path / "model", "qwen3", dtype=torch.float32)
    stored, config = load_file(source / "model.safetensors"), LearnerConfig(dtype="float32")
    limit = max(tensor.nbytes for tensor in stored.values()) + 1
    destination = tmp_path / "exported"
    run_ranks(run_and_export, 1, source, destination, config, UaqConfig(), 0, limit)
    files = sorted(destination.glob("*.safetensors"))
    exported = [load_file(file) for file in files]
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(sum(each.nbytes for each in file.values()) <= limit for file in exported)
    for file in exported:
        for name, tensor in file.items():
            assert torch.equal(tensor, stored.pop(name))
    assert not stored


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_published_hybrid_is_exported_as_its_text(family: Family, tmp_path: Path) -> None:
    """What is loaded comes back bit for bit, what is trained as transformers computes it."""
    from transformers import AutoModelForCausalLM

    source = build_published_model(tmp_path / "model", family, dtype=torch.float32)
    config = LearnerConfig(tensor_parallel_size=2, dtype="float32")
    logprobs = {}
    for updates in (0, 1):
        destination = tmp_path / f"after {updates} updates"
        logprobs[updates], _ = run_ranks(
            run_and_export, 2, source, destination, config, UaqConfig(), updates
        )
        model = AutoModelForCausalLM.from_pretrained(destination)
        assert model.config.model_type == family and model.dtype == torch.float32
        with torch.no_grad():
            scores = model(TOKENS).logits[:, :-1].log_softmax(-1)
        expected = scores.gather(2, TOKENS[:, 1:, None]).squeeze(2)
        torch.testing.assert_close(logprobs[updates][:, 1:], expected, rtol=0, atol=3e-5)
        if not updates:
            published = AutoModelForCausalLM.from_pretrained(source)
            for own, loaded in zip(*map(checkpoint_tensors, (model, published)), strict=True):
                assert own[0] == loaded[0] and torch.equal(own[1], loaded[1]), own[0]
    assert (logprobs[1] - logprobs[0]).abs().max() > 0.01
