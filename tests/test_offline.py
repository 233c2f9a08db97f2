"""Quantized directories hold the right tensors; an incomplete one never looks complete."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from qurl_megatron.cli import app
from qurl_megatron.config.schema import ConfigError, UaqConfig, WeightFormat
from qurl_megatron.model import huggingface
from qurl_megatron.model.architecture import ArchitectureError
from qurl_megatron.quantization import offline, quantize
from qurl_megatron.quantization.rounding import write_rounded
from tiny import build_fp8_model, build_tiny_model, logits, random_model

torch.set_num_threads(1)
FORMATS: tuple[WeightFormat, ...] = ("int8", "int4", "fp8", "fp8-tensor", "fp8-block")
DOWN = "model.layers.1.mlp.down_proj.weight"


DIMS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Build a tiny Qwen2 in two files, as large models are stored."""
    directory = build_tiny_model(tmp_path / "model", **DIMS)
    (directory / "model.safetensors").unlink()
    random_model(**DIMS).save_pretrained(directory, max_shard_size="500KB")
    return directory


def tensors_of(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def no_progress(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_quantized_directory_holds_what_a_publish_sends(
    source: Path, weight_format: WeightFormat, tmp_path: Path
) -> None:
    destination = tmp_path / "quantized"
    steps: list[tuple[int, int]] = []
    if weight_format == "fp8":  # of a model in float32, what is not quantized is rounded
        random_model(dtype=torch.float32, **DIMS).save_pretrained(source, max_shard_size="1200KB")
    offline.quantize_directory(
        source, destination, weight_format, lambda done, total: steps.append((done, total))
    )
    written = tensors_of(destination)
    for name, tensor in tensors_of(source).items():
        if name.endswith("_proj.weight"):
            quantized = quantize.quantize(tensor, weight_format)
            scale = written.pop(quantize.scale_name(name, weight_format))
            assert same_bytes(written.pop(name), quantized.codes)
            assert same_bytes(scale, quantize.engine_scale(quantized))
        else:
            sent = torch.empty(tensor.shape, dtype=torch.bfloat16)
            write_rounded(sent, tensor, name, "unbiased")
            assert same_bytes(written.pop(name), sent)
    assert not written
    index = json.loads((destination / "model.safetensors.index.json").read_text())
    for file in destination.glob("*.safetensors"):
        assert {n for n, where in index["weight_map"].items() if where == file.name} == set(
            load_file(file)
        )
    assert len(steps) == 2 and steps[-1][0] == steps[-1][1]
    AutoTokenizer.from_pretrained(destination)
    leftovers = {"job.json"} | {path.name for path in tmp_path.glob("*.partial")}
    assert not leftovers & {path.name for path in destination.iterdir()}


def test_float32_values_are_rounded_to_the_nearest_number_if_asked(tmp_path: Path) -> None:
    source = build_tiny_model(tmp_path / "model", dtype=torch.float32)
    words = ["quantize", str(source), str(tmp_path / "int8"), "--rounding", "nearest"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    written = tensors_of(tmp_path / "int8")
    for name, tensor in tensors_of(source).items():
        if not name.endswith("_proj.weight"):
            assert same_bytes(written[name], tensor.bfloat16()), name


def test_a_quantized_copy_of_fp8_in_blocks_is_that_of_what_is_read(tmp_path: Path) -> None:
    in_fp8, in_bf16 = build_fp8_model(tmp_path, "qwen3_moe")
    for weight_format in ("bf16", "int8"):
        of_fp8, of_bf16 = (
            tmp_path / f"{each.name} in {weight_format}" for each in (in_fp8, in_bf16)
        )
        offline.quantize_directory(in_fp8, of_fp8, weight_format, no_progress)
        offline.quantize_directory(in_bf16, of_bf16, weight_format, no_progress)
        written, expected = tensors_of(of_fp8), tensors_of(of_bf16)
        assert written.keys() == expected.keys()
        assert all(same_bytes(written[name], expected[name]) for name in expected)
        assert (of_fp8 / "config.json").read_text() == (of_bf16 / "config.json").read_text()


def test_a_smoothed_directory_computes_what_the_source_does(source: Path, tmp_path: Path) -> None:
    """Norms are divided, and so are rows of up; what is left is the error of INT8."""
    data, destination = tmp_path / "questions.jsonl", tmp_path / "smoothed"
    lines = [json.dumps({"question": letter * 7, "answer": "1"}) for letter in "abcdef"]
    data.write_text("\n".join(lines))
    words = ["quantize", str(source), str(destination), "--smoothing", "0.5", "--data", str(data)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = logits(model)
    written, factors = tensors_of(destination), set()
    for name, weight in model.named_parameters():
        held = written[name].float()
        if f"{name}_scale" in written:
            held *= written[f"{name}_scale"]
        elif "layernorm" in name:
            factors |= {*(held / weight.detach()).tolist()}
        weight.data = held
    assert factors > {0.5, 1.0, 2.0} and all(math.frexp(factor)[0] == 0.5 for factor in factors)
    assert 0 < (logits(model) - before).norm() < 0.05 * before.norm()


def test_sglangs_fp8_method_reads_an_fp8_block_directory(source: Path, tmp_path: Path) -> None:
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    offline.quantize_directory(source, tmp_path / "block", "fp8-block", no_progress)
    described = json.loads((tmp_path / "block" / "config.json").read_text())["quantization_config"]
    config = Fp8Config.from_config(described)
    assert config.is_checkpoint_fp8_serialized
    assert config.weight_block_size == [128, 128] and config.activation_scheme == "dynamic"
    written = tensors_of(tmp_path / "block")
    assert written[DOWN].dtype == torch.float8_e4m3fn
    assert written[f"{DOWN}_scale_inv"].shape == (1, 2)  # [64, 256] in blocks of 128


def test_a_large_file_is_written_as_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = build_tiny_model(tmp_path / "model")
    stored = load_file(source / "model.safetensors")
    offline.quantize_directory(source, tmp_path / "whole", "bf16", no_progress)
    limit = 4 * max(tensor.numel() for tensor in stored.values())
    monkeypatch.setattr(offline, "MAX_PIECE_BYTES", limit)
    offline.quantize_directory(source, tmp_path / "cut", "bf16", no_progress)
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        assert sum(4 * tensor.numel() for tensor in load_file(file).values()) <= limit
    assert tensors_of(tmp_path / "cut").keys() == stored.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    for name, parameter in AutoModelForCausalLM.from_pretrained(source).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


class Killed(BaseException):
    pass


def test_a_killed_call_is_resumed_by_the_same_job_only_and_gives_the_same_result(
    source: Path, tmp_path: Path
) -> None:
    def die(done: int, total: int) -> None:
        raise Killed

    destination = tmp_path / "quantized"
    with pytest.raises(Killed):
        offline.quantize_directory(source, destination, "int8", die)
    assert not destination.exists()
    (first,) = (tmp_path / "quantized.partial").glob("*.safetensors")
    written_at = first.stat().st_mtime_ns
    with pytest.raises(ConfigError, match=r"partial was left by another conversion"):
        offline.quantize_directory(source, destination, "fp8", no_progress)
    # A file that the kill interrupted has another name.
    (tmp_path / "quantized.partial" / "model-00002-of-00002.safetensors.unfinished").write_bytes(
        b"half"
    )

    offline.quantize_directory(source, destination, "int8", no_progress)
    assert (destination / first.name).stat().st_mtime_ns == written_at
    offline.quantize_directory(source, tmp_path / "at once", "int8", no_progress)
    resumed, at_once = tensors_of(destination), tensors_of(tmp_path / "at once")
    assert resumed.keys() == at_once.keys()
    assert all(same_bytes(resumed[name], at_once[name]) for name in resumed)
    assert {p.name for p in destination.iterdir()} == {
        p.name for p in (tmp_path / "at once").iterdir()
    }


def test_a_full_disk_leaves_no_directory_that_looks_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"the beginning")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(huggingface, "save_file", no_space)
    destination = tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", str(source), str(destination)])
    assert result.exit_code == 2 and "No space left on device" in result.output
    assert not destination.exists()
    assert not list((tmp_path / "out.partial").glob("*.safetensors"))


def test_uaq_changes_logits_by_rounding_only(source: Path, tmp_path: Path) -> None:
    invariance = offline.scale_directory(source, tmp_path / "scaled", UaqConfig(1.5), no_progress)
    assert invariance.largest_logit > 1
    assert invariance.float32_difference < 1e-4 < invariance.stored_difference < 0.5
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
            for path in (source, tmp_path / "scaled")
        )
    assert 1e-4 < (after - before).abs().max() < 0.5  # weights are rounded to BF16


def test_a_scaled_weight_beyond_float16_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = build_tiny_model(tmp_path / "model", dtype=torch.float16)
    tensors = load_file(source / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    tensors[norm][3] = 60000
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for scale in (1.5, 2.0):
        with pytest.raises(ArchitectureError, match=f"'{norm}' would hold inf in float16"):
            offline.scale_directory(source, tmp_path / "scaled", UaqConfig(scale), no_progress)
        assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize(("scale", "ulps"), [(2.0, 0), (0.25, 0), (1.5, 1)])
def test_undo_is_exact_for_powers_of_two_and_within_a_bf16_rounding_otherwise(
    source: Path, tmp_path: Path, scale: float, ulps: int
) -> None:
    offline.scale_directory(source, tmp_path / "scaled", UaqConfig(scale), no_progress)
    told = offline.unscale_directory(tmp_path / "scaled", tmp_path / "back", no_progress)
    back = tensors_of(tmp_path / "back")
    changed, rounded = 0, set()
    for name, tensor in tensors_of(source).items():
        steps = tensor.view(torch.int16).int() - back[name].view(torch.int16).int()
        assert steps.abs().max() <= ulps, name
        changed += int(steps.count_nonzero())
        rounded |= {name} if steps.any() else set()
    # What the command tells is right: two norms, and q, k, v, gate and up, of each of two layers.
    assert told.rounded_tensors == (2 * 7 if ulps else 0)
    assert told.exact_tensors + told.rounded_tensors == len(back)
    assert len(rounded) <= told.rounded_tensors
    assert (changed > 0) == (ulps > 0)
    assert "qurl_uaq" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_a_hybrid_is_scaled_and_back_in_the_tensors_of_its_files(tmp_path: Path) -> None:
    source = build_tiny_model(tmp_path / "model", "qwen3_5_text", dtype=torch.float32)
    config = UaqConfig(1.5, through_value=True, through_up=True)
    invariance = offline.scale_directory(source, tmp_path / "scaled", config, no_progress)
    assert invariance.float32_difference < 1e-4 * invariance.largest_logit
    told = offline.unscale_directory(tmp_path / "scaled", tmp_path / "back", no_progress)
    stored, scaled, back = map(tensors_of, (source, tmp_path / "scaled", tmp_path / "back"))
    assert stored.keys() == scaled.keys() == back.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(back[name], tensor, rtol=1e-6, atol=1e-7)
    assert told.rounded_tensors == sum(not stored[name].equal(scaled[name]) for name in stored)
    changed = {name.rpartition(".")[0] for name in stored if not stored[name].equal(scaled[name])}
    of_linear = {name.rpartition(".")[2] for name in changed if ".1.linear_attn" in name}
    projections = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
    assert of_linear == projections | {"norm"}
