"""The sum of `checksum.py` on a GPU, as a Triton kernel, and what other kernels need to add to it.

Plain PyTorch would write every element to memory as 64 bits, and read it again. Here each program
takes a few rows and adds up the products in registers. Integer sums wrap around, so their order
does not matter. Codes of one byte are summed four at a time, as one word.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK, NUM_WARPS = 4, 512, 4  # per program: 16 sums per thread


@triton.jit
def join_bytes(values, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the COUNT/4 words that COUNT numbers form, 8 bits each, the first one lowest.

    Numbers are added up, so what they hold above 8 bits is carried into the next byte.
    """
    shifts = (tl.arange(0, 4) * 8)[None, :]
    return tl.sum(tl.reshape(values, (COUNT // 4, 4)) << shifts, axis=1).to(tl.uint32)


@triton.jit
def weigh_words(words, weights, low_sum, high_sum):  # type: ignore[no-untyped-def]
    """Add words * weights modulo 2^64 to low_sum + 2^32 * high_sum, with two multiply-adds a word.

    Words and `high_sum` are uint32, weights int64, and `low_sum` is uint64.
    """
    low_sum += words.to(tl.uint64) * weights.to(tl.uint32).to(tl.uint64)
    high_sum += words * (weights >> 32).to(tl.uint32)
    return low_sum, high_sum


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
    IS_WORDS: tl.constexpr = bits.dtype.element_ty == tl.uint32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.int64)
    low_sum = tl.zeros((ROWS, BLOCK), dtype=tl.uint64)
    high_sum = tl.zeros((ROWS, BLOCK), dtype=tl.uint32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(bits + row[:, None] * columns + column[None, :], mask=inside, other=0)
        weights = tl.load(column_weights + column, mask=column < columns, other=0)[None, :]
        if IS_WORDS:
            low_sum, high_sum = weigh_words(values, weights, low_sum, high_sum)
        else:
            total += values.to(tl.int64) * weights
    if IS_WORDS:
        total = (low_sum + (high_sum.to(tl.uint64) << 32)).to(tl.int64)
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
