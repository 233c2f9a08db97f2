"""Quantised weights (QuRL Eq. 2): codes and scales, one scale an output channel.

    weight ~ codes * scale        scale = absmax(row) / largest code

    format   codes                           largest code   codes from weight / scale by
    int8     torch.int8, symmetric           127            round half to even
    fp8      torch.float8_e4m3fn (E4M3)      448            saturating round to nearest even

Rules that make codes a pure function of a weight and its row's absmax, so that a tensor-parallel
shard quantised with the absmax of the whole row holds byte for byte the slice of the whole tensor's
codes:

- The weight is the value the learner computes with (BF16, when it trains in BF16), upcast to
  float32.
- `scale` is a float32 division, and the codes come from dividing the weight by that rounded
  `scale`. The engine multiplies by the same `scale`, so this rounds to the code nearest in what
  the engine sees; and 127 / absmax, the factor that would make it a multiplication, overflows for
  tiny rows.
- A row whose scale would be below float32's smallest normal number (absmax under 1.5e-36 for int8;
  a row of zeros is the common case) gets scale 1 and codes 0: subnormal scales lose their digits
  here and are flushed to zero on some devices.
- NaN or infinity in a weight is refused, where the absmax is taken.

Everything goes over the rows in chunks of 4 MiB of float32 (one row where that is more), so that
quantising never holds a second, full-precision copy of a tensor; larger chunks are not faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1024 * 1024  # converted to float32 at once

_FORMATS: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}


class NonFiniteWeight(ValueError):
    """A weight to be quantised holds NaN or infinity."""


class QuantisedTensor(NamedTuple):
    """`codes` `[out, in]` int8 or float8_e4m3fn; `scale` `[out, 1]` float32, never 0."""

    codes: Tensor
    scale: Tensor


def row_absmax(weight: Tensor) -> Tensor:
    """Largest magnitude of each output channel: `weight` `[out, in]` -> `[out, 1]` float32.

    Over tensor-parallel shards of a row, take the maximum of theirs. Raises NonFiniteWeight,
    naming the first such row.
    """
    low, high = torch.aminmax(weight, dim=1, keepdim=True)  # unlike abs(), without a copy
    absmax = torch.maximum(-low, high).float()
    _refuse_non_finite(absmax)
    return absmax


def quantise(weight: Tensor, weight_format: str, absmax: Tensor | None = None) -> QuantisedTensor:
    """Codes and scales of `weight` `[out, in]`, any floating dtype (QuRL Eq. 2; rules above).

    `absmax` `[out, 1]` float32 is that of the whole row where `weight` is only a part of it; left
    out, the weight's own is taken. Raises ValueError for an unknown format or an `absmax` of
    another shape, NonFiniteWeight for NaN or infinity.
    """
    if weight_format not in _FORMATS:
        raise ValueError(
            f"unknown weight format {weight_format!r}; valid are {', '.join(_FORMATS)}"
        )
    dtype, largest = _FORMATS[weight_format]
    if absmax is None:
        absmax = row_absmax(weight)
    if absmax.shape != (weight.shape[0], 1) or absmax.dtype != torch.float32:
        raise ValueError(
            f"absmax is {absmax.dtype} {list(absmax.shape)}; a weight of {list(weight.shape)} "
            f"wants torch.float32 {[weight.shape[0], 1]}"
        )
    _refuse_non_finite(absmax)

    scale = absmax / largest
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1.0)
    codes = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    for rows in _row_chunks(weight):
        scaled = weight[rows].float() / scale[rows]  # not div_: .float() of float32 is no copy
        # The clamp saturates: absmax / scale can round to a hair above the largest code.
        scaled.clamp_(-largest, largest)
        codes[rows] = scaled.round_().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
    return QuantisedTensor(codes, scale)


def dequantise(quantised: QuantisedTensor) -> Tensor:
    """What the engine computes with: `codes * scale`, `[out, in]` float32, a full copy."""
    return quantised.codes.float() * quantised.scale


def quantisation_error_squares(weight: Tensor, quantised: QuantisedTensor) -> tuple[Tensor, Tensor]:
    """`(sum((Q(w) - w)^2), sum(w^2))`, scalars float64: the two sums of QuRL Eq. 14.

    They add up over tensors and shards; the metric is their quotient.
    """
    error_square_sum = torch.zeros((), dtype=torch.float64, device=weight.device)
    weight_square_sum = torch.zeros_like(error_square_sum)
    for rows in _row_chunks(weight):
        exact = weight[rows].float()
        error = dequantise(QuantisedTensor(quantised.codes[rows], quantised.scale[rows])) - exact
        error_square_sum += error.square_().sum(dtype=torch.float64)
        weight_square_sum += exact.square().sum(dtype=torch.float64)
    return error_square_sum, weight_square_sum


def code_flips(old_codes: Tensor, new_codes: Tensor) -> int:
    """How many codes of a tensor differ in their byte between two publishes."""
    return int(torch.count_nonzero(old_codes.view(torch.uint8) != new_codes.view(torch.uint8)))


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        yield slice(start, start + rows)


def _refuse_non_finite(absmax: Tensor) -> None:
    finite = absmax.isfinite()
    if not finite.all():
        row = int(torch.nonzero(~finite.flatten())[0])
        raise NonFiniteWeight(f"row {row} of the weight holds NaN or infinity")
