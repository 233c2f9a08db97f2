"""Receiving weights: a time limit for the learner, its memory, and deltas.

SGLang receives a bucket by a broadcast into its own memory. In a process group whose name ends in
`GROUP_SUFFIX`, only a header is broadcast, and the server's layers copy from the sender's memory.
That needs a sender on the same machine.

A bucket of a delta is not loaded. Its changes are written into the parameters where they are,
through the map that `verify.held_parts` has. Whether the server holds the version that the delta
changes is asked before, in `versions.update_weights`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.sglang_plugin.verify import held_parts
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.delta import Change, base_version, unpack
from qurl_megatron.weight_sync.shared_memory import GROUP_SUFFIX, HEADER_BYTES, attach

# A learner that hangs holds a server up for this long; PyTorch's own limit is half an hour.
LEARNER_TIMEOUT_S = 120.0


def join_group(original: Callable[..., Any], **options: Any) -> Any:
    """Join a process group for weights, as SGLang's `original` does, but with a time limit.

    A learner that was forked from a process with this plugin comes here too, with its own limit.
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

    Return whether it succeeded, and a message. SGLang's `original` handles whole tensors in all
    other groups.
    """
    is_delta = base_version(names) is not None
    if not is_delta and not group_name.endswith(GROUP_SUFFIX):
        return original(updater, names, dtypes, shapes, group_name)
    try:
        flat = receive(updater, shapes, group_name)
        if is_delta:
            write_changes(updater.get_model(), unpack(flat))
        else:
            bucket = Bucket(names, [getattr(torch, dtype) for dtype in dtypes], shapes, flat)
            updater.get_model().load_weights(list(bucket.tensors()))
        if flat.is_cuda:  # the answer lets the sender release the bucket: finish the copies first
            torch.cuda.synchronize()
    except Exception as error:
        return False, f"Failed to load weights: {error!r}"
    return True, "Succeeded to update parameter online."


def receive(updater: Any, shapes: Sequence[Sequence[int]], group_name: str) -> Tensor:
    """Return the buffer of a bucket, `[bytes]` uint8, that the learner sends to this group.

    Without shared memory the bucket has one tensor, of bytes.
    """
    group = updater._model_update_group[group_name]
    if group_name.endswith(GROUP_SUFFIX):
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        dist.broadcast(header, src=0, group=group)
        return attach(header)
    flat = torch.empty(shapes[0][0], dtype=torch.uint8, device=updater.device)
    dist.broadcast(flat, src=0, group=group)
    return flat


def write_changes(model: torch.nn.Module, delta: Iterable[Change]) -> None:
    """Write the changes of a delta into a model's parameters."""
    changes = defaultdict(list)
    for change in delta:
        changes[change.name].append(change)
    for part in held_parts(model):
        for change in changes[part.name]:
            change.write_to(part.values, part.row_offset, part.column_offset)
