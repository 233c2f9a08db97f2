"""The learner's policy as a Hugging Face directory, UAQ undone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors.torch import save_file

from qurl_megatron import uaq
from qurl_megatron.config import UaqConfig
from qurl_megatron.device import from_rank_zero, rank
from qurl_megatron.huggingface import copy_beside_weights, stored_dtype, write_index
from qurl_megatron.learner import Learner
from qurl_megatron.reshard import Converter

FILE_BYTES = 4 * 1024**3  # of float32, so half as much on disk where the source is BF16


def export(learner: Learner, source: Path, destination: Path, config: UaqConfig) -> None:
    """Write the policy to `destination`, in the dtype and with the tokenizer of `source`.

    Collective over all learner ranks; global rank 0 writes. The directory appears when it is whole.
    """
    unscale = uaq.inverse(config)
    partial = destination.with_name(destination.name + ".partial")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    from_rank_zero(begin)
    dtype = stored_dtype(source)
    files: dict[str, str] = {}
    buckets = Converter(learner, "masters", FILE_BYTES).buckets()
    for number, bucket in enumerate(buckets, start=1):
        tensors = {
            name: unscale(name, tensor.cpu()).to(dtype).contiguous()
            for name, tensor in bucket.tensors()
        }
        file = f"model-{number:05}.safetensors"
        save_file(tensors, partial / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    if rank() == 0:
        write_index(partial, files)
        copy_beside_weights(source, partial)
        os.replace(partial, destination)
