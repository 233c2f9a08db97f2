"""The sum of `checksum.py` on a GPU, in one pass over the tensor, as a Triton kernel.

Plain PyTorch would write every element to memory as 64 bits, and read it again. Here each program
takes a few rows and adds up the products in registers. Integer sums wrap around, so their order
does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK, NUM_WARPS = 4, 512, 4  # per program: 16 sums per thread


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    bits,
    row_weights,
    column_weights,
    sums,
    rows,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(bits + row[:, None] * columns + column[None, :], mask=inside, other=0)
        weights = tl.load(column_weights + column, mask=column < columns, other=0)
        total += values.to(tl.int64) * weights[None, :]
    weights = tl.load(row_weights + row, mask=row < rows, other=0)
    tl.store(sums + row, tl.sum(total, axis=1) * weights, mask=row < rows)


def weighted_sum(bits: Tensor, row_weights: Tensor, column_weights: Tensor) -> Tensor:
    """Return the sum of bits[i, j] * row_weights[i] * column_weights[j] modulo 2^64.

    Args:
        bits: [rows, columns], contiguous integers.
        row_weights: [rows] int64.
        column_weights: [columns] int64.

    Returns:
        An int64 scalar.
    """
    rows, columns = bits.shape
    sums = torch.empty(rows, dtype=torch.int64, device=bits.device)
    _sum_rows[(triton.cdiv(rows, ROWS),)](
        bits,
        row_weights,
        column_weights,
        sums,
        rows,
        columns,
        ROWS=ROWS,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return sums.sum()
