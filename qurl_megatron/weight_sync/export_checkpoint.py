"""Write the policy of a checkpoint as a Hugging Face directory, as `export` does a learner's."""

import os
import shutil
from pathlib import Path

from qurl_megatron.files import rename_whole
from qurl_megatron.learner.checkpoint import CheckpointError
from qurl_megatron.learner.saved_masters import read_config, read_masters
from qurl_megatron.machine.disk import free_bytes
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import Progress, stored_dtype
from qurl_megatron.weight_sync.export import Writer, create_partial, of_adapters


def export_checkpoint(checkpoint: Path, destination: Path, progress: Progress) -> None:
    """Write a run's checkpoint to `destination`; hold one layer and one file in memory at a time.

    `progress` is called with the bytes read so far and the bytes to read. Needs no process group.

    Raises:
        CheckpointError: `checkpoint` is not a checkpoint, `destination` exists, or the disk is
            too small for it.
    """
    checkpoint = checkpoint.resolve()  # a run may let `best` lead elsewhere meanwhile
    config = read_config(checkpoint)
    if adapter_rank := config.adapters.rank:
        adapters = of_adapters(adapter_rank)
        adapters.export_checkpoint(checkpoint, config, destination, progress)
        return
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists; choose another directory")
    model = checkpoint / "model"
    values = weight_map.num_parameters(Architecture.from_directory(model))
    needed, free = values * stored_dtype(model).itemsize, free_bytes(destination)
    if free < needed:
        raise CheckpointError(
            f"{destination}: needs {gigabytes(needed)} of disk, and has {gigabytes(free)} free"
        )
    partial = create_partial(destination)
    try:
        writer = Writer(model, partial, config.quantization.uaq, config.optimizer.rounding)
        for layer in read_masters(checkpoint, progress):
            writer.add(layer)
        writer.write_file()
        writer.finish()
        rename_whole(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
