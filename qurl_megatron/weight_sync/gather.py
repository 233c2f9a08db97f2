"""Full tensors from the parts that several ranks hold, and who sends them.

A team is a set of ranks that hold the parts of the same tensors: the tensor-parallel ranks of a
pipeline stage, say. Its first rank gathers the tensors and sends them to the servers, so it is a
*sender*. A learner has one sender for each team that converts.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def empty_part(tensors: list[SentTensor], rank: int) -> Bucket:
    """Allocate a rank's part of a bucket: a smaller bucket with the rank's part of each tensor."""
    entries = ((tensor.name, tensor.dtype, tensor.shape_on(rank)) for tensor in tensors)
    return Bucket.empty(entries, device())


def gather(tensors: list[SentTensor], own: Bucket, team: Team) -> Bucket | None:
    """Return the full bucket on the team's rank 0, None elsewhere."""
    if team.size == 1:
        return own
    sizes = [sum(tensor.part_bytes(rank) for tensor in tensors) for rank in range(team.size)]
    flats = gather_flat(own.flat, sizes, team)
    if flats is None:
        return None
    bucket = Bucket.empty(((t.name, t.dtype, t.shape) for t in tensors), device())
    full = dict(bucket.tensors())
    for rank in range(team.size):
        part = own
        if rank:
            entries = [(t.name, t.dtype, t.shape_on(rank)) for t in tensors]
            part = Bucket.around(entries, flats[rank])
        flats[rank] = own.flat  # releases it once it is placed
        for (name, view), index in zip(part.tensors(), _indices(part, tensors, rank), strict=True):
            copy_values(full[name][index], view)
        del part
    return bucket


def _indices(part: Bucket, tensors: list[SentTensor], rank: int) -> list[tuple[slice, ...]]:
    """Return where the tensors of a rank's part lie in the full tensors."""
    by_name = {tensor.name: tensor for tensor in tensors}
    return [by_name[name].index_on(rank) for name in part.names]


def gather_flat(own: Tensor, sizes: Sequence[int], team: Team) -> list[Tensor] | None:
    """Return the flat uint8 tensors of all ranks, of these sizes, on the team's rank 0.

    One collective; its first tensor is `own` itself.
    """
    if team.size == 1:
        return [own]
    ranks = dist.get_process_group_ranks(team.group)
    if team.rank != 0:
        if len(own):
            operation = dist.P2POp(dist.isend, own, ranks[0], team.group)
            for work in dist.batch_isend_irecv([operation]):
                work.wait()
        return None
    flats = [own, *(torch.empty(n, dtype=own.dtype, device=own.device) for n in sizes[1:])]
    operations = [
        dist.P2POp(dist.irecv, flat, rank, team.group)
        for flat, rank in zip(flats[1:], ranks[1:], strict=True)
        if len(flat)
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return flats
