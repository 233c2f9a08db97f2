"""Triton kernels for GPUs: quantization, checksums, values of INT4, rounding without bias.

`quantize_on_gpu`: a program reads one row, or one block in strips of rows, twice: first for its
absmax, then, from cache, for its codes. It can take the checksum of the codes on the way. The
absmax can be given instead, for a shard that holds a part of each row or block. Codes, scales and
checksum are those of `quantize.quantize` and `checksum.checksum`, byte for byte.

By channel, a weight is divided by the scale with one reciprocal a row and three multiply-adds a
weight:

    quotient = weight * reciprocal
    quotient = quotient + (weight - quotient * scale) * reciprocal

Fused multiply-adds make this the float32 nearest to weight / scale, unless the inner difference is
subnormal. `quantize.SMALLEST_SCALE` prevents that. By block, the factor is a power of two, so
the products are exact.

`weighted_sum` is the sum of `checksum.py`. Plain PyTorch would write every element to memory as 64
bits, and read it again. Here each program takes a few rows and adds up the products in registers.
Integer sums wrap around, so their order does not matter. Codes of one byte are summed four at a
time, as one word.

`int4_values` writes the BF16 values of INT4 codes, which are then multiplied as any BF16 weight.

`round_rows` reads each weight once, and computes its dither in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16  # the length and the strides of rows are multiples of it, so that loads are wide
# Weights that a multiprocessor's programs may hold at once, so that a second read finds a row in
# cache. A multiprocessor runs up to 64 warps.
CACHED_ELEMENTS = 98304
WARPS_AT_ONCE = 64
# The negative of a code, less this, is a float32 whose lowest byte is the code plus 128. Its upper
# bytes are those of -2^23. The subtraction rounds half to even.
BIASED_ROUNDING = tl.constexpr(2.0**23 + 128)
UPPER_BITS = tl.constexpr(0xCB000000)
SIDE = 128  # of a block
STRIP, NUM_WARPS = 16, 8  # rows of a strip: 8 weights, one wide load, per thread
INFINITY = tl.constexpr(float("inf"))
SUM_ROWS, SUM_BLOCK, SUM_WARPS = 4, 512, 4  # per program of a checksum: 16 sums per thread
PAIRS, PAIR_WARPS = 1024, 4  # INT4 codes of a program, two a byte: 8 bytes per thread
ROUNDED, ROUND_WARPS = 1024, 4  # weights of a program: 8 per thread
LARGEST_BF16, INFINITY_BITS = tl.constexpr(0x7F7F0000), tl.constexpr(0x7F800000)


@triton.jit
def join_bytes(values, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the COUNT/4 words that COUNT numbers form, 8 bits each, the first number lowest.

    Numbers are added up, so their bits above the lowest 8 are carried into the next byte.
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
def join_codes(negatives, IS_INTEGER: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round the negatives of COUNT scaled weights, within the codes' range, to words of 4 codes."""
    if IS_INTEGER:
        biased = (negatives - BIASED_ROUNDING).to(tl.uint32, bitcast=True)
        words = join_bytes(biased, COUNT) - UPPER_BITS
    else:
        bits = negatives.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        words = join_bytes(bits.to(tl.uint32), COUNT)
    return words ^ 0x80808080  # removes the bias; of FP8 codes, the sign


@triton.jit
def _quantize_row(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    weight,
    absmax,
    codes,
    scales,
    row_weights,
    word_weights,
    sums,
    columns,
    weight_stride,
    words_stride,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    FINDS_ABSMAX: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    IS_BF16: tl.constexpr = weight.dtype.element_ty == tl.bfloat16
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    weight += row * weight_stride + offsets
    if FINDS_ABSMAX:
        # The bits of magnitudes, read as integers, are in the order of the numbers, with infinity
        # and NaN above all others.
        magnitudes = tl.zeros((BLOCK,), tl.int16 if IS_BF16 else tl.int32)
        pointers = weight
        for start in range(0, columns, BLOCK):
            values = tl.load(pointers, mask=offsets < columns - start, other=0.0)
            if IS_BF16:
                bits = values.to(tl.int16, bitcast=True) & 0x7FFF
            else:
                bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            magnitudes = tl.maximum(magnitudes, bits)
            pointers += BLOCK
        highest = tl.max(magnitudes, axis=0).to(tl.int32)
        largest = (highest << 16 if IS_BF16 else highest).to(tl.float32, bitcast=True)
        tl.store(absmax + row, largest)
    else:
        largest = tl.load(absmax + row)
    scale = tl.div_rn(largest, LARGEST)
    scale = tl.where(scale < SMALLEST_SCALE, 1.0, scale)
    tl.store(scales + row, scale)
    # Quotients are computed negated: then a weight of -0 gives the quotient -0.
    reciprocal = tl.div_rn(-1.0, scale)
    word = tl.arange(0, BLOCK // 4)
    codes += row * words_stride + word
    word_weights += word
    low_sum = tl.zeros((BLOCK // 4,), tl.uint64)
    high_sum = tl.zeros((BLOCK // 4,), tl.uint32)
    for start in range(0, columns, BLOCK):
        values = tl.load(weight, mask=offsets < columns - start, other=0.0).to(tl.float32)
        quotient = values * reciprocal
        quotient = tl.fma(tl.fma(quotient, scale, values), reciprocal, quotient)
        words = join_codes(quotient, IS_INTEGER, BLOCK)
        inside = word < (columns - start) // 4
        tl.store(codes, words, mask=inside)
        if SUMS:
            hashes = tl.load(word_weights, mask=inside, other=0)
            low_sum, high_sum = weigh_words(words, hashes, low_sum, high_sum)
        weight += BLOCK
        codes += BLOCK // 4
        word_weights += BLOCK // 4
    if SUMS:
        total = tl.sum(low_sum + (high_sum.to(tl.uint64) << 32), axis=0).to(tl.int64)
        tl.store(sums + row, total * tl.load(row_weights + row))


@triton.jit
def _quantize_block(  # type: ignore[no-untyped-def]
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
        # As in `_quantize_row`: the integer order of the bits keeps NaN.
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


def fits(weight: Tensor, codes: Tensor, offset: tuple[int, int] = (0, 0)) -> bool:
    """Return whether the kernels can read `weight` and write `codes`.

    `offset` is the row and column of the full tensor at which they begin.
    """
    lengths = (weight.shape[1], weight.stride(0), codes.stride(0), offset[1])
    return (
        weight.dtype in (torch.bfloat16, torch.float32)
        and weight.stride(1) == codes.stride(1) == 1
        and not any(length % ALIGNMENT for length in lengths)
        and codes.data_ptr() % 4 == 0
    )


def quantize_on_gpu(
    weight: Tensor,
    absmax: Tensor | None,
    codes: Tensor,
    largest: float,
    smallest_scale: float,
    *,
    by_block: bool = False,
    offset: tuple[int, int] = (0, 0),
    hashes: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize `weight` into `codes`, with one scale per row or per block of 128 x 128.

    Args:
        weight: [out, in] bfloat16 or float32; `fits` holds.
        absmax: [out, 1] or [block rows, block columns] float32, of the whole rows or blocks that
            `weight` touches, not checked for NaN or infinity; None: computed.
        codes: [out, in] int8 or float8_e4m3fn; written.
        largest: the largest code; by block it is 448.
        smallest_scale: a smaller scale of a row is replaced by 1.
        by_block: one scale per block, not per row.
        offset: row and column of the full tensor at which `weight` begins.
        hashes: `checksum.hash_codes` of the codes; None: no checksum.

    Returns:
        absmax and scale, of one shape, and the checksum of the codes, an int64 scalar, or None. A
        computed absmax is infinity or NaN where the row or block holds either; its codes mean
        nothing.
    """
    rows, columns = weight.shape
    kernel: Any
    constants: dict[str, Any]
    if by_block:
        before = [start % SIDE for start in offset]
        grid = (triton.cdiv(before[0] + rows, SIDE), triton.cdiv(before[1] + columns, SIDE))
        kernel, sizes, warps = _quantize_block, (rows, columns, *before), NUM_WARPS
        largest_factor = torch.finfo(weight.dtype).max
        constants = {"LARGEST_FACTOR": largest_factor, "SIDE": SIDE, "STRIP": STRIP}
    else:
        warps = count_warps(columns)
        kernel, sizes, grid = _quantize_row, (columns,), (rows, 1)
        constants = {"LARGEST": largest, "SMALLEST_SCALE": smallest_scale, "BLOCK": 256 * warps}
        constants["IS_INTEGER"] = codes.dtype == torch.int8
    finds_absmax = absmax is None
    if absmax is None:
        absmax = torch.empty(grid, dtype=torch.float32, device=weight.device)
    scale = torch.empty_like(absmax, memory_format=torch.contiguous_format)
    sums = torch.empty(grid if hashes else [0], dtype=torch.int64, device=weight.device)
    row_weights, word_weights = hashes or (sums, sums)
    if all(grid):
        kernel[grid](
            weight,
            absmax.contiguous(),
            codes.view(torch.uint32),
            scale,
            row_weights,
            word_weights,
            sums,
            *sizes,
            weight.stride(0),
            codes.stride(0) // 4,
            FINDS_ABSMAX=finds_absmax,
            SUMS=hashes is not None,
            num_warps=warps,
            **constants,
        )
    return absmax, scale, sums.sum() if hashes else None


def count_warps(columns: int) -> int:
    """Return the warps of a program, for rows of `columns` elements.

    A multiprocessor works on as many rows as its cache holds, and always has enough warps.
    """
    warps = triton.next_power_of_2(triton.cdiv(WARPS_AT_ONCE * columns, CACHED_ELEMENTS))
    return min(16, max(2, warps))


@triton.jit
def _sum_rows(  # type: ignore[no-untyped-def]
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
    _sum_rows[(triton.cdiv(rows, SUM_ROWS),)](
        bits,
        row_weights,
        column_weights,
        sums,
        rows,
        columns,
        ROWS=SUM_ROWS,
        BLOCK=SUM_BLOCK,
        num_warps=SUM_WARPS,
    )
    return sums.sum()


@triton.jit
def _values_of_pairs(  # type: ignore[no-untyped-def]
    packed, scales, values, num_bytes, GROUP_BYTES: tl.constexpr, PAIRS: tl.constexpr
):
    byte = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    inside = byte < num_bytes
    pair = tl.load(packed + byte, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + byte // GROUP_BYTES, mask=inside, other=0.0).to(tl.float32)
    low = (((pair & 15) - 8).to(tl.float32) * scale).to(tl.bfloat16)
    high = (((pair >> 4) - 8).to(tl.float32) * scale).to(tl.bfloat16)
    both = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    both |= high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    tl.store(values + byte, both, mask=inside)


def int4_values(packed: Tensor, scale: Tensor) -> Tensor:
    """Return what `quantize.int4_values` returns, [out, in] bfloat16.

    Args:
        packed: [out, in / 2] uint8.
        scale: [out, groups] bfloat16; groups have equally many columns.
    """
    rows, columns = packed.shape
    values = torch.empty(rows, 2 * columns, dtype=torch.bfloat16, device=packed.device)
    if values.numel():
        _values_of_pairs[(triton.cdiv(packed.numel(), PAIRS),)](
            packed.contiguous(),
            scale.contiguous(),
            values.view(torch.uint32),
            packed.numel(),
            GROUP_BYTES=columns // scale.shape[1],
            PAIRS=PAIRS,
            num_warps=PAIR_WARPS,
        )
    return values


@triton.jit
def _round_row(  # type: ignore[no-untyped-def]
    out,
    values,
    row_keys,
    column_keys,
    columns,
    out_stride,
    values_stride,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ROUNDED + tl.arange(0, ROUNDED)
    inside = column < columns
    hashed = tl.load(row_keys + row) + tl.load(column_keys + column, mask=inside, other=0)
    hashed = (hashed ^ (hashed >> 16)) * FIRST
    hashed = (hashed ^ (hashed >> 15)) * SECOND
    weight = tl.load(values + row * values_stride + column, mask=inside, other=0.0)
    bits = weight.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    dither = tl.where(magnitude < LARGEST_BF16, (hashed >> 16) & 0xFFFF, 0)
    bits = tl.where(magnitude > INFINITY_BITS, bits | 0x400000, bits)  # NaN stays NaN
    rounded = ((bits + dither) >> 16).to(tl.int16)
    tl.store(out + row * out_stride + column, rounded, mask=inside)


def round_rows(
    out: Tensor, values: Tensor, row_keys: Tensor, column_keys: Tensor, factors: tuple[int, int]
) -> None:
    """Do what `rounding.round_rows` does.

    Args:
        out: [rows, columns] bfloat16, written.
        values: [rows, columns] float32; the elements of a row are neighbours, as in `out`.
        row_keys: [rows] int32.
        column_keys: [columns] int32.
        factors: of the hash, as int32.
    """
    rows, columns = values.shape
    if values.numel():
        _round_row[(rows, triton.cdiv(columns, ROUNDED))](
            out.view(torch.int16),
            values,
            row_keys,
            column_keys,
            columns,
            out.stride(0),
            values.stride(0),
            FIRST=factors[0],
            SECOND=factors[1],
            ROUNDED=ROUNDED,
            num_warps=ROUND_WARPS,
        )
