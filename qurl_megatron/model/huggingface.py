"""Read and write Hugging Face directories, and check their safetensors against config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qurl_megatron.files import write_whole
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError

INDEX_FILE = "model.safetensors.index.json"

Progress = Callable[[int, int], None]
"""A callback that receives (bytes done, bytes in total) while a directory is written."""


class Weights:
    """The weights in `model.safetensors`, or in the files of `model.safetensors.index.json`."""

    def __init__(self, directory: str | Path, architecture: Architecture) -> None:
        """Read and check the names and shapes of all tensors, without their values.

        Raises:
            ArchitectureError: a file is missing, or a tensor is missing, unknown or misshapen.
        """
        self._directory = Path(directory)
        self._architecture = architecture
        files = self._files_by_tensor()
        self._open: dict[str, Any] = {}
        for file in sorted(set(files.values())):
            if not (self._directory / file).is_file():
                raise ArchitectureError(f"'{directory}' lacks {file}, which its index names")
            self._open[file] = safe_open(self._directory / file, "pt")
        self._file_of = files
        self.files = sorted(set(files.values()))

        expected = weight_map.hugging_face_names(architecture)
        stored = {name for name in files if not self._is_redundant(name)}
        for problem, names in (("lacks", expected - stored), ("has unknown", stored - expected)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise ArchitectureError(
                    f"'{directory}' {problem} tensor '{min(names)}'{more}, according to its "
                    "config.json"
                )
        for name in sorted(expected):
            rule, layer = weight_map.find_hugging_face(name)
            hf_tensor = rule.tensors[rule.hugging_face_names(layer).index(name)]
            expected_shape = list(weight_map.full_shape(hf_tensor, architecture))
            stored_shape = list(self._stored(name).get_shape())
            if stored_shape != expected_shape:
                raise ArchitectureError(
                    f"'{directory}' has tensor '{name}' of shape {stored_shape}; "
                    f"its config.json implies {expected_shape}"
                )

    def _files_by_tensor(self) -> dict[str, str]:
        index = self._directory / INDEX_FILE
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        single = self._directory / "model.safetensors"
        if not single.is_file():
            raise ArchitectureError(
                f"'{self._directory}' has neither model.safetensors "
                "nor model.safetensors.index.json"
            )
        with safe_open(single, "pt") as file:
            return dict.fromkeys(file.keys(), single.name)

    def _is_redundant(self, name: str) -> bool:
        """Return True for a tensor that some checkpoints store although others determine it."""
        tied_copy = self._architecture.tie_word_embeddings and name == "lm_head.weight"
        return tied_copy or name.endswith("rotary_emb.inv_freq")

    def _stored(self, name: str) -> Any:
        return self._open[self._file_of[name]].get_slice(name)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return the tensor `name` at `index`, in its stored dtype; only this part is read."""
        return self._stored(name)[index]


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of `config.json`.

    Raises:
        ArchitectureError: the file is missing, broken, or of an unsupported architecture.
    """
    Architecture.from_directory(directory)
    return json.loads((directory / "config.json").read_text())


def stored_dtype(directory: Path) -> torch.dtype:
    """Return the dtype of the weights according to `config.json`; bfloat16 if it names none."""
    config = read_config(directory)
    return getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def copy_beside_weights(source: Path, destination: Path) -> None:
    """Copy the files of a model directory other than its weights: config, tokenizer, licence."""
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_FILE:
            shutil.copyfile(path, destination / path.name)


def write_index(directory: Path, file_of: dict[str, str]) -> None:
    """Write `model.safetensors.index.json`; `file_of` maps tensor names to files in `directory`."""
    sizes = {file: (directory / file).stat().st_size for file in file_of.values()}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of}
    write_whole(directory / INDEX_FILE, json.dumps(index, indent=2) + "\n")
