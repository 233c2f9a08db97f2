"""Write the learner's policy as a Hugging Face directory, with UAQ undone.

UAQ (update-aware quantization) rescales weights at load; an export reverses that. `export` writes
the policy of a live learner, and `export_checkpoint.py` that of a checkpoint. Where adapters were
trained, `extensions/adapters` writes them, and the model with them merged.
The directory is written as `<name>.partial` and renamed when it is complete.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import Rounding, UaqConfig
from qurl_megatron.device import from_rank_zero, rank
from qurl_megatron.files import partial_of, rename_whole
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import (
    copy_beside_weights,
    stored_dtype,
    write_index,
    write_template,
    write_tensors,
)
from qurl_megatron.quantization import uaq
from qurl_megatron.quantization.rounding import write_rounded
from qurl_megatron.weight_sync.gather import to_rank_zero
from qurl_megatron.weight_sync.reshard import Converter

BUCKET_BYTES = 512 * 1024**2  # that ranks gather at once, in float32
FILE_BYTES = 5 * 10**9  # of a file on disk, as transformers writes them


def export(
    learner: Learner,
    source: Path,
    destination: Path,
    config: UaqConfig,
    chat_template: str = "",
) -> None:
    """Write the policy to `destination`, replacing an earlier export.

    The dtype, the tokenizer and the other files beside the weights come from `source`. Collective
    over all learner ranks; every sender writes the tensors that it gathers.
    """
    if adapter_rank := learner.architecture.adapter_rank:
        of_adapters(adapter_rank).export(learner, source, destination, chat_template)
        return
    partial = from_rank_zero(lambda: create_partial(destination))
    writer = Writer(source, partial, config, learner.rounding, f"-{rank():05}")
    converter = Converter(learner, "masters", BUCKET_BYTES)
    converter.convert(lambda bucket: writer.add(bucket.tensors()))
    writer.write_file()
    files = to_rank_zero(writer.file_of, converter.senders)
    if rank() == 0:
        writer.file_of = {name: file for part in files for name, file in part.items()}
        writer.finish()
        write_template(partial, chat_template)
        shutil.rmtree(destination, ignore_errors=True)
        rename_whole(partial, destination)


def of_adapters(adapter_rank: int) -> Any:
    """Return the module that exports adapters of this rank."""
    return needed("adapters", "export", by=f"adapters.rank={adapter_rank}")


def create_partial(destination: Path) -> Path:
    """Make the empty directory that is filled before it is renamed to `destination`."""
    partial = partial_of(destination)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


class Writer:
    """Writes the safetensors files of a directory one by one, and then the files beside them."""

    def __init__(
        self, source: Path, directory: Path, config: UaqConfig, rounding: Rounding, infix: str = ""
    ) -> None:
        self._source = source
        self._rounding: Rounding = rounding
        self._directory = directory
        self._infix = infix  # keeps the files of several writers apart
        self._dtype = stored_dtype(source)
        self._architecture = Architecture.from_directory(source)
        self._unscale = uaq.inverse(config, is_hybrid=self._architecture.is_hybrid)
        self.file_of: dict[str, str] = {}
        self._num_files = 0
        self._waiting: dict[str, Tensor] = {}  # for the next file
        self._waiting_bytes = 0
        # Stored tensors made of several full tensors, with the number of values still missing.
        self._unfinished: dict[str, tuple[Tensor, int]] = {}

    def add(self, masters: Iterable[tuple[str, Tensor]]) -> None:
        """Add float32 weights, given by name, to the next file; write that if it is full."""
        for name, master in masters:
            # Tensors that a server holds in float32 stay so; config.json's dtype is for the others.
            is_exact = weight_map.sent_dtype(name) == torch.float32
            dtype = torch.float32 if is_exact else self._dtype
            unscaled = self._unscale(name, master.cpu())
            values = torch.empty(unscaled.shape, dtype=dtype)
            write_rounded(values, unscaled, name, self._rounding)
            place = weight_map.in_file(name, self._architecture)
            if place.name == name:
                self._put(name, values)
                continue
            empty = torch.empty(place.shape, dtype=self._dtype)
            stored, missing = self._unfinished.pop(place.name, (empty, empty.numel()))
            stored[place.where] = values
            if missing > values.numel():
                self._unfinished[place.name] = stored, missing - values.numel()
            else:
                self._put(place.name, stored)

    def _put(self, name: str, values: Tensor) -> None:
        if self._waiting_bytes + values.nbytes > FILE_BYTES:
            self.write_file()
        self._waiting[name] = values
        self._waiting_bytes += values.nbytes

    def write_file(self) -> None:
        """Write the tensors that wait for a file, if there are any."""
        if not self._waiting:
            return
        self._num_files += 1
        file = f"model{self._infix}-{self._num_files:05}.safetensors"
        write_tensors(self._waiting, self._directory / file)
        self.file_of |= dict.fromkeys(self._waiting, file)
        self._waiting, self._waiting_bytes = {}, 0

    def finish(self) -> None:
        """Name the files as transformers does, and copy those beside the weights of the source."""
        files = sorted(set(self.file_of.values()))
        names = {
            file: f"model-{number:05}-of-{len(files):05}.safetensors"
            for number, file in enumerate(files, start=1)
        }
        if len(files) == 1:
            names = {files[0]: "model.safetensors"}
        for file, name in names.items():
            (self._directory / file).rename(self._directory / name)
        if len(files) > 1:
            write_index(self._directory, {name: names[file] for name, file in self.file_of.items()})
        copy_beside_weights(self._source, self._directory)
