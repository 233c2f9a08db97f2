"""The tensors that a weight is sent as, and the part of each that a rank holds.

An unquantized weight is sent as one tensor, a quantized one as two: codes and scales. Each is
assembled from the parts of the tensor-parallel ranks, in one of two ways:

    partition_dim   rank_slices    the full tensor
    0 or 1          one per rank   the ranks' parts, one after another along `partition_dim`
    None            None           the same on every rank; rank 0 sends it

Scales are divided like the codes if the boundaries between ranks fall between blocks of one scale.
If such a block lies on several ranks (as a row of a row-parallel layer does), every rank computes
all scales from a shared absmax, and rank 0 sends them.

This file is arithmetic on shapes; `reshard.py` does the collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.quantization import quantize
from qurl_megatron.weight_sync.bucket import Manifest


@dataclass(frozen=True)
class SentTensor:
    """One full tensor that is sent, and how the tensor-parallel ranks share it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    partition_dim: int | None = None  # dimension that ranks share; None: rank 0 sends all
    rank_slices: list[slice] | None = None  # one per rank, along `partition_dim`

    def index_on(self, tp_rank: int) -> tuple[slice, ...]:
        """Return where a rank's part lies in the full tensor; empty if it sends nothing."""
        index = [slice(0, size) for size in self.shape]
        if self.partition_dim is not None and self.rank_slices is not None:
            index[self.partition_dim] = self.rank_slices[tp_rank]
        elif tp_rank != 0:
            index[0] = slice(0, 0)
        return tuple(index)

    def offset_on(self, tp_rank: int) -> tuple[int, int]:
        """Return the row and column of the full tensor at which a rank's part begins."""
        row, *columns = self.index_on(tp_rank)
        return row.start, columns[0].start if columns else 0

    def shape_on(self, tp_rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        return tuple(extent.stop - extent.start for extent in self.index_on(tp_rank))

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SentWeight:
    """A rank's part of one weight, and the tensors the full weight is sent as."""

    part: TensorPart
    tensors: Sequence[SentTensor]  # the weight, or its codes and then its scales

    @classmethod
    def plain(cls, part: TensorPart, dtype: torch.dtype) -> SentWeight:
        """Describe a weight that is sent as it is, in `dtype`."""
        return cls(
            part, [SentTensor(part.name, dtype, part.full_shape, part.dim, part.rank_slices)]
        )

    @classmethod
    def quantized(cls, part: TensorPart, weight_format: str) -> SentWeight:
        """Describe a weight that is sent as codes and scales of `weight_format`."""
        dtype = quantize.code_dtype(weight_format)
        codes = SentTensor(part.name, dtype, part.full_shape, part.dim, part.rank_slices)
        name = quantize.scale_name(part.name, weight_format)
        shape = scale_shape(part, weight_format)
        if weight_format == "fp8-tensor":
            shape = (part.full_shape[0], 1)  # the shape of `quantize.engine_scale`
        block = None if part.dim is None else quantize.block_shape(weight_format)[part.dim]
        if block is None or part.rank_slices is None or blocks_are_shared(part, weight_format):
            return cls(part, [codes, SentTensor(name, torch.float32, shape)])
        slices = [slice(rows.start // block, -(-rows.stop // block)) for rows in part.rank_slices]
        return cls(part, [codes, SentTensor(name, torch.float32, shape, part.dim, slices)])

    @property
    def is_quantized(self) -> bool:
        """True if the weight is sent as codes and scales."""
        return len(self.tensors) == 2

    @property
    def num_bytes(self) -> int:
        """Size of the full tensors, in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class PlannedBucket:
    """A rank's parts of the weights of one bucket."""

    weights: Sequence[SentWeight]

    @cached_property
    def tensors(self) -> list[SentTensor]:
        """The bucket's full tensors, in their order in the bucket."""
        tensors = [tensor for weight in self.weights for tensor in weight.tensors]
        return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)

    def manifest(self) -> Manifest:
        """Return the manifest of the bucket."""
        return Manifest.of((tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors)

    def manifest_on(self, tp_rank: int) -> Manifest:
        """Return the manifest of a smaller bucket, with the rank's part of each tensor."""
        return Manifest.of(
            (tensor.name, tensor.dtype, tensor.shape_on(tp_rank)) for tensor in self.tensors
        )


def blocks_are_shared(part: TensorPart, weight_format: str) -> bool:
    """Return True if a block of one scale lies on more than one tensor-parallel rank."""
    if part.dim is None or part.rank_slices is None or len(part.rank_slices) == 1:
        return False
    block = quantize.block_shape(weight_format)[part.dim]
    inner_starts = [
        rows.start for rows in part.rank_slices if 0 < rows.start < part.full_shape[part.dim]
    ]
    return block is None or any(start % block for start in inner_starts)


def scale_shape(part: TensorPart, weight_format: str) -> tuple[int, ...]:
    """Return the number of blocks of the full tensor along each dimension."""
    return tuple(
        1 if block is None else -(-size // block)
        for size, block in zip(part.full_shape, quantize.block_shape(weight_format), strict=True)
    )


def scale_index(part: TensorPart, weight_format: str) -> tuple[slice, ...]:
    """Return where the blocks that a part touches lie among those of the full tensor."""
    return tuple(
        slice(None) if block is None else slice(start // block, -(-(start + size) // block))
        for start, size, block in zip(
            part.offset, part.shape, quantize.block_shape(weight_format), strict=True
        )
    )
