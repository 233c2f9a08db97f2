"""Quantization by blocks of 128 x 128 on a GPU, with the checksum of the codes, as a Triton kernel.

A program reads one block twice, in strips of rows: first for its absmax, then, from cache, for its
codes. The absmax can be given instead, for a shard that holds parts of blocks. Codes, scales and
checksum are those of `quantize.quantize` for `fp8-block` and of `checksum.checksum`, byte for byte.
The factor is a power of two, so the products are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl_megatron.quantization.channel_kernel import join_codes

SIDE = 128
STRIP, NUM_WARPS = 16, 8  # rows of a strip: 8 weights, one wide load, per thread
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _quantize_block(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    weight,
    absmax,
    codes,
    scales,
    row_weights,
    word_weights,
    sums,
    rows,
    columns,
    rows_before,
    columns_before,
    weight_stride,
    words_stride,
    LARGEST_FACTOR: tl.constexpr,
    FINDS_ABSMAX: tl.constexpr,
    SUMS: tl.constexpr,
    SIDE: tl.constexpr,
    STRIP: tl.constexpr,
):
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    # Positions in the shard; negative where a block begins before it.
    first_row = tl.program_id(0) * SIDE - rows_before
    column = tl.program_id(1) * SIDE - columns_before + tl.arange(0, SIDE)
    inside_columns = ((column >= 0) & (column < columns))[None, :]
    weight += column[None, :]
    if FINDS_ABSMAX:
        # As in `channel_kernel`: the integer order of the bits keeps NaN.
        magnitudes = tl.zeros((STRIP, SIDE), tl.int32)
        for start in range(0, SIDE, STRIP):
            row = (first_row + start + tl.arange(0, STRIP))[:, None]
            inside = (row >= 0) & (row < rows) & inside_columns
            values = tl.load(weight + row.to(tl.int64) * weight_stride, mask=inside, other=0.0)
            bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            magnitudes = tl.maximum(magnitudes, bits)
        largest = tl.max(tl.max(magnitudes, axis=1), axis=0).to(tl.float32, bitcast=True)
        tl.store(absmax + block, largest)
    else:
        largest = tl.load(absmax + block)
    factor = tl.div_rn(448.0, largest)
    factor = tl.where(factor == INFINITY, LARGEST_FACTOR, factor)
    factor = tl.where(largest == 0.0, 1.0, factor)
    power = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(scales + block, tl.div_rn(1.0, power))
    # `columns_before` is a multiple of 16, so words of 4 codes lie within the block.
    word = (tl.program_id(1) * SIDE - columns_before) // 4 + tl.arange(0, SIDE // 4)
    inside_words = ((word >= 0) & (word < columns // 4))[None, :]
    codes += word[None, :]
    total = tl.zeros((STRIP, SIDE // 4), tl.int64)
    if SUMS:
        hashes = tl.load(word_weights + word[None, :], mask=inside_words, other=0)
    for start in range(0, SIDE, STRIP):
        row = (first_row + start + tl.arange(0, STRIP))[:, None]
        inside_rows = (row >= 0) & (row < rows)
        inside = inside_rows & inside_columns
        values = tl.load(weight + row.to(tl.int64) * weight_stride, mask=inside, other=0.0)
        negatives = tl.reshape(values.to(tl.float32) * -power, (STRIP * SIDE,))
        words = tl.reshape(join_codes(negatives, False, STRIP * SIDE), (STRIP, SIDE // 4))
        row = (first_row + start + tl.arange(0, STRIP))[:, None]
        inside = inside_rows & inside_words
        tl.store(codes + row.to(tl.int64) * words_stride, words, mask=inside)
        if SUMS:
            of_rows = tl.load(row_weights + row, mask=inside_rows, other=0)
            total += words.to(tl.int64) * (of_rows * hashes)
    if SUMS:
        tl.store(sums + block, tl.sum(tl.sum(total, axis=1), axis=0))


def quantize_blocks(
    weight: Tensor,
    absmax: Tensor | None,
    codes: Tensor,
    offset: tuple[int, int] = (0, 0),
    hashes: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize `weight` into `codes`, with one scale per block of 128 x 128.

    Args:
        weight: [out, in] bfloat16 or float32; `channel_kernel.fits` holds.
        absmax: [block rows, block columns] float32, of the whole blocks that `weight` touches, not
            checked for NaN or infinity; None: computed.
        codes: [out, in] float8_e4m3fn; written.
        offset: row and column of the full tensor at which `weight` begins.
        hashes: `checksum.hash_codes` of the codes; None: no checksum.

    Returns:
        absmax and scale, of the shape of `absmax`, and the checksum of the codes, an int64 scalar,
        or None. A computed absmax is infinity or NaN where the block holds either.
    """
    before = [start % SIDE for start in offset]
    grid = [
        triton.cdiv(skipped + size, SIDE)
        for skipped, size in zip(before, weight.shape, strict=True)
    ]
    finds_absmax = absmax is None
    if absmax is None:
        absmax = torch.empty(grid, dtype=torch.float32, device=weight.device)
    scale = torch.empty_like(absmax, memory_format=torch.contiguous_format)
    sums = torch.empty(grid if hashes else [0], dtype=torch.int64, device=weight.device)
    row_weights, word_weights = hashes or (sums, sums)
    if weight.numel():
        _quantize_block[tuple(grid)](
            weight,
            absmax.contiguous(),
            codes.view(torch.uint32),
            scale,
            row_weights,
            word_weights,
            sums,
            *weight.shape,
            *before,
            weight.stride(0),
            codes.stride(0) // 4,
            LARGEST_FACTOR=torch.finfo(weight.dtype).max,
            FINDS_ABSMAX=finds_absmax,
            SUMS=hashes is not None,
            SIDE=SIDE,
            STRIP=STRIP,
            num_warps=NUM_WARPS,
        )
    return absmax, scale, sums.sum() if hashes else None
