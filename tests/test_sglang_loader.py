"""After SGLang's own loaders, a server's ranks hold what was sent, for any number of ranks."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import sglang_loader
from learner_reference import SCALED_ROPES
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.sglang_plugin.weights import held_parts, update_weights
from tiny import build_tiny_model, quantized

SERVER_SIZES = (1, 2, 4)
FORMATS = ("bf16", "int8", "int4-g32", "fp8", "fp8-tensor", "fp8-block")


@st.composite
def models(draw: st.DrawFn, weight_format: str) -> dict[str, Any]:
    """Draw the config of a small model that four ranks can share; all its widths differ."""
    blocks, groups = weight_format == "fp8-block", weight_format == "int4-g32"
    key_value_heads = draw(st.sampled_from([4] if blocks else [1, 2, 4]))
    head_dims = [128] if blocks else [32, 64] if groups else [8, 16, 24]
    head_dim = draw(st.sampled_from(head_dims))
    fields: dict[str, Any] = {
        "architecture": draw(st.sampled_from(["qwen2", "qwen3"] + ["llama"] * (not blocks))),
        "tied": draw(st.booleans()),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_key_value_heads": key_value_heads,
        "num_attention_heads": draw(st.sampled_from([4, 8] if groups else [4, 8, 12])),
        "head_dim": head_dim,
        "hidden_size": (32 if groups else 24) * draw(st.integers(2, 8)),
        "intermediate_size": (512 if blocks else 128 if groups else 4)
        * draw(st.integers(1, 3 if blocks or groups else 60)),
        "vocab_size": draw(st.integers(110, 300)),
    }
    widths = [head_dim * fields["num_attention_heads"], head_dim * key_value_heads]
    widths += [fields[name] for name in ("hidden_size", "intermediate_size", "vocab_size")]
    assume(len(set(widths)) == len(widths))
    return fields


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("weight_format", FORMATS)
@settings(max_examples=6, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_every_server_size_holds_the_checkpoint_quantized_directly(
    weight_format: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model_dir = build_tiny_model(Path(directory), **data.draw(models(weight_format)))
        sent = quantized(model_dir, weight_format)
        for size in SERVER_SIZES:
            ranks = sglang_loader.build_ranks(model_dir, weight_format, size)
            sglang_loader.load(ranks, sent)
            held = sglang_loader.whole_tensors(ranks, sent)
            for name, tensor in sent.items():
                assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


PAIRS = [("qwen2", "int8"), ("qwen3", "bf16"), ("llama", "fp8"), ("qwen3_moe", "int4-g32")]


def products_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the products of each linear layer, experts excepted, and its buffers, by name."""
    torch.manual_seed(0)
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, layer in model.named_modules():
        if hasattr(layer, "input_size") and hasattr(layer, "quant_method"):
            x = torch.randn(3, layer.input_size, dtype=torch.bfloat16)
            found[f"{name}(x)"] = layer.quant_method.apply(layer, x)
    return found


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("family", "weight_format"), PAIRS)
def test_after_new_weights_products_are_those_of_a_model_that_never_had_others(
    family: Any, weight_format: str, tmp_path: Path
) -> None:
    """What is derived from weights, as packed copies are, must not outlive them."""
    first = build_tiny_model(tmp_path / "first", family, head_dim=32)
    sent = quantized(first, weight_format)
    new = {name: t.flip(0) if t.dim() == 2 else t * 2 for name, t in sent.items()}
    models = sglang_loader.build_ranks(first, weight_format, 1)
    fresh = sglang_loader.build_ranks(first, weight_format, 1)
    sglang_loader.load(models, sent)
    before = products_of(models[0])

    def load(*_: Any) -> Any:
        sglang_loader.load(models, new)
        return SimpleNamespace(success=True)

    update(models[0], load, [*new])
    sglang_loader.load(fresh, new)
    after, expected = products_of(models[0]), products_of(fresh[0])
    assert sum(name.endswith("(x)") for name in after) > 3
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name
        assert not name.endswith("(x)") or not torch.equal(before[name], tensor), name


def update(model: Any, load: Any, names: list[str]) -> None:
    """Update a model's weights as a server does, which `load` writes."""
    waits = SimpleNamespace(synchronize=lambda: None)
    scheduler = SimpleNamespace(loaded_version=1, waiting_queue=[], device_module=waits)
    updater = SimpleNamespace(
        scheduler=scheduler,
        begin_weight_update=id,
        end_weight_update=id,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
    )
    update_weights(load, updater, SimpleNamespace(names=names, weight_version="2"))


@pytest.mark.usefixtures("engine")
def test_a_fused_layer_has_nothing_between_its_adapters(tmp_path: Path) -> None:
    """SGLang fills all parameters at random first."""
    directory = build_tiny_model(tmp_path)
    with sglang_loader.as_rank(0, 1):
        model = sglang_loader.build(directory, "int8", {"rank": 4, "alpha": 8.0})
    wide = {name: p for name, p in model.named_parameters() if name.endswith("lora_b")}
    for parameter in wide.values():
        parameter.data.fill_(1.0)
    update(model, lambda *_: SimpleNamespace(success=True), ["some"])
    parts = [p for n, of in held_parts(model).items() if n.endswith("lora_B.weight") for p in of]
    sent = sum(float(part.values.sum()) for part in parts)
    assert sent == sum(part.values.numel() for part in parts)
    assert sent == sum(float(parameter.sum()) for parameter in wide.values())
    assert sent < sum(parameter.numel() for parameter in wide.values())


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", SCALED_ROPES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_a_server_rotates_by_what_transformers_scales(
    family: Any, name: str, tmp_path: Path
) -> None:
    """Its table has a row for each position of the longest sequence, beyond the original length."""
    from transformers import AutoConfig, AutoModelForCausalLM

    rope = {"rope_theta": 100.0, **SCALED_ROPES[name]}
    directory = build_tiny_model(
        tmp_path, family, rope_parameters=rope, max_position_embeddings=64, num_hidden_layers=1
    )
    longest = Architecture.from_directory(directory).max_position_embeddings
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    expected = model.model.rotary_emb(torch.zeros(1), torch.arange(longest)[None])
    served = sglang_loader.build(directory, "bf16").model.layers[0].self_attn.rotary_emb
    table = served.cos_sin_cache[:longest].float()
    cos_sin = torch.cat([each[0].chunk(2, -1)[0] for each in expected], -1)
    torch.testing.assert_close(table, cos_sin, rtol=0, atol=0.01)  # it is in BF16 on a CPU
