"""Check that a model directory is read if its weights fit its config, and refused otherwise.

Headers tell whether a model of any size can be used; small models are read whole.
"""

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from published import MODELS
from qurl_megatron.model import huggingface, weight_map
from qurl_megatron.model.architecture import (
    Architecture,
    ArchitectureError,
    Family,
    trainable,
)
from qurl_megatron.model.huggingface import (
    Weights,
    check_model,
    copy_beside_weights,
    served_directory,
    write_tensors,
)
from qurl_megatron.model.transformers_model import transformers_model
from tiny import build_fp8_model, build_tiny_model, logits

Change = Callable[[dict[str, Tensor]], object]
WriteChanged = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=131)


@pytest.fixture
def write_changed(model: Path, tmp_path: Path) -> WriteChanged:
    """Return a function that writes the model with changed tensors, in one file or in two."""
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")

    def write(change: Change | None = None, sharded: bool = False) -> Path:
        if change:
            change(tensors)
        if not sharded:
            save_file(tensors, tmp_path / "model.safetensors")
            return tmp_path
        files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
        for file in set(files.values()):
            save_file({n: t for n, t in tensors.items() if files[n] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        return tmp_path

    return write


def open_weights(directory: Path) -> Weights:
    return Weights(directory, Architecture.from_directory(directory))


@pytest.mark.parametrize("sharded", [False, True])
def test_the_parts_of_all_ranks_are_the_stored_tensor(
    model: Path, write_changed: WriteChanged, sharded: bool
) -> None:
    weights = open_weights(write_changed(sharded=sharded))
    for name, stored in load_file(model / "model.safetensors").items():
        rule, layer = weight_map.find_hugging_face(name)
        hf_tensor = rule.tensors[rule.hugging_face_names(layer).index(name)]
        architecture = Architecture.from_directory(model)
        parts = [
            weights.read(name, weight_map.part_index(rule, hf_tensor, architecture, rank, 2))
            for rank in range(2)
        ]
        if hf_tensor.partition_dim is None:
            assert all(torch.equal(part, stored) for part in parts)
        else:
            assert torch.equal(torch.cat(parts, hf_tensor.partition_dim), stored)


def test_a_redundant_copy_of_a_tied_embedding_is_ignored(write_changed: WriteChanged) -> None:
    def add_copy(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    check_model(write_changed(add_copy))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.index_put_((torch.tensor(130), torch.tensor(63)), torch.tensor(9.0)),
        lambda head: head[:130],
    ],
    ids=["one value", "a row less"],
)
def test_another_head_than_a_tied_embedding_is_refused(
    write_changed: WriteChanged,
    change: Callable[[Tensor], Tensor],
    sharded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add_other(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = change(tensors["model.embed_tokens.weight"].float())

    monkeypatch.setattr(huggingface, "MAX_BYTES_READ", 1)  # in models of any size
    monkeypatch.setattr(huggingface, "ROWS_READ", 50)
    with pytest.raises(ArchitectureError, match="'lm_head.weight' is not its 'model.embed_tokens"):
        check_model(write_changed(add_other, sharded))


def test_a_copy_of_a_tied_embedding_may_have_another_dtype(write_changed: WriteChanged) -> None:
    def add_copy(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()

    check_model(write_changed(add_copy))


NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), f"lacks tensor '{NORM}'"),
        (lambda t: (t.pop(NORM), t.pop(DOWN)), f"lacks tensor '{DOWN}' and 1 more"),
        (
            lambda t: t.update({DOWN + "_scale": torch.ones(1)}),
            f"has unknown tensor '{DOWN}_scale'",
        ),
        (
            lambda t: t.update({DOWN: t[DOWN].t().contiguous()}),
            rf"'{DOWN}' of shape \[160, 64\]; its config.json implies \[64, 160\]",
        ),
    ],
    ids=["missing", "two missing", "unknown", "misshapen"],
)
def test_a_missing_unknown_or_misshapen_tensor_is_named_in_one_line(
    write_changed: WriteChanged, change: Change, words: str
) -> None:
    with pytest.raises(ArchitectureError, match=words) as refusal:
        open_weights(write_changed(change))
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(write_changed: WriteChanged) -> None:
    directory = write_changed(sharded=True)
    (directory / "part-1.safetensors").unlink()
    with pytest.raises(ArchitectureError, match="lacks part-1.safetensors"):
        open_weights(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ArchitectureError, match="neither model.safetensors nor"):
        open_weights(directory)


def test_weights_of_two_saves_in_one_directory_are_refused(
    model: Path, write_changed: WriteChanged
) -> None:
    directory = write_changed(sharded=True)
    single = directory / "model.safetensors"
    shutil.copy(model / "model.safetensors", single)
    with pytest.raises(
        ArchitectureError, match="model.safetensors.index.json, which does not name"
    ):
        open_weights(directory)
    single.rename(directory / "model-00003-of-00003.safetensors")  # which the index does not name
    with pytest.raises(ArchitectureError, match="in model-00003-of-00003.safetensors and in part-"):
        open_weights(directory)
    (directory / "model-00003-of-00003.safetensors").rename(single)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ArchitectureError, match="in model.safetensors and in part-0.safetensors"):
        open_weights(directory)
    for part in ("part-0.safetensors", "part-1.safetensors"):
        (directory / part).unlink()
    save_file({"other.weight": torch.zeros(1)}, directory / "other.safetensors")
    open_weights(directory)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.bin"])
def test_adapters_beside_weights_are_refused(write_changed: WriteChanged, file: str) -> None:
    directory = write_changed()
    (directory / file).write_text("{}")
    for check in (check_model, trainable):  # a run, and a plan
        with pytest.raises(ArchitectureError, match=f"has {file} beside its weights, .*; merge th"):
            check(directory)


def test_a_directory_of_adapters_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ArchitectureError, match="holds adapters over 'org/base' and no model; giv"):
        check_model(tmp_path)


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_quantization_that_is_null_is_none(write_changed: WriteChanged, field: str) -> None:
    directory = write_changed()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, field: None}))
    check_model(directory)
    copied = directory / "copied"
    copied.mkdir()
    copy_beside_weights(directory, copied)
    assert json.loads((copied / "config.json").read_text()) == config
    (directory / "config.json").write_text(json.dumps({**config, field: {"bits": 4}}))
    with pytest.raises(ArchitectureError, match=f"is quantized already .{field} in its config"):
        check_model(directory)


# Blocks of 128 end within the parts of two and four ranks, and at the ends of rows and columns.
IN_FP8: dict[Family, dict[str, int]] = {
    "qwen3": {"hidden_size": 200, "intermediate_size": 424, "head_dim": 72},
    "llama": {"hidden_size": 136, "intermediate_size": 264, "head_dim": 34},
    "qwen3_moe": {"hidden_size": 144, "moe_intermediate_size": 280, "num_experts": 2},
}


@pytest.mark.parametrize("family", IN_FP8)
def test_fp8_in_blocks_is_read_as_sglang_reads_it_in_the_parts_of_any_rank(
    family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_fp8, in_bf16 = build_fp8_model(tmp_path, family, **IN_FP8[family])
    capsys.readouterr()
    weights, expected = check_model(in_fp8), open_weights(in_bf16)
    assert capsys.readouterr().err == f"qurl: {in_fp8}: its FP8 weights are read as BF16\n"
    architecture = Architecture.from_directory(in_fp8)
    assert architecture == Architecture.from_directory(in_bf16)
    for rule in weight_map.rules(architecture):
        for layer in rule.layers(architecture.linear_layers):
            for tensor, name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
                whole = expected.read(name, ())
                assert torch.equal(weights.read(name, ()), whole), name
                for size in (2, 4):
                    for rank in range(size):
                        part = weight_map.part_index(rule, tensor, architecture, rank, size)
                        assert torch.equal(weights.read(name, part), whole[part]), (name, part)
    assert torch.equal(
        *(logits(transformers_model(each, torch.bfloat16)) for each in (in_fp8, in_bf16))
    )


def test_a_server_is_not_told_of_the_fp8_that_its_learner_has_read(tmp_path: Path) -> None:
    in_fp8, in_bf16 = build_fp8_model(tmp_path, "qwen3")
    served = served_directory(in_fp8, tmp_path / "served")
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((served / name).read_text()) == json.loads((in_bf16 / name).read_text())


@pytest.mark.parametrize(
    ("described", "change", "words"),
    [
        ({"activation_scheme": "static"}, None, "only FP8 in blocks is read"),
        ({"weight_block_size": None}, None, "only FP8 in blocks is read"),
        ({"quant_method": "mxfp8"}, None, "only FP8 in blocks is read"),
        ({}, lambda t: t.pop(f"{DOWN}_scale_inv"), f"lacks tensor '{DOWN}_scale_inv'"),
        ({"weight_block_size": [64, 64]}, None, r"'.*_scale_inv' of shape .*; its config.json imp"),
        (
            {},
            lambda t: t.update({f"{DOWN}_scale_inv": t[f"{DOWN}_scale_inv"].to(torch.uint8)}),
            f"has tensor '{DOWN}_scale_inv' in U8",
        ),
        (
            {},
            lambda t: t[f"{DOWN}_scale_inv"].fill_(torch.nan),
            rf"'{DOWN}' holds nan at \[0, 0\]",
        ),
        ({}, lambda t: t.update({f"{NORM}_scale_inv": t[NORM].clone()}), "has unknown tensor"),
    ],
    ids=["static", "a scale a tensor", "other", "no scales", "blocks", "codes", "NaN", "unknown"],
)
def test_other_fp8_is_refused(
    described: dict[str, Any], change: Change | None, words: str, tmp_path: Path
) -> None:
    model, _ = build_fp8_model(tmp_path, "qwen3")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] |= described
    (model / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    if change:
        change(tensors)
        save_file(tensors, model / "model.safetensors")
    with pytest.raises(ArchitectureError, match=words) as refusal:
        check_model(model)
    assert "\n" not in str(refusal.value)


def test_numbers_beyond_the_dtype_of_the_model_are_refused(write_changed: WriteChanged) -> None:
    name = "model.layers.0.mlp.down_proj.weight"

    def overflow(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].float()
        tensors[name][1, 2] = 1e5

    directory = write_changed(overflow)
    check_model(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    with pytest.raises(ArchitectureError, match=f"'{name}' holds numbers beyond float16"):
        check_model(directory)
    for bad in (torch.inf, torch.nan):
        file = directory / "written.safetensors"
        with pytest.raises(ArchitectureError, match=f"'{name}' would hold {bad} in float16"):
            write_tensors({name: torch.tensor([1, bad, -2]).half()}, file)
        assert not file.exists()


def test_shards_that_overlap_are_refused(write_changed: WriteChanged) -> None:
    directory = write_changed(sharded=True)
    first, second = (load_file(directory / f"part-{number}.safetensors") for number in (0, 1))
    name = min(first)
    save_file({**second, name: first[name]}, directory / "part-1.safetensors")
    with pytest.raises(ArchitectureError, match=f"tensor '{name}' in part-0.* and in part-1"):
        open_weights(directory)


def test_the_files_beside_weights_are_copied_and_weights_of_no_format_are(
    model: Path, tmp_path: Path
) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    shutil.copytree(model, source)
    destination.mkdir()
    kept = {
        *("merges.txt", "vocab.json", "spiece.model", "tokenizer.model", "chat_template.jinja"),
        *("LICENSE", "README.md", "tokenization_own.py", "qwen.tiktoken", "added_tokens.json"),
    }
    weights = {
        *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"),
        *("consolidated.00.pth", "model.pt", "last.ckpt", "model-Q4_K_M.gguf", "model.onnx"),
        *("tf_model.h5", "tf_model.h5.index.json", "flax_model.msgpack"),
        *("model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *("model.fp16.safetensors.index.json", "adapter_config.json", "adapter_model.safetensors"),
    }
    for name in kept | weights:
        (source / name).touch()
    beside = {path.name for path in model.iterdir()} - {"model.safetensors"}
    assert "config.json" in beside
    copy_beside_weights(source, destination)
    assert {path.name for path in destination.iterdir()} == beside | kept


QWEN_32B = {**MODELS["Qwen2.5-32B"], "torch_dtype": "bfloat16"}
NUM_FILES = 17


def write_sparse(directory: Path) -> None:
    """Write a 32B model whose values take no disk: 17 files with headers, 65 GB in name."""
    (directory / "config.json").write_text(json.dumps(QWEN_32B))
    architecture = Architecture.from_directory(directory)
    names = sorted(weight_map.hugging_face_names(architecture))
    files = [names[number::NUM_FILES] for number in range(NUM_FILES)]
    file_of = {}
    for number, tensors in enumerate(files, start=1):
        file = f"model-{number:05}-of-{NUM_FILES:05}.safetensors"
        header, end = {}, 0
        for name in tensors:
            rule, layer = weight_map.find_hugging_face(name)
            tensor = rule.tensors[rule.hugging_face_names(layer).index(name)]
            shape = weight_map.full_shape(tensor, architecture)
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            file_of[name] = file
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    index = json.dumps({"weight_map": file_of})
    (directory / "model.safetensors.index.json").write_text(index)


def test_a_32b_model_in_17_files_is_checked_in_less_than_a_second(tmp_path: Path) -> None:
    write_sparse(tmp_path)
    start = time.process_time()
    weights = check_model(tmp_path)
    assert time.process_time() - start < 1
    assert len(weights.files) == NUM_FILES and weights.num_bytes > 65e9
    last = tmp_path / weights.files[-1]
    with last.open("rb+") as file:
        file.truncate(last.stat().st_size - 1)
    with pytest.raises(ArchitectureError, match=f"{last.name} is not a whole safetensors file"):
        check_model(tmp_path)


def test_nan_is_found_at_once_in_a_small_model_and_when_a_rank_reads_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny_model(tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(model / "model.safetensors")
    tensors[name][40, 2] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArchitectureError, match=rf"'{name}' holds nan at \[40, 2\]"):
        check_model(model)
    monkeypatch.setattr(huggingface, "MAX_BYTES_READ", 1)
    weights = check_model(model)
    weights.read(name, (slice(0, 32), slice(None)))  # the part of another rank
    with pytest.raises(ArchitectureError, match=rf"'{name}' holds nan at \[8, 2\]"):
        weights.read(name, (slice(32, 64), slice(None)))
