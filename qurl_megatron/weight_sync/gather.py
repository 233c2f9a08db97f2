"""Gather buckets from the parts that several ranks hold.

A team is a set of ranks that hold parts of the same tensors, such as the tensor-parallel ranks of a
pipeline stage. Its first rank gathers the tensors, or their changes, and sends them to the servers:
it is a *sender*. A learner has one sender for each team that converts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.device import device
from qurl_megatron.quantization.checksum import as_integers
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket, Manifest, PlannedBucket
from qurl_megatron.weight_sync.crossings import Crossings, Transfer
from qurl_megatron.weight_sync.direct import ServerParameters

T = TypeVar("T")

Release = Callable[[], None] | None
Send = Callable[[Bucket], Release]
"""Sends a bucket; returns a function that waits until the bucket may be released, or None."""


@dataclass(frozen=True)
class Team:
    """The ranks that hold the parts of the same tensors, as this rank sees them."""

    group: dist.ProcessGroup
    rank: int  # of this process in the group, whose rank 0 sends
    size: int
    holders: tuple[int, ...]  # global ranks that hold this rank's parts, or copies of them
    of_experts: bool = False  # True for experts' tensors, False for all others

    @classmethod
    def tensor_parallel(cls) -> Team:
        """Return this rank's tensor-parallel team; only the first replica's converts."""
        return cls(
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            _ranks_of(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        )

    @classmethod
    def expert_tensor_parallel(cls) -> Team:
        """Return the team that shares this rank's experts; only the first copy's converts.

        A stage has one such team for each of its expert-parallel ranks.
        """
        return cls(
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            _ranks_of(parallel_state.get_expert_data_parallel_group()),
            of_experts=True,
        )

    @property
    def ranks(self) -> set[int]:
        """The global ranks of the team."""
        return set(_ranks_of(self.group))

    @property
    def converts(self) -> bool:
        """False if another rank converts the parts that this rank holds."""
        return self.holders[0] == dist.get_rank()

    @property
    def sends(self) -> bool:
        """True if this rank has full tensors to send."""
        return self.converts and self.rank == 0


def to_rank_zero(value: T, senders: Sequence[int]) -> list[T]:
    """Return the senders' values, in their order, on global rank 0; an empty list elsewhere."""
    rank = dist.get_rank()
    if rank != 0:
        if rank in senders:
            dist.send_object_list([value], dst=0, device=device())
        return []
    values: list[Any] = []
    for sender in senders:
        received = [value]
        if sender != 0:
            dist.recv_object_list(received, src=sender, device=device())
        values += received
    return values


class Gatherer:
    """Gathers a team's full buckets from the parts of its ranks; the first rank sends them."""

    def __init__(self, send: Send, team: Team, kept: list[Bucket] | None = None) -> None:
        """Gather nothing yet.

        Args:
            kept: this rank's part of each bucket in the last pass, which gets those of this one,
                for a delta in the next; None: nothing is kept.
        """
        self._send = send
        self._team = team
        self._kept = kept
        self._number = 0  # of the bucket that comes next
        self._release: Release = None  # of the bucket that was sent last

    def add(self, planned: PlannedBucket, own: Bucket) -> None:
        """Gather a bucket and send it, once the one sent before is released.

        Collective over the team. `own` is this rank's part of the bucket.
        """
        self.finish()
        self._keep(own)
        if self._team.size == 1:
            self._release = self._send(own)
            return
        manifests = [planned.manifest_on(rank) for rank in range(self._team.size)]
        flats = gather(own.flat, [manifest.num_bytes for manifest in manifests], self._team)
        if flats is not None:
            parts = [Bucket.around(*both) for both in zip(manifests, flats, strict=True)]
            self._release = self._send(_assemble(planned, parts))

    def _keep(self, own: Bucket) -> None:
        """Keep a part in place of the last pass's, if parts are kept."""
        if self._kept is not None:
            self._kept[self._number : self._number + 1] = [own]
        self._number += 1

    def finish(self) -> None:
        """Wait until the last bucket may be released."""
        if self._release:
            self._release()
        self._release = None


class DeltaGatherer(Gatherer):
    """Gathers what changed since a version, in few buckets.

    A bucket has changes of at most `bucket_bytes`, or of one larger weight, and their headers.
    """

    def __init__(
        self,
        send: Send,
        team: Team,
        kept: list[Bucket],
        since: int,
        bucket_bytes: int,
        *,
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


@dataclass(frozen=True)
class PartOfBucket:
    """A rank's part of a bucket: its tensors, and where each begins in the full tensor."""

    manifest: Manifest
    offsets: list[tuple[int, int]]

    @classmethod
    def on(cls, planned: PlannedBucket, rank: int) -> PartOfBucket:
        """Describe the part that a rank of the team has."""
        offsets = [tensor.offset_on(rank) for tensor in planned.tensors]
        return cls(planned.manifest_on(rank), offsets)


class ParameterWriter:
    """Writes a team's buckets into servers' parameters; its methods are those of a `Gatherer`.

    A rank writes its own parts, and the parts that others send to it (`crossings.py`). All ranks go
    through their buckets in step: the first ones cross, then the second ones, and so on.
    """

    def __init__(
        self,
        parameters: ServerParameters,
        team: Team,
        crossings: Crossings,
        parts: Sequence[Sequence[PartOfBucket]],
    ) -> None:
        """Write nothing yet.

        Args:
            parts: of each rank's buckets, by global rank; not read if nothing crosses.
        """
        self._parameters = parameters
        self._team = team
        self._parts = parts
        self._writes = dist.get_rank() in crossings.writers
        self._transfers: dict[int, list[Transfer]] = {}  # of this rank, by round
        for transfer in crossings.transfers:
            if dist.get_rank() in (transfer.sender, transfer.receiver):
                self._transfers.setdefault(transfer.round, []).append(transfer)
        self._number = 0  # of the bucket that comes next

    def add(self, planned: PlannedBucket, own: Bucket) -> None:
        """Write `own`, this rank's part of a bucket, and let parts cross.

        Collective over the ranks that send to each other.
        """
        if self._writes:
            self._write(PartOfBucket.on(planned, self._team.rank), own)
        self._exchange(own)

    def finish(self) -> None:
        """Receive the remaining buckets: other ranks may have more than this rank."""
        senders = [each.sender for some in self._transfers.values() for each in some]
        while self._number < max((len(self._parts[rank]) for rank in senders), default=0):
            self._exchange(None)

    def _write(self, part: PartOfBucket, values: Bucket) -> None:
        for offset, (name, tensor) in zip(part.offsets, values.tensors(), strict=True):
            self._parameters.write(delta.Change.whole(name, offset, tensor))

    def _exchange(self, own: Bucket | None) -> None:
        """Send `own` if a transfer says so; receive and write the parts of other ranks."""
        number, rank = self._number, dist.get_rank()
        self._number += 1
        for _, transfers in sorted(self._transfers.items()):  # rounds, in one order on all ranks
            exchanged, arriving = [], []  # at most one arrives
            for transfer in transfers:
                buckets = self._parts[transfer.sender]
                if number >= len(buckets) or not buckets[number].manifest.num_bytes:
                    continue
                if transfer.sender == rank:
                    assert own is not None
                    exchanged.append(dist.P2POp(dist.isend, own.flat, transfer.receiver))
                else:
                    bucket = Bucket.empty(buckets[number].manifest, device())
                    arriving.append((buckets[number], bucket))
                    exchanged.append(dist.P2POp(dist.irecv, bucket.flat, transfer.sender))
            for work in dist.batch_isend_irecv(exchanged) if exchanged else ():
                work.wait()
            for part, bucket in arriving:
                self._write(part, bucket)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def delta_bucket(since: int, flat: Tensor) -> Bucket:
    """Return a bucket of delta messages, `[bytes]` uint8, that change version `since`."""
    return Bucket([delta.bucket_name(since)], [flat.dtype], [tuple(flat.shape)], flat)


def gather(own: Tensor, sizes: Sequence[int], team: Team) -> list[Tensor] | None:
    """Return the flat uint8 tensors of all ranks on the team's first rank; None on the others.

    Collective over the team. `sizes` are all ranks' bytes. The first tensor is `own`, not a copy.
    """
    ranks = dist.get_process_group_ranks(team.group)
    flats = None
    if team.rank != 0:
        transfers = [dist.P2POp(dist.isend, own, ranks[0], team.group)]
    else:
        flats = [own, *(torch.empty(n, dtype=own.dtype, device=own.device) for n in sizes[1:])]
        transfers = [
            dist.P2POp(dist.irecv, flat, rank, team.group)
            for rank, flat in zip(ranks[1:], flats[1:], strict=True)
        ]
    transfers = [each for each in transfers if len(each.tensor)]  # both sides know the sizes
    if transfers:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
    return flats


def _assemble(planned: PlannedBucket, parts: Sequence[Bucket]) -> Bucket:
    """Return the full bucket of these parts, one of each rank; each tensor is copied once."""
    full = Bucket.empty(planned.manifest(), device())
    views = dict(full.tensors())
    by_rank = [dict(part.tensors()) for part in parts]
    for tensor in planned.tensors:
        held = [as_integers(each[tensor.name]) for each in by_rank]  # not all backends copy float8
        held = [values for values in held if values.numel()]
        torch.cat(held, tensor.partition_dim or 0, out=as_integers(views[tensor.name]))
    return full
