"""Headers tell whether a model of any size can be used; small models are read whole."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from published import MODELS
from qurl_megatron.model import check, weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.check import check_model, load_tokenizer
from tiny import build_tiny_model

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
    monkeypatch.setattr(check, "MAX_BYTES_READ", 1)
    weights = check_model(model)
    weights.read(name, (slice(0, 32), slice(None)))  # the part of another rank
    with pytest.raises(ArchitectureError, match=rf"'{name}' holds nan at \[8, 2\]"):
        weights.read(name, (slice(32, 64), slice(None)))


def test_a_tokenizer_that_fits_its_model_is_returned(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(build_tiny_model(tmp_path))
    assert tokenizer.decode(tokenizer("1 + 2")["input_ids"]) == "1 + 2"
