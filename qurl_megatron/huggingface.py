"""The safetensors of a Hugging Face directory, checked against its config and read in slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from qurl_megatron import weight_map
from qurl_megatron.architecture import Architecture, ArchitectureError
from qurl_megatron.weight_map import HuggingFaceTensor


class Weights:
    """`model.safetensors`, or the files of `model.safetensors.index.json`."""

    def __init__(self, directory: str | Path, architecture: Architecture) -> None:
        """Read the names and shapes, not the weights.

        Raises:
            ArchitectureError: a file or tensor is missing, unknown or misshapen; one line.
        """
        self._directory = Path(directory)
        self._architecture = architecture
        files = self._files_by_tensor()
        self._open: dict[str, Any] = {}
        for file in sorted(set(files.values())):
            if not (self._directory / file).is_file():
                raise ArchitectureError(f"'{directory}' lacks {file}, which its index names")
            self._open[file] = safe_open(self._directory / file, "pt")
        self._files = files

        expected = weight_map.hugging_face_names(architecture)
        found = {name for name in files if not self._is_redundant(name)}
        for what, names in (("lacks", expected - found), ("has unknown", found - expected)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise ArchitectureError(
                    f"'{directory}' {what} tensor '{min(names)}'{more}, judging by its config.json"
                )
        for name in sorted(expected):
            rule, layer = weight_map.find_hugging_face(name)
            part = rule.parts[rule.hugging_face_names(layer).index(name)]
            shape = list(weight_map.full_shape(part, architecture))
            stored = list(self._stored(name).get_shape())
            if stored != shape:
                raise ArchitectureError(
                    f"'{directory}' has tensor '{name}' of shape {stored}; "
                    f"its config.json implies {shape}"
                )

    def _files_by_tensor(self) -> dict[str, str]:
        index = self._directory / "model.safetensors.index.json"
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
        """Some checkpoints store what follows from the rest."""
        tied_copy = self._architecture.tie_word_embeddings and name == "lm_head.weight"
        return tied_copy or name.endswith("rotary_emb.inv_freq")

    def _stored(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)

    def read(self, name: str, part: HuggingFaceTensor, tp_rank: int, tp_size: int) -> Tensor:
        """The run of tensor `name` that a tensor-parallel rank has, in its stored dtype."""
        index = weight_map.part_index(part, self._architecture, tp_rank, tp_size)
        return self._stored(name)[index]
