"""Buckets of deltas: what changed in the ranks' parts of tensors, gathered for the sender."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from qurl_megatron.device import device
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.delta import Change
from qurl_megatron.weight_sync.gather import Team, gather_flat
from qurl_megatron.weight_sync.layout import SentTensor

Release = Callable[[], None] | None
Send = Callable[[Bucket], Release]
"""Takes a bucket, and returns a function that waits until the bucket may be released, or None."""


class Deltas:
    """Gathers what changed in the ranks' parts of buckets, and sends it in as few buckets."""

    def __init__(
        self, send: Send, base: int, bucket_bytes: int, team: Team, *, with_steps: bool
    ) -> None:
        self._send = send
        self._base = base
        self._bucket_bytes = bucket_bytes
        self._team = team
        self._with_steps = with_steps
        self._changes: list[Change] = []  # of this rank
        self._num_bytes = 0  # of all ranks
        self._release: Release = None  # of the bucket that was sent last

    def add(self, tensors: list[SentTensor], old: Bucket, new: Bucket) -> None:
        """Collect the changes in this rank's part of a bucket."""
        before, after = dict(old.tensors()), dict(new.tensors())
        changes = []
        for tensor in tensors:
            if after[tensor.name].numel():
                offset = tensor.offset_on(self._team.rank)
                old_part, new_part = before[tensor.name], after[tensor.name]
                change = delta.compare(
                    tensor.name, offset, old_part, new_part, with_steps=self._with_steps
                )
                changes += [change] if change else []
        num_bytes = sum(change.num_bytes for change in changes)
        if self._team.size > 1:
            total = torch.tensor(num_bytes, device=device())
            dist.all_reduce(total, group=self._team.group)
            num_bytes = int(total)
        if self._num_bytes and self._num_bytes + num_bytes > self._bucket_bytes:
            self.flush()
        self._changes += changes
        self._num_bytes += num_bytes

    def flush(self) -> None:
        """Send what was collected, on the team's rank 0; nothing if no rank has a change."""
        changes, num_bytes = self._changes, self._num_bytes
        self._changes, self._num_bytes = [], 0
        if not num_bytes:
            return
        if self._release:
            self._release()
        own = delta.pack(changes, device())
        flats = gather_flat(own, self._sizes(len(own)), self._team)
        if flats is not None:
            flat = flats[0] if len(flats) == 1 else torch.cat(flats)
            name = delta.bucket_name(self._base)
            self._release = self._send(Bucket([name], [flat.dtype], [tuple(flat.shape)], flat))

    def finish(self) -> None:
        """Send what is left, and wait until all may be released."""
        self.flush()
        if self._release:
            self._release()

    def _sizes(self, own: int) -> list[int]:
        """Return the sizes of all ranks' messages."""
        if self._team.size == 1:
            return [own]
        sizes = [torch.zeros(1, dtype=torch.int64, device=device()) for _ in range(self._team.size)]
        dist.all_gather(sizes, torch.tensor([own], device=device()), group=self._team.group)
        return torch.cat(sizes).tolist()
