"""Write adapters as peft's directory, and the model into which they are merged beside it."""

import os
import shutil
from pathlib import Path

from torch import Tensor

from qurl_megatron.config.schema import Config, Rounding
from qurl_megatron.device import rank
from qurl_megatron.extensions.adapters.checks import adapted_layers
from qurl_megatron.extensions.adapters.files import merge_directory, read_adapters, write_adapters
from qurl_megatron.extensions.adapters.layers import Adapters
from qurl_megatron.extensions.adapters.learner import AdaptedLearner
from qurl_megatron.files import partial_of, rename_whole
from qurl_megatron.learner.checkpoint import CheckpointError, read_state
from qurl_megatron.learner.saved_masters import read_masters
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import Progress, write_template
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.export import BUCKET_BYTES
from qurl_megatron.weight_sync.gather import to_rank_zero
from qurl_megatron.weight_sync.reshard import Converter

ADAPTERS = "final_adapters"  # beside final_model


def export(
    learner: AdaptedLearner, source: Path, destination: Path, chat_template: str = ""
) -> None:
    """Write the policy to `destination`, and its adapters beside it, replacing earlier ones.

    Collective over all learner ranks. Rank 0 holds all adapters in memory.
    """
    tensors, base = _gather(learner), learner.base_hash()
    of_adapters = destination.with_name(ADAPTERS)
    if rank() == 0:
        for earlier in (destination, of_adapters):
            shutil.rmtree(earlier, ignore_errors=True)
        places = source, destination, of_adapters
        _write(tensors, learner.adapters, base, *places, learner.rounding)
        write_template(destination, chat_template)


def export_checkpoint(
    checkpoint: Path, config: Config, destination: Path, progress: Progress
) -> None:
    """Write a checkpoint of a run under `config`, as `export` does.

    Raises:
        CheckpointError: a destination exists.
    """
    of_adapters = destination.with_name(f"{destination.name}_adapters")
    for path in (destination, of_adapters):
        if os.path.lexists(path):
            raise CheckpointError(f"{path} exists; choose another directory")
    layers = read_masters(checkpoint, progress)
    tensors = {name: values for layer in layers for name, values in layer}
    base = read_state(checkpoint).base
    places = Path(config.model), destination, of_adapters
    _write(tensors, Adapters.of(config), base, *places, config.optimizer.rounding, progress)
    write_template(destination, config.prompts.chat_template)


def _gather(learner: AdaptedLearner) -> dict[str, Tensor]:
    """Return the adapters' float32 A's and B's by name, on global rank 0. Collective."""
    tensors: dict[str, Tensor] = {}

    def keep(bucket: Bucket) -> None:
        tensors.update((name, values.to("cpu", copy=True)) for name, values in bucket.tensors())

    converter = Converter(learner, "masters", BUCKET_BYTES)
    converter.convert(keep)
    parts = to_rank_zero(tensors, converter.senders)
    return {name: values for part in parts for name, values in part.items()}


def _write(
    tensors: dict[str, Tensor],
    adapters: Adapters,
    base: str,
    source: Path,
    destination: Path,
    of_adapters: Path,
    rounding: Rounding,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write peft's directory, and the model in which base and adapters are merged."""
    layers = adapted_layers(adapters.targets, Architecture.from_directory(source))
    # A layer that fuses projections has adapters for all of them, also without a target.
    kept = {name: values for name, values in tensors.items() if name.split(".lora_")[0] in layers}
    partial, weight_format = partial_of(of_adapters), adapters.weight_format
    for killed in (partial, partial_of(destination)):  # maybe an export of an earlier step
        shutil.rmtree(killed, ignore_errors=True)
    try:
        write_adapters(
            partial,
            kept,
            alpha=adapters.alpha,
            source=source,
            weight_format=weight_format,
            base=base,
        )
        read = read_adapters(partial)
        merge_directory(source, destination, read, weight_format, progress, rounding)
        rename_whole(partial, of_adapters)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
