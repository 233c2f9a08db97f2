"""The converter's invariants, on real learner ranks, for layouts of up to eight processes.

Dimensions are all unequal and the vocabulary does not divide, so that a transposed, misplaced or
padded tensor cannot pass for the right one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import sglang_loader
from distributed import run_ranks
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, UaqConfig
from qurl_megatron.learner.learner import Learner
from qurl_megatron.quantization import quantize, uaq
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.quantization.quantize import NonFiniteWeight
from qurl_megatron.weight_sync.reshard import Bucket, Converter
from tiny import build_tiny_model, quantized

DIMENSIONS = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 144,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
# Sixteen heads, four key-value heads: for eight ranks.
LARGER = DIMENSIONS | {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 253}
# Tensor, pipeline, data and virtual pipeline parallel sizes, layers in the last stage.
LAYOUTS = {
    "TP1": (1, 1),
    "TP2": (2, 1),
    "PP2": (1, 2),
    "TP2xPP2": (2, 2),
    "TP2xDP2": (2, 1, 2),
    "TP4, two to a key-value head": (4, 1),
    "PP3 of 1, 1 and 2 layers": (1, 3, 1, 1, 2),
    "PP2 in 2 parts": (1, 2, 1, 2),
}
SERVER_SIZES = (1, 2, 4)
SCALE = 1.5
BUCKET_BYTES = 40_000
FORMATS = ("int8", "fp8", "fp8-tensor", "fp8-block", "bf16")


def learner_of(model_dir: Path, layout: tuple[int, ...]) -> Learner:
    return Learner(
        model_dir,
        LearnerConfig(*layout, dtype="float32"),
        OptimizerConfig(),
        transform=uaq.transform(UaqConfig(SCALE)),
    )


def convert(model_dir: Path, layout: tuple[int, ...]) -> dict[str, object]:
    """All formats on one set of ranks; on rank 0 the buckets and what the passes showed."""
    learner = learner_of(model_dir, layout)
    shown: dict[str, object] = {}
    for weight_format in FORMATS:
        converter = Converter(learner, weight_format, BUCKET_BYTES)
        shown[weight_format] = list(converter.buckets())
        shown[f"{weight_format} conversion"] = converter.conversion
    learner.close()
    return shown


def tensors(buckets: list[Bucket]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for bucket in buckets:
        for name, tensor in bucket.tensors():
            assert name not in named, f"{name} was sent twice"
            named[name] = tensor
        assert sum(tensor.nbytes for _, tensor in bucket.tensors()) == bucket.flat.numel()
    return named


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("qwen3", False)])
def test_every_layout_sends_what_quantizing_the_checkpoint_directly_gives(
    architecture: str, tied: bool, layout: tuple[int, ...], tmp_path: Path, engine: None
) -> None:
    build_tiny_model(tmp_path, architecture, tied=tied, **DIMENSIONS)
    leader, *others = run_ranks(convert, math.prod(layout[:3]), tmp_path, layout)
    for weight_format in FORMATS:
        buckets = leader[weight_format]
        wanted = quantized(tmp_path, weight_format, uaq.transform(UaqConfig(SCALE)))
        sent = tensors(buckets)
        assert sent.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (sent[name].dtype, sent[name].shape) == (tensor.dtype, tensor.shape), name
            assert as_bytes(sent[name]) == as_bytes(tensor), name
        conversion = leader[f"{weight_format} conversion"]
        assert conversion.checksums == {name: checksum(t) for name, t in wanted.items()}
        largest = max(tensor.nbytes for tensor in wanted.values())
        assert all(bucket.flat.numel() <= max(BUCKET_BYTES, largest) for bucket in buckets)
        assert len(buckets) > 1
        assert all(other[weight_format] == [] for other in others)
        for size in SERVER_SIZES if weight_format != "fp8-block" else ():  # widths are no blocks
            held = sglang_loader.held(tmp_path, weight_format, sent, size)
            assert all(as_bytes(held[name]) == as_bytes(tensor) for name, tensor in sent.items())


@pytest.mark.parametrize("layout", [(8, 1), (2, 4)], ids=["TP8", "TP2xPP4"])
def test_eight_ranks_send_what_quantizing_the_checkpoint_directly_gives(
    layout: tuple[int, ...], tmp_path: Path
) -> None:
    build_tiny_model(tmp_path, "qwen2", tied=True, **LARGER)
    leader, *_ = run_ranks(convert, 8, tmp_path, layout)
    for weight_format in FORMATS:
        sent = tensors(leader[weight_format])
        wanted = quantized(tmp_path, weight_format, uaq.transform(UaqConfig(SCALE)))
        assert sent.keys() == wanted.keys()
        assert all(as_bytes(sent[name]) == as_bytes(tensor) for name, tensor in wanted.items())


def squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def convert_scaled(model_dir: Path, layout: tuple[int, ...]) -> list[object]:
    """The conversions of the weights as they are, then doubled, then negated."""
    learner = learner_of(model_dir, layout)
    converter = Converter(learner, "int8", BUCKET_BYTES)
    conversions = []
    for factor in (1, 2, -1):
        for _, _, shard in learner.shards():
            shard.mul_(factor)
        list(converter.buckets())
        conversions.append(converter.conversion)
    learner.close()
    return conversions


def test_update_and_error_norms_are_those_of_the_whole_model(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, **DIMENSIONS)
    leader, *_ = run_ranks(convert_scaled, 4, tmp_path, (2, 2))
    first, doubled, negated = leader

    error = weight_squares = 0.0
    for name, stored in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weight = uaq.transform(UaqConfig(SCALE))(name, stored.float())
            error += squares(quantize.dequantize(quantize.quantize(weight, "int8")) - weight)
            weight_squares += squares(weight)
    assert first.total.quant_error == pytest.approx(error / weight_squares, rel=1e-6)
    assert first.total.update_norm == 0
    # |2w - w|^2 / |w|^2 and |-2w - 2w|^2 / |2w|^2
    assert doubled.total.update_norm == pytest.approx(1, rel=1e-6)
    assert negated.total.update_norm == pytest.approx(4, rel=1e-6)
    # Codes are relative to their row's largest weight: doubling changes none, negating all but 0.
    assert doubled.total.code_flip_fraction == 0
    assert 0.95 < negated.total.code_flip_fraction < 1


def refusal(model_dir: Path, spoil: Callable[[str], bool]) -> str:
    learner = learner_of(model_dir, (1, 1))
    for rule, layer, shard in learner.shards():
        if spoil(rule.hugging_face_names(layer)[-1]):
            shard.view(-1)[-1] = torch.nan
    try:
        list(Converter(learner, "int8", BUCKET_BYTES).buckets())
        return "accepted"
    except NonFiniteWeight as error:
        return str(error)
    finally:
        learner.close()


def is_second_up_projection(name: str) -> bool:
    return name == "model.layers.1.mlp.up_proj.weight"


def test_a_weight_that_is_not_a_number_stops_the_pass_by_name(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, **DIMENSIONS)
    (message,) = run_ranks(refusal, 1, tmp_path, is_second_up_projection)
    assert message.startswith("model.layers.1.mlp.up_proj.weight: row 143")
