"""A model directory whose weights do not fit its config is refused before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import Weights
from tiny import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), tied=True, vocab_size=131)


@pytest.fixture
def changed(model, tmp_path):
    """Writes the model with other tensors, in one file or in two with an index."""
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")

    def write(change=lambda tensors: None, sharded: bool = False) -> Path:
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


def opened(directory: Path) -> Weights:
    return Weights(directory, Architecture.from_directory(directory))


@pytest.mark.parametrize("sharded", [False, True])
def test_the_runs_of_all_ranks_are_the_stored_tensor(model, changed, sharded):
    weights = opened(changed(sharded=sharded))
    for name, stored in load_file(model / "model.safetensors").items():
        rule, layer = weight_map.find_hugging_face(name)
        part = rule.parts[rule.hugging_face_names(layer).index(name)]
        architecture = Architecture.from_directory(model)
        runs = [
            weights.read(name, weight_map.part_index(rule, part, architecture, rank, 2))
            for rank in range(2)
        ]
        together = runs[0] if part.shared_dim is None else torch.cat(runs, part.shared_dim)
        assert torch.equal(together, stored)


def test_what_follows_from_other_tensors_is_passed_over(changed):
    opened(changed(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})))


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
def test_a_tensor_that_does_not_fit_is_named_in_one_line(changed, change, words):
    with pytest.raises(ArchitectureError, match=words) as refusal:
        opened(changed(change))
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(changed):
    directory = changed(sharded=True)
    (directory / "part-1.safetensors").unlink()
    with pytest.raises(ArchitectureError, match="lacks part-1.safetensors"):
        opened(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(ArchitectureError, match="neither model.safetensors nor"):
        opened(directory)
