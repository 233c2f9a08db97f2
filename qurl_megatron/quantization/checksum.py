"""A checksum of a tensor that its shards' checksums add up to.

    checksum = sum over i, j of bits[i, j] * row_weight(i) * column_weight(j)    modulo 2^64

`bits` is the element's memory as a signed integer, `i` and `j` its position in the full tensor, and
the weights are odd 64-bit hashes. So the learner can sum over its shards, a server over its own,
and the two agree whatever both layouts are; a transposed, permuted, shifted or partly lost tensor,
or a single flipped bit, does not. On a GPU it is one pass of `checksum_kernel.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**18  # widened to int64 at once: 2 MiB, within a core's cache

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def checksum(tensor: Tensor, *, row_offset: int = 0, column_offset: int = 0) -> int:
    """Checksum of `tensor` [rows, columns] or [rows], of 1, 2 or 4 bytes an element; signed 64 bit.

    The offsets say where in the full tensor this part's first row and column lie.
    """
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    bits = bits.unsqueeze(1) if bits.dim() == 1 else bits
    rows, columns = bits.shape
    column_weights = _weights(column_offset, columns, 0x2545F4914F6CDD1D, bits.device)
    row_weights = _weights(row_offset, rows, 0x1B873593CC9E2D51, bits.device)
    if bits.is_cuda and bits.numel():
        from qurl_megatron.quantization.checksum_kernel import weighted_sum

        return int(weighted_sum(bits, row_weights, column_weights))
    total = torch.zeros((), dtype=torch.int64)
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        chunk = bits[start : start + step].to(torch.int64)
        total += ((chunk @ column_weights) * row_weights[start : start + step]).sum()
    return int(total)


def part_key(name: str, row_offset: int, column_offset: int) -> str:
    """Name of the part of tensor `name` that begins at these offsets, for `combine`."""
    return f"{name}@{row_offset},{column_offset}"


def combine(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Full tensors' checksums by name, from those of the parts each rank holds, by `part_key`.

    Different parts add up; a part that several ranks hold must be the same on all of them.

    Raises:
        ValueError: it is not; the part is named.
    """
    parts: dict[str, int] = {}
    for held in ranks:
        for key, value in held.items():
            if parts.setdefault(key, value) != value:
                raise ValueError(f"ranks hold different copies of {key}")
    totals: dict[str, int] = {}
    for key, value in parts.items():
        name = key.rpartition("@")[0]
        totals[name] = _wrap(totals.get(name, 0) + value)
    return totals


def _weights(start: int, count: int, factor: int, device: torch.device) -> Tensor:
    """Odd hashes of start, start + 1, ...: a row or column keeps its weight in every shard."""
    hashed = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    for shift in (29, 31):
        hashed = hashed * _wrap(factor)
        hashed = hashed ^ (hashed >> shift)
    return hashed | 1


def _wrap(value: int) -> int:
    """`value` modulo 2^64, as the signed integer int64 arithmetic leaves it."""
    return (value + 2**63) % 2**64 - 2**63
