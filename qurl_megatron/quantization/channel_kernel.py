"""Quantizing by output channel on a GPU in one pass over the weight, as a Triton kernel.

A program takes one row, holds it in registers, finds its absmax (unless that of a longer row is
given) and writes codes and scale: each weight is read once and each code written once. The codes
are `quantize.quantize`'s, byte for byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST_ROW = 65536  # elements a program can hold
# Adding it pushes a float32's fraction out of its mantissa, which rounds halves to even.
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
        # As integers, magnitudes are ordered as numbers are, with infinity and NaN above them all.
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
        # The fraction that is left is the code in two's complement, in its lowest byte.
        rounded = (scaled + ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        # Rounded here, so that the cast has nothing left to round: E4M3 has 3 bits of fraction, and
        # steps of 2^-9 below 2^-6.
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
    """Write the codes of `weight` [out, in] into `codes`, int8 or float8_e4m3fn of the same shape.

    Args:
        absmax: [out, 1] float32 of whole rows, or None to find it; not checked for NaN or infinity.
        largest: the largest code.

    Returns:
        absmax, infinite or NaN where a row holds NaN or infinity, and scale; [out, 1] float32.
    """
    rows, columns = weight.shape
    if columns > LONGEST_ROW or weight.stride(1) != 1 or codes.stride(1) != 1:
        raise ValueError(
            f"rows of {columns} with strides {weight.stride()} and {codes.stride()}; the kernel "
            f"wants at most {LONGEST_ROW} elements next to each other"
        )
    finds_absmax = absmax is None
    if absmax is None:
        absmax = torch.empty(rows, 1, dtype=torch.float32, device=weight.device)
    scale = torch.empty_like(absmax)
    block, warps = launch(columns)
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


def launch(columns: int) -> tuple[int, int]:
    """Elements a program has room for, and its warps, when rows have so many columns."""
    block = triton.next_power_of_2(columns)
    return block, min(32, max(4, block // 1024))
