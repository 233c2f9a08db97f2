"""Quantization by output channel on a GPU, with the checksum of the codes, as a Triton kernel.

A program reads one row twice: first for its absmax, then, from cache, for its codes. The absmax can
be given instead, for a shard that holds a part of each row. Codes, scales and checksum are those of
`quantize.quantize` and `checksum.checksum`, byte for byte.

A weight is divided by the scale with one reciprocal a row and three multiply-adds a weight:

    quotient = weight * reciprocal
    quotient = quotient + (weight - quotient * scale) * reciprocal

Fused multiply-adds make this the float32 nearest to weight / scale, if the inner difference is no
subnormal number. `quantize.SMALLEST_SCALE` sees to that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qurl_megatron.quantization.checksum_kernel import join_bytes, weigh_words

ALIGNMENT = 16  # the length and the strides of rows are multiples of it, so that loads are wide
# Weights that a multiprocessor's programs may hold at once, so that a second read finds a row in
# cache. It runs up to 64 warps.
CACHED_ELEMENTS = 98304
WARPS_AT_ONCE = 64
# The negative of a code, less this, is a float32 whose lowest byte is the code plus 128. Its upper
# bytes are those of -2^23. The subtraction rounds half to even.
BIASED_ROUNDING = tl.constexpr(2.0**23 + 128)
UPPER_BITS = tl.constexpr(0xCB000000)


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


def fits(weight: Tensor, codes: Tensor, offset: tuple[int, int] = (0, 0)) -> bool:
    """Check whether the kernels of this folder can read `weight` and write `codes`.

    `offset` is the row and column of the full tensor at which they begin.
    """
    lengths = (weight.shape[1], weight.stride(0), codes.stride(0), offset[1])
    return (
        weight.dtype in (torch.bfloat16, torch.float32)
        and weight.stride(1) == codes.stride(1) == 1
        and not any(length % ALIGNMENT for length in lengths)
        and codes.data_ptr() % 4 == 0
    )


def quantize_channels(
    weight: Tensor,
    absmax: Tensor | None,
    codes: Tensor,
    largest: float,
    smallest_scale: float,
    hashes: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize `weight` into `codes`, with one scale per row.

    Args:
        weight: [out, in] bfloat16 or float32; `fits` holds.
        absmax: [out, 1] float32, of whole rows, not checked for NaN or infinity; None: computed.
        codes: [out, in] int8 or float8_e4m3fn; written.
        largest: the largest code.
        smallest_scale: a smaller scale is replaced by 1.
        hashes: `checksum.hash_codes` of the codes; None: no checksum.

    Returns:
        absmax and scale, [out, 1] float32, and the checksum of the codes, an int64 scalar, or None.
        A computed absmax is infinity or NaN where the row holds either; its codes mean nothing.
    """
    rows, columns = weight.shape
    finds_absmax = absmax is None
    if absmax is None:
        absmax = torch.empty(rows, 1, dtype=torch.float32, device=weight.device)
    scale = torch.empty_like(absmax)
    sums = torch.empty(rows if hashes else 0, dtype=torch.int64, device=weight.device)
    row_weights, word_weights = hashes or (sums, sums)
    if rows:
        warps = count_warps(columns)
        _quantize_row[(rows,)](
            weight,
            absmax.contiguous(),
            codes.view(torch.uint32),
            scale,
            row_weights,
            word_weights,
            sums,
            columns,
            weight.stride(0),
            codes.stride(0) // 4,
            LARGEST=largest,
            SMALLEST_SCALE=smallest_scale,
            FINDS_ABSMAX=finds_absmax,
            IS_INTEGER=codes.dtype == torch.int8,
            SUMS=hashes is not None,
            BLOCK=256 * warps,
            num_warps=warps,
        )
    return absmax, scale, sums.sum() if hashes else None


def count_warps(columns: int) -> int:
    """Return the warps of a program, for rows of `columns` elements.

    As many rows are worked on at once as a multiprocessor caches, and it always has enough warps.
    """
    warps = triton.next_power_of_2(triton.cdiv(WARPS_AT_ONCE * columns, CACHED_ELEMENTS))
    return min(16, max(2, warps))
