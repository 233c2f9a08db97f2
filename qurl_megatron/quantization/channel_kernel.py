"""Quantization by output channel on a GPU, in one pass over the weight, as a Triton kernel.

Each program holds one row in registers, finds its absmax and writes its codes and scale. So each
weight is read once and each code is written once. The absmax can be given instead, for a shard that
holds a part of each row. The codes are those of `quantize.quantize`, byte for byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_ROW = 65536  # elements that a program can hold
# Adding this to a float32 shifts the fraction out of its mantissa, which rounds half to even.
ROUNDING = tl.constexpr(1.5 * 2**23)
SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _quantize_row(  # type: ignore[no-untyped-def]  # Triton reads annotations its own way
    weight,
    absmax,
    codes,
    scales,
    columns,
    weight_stride,
    codes_stride,
    LARGEST: tl.constexpr,
    FINDS_ABSMAX: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    values = tl.load(weight + row * weight_stride + offsets, mask=inside, other=0.0)
    values = values.to(tl.float32)
    if FINDS_ABSMAX:
        # The bits of magnitudes, read as integers, are in the order of the numbers, with infinity
        # and NaN above all others.
        magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(magnitudes, axis=0).to(tl.float32, bitcast=True)
        tl.store(absmax + row, largest)
    else:
        largest = tl.load(absmax + row)
    scale = tl.div_rn(largest, LARGEST * 1.0)
    scale = tl.where(scale < SMALLEST_NORMAL, 1.0, scale)
    scaled = tl.div_rn(values, scale)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if IS_INTEGER:
        # The lowest byte of the sum's mantissa is the code in two's complement.
        rounded = (scaled + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        # Round here, so that the cast has nothing to round. E4M3 has 3 bits of fraction, and steps
        # of 2^-9 below 2^-6.
        bits = scaled.to(tl.int32, bitcast=True)
        power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        shift = tl.maximum(power, 0.015625) * 0.125 * ROUNDING
        magnitude = (tl.abs(scaled) + shift) - shift
        rounded = (magnitude * tl.where(bits < 0, -1.0, 1.0)).to(tl.float8e4nv)
    tl.store(codes + row * codes_stride + offsets, rounded, mask=inside)
    tl.store(scales + row, scale)


def quantize_channels(
    weight: Tensor, absmax: Tensor | None, codes: Tensor, largest: float
) -> tuple[Tensor, Tensor]:
    """Quantize `weight` into `codes`, with one scale per row.

    Args:
        weight: [out, in], any floating dtype, rows contiguous.
        absmax: [out, 1] float32, of whole rows, not checked for NaN or infinity; None: computed.
        codes: [out, in] int8 or float8_e4m3fn, rows contiguous; written.
        largest: the largest code.

    Returns:
        absmax and scale, [out, 1] float32. A computed absmax is infinity or NaN where the row holds
        either.

    Raises:
        ValueError: rows are longer than LONGEST_ROW, or not contiguous.
    """
    rows, columns = weight.shape
    if columns > LONGEST_ROW or weight.stride(1) != 1 or codes.stride(1) != 1:
        raise ValueError(
            f"rows of {columns} with strides {weight.stride()} and {codes.stride()}; the kernel "
            f"needs contiguous rows of at most {LONGEST_ROW} elements"
        )
    finds_absmax = absmax is None
    if absmax is None:
        absmax = torch.empty(rows, 1, dtype=torch.float32, device=weight.device)
    scale = torch.empty_like(absmax)
    block, warps = launch_size(columns)
    if rows:
        _quantize_row[(rows,)](
            weight,
            absmax.contiguous(),
            codes,
            scale,
            columns,
            weight.stride(0),
            codes.stride(0),
            LARGEST=largest,
            FINDS_ABSMAX=finds_absmax,
            IS_INTEGER=codes.dtype == torch.int8,
            BLOCK=block,
            num_warps=warps,
        )
    return absmax, scale


def launch_size(columns: int) -> tuple[int, int]:
    """Return the elements and the warps of a program, for rows of `columns` elements."""
    block = triton.next_power_of_2(columns)
    return block, min(32, max(4, block // 1024))
