"""Receiving weights: a time limit for the learner, and loading a bucket from its memory.

SGLang receives a bucket by a broadcast into its own memory. In a process group whose name ends in
`GROUP_SUFFIX`, only a header is broadcast, and the server's layers copy from the sender's memory.
That needs a sender on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.shared_memory import GROUP_SUFFIX, HEADER_BYTES, attach

# A learner that hangs holds a server up for this long; PyTorch's own limit is half an hour.
LEARNER_TIMEOUT_S = 120.0


def join_group(original: Callable[..., Any], **options: Any) -> Any:
    """Join a process group for weights, as SGLang's `original` does, but with a time limit.

    A learner that is a fork of the servers' parent calls this too, with a limit of its own.
    """
    return original(**{"timeout": timedelta(seconds=LEARNER_TIMEOUT_S), **options})


def update_bucket(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
) -> tuple[bool, str]:
    """Load a bucket, in place of `WeightUpdater._update_bucketed_weights_from_distributed`.

    Return whether it succeeded, and a message. SGLang's `original` handles all other groups.
    """
    if not group_name.endswith(GROUP_SUFFIX):
        return original(updater, names, dtypes, shapes, group_name)
    try:
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.broadcast(header, src=0, group=updater._model_update_group[group_name])
        flat = attach(header)
        bucket = Bucket(names, [getattr(torch, dtype) for dtype in dtypes], shapes, flat)
        updater.get_model().load_weights(list(bucket.tensors()))
        if flat.is_cuda:  # the answer lets the sender release the bucket: finish the copies first
            torch.cuda.synchronize()
    except Exception as error:
        return False, f"Failed to load weights from the sender's memory: {error!r}"
    return True, "Succeeded to update parameter online."
