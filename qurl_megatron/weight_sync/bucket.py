"""The bucket: full tensors in one flat buffer, the unit in which weights leave the learner.

A bucket is sent as two things. A description lists the name, dtype and shape of each tensor. A flat
uint8 buffer holds their values, one tensor after another, without gaps and each in row-major order:

    names    [q_proj.weight_scale,  q_proj.weight,     k_proj.weight   ]
    dtypes   [float32,              int8,              int8            ]
    flat     |256 x 4 bytes        |256 x 512 bytes   |64 x 512 bytes  |

The widest element types come first. Each tensor then starts at a multiple of its element size, so
the reader takes views of the buffer and copies nothing. This is the layout of SGLang's
`flattened_bucket` load format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """Tensors in one flat buffer; entry i of `names`, `dtypes` and `shapes` is the i-th tensor."""

    names: Sequence[str]  # Hugging Face names, and scale names from `quantize.scale_name`
    dtypes: Sequence[torch.dtype]  # widest first
    shapes: Sequence[Sequence[int]]
    flat: Tensor  # [bytes] uint8

    @classmethod
    def empty(
        cls, entries: Iterable[tuple[str, torch.dtype, Sequence[int]]], device: torch.device
    ) -> Bucket:
        """Allocate uninitialized tensors, given as (name, dtype, shape) in any order."""
        entries = sorted(entries, key=lambda entry: -entry[1].itemsize)
        names, dtypes, shapes = zip(*entries, strict=True)
        num_bytes = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in entries)
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return cls(names, dtypes, shapes, flat)

    @classmethod
    def pack(cls, tensors: Mapping[str, Tensor]) -> Bucket:
        """Copy tensors of one device, given by name, into a new bucket."""
        entries = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        bucket = cls.empty(entries, next(iter(tensors.values())).device)
        for name, view in bucket.tensors():
            copy_values(view, tensors[name])
        return bucket

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, which are views of the buffer."""
        start = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            end = start + math.prod(shape) * dtype.itemsize
            yield name, self.flat[start:end].view(dtype).view(tuple(shape))
            start = end


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`, of the same dtype and shape."""
    # One-byte codes are copied as bytes, because not every backend copies float8.
    dtype = torch.uint8 if source.dtype.itemsize == 1 else source.dtype
    target.view(dtype).copy_(source.view(dtype))
