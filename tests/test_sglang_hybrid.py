"""A hybrid's linear attention, gated attention and shared expert in the ranks of a server."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.models.qwen3_5 import Qwen3_5ForCausalLM
from torch import Tensor

import sglang_loader
from qurl_megatron.config.keep import kept_layers, layers_of
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.model.architecture import Architecture, Family
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.quantization.offline import quantize_directory
from qurl_megatron.sglang_plugin.weights import held_parts, write_bucket
from qurl_megatron.weight_sync.bucket import model_tensors
from sent import packed
from tiny import build_published_model, build_tiny_model, quantized

# Widths of a rank are whole blocks of 128, or groups of 32.
BLOCKS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
FORMATS: dict[WeightFormat, dict[str, Any]] = {
    "bf16": {},
    "int8": {},
    "int4": BLOCKS,
    "fp8": {},
    "fp8-tensor": {},
    "fp8-block": BLOCKS,
}
LAYOUTS: dict[Family, list[tuple[int, int]]] = {
    "qwen3_5_text": [(1, 1), (2, 1)],
    "qwen3_5_moe_text": [(2, 2)],
}


def contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("family", "weight_format"),
    [
        *(("qwen3_5_text", weight_format) for weight_format in FORMATS),
        *(("qwen3_5_moe_text", weight_format) for weight_format in ("bf16", "int8", "fp8-block")),
    ],
)
def test_ranks_hold_what_was_sent_whole_and_as_a_delta(
    family: Family, weight_format: WeightFormat, tmp_path: Path
) -> None:
    dims = {"num_hidden_layers": 4, **FORMATS[weight_format]}
    first, second = (
        contiguous(
            quantized(
                build_tiny_model(tmp_path / str(seed), family, seed=seed, **dims), weight_format
            )
        )
        for seed in (0, 1)
    )
    for size, groups in LAYOUTS[family]:
        ranks = sglang_loader.build_ranks(tmp_path / "0", weight_format, size, groups)
        for model in ranks:
            write_bucket(model, packed(second))
            assert held_parts(model).keys() <= second.keys()
        assert sglang_loader.hold(ranks, second)
        sglang_loader.send_changes(ranks, second, first)
        assert sglang_loader.hold(ranks, first)
        assert sglang_loader.checksums_of(ranks) == {
            name: checksum(tensor) for name, tensor in first.items()
        }


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_server_elsewhere_takes_what_is_sent_of_a_hybrid(
    weight_format: WeightFormat, tmp_path: Path
) -> None:
    model_dir = build_tiny_model(tmp_path, "qwen3_5_moe_text", **FORMATS[weight_format])
    architecture = Architecture.from_directory(model_dir)
    kept = kept_layers(["layers.1.linear_attn"], architecture)
    sent = quantized(model_dir, weight_format, kept=kept)
    taken = model_tensors(architecture, weight_format, layers_of(kept))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in taken.items()
    }


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("family", LAYOUTS)
def test_what_is_sent_lies_where_sglangs_own_loader_puts_the_file(
    family: Family, tmp_path: Path
) -> None:
    model_dir = build_tiny_model(tmp_path, family)
    sent = quantized(model_dir, "bf16")
    for size, groups in LAYOUTS[family]:
        ranks = sglang_loader.build_ranks(model_dir, "bf16", size, groups)
        sglang_loader.load(ranks, load_file(model_dir / "model.safetensors"), groups)
        assert sglang_loader.hold(ranks, sent)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("family", "weight_format"),
    [("qwen3_5_text", "fp8-tensor"), ("qwen3_5_text", "int4"), ("qwen3_5_moe_text", "int8")],
)
def test_a_quantized_directory_is_loaded_like_a_publish(
    family: Family, weight_format: WeightFormat, tmp_path: Path
) -> None:
    """A directory as it is published has joined experts, and images, whose weights stay out."""
    model_dir = build_tiny_model(tmp_path / "model", family, **FORMATS[weight_format])
    published = build_published_model(tmp_path / "published", family, **FORMATS[weight_format])
    keep = ["layers.1.linear_attn.in_proj_qkv", "layers.1.linear_attn.in_proj_z", "o_proj"]
    kept = kept_layers(keep, Architecture.from_directory(model_dir))
    sent = quantized(model_dir, weight_format, kept=kept)
    written = tmp_path / "quantized"
    quantize_directory(published, written, weight_format, lambda *_: None, keep)
    for size, groups in LAYOUTS[family]:
        ranks = sglang_loader.build_ranks(written, weight_format, size, groups)
        sglang_loader.load(ranks, load_file(written / "model.safetensors"), groups)
        assert sglang_loader.hold(ranks, sent)


def test_sglangs_own_blocks_of_fp8_leave_the_gates_in_bf16(tmp_path: Path) -> None:
    model_dir = build_tiny_model(tmp_path / "model", "qwen3_5_text", **BLOCKS)
    quantize_directory(model_dir, tmp_path / "fp8", "fp8-block", lambda *_: None)
    described = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    mapping = Qwen3_5ForCausalLM.packed_modules_mapping
    ignored = Fp8Config.from_config(described).ignored_layers
    for layer, is_ignored in {"in_proj_ba": True, "in_proj_qkvz": False, "out_proj": False}.items():
        prefix = f"model.layers.2.linear_attn.{layer}"
        assert is_layer_skipped(prefix, ignored, mapping) == is_ignored
