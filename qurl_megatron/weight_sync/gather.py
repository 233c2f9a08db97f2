"""Gather buckets from the parts that several ranks hold.

A team is a set of ranks that hold parts of the same tensors, such as the tensor-parallel ranks of a
pipeline stage. Its first rank gathers the tensors, or their changes, and sends them to the servers:
it is a *sender*. A learner has one sender for each team that converts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.device import device
from qurl_megatron.quantization.checksum import as_integers
from qurl_megatron.weight_sync.bucket import Bucket, PlannedBucket

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


class Sink(Protocol):
    """Takes the buckets of a team, one after another."""

    def add(self, planned: PlannedBucket, own: Bucket) -> None:
        """Take this rank's part of a bucket. Collective over the team."""

    def finish(self) -> None:
        """End the pass, after the last bucket."""


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


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


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
