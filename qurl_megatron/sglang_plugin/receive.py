"""Receiving weights: what one request of the learner announces (`weight_sync/stream.py`).

A server receives each bucket from the channel of its sender: by a broadcast into its own memory,
or, in a process group whose name ends in `GROUP_SUFFIX`, by a header that says where it is in the
memory of a sender on the same machine. While one bucket is written into the parameters, the next is
received.

Whole tensors and deltas are written into the parameters where they are, through the map that
`verify.held_parts` has; SGLang's loaders would look up each tensor anew. Requests without this
project's markers go to SGLang's own code.

Whether the server holds the version that a delta changes is asked before, in
`versions.update_weights`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.quantization.checksum import as_integers
from qurl_megatron.sglang_plugin.verify import HeldPart, held_parts
from qurl_megatron.weight_sync.delta import Change, base_version, unpack
from qurl_megatron.weight_sync.shared_memory import GROUP_SUFFIX, HEADER_BYTES, attach
from qurl_megatron.weight_sync.stream import (
    Announced,
    is_key_frame,
    read_key_frame,
    sibling,
)

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

    Return whether it succeeded, and a message. After a failure the channels are closed, so that no
    sender waits for this server. SGLang's `original` handles what has no markers.
    """
    try:
        if base_version(names) is not None:
            for sender in range(shapes[0][0]):
                channel = Channel(updater, sibling(group_name, sender))
                for flat in channel.until_end():
                    write_changes(updater.get_model(), unpack(flat))
                    channel.confirm()
        elif is_key_frame(names):
            _load(updater, names, dtypes, shapes, group_name)
        else:
            return original(updater, names, dtypes, shapes, group_name)
    except Exception as error:
        leave(updater, group_name)
        return False, f"Failed to load weights: {error!r}"
    return True, "Succeeded to update parameter online."


class Channel:
    """This process's end of the process group with one sender."""

    def __init__(self, updater: Any, name: str) -> None:
        """Take the group of this name, which this server has joined."""
        self._group = updater._model_update_group[name]
        self._device = torch.device(updater.device)
        self._is_shared = name.endswith(GROUP_SUFFIX)

    def begin(self, num_bytes: int) -> tuple[Tensor, Any]:
        """Begin to receive a bucket; return its buffer, `[bytes]` uint8, and what to wait for."""
        size, place = num_bytes, self._device
        if self._is_shared:
            size, place = HEADER_BYTES, torch.device("cpu")
        flat = torch.empty(size, dtype=torch.uint8, device=place)
        return flat, dist.broadcast(flat, src=0, group=self._group, async_op=True)

    def finish(self, flat: Tensor, receiving: Any) -> Tensor:
        """Wait for a bucket, and return its values."""
        receiving.wait()
        return attach(flat) if self._is_shared else flat

    def confirm(self) -> None:
        """Let the sender release the bucket, if it was read from its memory."""
        if self._is_shared:
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier(group=self._group)

    def until_end(self) -> Iterator[Tensor]:
        """Yield buckets that were not announced, `[bytes]` uint8, until the sender ends them."""
        on_gpu = dist.get_backend(self._group) == "nccl"
        size = torch.empty(1, dtype=torch.int64, device=self._device if on_gpu else "cpu")
        while True:
            dist.broadcast(size, src=0, group=self._group)
            num_bytes = int(size)
            if not num_bytes:
                return
            yield self.finish(*self.begin(num_bytes))


def leave(updater: Any, group_name: str) -> None:
    """Close the channels to all senders of one learner, of which `group_name` is one."""
    groups = updater._model_update_group
    for sender in itertools.count():
        group = groups.pop(sibling(group_name, sender), None)
        if group is None:
            return
        with suppress(RuntimeError):  # the learner may have closed it
            backend = dist.get_backend(group)
            kind = torch.device(updater.device if backend == "nccl" else "cpu")
            group._get_backend(kind).abort()
            dist.destroy_process_group(group)


class Copy(NamedTuple):
    """Where a tensor of a bucket goes: `target` gets what is at `start` of the buffer."""

    target: Tensor  # integers of `width` bytes
    start: int  # elements of this width, from the beginning of the buffer's part of this width
    stride: tuple[int, ...]  # of the sent tensor, in elements


class LoadPlan:
    """What to copy from the buckets of a key frame into this rank's parameters; made once."""

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
    ) -> None:
        self.key = (names, dtypes, shapes)
        self.buckets = read_key_frame(names, dtypes, shapes)
        held = defaultdict(list)
        for part in held_parts(model):
            held[part.name].append(part)
        self.copies = [_plan_bucket(bucket, held) for bucket in self.buckets]

    def write(self, number: int, flat: Tensor) -> None:
        """Copy bucket `number`, `[bytes]` uint8, into the parameters."""
        targets, sources = [], []
        for (begin, end, dtype), copies in self.copies[number].items():
            region = flat[begin:end].view(dtype)
            for target, start, stride in copies:
                targets.append(target)
                # `as_strided` counts from the beginning of the storage.
                place = region.storage_offset() + start
                sources.append(region.as_strided(target.shape, stride, place))
        if targets:
            torch._foreach_copy_(targets, sources)


_Region = tuple[int, int, torch.dtype]  # first and last byte in a bucket, and integers of a width


def _plan_bucket(bucket: Announced, held: dict[str, list[HeldPart]]) -> dict[_Region, list[Copy]]:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by width in bytes
    tensors = [
        (name, getattr(torch, dtype), tuple(shape))
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)
    ]
    plan: dict[_Region, list[Copy]] = {}
    begin = 0
    for width, group in itertools.groupby(tensors, key=lambda tensor: tensor[1].itemsize):
        copies, position = [], 0
        for name, _, shape in group:
            columns = shape[1] if len(shape) == 2 else 1
            for part in held[name]:
                target = as_integers(part.values)
                start = position + part.row_offset * columns + part.column_offset
                copies.append(Copy(target, start, (columns, 1)[: target.dim()]))
            position += shape[0] * columns
        end = begin + position * width
        plan[begin, end, integers[width]] = copies
        begin = end
    return plan


def _load(
    updater: Any,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str,
) -> None:
    """Receive a key frame, and write each bucket while the next is received."""
    model = updater.get_model()
    plan = getattr(model, "_qurl_load_plan", None)
    if plan is None or plan.key != (names, dtypes, shapes):
        plan = model._qurl_load_plan = LoadPlan(model, names, dtypes, shapes)
    channels = {
        sender: Channel(updater, sibling(group_name, sender))
        for sender in {bucket.sender for bucket in plan.buckets}
    }
    waiting: tuple[int, Channel, Tensor] | None = None
    for number, bucket in enumerate(plan.buckets):
        channel = channels[bucket.sender]
        if waiting and group_name.endswith(GROUP_SUFFIX):  # a sender waits for each confirmation
            _write(plan, waiting)
            waiting = None
        receiving = channel.begin(bucket.num_bytes)
        if waiting:
            _write(plan, waiting)
        waiting = number, channel, channel.finish(*receiving)
    if waiting:
        _write(plan, waiting)
    if torch.device(updater.device).type == "cuda":
        torch.cuda.synchronize()


def _write(plan: LoadPlan, received: tuple[int, Channel, Tensor]) -> None:
    number, channel, flat = received
    plan.write(number, flat)
    channel.confirm()


def write_changes(model: torch.nn.Module, delta: Iterable[Change]) -> None:
    """Write the changes of a delta into a model's parameters."""
    changes = defaultdict(list)
    for change in delta:
        changes[change.name].append(change)
    for part in held_parts(model):
        for change in changes[part.name]:
            change.write_to(part.values, part.row_offset, part.column_offset)
