"""The converter's invariants, on real learner ranks, for every layout that fits four processes.

Dimensions are all unequal and the vocabulary does not divide, so that a transposed, misplaced or
padded tensor cannot pass for the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distributed import run_ranks
from qurl_megatron import quantize, uaq
from qurl_megatron.checksum import checksum
from qurl_megatron.config import LearnerConfig, OptimizerConfig
from qurl_megatron.learner import Learner
from qurl_megatron.quantize import NonFiniteWeight
from qurl_megatron.reshard import Bucket, Converter
from tiny import build_tiny_model

DIMENSIONS = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]  # tensor x pipeline parallel
SCALE = 1.5
BUCKET_BYTES = 40_000
FORMATS = ("int8", "fp8", "bf16")


def learner_of(model_dir: Path, layout: tuple[int, int]) -> Learner:
    return Learner(
        model_dir,
        LearnerConfig(
            tensor_parallel_size=layout[0], pipeline_parallel_size=layout[1], dtype="float32"
        ),
        OptimizerConfig(),
        transform=uaq.transform(SCALE),
    )


def convert(model_dir: Path, layout: tuple[int, int]) -> dict[str, object]:
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
    named = {}
    for bucket in buckets:
        start = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            end = start + torch.Size(shape).numel() * dtype.itemsize
            assert name not in named, f"{name} was sent twice"
            named[name] = bucket.flat[start:end].view(dtype).view(shape)
            start = end
        assert start == bucket.flat.numel()
    return named


def expected(model_dir: Path, weight_format: str) -> dict[str, Tensor]:
    """The Hugging Face tensors, scaled and quantised directly, with no layout in sight."""
    scale_weight = uaq.transform(SCALE)
    wanted = {}
    for name, stored in load_file(model_dir / "model.safetensors").items():
        weight = scale_weight(name, stored.float())
        if weight_format != "bf16" and name.endswith("_proj.weight"):
            codes, scale = quantize.quantise(weight, weight_format)
            wanted[name], wanted[f"{name}_scale"] = codes, scale
        else:
            wanted[name] = weight.to(torch.bfloat16)
    return wanted


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"TP{layout[0]}xPP{layout[1]}")
@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", True), ("qwen3", False)])
def test_every_layout_sends_what_quantising_the_checkpoint_directly_gives(
    architecture: str, tied: bool, layout: tuple[int, int], tmp_path: Path
) -> None:
    build_tiny_model(tmp_path, architecture, tied=tied, **DIMENSIONS)
    leader, *others = run_ranks(convert, layout[0] * layout[1], tmp_path, layout)
    for weight_format in FORMATS:
        buckets, wanted = leader[weight_format], expected(tmp_path, weight_format)
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


def squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def convert_scaled(model_dir: Path, layout: tuple[int, int]) -> list[object]:
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
            weight = uaq.transform(SCALE)(name, stored.float())
            error += squares(quantize.dequantise(quantize.quantise(weight, "int8")) - weight)
            weight_squares += squares(weight)
    assert first.weight_quant_error == pytest.approx(error / weight_squares, rel=1e-6)
    assert first.weight_update_norm == 0
    # |2w - w|^2 / |w|^2 and |-2w - 2w|^2 / |2w|^2
    assert doubled.weight_update_norm == pytest.approx(1, rel=1e-6)
    assert negated.weight_update_norm == pytest.approx(4, rel=1e-6)
    # Codes are relative to their row's largest weight: doubling changes none, negating all but 0.
    assert doubled.code_flip_fraction == 0
    assert 0.95 < negated.code_flip_fraction < 1


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
