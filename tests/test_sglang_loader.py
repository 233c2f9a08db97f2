"""After SGLang's own loaders, a server's ranks hold what was sent, for any number of ranks."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import sglang_loader
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
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
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
