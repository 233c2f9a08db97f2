"""Full tensors from the parts that several ranks hold, and who sends them.

A team is a set of ranks that hold the parts of the same tensors: the tensor-parallel ranks of a
pipeline stage, say. Its first rank gathers the tensors and sends them to the servers, so it is a
*sender*. A learner has one sender for each team that converts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.device import device
from qurl_megatron.weight_sync.bucket import Bucket, copy_values
from qurl_megatron.weight_sync.layout import SentTensor

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The ranks that hold the parts of the same tensors, as this rank sees them."""

    group: dist.ProcessGroup
    rank: int  # of this process in the group; rank 0 sends
    size: int
    converts: bool  # False if the ranks hold copies of another team's parts
    of_experts: bool = False  # whether its tensors are those of experts, or all the others

    @classmethod
    def tensor_parallel(cls) -> Team:
        """Return this rank's tensor-parallel group, which converts on the first replica."""
        return cls(
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
        )

    @classmethod
    def expert_tensor_parallel(cls) -> Team:
        """Return the ranks that share this rank's experts, which convert on the first copy.

        They are one team for each expert-parallel rank of a stage.
        """
        return cls(
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_data_parallel_rank() == 0,
            of_experts=True,
        )

    @property
    def sends(self) -> bool:
        """True if this rank has full tensors to send."""
        return self.converts and self.rank == 0


def find_senders(teams: Sequence[Team]) -> list[int]:
    """Return the global ranks that send. Collective over all learner ranks."""
    own = torch.tensor([any(team.sends for team in teams)], dtype=torch.int32, device=device())
    flags = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(flags, own)
    return [rank for rank, flag in enumerate(torch.cat(flags).tolist()) if flag]


def to_rank_zero(value: T, senders: Sequence[int]) -> list[T]:
    """Return the values of the senders, in their order, on global rank 0; nothing elsewhere."""
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


def empty_full(tensors: list[SentTensor]) -> Bucket:
    """Allocate a full bucket."""
    return Bucket.empty(((t.name, t.dtype, t.shape) for t in tensors), device())


def empty_part(tensors: list[SentTensor], rank: int) -> Bucket:
    """Allocate a rank's part of a bucket: a smaller bucket with the rank's part of each tensor."""
    return Bucket.empty(_part_entries(tensors, rank), device())


def part_views(full: Bucket, tensors: list[SentTensor], rank: int) -> dict[str, Tensor]:
    """Return where the tensors of a rank's part lie in a full bucket, by name."""
    views = dict(full.tensors())
    return {tensor.name: views[tensor.name][tensor.index_on(rank)] for tensor in tensors}


def gather(tensors: list[SentTensor], own: Bucket, team: Team, *, is_full: bool) -> Bucket | None:
    """Return the full bucket on the team's rank 0, None elsewhere.

    Args:
        own: this rank's part, or on rank 0 a full bucket in which rank 0's part is in its place.
        is_full: it is a full bucket.
    """
    if team.size == 1:
        return own
    pieces = _pieces(tensors)
    if team.rank != 0:
        sizes = [sum(tensor.part_bytes(team.rank) for tensor in piece) for piece in pieces]
        _transfer(own.flat.split(sizes), [], team)
        return None
    bucket = own
    if not is_full:
        bucket = empty_full(tensors)
        _place(own, part_views(bucket, tensors, 0))
    incoming: list[list[Tensor]] = [[]]  # for each rank, of which rank 0 sends itself nothing
    waiting: list[tuple[Bucket, dict[str, Tensor]]] = []  # what is to be copied, and to where
    for rank in range(1, team.size):
        places = part_views(bucket, tensors, rank)
        incoming.append([])
        for piece in pieces:
            if piece[0].is_placed:
                flat = places[piece[0].name].view(torch.uint8).view(-1)
            else:
                part = Bucket.empty(_part_entries(piece, rank), device())
                waiting.append((part, places))
                flat = part.flat
            incoming[rank].append(flat)
    _transfer([], incoming, team)
    for part, places in waiting:
        _place(part, places)
    return bucket


def _pieces(tensors: Sequence[SentTensor]) -> list[list[SentTensor]]:
    """Return the tensors of each message in which a rank sends its part."""
    groups = itertools.groupby(tensors, lambda tensor: tensor.name if tensor.is_placed else "")
    return [list(group) for _, group in groups]


def _part_entries(
    tensors: Sequence[SentTensor], rank: int
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(tensor.name, tensor.dtype, tensor.shape_on(rank)) for tensor in tensors]


def _place(part: Bucket, places: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a part to their places."""
    for name, view in part.tensors():
        copy_values(places[name], view)


def gather_flat(own: Tensor, sizes: Sequence[int], team: Team) -> list[Tensor] | None:
    """Return the flat uint8 tensors of all ranks, of these sizes, on the team's rank 0.

    One collective; its first tensor is `own` itself.
    """
    if team.rank != 0:
        _transfer([own], [], team)
        return None
    flats = [own, *(torch.empty(n, dtype=own.dtype, device=own.device) for n in sizes[1:])]
    _transfer([], [[], *([flat] for flat in flats[1:])], team)
    return flats


def _transfer(outgoing: Sequence[Tensor], incoming: Sequence[Sequence[Tensor]], team: Team) -> None:
    """Send tensors to the team's rank 0, and receive those of each rank there."""
    ranks = dist.get_process_group_ranks(team.group)
    operations = [
        dist.P2POp(dist.isend, tensor, ranks[0], team.group, tag)
        for tag, tensor in enumerate(outgoing)
        if len(tensor)
    ]
    operations += [
        dist.P2POp(dist.irecv, tensor, rank, team.group, tag)
        for rank, tensors in zip(ranks, incoming, strict=False)
        for tag, tensor in enumerate(tensors)
        if len(tensor)
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
