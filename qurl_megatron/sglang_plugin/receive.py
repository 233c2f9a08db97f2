"""Receiving weights: what one request of the learner announces (`weight_sync/bucket.py`).

A server receives each bucket by a broadcast from its sender. While one bucket is written into the
parameters, the next is received.

Whole tensors and deltas are written into the parameters where they are, through the map that
`verify.held_parts` has; SGLang's loaders would look up each tensor anew. Requests without this
project's markers go to SGLang's own code.

Whether the server holds the version that a delta changes is asked before, in
`versions.update_weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.quantization.checksum import as_integers
from qurl_megatron.sglang_plugin.verify import held_parts
from qurl_megatron.weight_sync.bucket import (
    Bucket,
    Manifest,
    channel_name,
    is_key_frame,
    read_key_frame,
)
from qurl_megatron.weight_sync.delta import base_version, unpack

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
    """Load what a request announces, in place of SGLang's loading of buckets.

    Return whether it succeeded, and a message. After a failure the process groups are left, so that
    no sender waits for this server. SGLang's `original` handles what has no markers.
    """
    base = base_version(names)
    if base is None and not is_key_frame(names):
        return original(updater, names, dtypes, shapes, group_name)
    try:
        request = Manifest.read(names, dtypes, shapes)
        if base is not None:
            for sender in range(request.shapes[0][0]):
                for flat in _receive_delta(updater, channel_name(group_name, sender)):
                    write_bucket(updater.get_model(), Bucket.around(request, flat))
        else:
            _receive_key_frame(updater, request, group_name)
    except Exception as error:
        leave(updater, group_name)
        return False, f"Failed to load weights: {error!r}"
    return True, "Succeeded to update parameter online."


def _begin(updater: Any, channel: str, num_bytes: int) -> tuple[Tensor, Any]:
    """Begin to receive a bucket; return its buffer, `[bytes]` uint8, and what to wait for."""
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=updater.device)
    group = updater._model_update_group[channel]
    return flat, dist.broadcast(flat, src=0, group=group, async_op=True)


def _receive_delta(updater: Any, channel: str) -> Iterator[Tensor]:
    """Yield a sender's buckets of a delta, `[bytes]` uint8, up to the empty one."""
    group = updater._model_update_group[channel]
    on_gpu = dist.get_backend(group) == "nccl"
    size = torch.empty(1, dtype=torch.int64, device=updater.device if on_gpu else "cpu")
    while True:
        dist.broadcast(size, src=0, group=group)
        if not size:
            return
        flat, receiving = _begin(updater, channel, int(size))
        receiving.wait()
        yield flat


def _receive_key_frame(updater: Any, request: Manifest, group_name: str) -> None:
    """Receive a key frame, and write each bucket while the next is received."""
    model, last = updater.get_model(), None
    for sender, manifest in read_key_frame(request):
        channel = channel_name(group_name, sender)
        flat, receiving = _begin(updater, channel, manifest.num_bytes)
        if last:
            write_bucket(model, last)
        receiving.wait()
        last = Bucket.around(manifest, flat)
    if last:
        write_bucket(model, last)
    if torch.device(updater.device).type == "cuda":
        torch.cuda.synchronize()


def leave(updater: Any, group_name: str) -> None:
    """Leave the process groups with all senders of one learner."""
    groups = updater._model_update_group
    for sender in itertools.count():
        group = groups.pop(channel_name(group_name, sender), None)
        if group is None:
            return
        with suppress(RuntimeError):  # the learner may have closed it
            backend = dist.get_backend(group)
            kind = torch.device(updater.device if backend == "nccl" else "cpu")
            group._get_backend(kind).abort()
            dist.destroy_process_group(group)


def write_bucket(model: torch.nn.Module, bucket: Bucket) -> None:
    """Write a bucket of whole tensors, or of a delta, into a model's parameters."""
    held = held_parts(model)
    if base_version(bucket.names) is not None:
        for change in unpack(bucket.flat):
            for values, row, column in held.get(change.name, ()):
                change.write_to(values, row, column)
        return
    targets, sources = [], []
    for name, tensor in bucket.tensors():
        for values, row, column in held.get(name, ()):
            source = tensor.narrow(0, row, len(values))
            if values.dim() == 2:
                source = source.narrow(1, column, values.shape[1])
            targets.append(as_integers(values))
            sources.append(as_integers(source))
    if targets:
        torch._foreach_copy_(targets, sources)
