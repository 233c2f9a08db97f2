"""Tensors of any bits at all, and copies of them with other bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qurl_megatron.quantization.checksum import as_integers

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a tensor of any bits at all: every NaN, both zeros, infinities, subnormals."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return memory.view(dtype).view(shape)


def changed(old: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Return a copy with other bits in about this fraction of the elements."""
    new = old.clone()
    chosen = torch.rand(new.shape, generator=generator) < fraction
    as_integers(new)[chosen] ^= 1
    return new


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
