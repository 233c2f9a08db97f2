"""Gather what changed since a version, in place of full buckets; `delta.py` has its bytes."""

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.device import device
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket, PlannedBucket, bucket_name
from qurl_megatron.weight_sync.gather import Gatherer, Send, Team, gather


class DeltaGatherer(Gatherer):
    """Gathers what changed since a version, in few buckets.

    A bucket has changes of at most `bucket_bytes`, or of one larger weight, and their headers.
    """

    def __init__(
        self,
        send: Send,
        team: Team,
        kept: list[Bucket] | None,
        *,
        since: int,
        bucket_bytes: int,
        is_relative: bool,
    ) -> None:
        super().__init__(send, team, kept)
        self._since = since
        self._bucket_bytes = bucket_bytes
        self._is_relative = is_relative
        self._changes: list[delta.Change] = []  # of this rank
        self._num_bytes = 0  # of all ranks

    def add(self, planned: PlannedBucket, own: Bucket) -> None:
        """Collect the changes of a bucket; first send the earlier ones if both exceed the limit.

        Collective over the team.
        """
        assert self._kept is not None
        old, new = dict(self._kept[self._number].tensors()), dict(own.tensors())
        self._keep(own)
        changes = []
        for tensor in planned.tensors:
            name, offset = tensor.name, tensor.offset_on(self._team.rank)
            change = delta.compare(
                name, offset, old[name], new[name], is_relative=self._is_relative
            )
            changes += [change] if change else []
        num_bytes = sum(change.num_bytes for change in changes)
        if self._team.size > 1:
            # All ranks need the same sum, because `_flush` is collective.
            total = torch.tensor(num_bytes, device=device())
            dist.all_reduce(total, group=self._team.group)
            num_bytes = int(total)
        if self._num_bytes and self._num_bytes + num_bytes > self._bucket_bytes:
            self._flush()
        self._changes += changes
        self._num_bytes += num_bytes

    def finish(self) -> None:
        """Send the remaining changes, and wait until their bucket may be released."""
        self._flush()
        super().finish()

    def _flush(self) -> None:
        """Send the collected changes; send nothing if no rank has any. Collective over the team."""
        changes, num_bytes = self._changes, self._num_bytes
        self._changes, self._num_bytes = [], 0
        if not num_bytes:
            return
        super().finish()
        own = delta.pack(changes, device())
        sizes = [torch.zeros(1, dtype=torch.int64, device=device()) for _ in range(self._team.size)]
        dist.all_gather(sizes, torch.tensor([len(own)], device=device()), group=self._team.group)
        flats = gather(own, torch.cat(sizes).tolist(), self._team)
        if flats is not None:
            self._release = self._send(delta_bucket(self._since, torch.cat(flats)))


def delta_bucket(since: int, flat: Tensor) -> Bucket:
    """Return a bucket of delta messages, `[bytes]` uint8, that change version `since`."""
    return Bucket([bucket_name(since)], [flat.dtype], [tuple(flat.shape)], flat)


def end_delta(send: Send, since: int) -> None:
    """Send the empty bucket that ends a sender's delta, and wait until it may be released."""
    if release := send(delta_bucket(since, torch.empty(0, dtype=torch.uint8, device=device()))):
        release()
