"""Hybrids as Qwen publishes them, and as transformers saves them: read, served, or refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from published import HYBRID_MODELS
from qurl_megatron.config.schema import (
    ConfigError,
    LearnerConfig,
    UaqConfig,
)
from qurl_megatron.config.validate import check_layout, check_scales
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError, Family
from qurl_megatron.model.huggingface import (
    check_model,
    served_directory,
    stored_dtype,
)
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.model.tokenizer import load_tokenizer
from qurl_megatron.model.transformers_model import checkpoint_tensors
from tiny import build_published_model, build_tiny_model, random_model

HYBRIDS: tuple[Family, ...] = ("qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_published_directory_is_read_as_its_text(
    family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = build_published_model(tmp_path / "published", family)
    weights = check_model(published)
    (line,) = capsys.readouterr().err.splitlines()
    assert "only its text is used; model.visual.* and mtp.* are left out" in line
    text = build_tiny_model(tmp_path / "text", family)
    assert Architecture.from_directory(published) == Architecture.from_directory(text)
    assert stored_dtype(published) == torch.bfloat16
    for name, tensor in checkpoint_tensors(random_model(family)):
        assert torch.equal(weights.read(name, ()), tensor), name
    capsys.readouterr()  # what transformers says
    check_model(text)
    assert not capsys.readouterr().err
    load_tokenizer(published)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("form", ["published", "saved by transformers"])
def test_a_served_directory_says_the_same_to_every_reader(
    family: Family, form: str, tmp_path: Path
) -> None:
    """SGLang reads two fields of config.json where transformers does not write them."""
    from transformers import AutoModelForCausalLM

    build = build_published_model if form == "published" else build_tiny_model
    source = build(tmp_path / "model", family)
    served = served_directory(source, tmp_path / "served")
    config = json.loads((served / "config.json").read_text())
    assert config["model_type"] == family and "text_config" not in config
    assert (config["full_attention_interval"], config["partial_rotary_factor"]) == (4, 0.5)
    assert served_directory(served, tmp_path / "again") == served
    assert Architecture.from_directory(served) == Architecture.from_directory(source)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits, expected = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(tokens).logits
            for path in (served, source)
        )
    assert torch.equal(logits, expected)
    assert torch.equal(logits, random_model(family)(tokens).logits)


def test_a_directory_of_another_family_is_served_as_it_is(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", "qwen3")
    assert served_directory(model, tmp_path / "served") == model


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no gate": ({"attn_output_gate": False}, "'attn_output_gate' must be True"),
    "another gate": ({"output_gate_type": "sigmoid"}, "'output_gate_type' must be 'swish'"),
    "states": ({"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype' must be 'float32'"),
    "choices": ({"norm_topk_prob": False}, "'norm_topk_prob' must be True"),
    "layers": ({"layer_types": ["full_attention"] * 4}, "'layer_types' must repeat a block"),
    "interval": ({"full_attention_interval": 2}, "'layer_types' must repeat a block"),
    "rotation": (
        {"rope_parameters": {"partial_rotary_factor": 0.3, "rope_theta": 1e4}},
        "partial_rotary_factor 0.3 of a head's 16 channels",
    ),
    "heads": ({"linear_num_value_heads": 3}, "3 value heads of linear attention do not divide"),
    "YaRN": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "rope scaling is not supported in a hybrid",
    ),
    "head": ({"tie_word_embeddings": True}, "is False, and True in text_config"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_engines_would_compute_differently_is_refused(name: str, tmp_path: Path) -> None:
    model = build_published_model(tmp_path / "model", "qwen3_5_text")
    config = json.loads((model / "config.json").read_text())
    changes, words = CONTRADICTIONS[name]
    config["text_config"] |= changes
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchitectureError) as refusal:
        Architecture.from_directory(model)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_published_directory_without_its_text_is_refused(tmp_path: Path) -> None:
    fields = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ArchitectureError, match="without an object 'text_config'"):
        Architecture.from_directory(tmp_path)


LAYOUTS: dict[str, dict[str, Any]] = {
    "2 key heads of linear attention are not divisible by tensor_parallel_size=4": {
        "tensor_parallel_size": 4
    },
    "context_parallel_size=2: not supported with linear attention": {"context_parallel_size": 2},
    "80 channels of the shared expert are not divisible by tensor_parallel_size=3": {
        "tensor_parallel_size": 3
    },
}


@pytest.mark.parametrize("words", LAYOUTS)
def test_a_layout_that_linear_attention_does_not_have_is_refused(
    words: str, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 12, "linear_num_value_heads": 6, "num_key_value_heads": 1}
    if "shared expert" in words:
        heads["linear_num_key_heads"] = 6
    model = build_tiny_model(tmp_path / "m", "qwen3_5_moe_text", **heads)
    architecture = Architecture.from_directory(model)
    with pytest.raises(ArchitectureError) as refusal:
        check_layout(architecture, LearnerConfig(**LAYOUTS[words]))
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_hybrid_with_experts_has_no_scales_but_1(tmp_path: Path) -> None:
    """Its router reads a norm that is rounded whatever the scale."""
    model = build_tiny_model(tmp_path / "m", "qwen3_5_moe_text")
    architecture = Architecture.from_directory(model)
    check_scales(UaqConfig(), architecture)
    with pytest.raises(ConfigError, match="scale=2: a hybrid with experts cannot be scaled"):
        check_scales(UaqConfig(2.0), architecture)


def test_the_published_config_of_27b_is_the_known_model(tmp_path: Path) -> None:
    config = HYBRID_MODELS["Qwen3.6-27B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [248046, 248044]}')
    architecture = Architecture.from_directory(tmp_path)
    assert architecture == KNOWN_MODELS["Qwen3.6-27B"]
    assert weight_map.num_parameters(architecture) == 26_895_998_464
    architecture.check_blocks("fp8-block", 4)
    with pytest.raises(ArchitectureError, match="64 linear key channels"):
        dataclasses.replace(
            architecture,
            delta_net=dataclasses.replace(architecture.delta_net, key_dim=16),  # type: ignore[type-var]
        ).check_blocks("fp8-block", 4)
