"""A server that reads a bucket of weights where the learner has it, on the same machine.

SGLang receives a bucket into memory of its own, by a broadcast. In a process group whose name ends
in `SHARED` only a header is broadcast, and the server's layers copy from the sender's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.weight_sync.shared_memory import HEADER_BYTES, SHARED, attach


def update_bucket(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
) -> tuple[bool, str]:
    """Stands around SGLang's `WeightUpdater._update_bucketed_weights_from_distributed`."""
    if not group_name.endswith(SHARED):
        return original(updater, names, dtypes, shapes, group_name)
    try:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.broadcast(header, src=0, group=updater._model_update_group[group_name])
        bucket = attach(header)
        updater.get_model().load_weights(list(_tensors(bucket, names, dtypes, shapes)))
        if bucket.is_cuda:  # the sender writes the next bucket once this one is answered
            torch.cuda.synchronize()
    except Exception as error:
        return False, f"Failed to load weights from the sender's memory: {error!r}"
    return True, "Succeeded to update parameter online."


def _tensors(
    bucket: Tensor, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        end = start + math.prod(shape) * dtype.itemsize
        yield name, bucket[start:end].view(dtype).view(*shape)
        start = end
