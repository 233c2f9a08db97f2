"""The policy as a Hugging Face directory, UAQ undone: from a live learner or from a checkpoint.

A directory appears under its name only when it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from qurl_megatron.config.schema import UaqConfig
from qurl_megatron.device import from_rank_zero, rank
from qurl_megatron.files import partial_of, rename_whole
from qurl_megatron.learner import checkpoint as checkpoints
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model.huggingface import Progress, copy_beside_weights, stored_dtype, write_index
from qurl_megatron.quantization import uaq
from qurl_megatron.weight_sync.reshard import Converter

FILE_BYTES = 4 * 1024**3  # of float32, so half as much on disk where the source is BF16

NamedTensors = Iterator[tuple[str, Tensor]]


def export(learner: Learner, source: Path, destination: Path, config: UaqConfig) -> None:
    """Write the policy to `destination`, in the dtype and with the tokenizer of `source`.

    Collective over all learner ranks; global rank 0 writes, over what an earlier export left.
    """
    partial = from_rank_zero(lambda: _begin(destination))
    buckets = Converter(learner, "masters", FILE_BYTES).buckets()
    files = (bucket.tensors() for bucket in buckets)
    _write(files, source, partial, config)
    if rank() == 0:
        shutil.rmtree(destination, ignore_errors=True)
        rename_whole(partial, destination)


def export_checkpoint(checkpoint: Path, destination: Path, progress: Progress) -> None:
    """Write a run's checkpoint to `destination`, holding one layer in memory at a time.

    `progress` is told the bytes read and those to be read. Needs no process group.

    Raises:
        CheckpointError: not a checkpoint, or `destination` is there already; one line.
    """
    config = checkpoints.read_config(checkpoint)
    if destination.exists():
        raise checkpoints.CheckpointError(f"{destination} exists; choose another")
    partial = _begin(destination)
    layers = checkpoints.read_masters(checkpoint, progress)
    _write(layers, checkpoint / "model", partial, config.quantization.uaq)
    rename_whole(partial, destination)


def _begin(destination: Path) -> Path:
    partial = partial_of(destination)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _write(files: Iterable[NamedTensors], source: Path, partial: Path, config: UaqConfig) -> None:
    """One safetensors file for each of `files`, and what stands beside them in `source`."""
    unscale = uaq.inverse(config)
    dtype = stored_dtype(source)
    file_of: dict[str, str] = {}
    for number, named in enumerate(files, start=1):
        tensors = {
            name: unscale(name, tensor.cpu()).to(dtype).contiguous() for name, tensor in named
        }
        file = f"model-{number:05}.safetensors"
        save_file(tensors, partial / file, {"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
    if file_of:  # ranks other than the first have none
        write_index(partial, file_of)
        copy_beside_weights(source, partial)
