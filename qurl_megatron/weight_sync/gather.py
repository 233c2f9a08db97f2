"""Full tensors from the parts that tensor-parallel ranks hold."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.device import device
from qurl_megatron.weight_sync.bucket import Bucket, copy_values
from qurl_megatron.weight_sync.layout import SentTensor


def empty_part(tensors: list[SentTensor], tp_rank: int) -> Bucket:
    """Allocate a rank's part of a bucket: a smaller bucket with the rank's part of each tensor."""
    entries = ((tensor.name, tensor.dtype, tensor.shape_on(tp_rank)) for tensor in tensors)
    return Bucket.empty(entries, device())


def gather(tensors: list[SentTensor], own: Bucket) -> Bucket | None:
    """Return the full bucket on tensor-parallel rank 0, None elsewhere."""
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        dist.send(own.flat, dst=ranks[0], group=group)
        return None
    if len(ranks) == 1:
        return own
    entries = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    bucket = Bucket.empty(entries, device())
    full = dict(bucket.tensors())
    _place(tensors, own, 0, full)
    for tp_rank, source in enumerate(ranks[1:], start=1):
        _receive_part(tensors, tp_rank, source, full)
    return bucket


def _receive_part(
    tensors: list[SentTensor], tp_rank: int, source: int, full: dict[str, Tensor]
) -> None:
    """Receive a rank's part and place it; it is released before the next one is received."""
    part = empty_part(tensors, tp_rank)
    dist.recv(part.flat, src=source, group=parallel_state.get_tensor_model_parallel_group())
    _place(tensors, part, tp_rank, full)


def _place(tensors: list[SentTensor], part: Bucket, tp_rank: int, full: dict[str, Tensor]) -> None:
    """Copy a rank's part of a bucket to its places in the full tensors."""
    views = dict(part.tensors())
    for tensor in tensors:
        copy_values(full[tensor.name][tensor.index_on(tp_rank)], views[tensor.name])


def gather_flat(own: Tensor) -> Tensor | None:
    """Return the ranks' flat tensors, one after another, on tensor-parallel rank 0."""
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return own
    sizes = [torch.zeros(1, dtype=torch.int64, device=device()) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device()), group=group)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        dist.send(own, dst=ranks[0], group=group)
        return None
    flat = torch.empty(int(sum(sizes)), dtype=own.dtype, device=device())
    parts = flat.split([int(size) for size in sizes])
    parts[0].copy_(own)
    for part, source in zip(parts[1:], ranks[1:], strict=True):
        dist.recv(part, src=source, group=group)
    return flat
