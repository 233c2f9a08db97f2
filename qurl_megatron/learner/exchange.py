"""Tensors on their way between global rank 0 and the data-parallel replicas of the policy.

Global rank 0 sends each replica its part once, to the replica's first rank, which passes it on to
the replica's other ranks. Results come back from the last pipeline stage of each replica. So global
rank 0 sends and receives the batch once, however many replicas there are, beside what its own
replica needs, and no other rank holds another replica's part.

Megatron's parallel state says which ranks are a replica: those of one context-parallel group and
the model-parallel groups of its members. Every rank makes the same calls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron import device

_DTYPES = (torch.int64, torch.int32, torch.int16, torch.float32, torch.bool)
_MAX_DIMENSIONS = 3


def to_replicas(parts: Iterable[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Send each data-parallel replica its tensors; return this replica's, on the CPU.

    Args:
        parts: tensors of each replica, of up to three dimensions, on global rank 0, which takes one
            replica's after the other; unused on other ranks.
    """
    replicas = parallel_state.get_data_parallel_group()
    stages = parallel_state.get_model_parallel_group()
    context = parallel_state.get_context_parallel_group()
    message = torch.zeros(0, dtype=torch.uint8, device=device.device())
    if stages.rank() == context.rank() == 0:  # the replica's first rank
        if dist.get_rank() == 0:
            remaining = iter(parts)
            message = _encode(next(remaining))
            for replica, tensors in enumerate(remaining, start=1):
                _send(_encode(tensors), replica, replicas)
        else:
            message = _receive(0, replicas)
    if stages.rank() == 0:
        message = _pass_on(message, context)
    return _decode(_pass_on(message, stages))


def to_rank_zero(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Send `tensors` to global rank 0; return each replica's there, on the CPU, elsewhere none.

    Args:
        tensors: one-dimensional, on the last pipeline stage; unused on other stages.
    """
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    if not is_first or parallel_state.get_context_parallel_rank() != 0:
        return []  # another rank of this replica has the same tensors
    stages = parallel_state.get_pipeline_model_parallel_group()
    replicas = parallel_state.get_data_parallel_group()
    last = stages.size() - 1
    if 0 < stages.rank() < last:
        return []
    message = _encode(tensors)
    if last and stages.rank() == last:
        _send(message, 0, stages)
        return []
    if last:
        message = _receive(last, stages)
    if replicas.rank() != 0:
        _send(message, 0, replicas)
        return []
    others = (_receive(replica, replicas) for replica in range(1, replicas.size()))
    return [
        [tensor for tensor in _decode(each) if tensor is not None]
        for each in itertools.chain([message], others)
    ]


def _encode(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return tensors as bytes, on this rank's device: how many, dtype and shape of each, values.

    The shape is filled up with -1; a tensor that is None has nothing else.
    """
    header = [len(tensors)]
    for tensor in tensors:
        shape = [] if tensor is None else list(tensor.shape)
        header.append(0 if tensor is None else _DTYPES.index(tensor.dtype))
        header += shape + [-1] * (_MAX_DIMENSIONS - len(shape))
    given = [torch.tensor(header), *(tensor.cpu() for tensor in tensors if tensor is not None)]
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in given]
    return torch.cat(flat).to(device.device())


def _decode(message: Tensor) -> list[Tensor | None]:
    """Return the tensors that `_encode` made `message` of, on the CPU."""
    message = message.cpu()
    number = int(message[:8].view(torch.int64))
    fields = 1 + _MAX_DIMENSIONS
    start = 8 + 8 * fields * number
    header = message[8:start].view(torch.int64).view(number, fields).tolist()
    tensors: list[Tensor | None] = []
    for dtype, *sizes in header:
        shape = [size for size in sizes if size >= 0]
        if not shape:
            tensors.append(None)
            continue
        stop = start + math.prod(shape) * _DTYPES[dtype].itemsize
        # A copy, because a view must start at a multiple of its dtype's size.
        tensors.append(message[start:stop].clone().view(_DTYPES[dtype]).view(shape))
        start = stop
    return tensors


def _send(message: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Send bytes to a rank of `group`."""
    dist.send(_size(message), group=group, group_dst=to)
    dist.send(message, group=group, group_dst=to)


def _receive(source: int, group: dist.ProcessGroup) -> Tensor:
    """Return the bytes that a rank of `group` sends."""
    size = _size(torch.empty(0, dtype=torch.uint8))
    dist.recv(size, group=group, group_src=source)
    message = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    dist.recv(message, group=group, group_src=source)
    return message


def _pass_on(message: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the bytes that the first rank of `group` has, on all of its ranks."""
    if group.size() == 1:
        return message
    size = _size(message)
    dist.broadcast(size, group=group, group_src=0)
    if group.rank() != 0:
        message = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    dist.broadcast(message, group=group, group_src=0)
    return message


def _size(message: Tensor) -> Tensor:
    return torch.tensor([len(message)], device=device.device())
