"""Buckets of deltas: what changed in the ranks' parts of tensors, gathered and joined."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.device import device
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.delta import Change
from qurl_megatron.weight_sync.gather import gather_flat
from qurl_megatron.weight_sync.layout import SentTensor

Send = Callable[[Bucket], None]


class Deltas:
    """Gathers what changed in the ranks' parts of buckets, and sends it in as few buckets."""

    def __init__(self, send: Send, base: int, bucket_bytes: int) -> None:
        self._send = send
        self._base = base
        self._bucket_bytes = bucket_bytes
        self._changes: list[Change] = []  # of this rank
        self._num_bytes = 0  # of all ranks

    def add(self, tensors: list[SentTensor], old: Bucket, new: Bucket) -> None:
        """Collect the changes in this rank's part of a bucket."""
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        before, after = dict(old.tensors()), dict(new.tensors())
        changes = []
        for tensor in tensors:
            if after[tensor.name].numel():
                offset = tensor.offset_on(tp_rank)
                change = delta.compare(tensor.name, offset, before[tensor.name], after[tensor.name])
                changes += [change] if change else []
        total = torch.tensor(sum(change.num_bytes for change in changes), device=device())
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        num_bytes = int(total)
        if self._num_bytes and self._num_bytes + num_bytes > self._bucket_bytes:
            self.flush()
        self._changes += changes
        self._num_bytes += num_bytes

    def flush(self) -> None:
        """Send what was collected, on tensor-parallel rank 0; a bucket may be empty."""
        own = delta.pack(self._changes, device())
        self._changes, self._num_bytes = [], 0
        flat = gather_flat(own)
        if flat is not None:
            self._send(_delta_bucket(self._base, flat))


class MergedDeltas:
    """Joins small buckets of the stages' deltas: each costs the servers a request."""

    def __init__(self, send: Send, base: int, most_bytes: int) -> None:
        self._send = send
        self._base = base
        self._most_bytes = most_bytes
        self._messages: list[Tensor] = []

    def add(self, bucket: Bucket) -> None:
        """Take a bucket of a delta."""
        if self._num_bytes + len(bucket.flat) > self._most_bytes:
            self.flush()
        self._messages.append(bucket.flat)
        if self._num_bytes > self._most_bytes:
            self.flush()

    def flush(self) -> None:
        """Send what was taken."""
        if self._messages:
            messages, self._messages = self._messages, []
            flat = messages[0] if len(messages) == 1 else torch.cat(messages)
            self._send(_delta_bucket(self._base, flat))

    @property
    def _num_bytes(self) -> int:
        return sum(len(message) for message in self._messages)


def _delta_bucket(base: int, flat: Tensor) -> Bucket:
    """Return the bucket of messages that change version `base`."""
    return Bucket([delta.bucket_name(base)], [flat.dtype], [tuple(flat.shape)], flat)
