"""Matrix products of a server without a GPU: their instructions, and copies of weights for them.

A processor with AMX or VNNI multiplies INT8 codes as INT8; one with AMX or AVX512-BF16 multiplies
bfloat16 values as bfloat16. Others are fastest in float32. For each shape, the candidates are
checked and timed once on this machine. All of them sum INT8 codes exactly, so the choice does not
change a result.

Some products need the weight in another form, which is kept until weights change (`forget`).

On a GPU, where `qurl mismatch` computes what a CPU server would, all products are in float32, and
nothing is kept: the GPU's memory would not hold it.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(codes' values [tokens, in] float32, weight [out, in] int8, scales [out, 1]) -> [tokens, out].

The sums are exact and then, as float32, multiplied by the scale of the output channel.
"""

# A product of two INT8 codes is at most 127 * 127, so float32 sums 1040 of them exactly.
EXACT_TERMS = 1024

TIMED_TOKENS = 16
TIMED_WEIGHTS = 1 << 22  # more than a core's cache holds

# By address: a weight, held so that its address is not reused, and what is kept of it.
_kept: dict[int, tuple[Tensor, Tensor]] = {}


def kept(weight: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `make(weight)`, which is made at the first call after weights have changed.

    On a GPU it is made at every call.
    """
    if weight.is_cuda:
        return make(weight)
    entry = _kept.get(weight.data_ptr())
    if entry is None:
        entry = _kept[weight.data_ptr()] = weight, make(weight)
    return entry[1]


def forget() -> None:
    """Drop all copies: weights have changed, or are about to leave the memory."""
    _kept.clear()


def in_float32(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply INT8 codes in float32, as many terms at once as it sums exactly."""
    weight = kept(weight, Tensor.float)
    if codes.shape[1] <= EXACT_TERMS:
        return (codes @ weight.t()).mul_(scale.t())
    parts = zip(codes.split(EXACT_TERMS, dim=1), weight.split(EXACT_TERMS, dim=1), strict=True)
    sums = torch.stack([a @ b.t() for a, b in parts]).to(torch.int32).sum(dim=0)
    return sums.float().mul_(scale.t())


def in_int8(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply INT8 codes as they are."""
    return torch._int_mm(codes.to(torch.int8), weight.t()) * scale.t()


def packed_int8(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply INT8 codes by a copy of the weight in the order in which oneDNN reads it."""
    packed, scales = kept(weight, _pack), scale.flatten()
    of_weight = packed, scales, _zeros(len(scales)), None
    return torch.ops.onednn.qlinear_pointwise.default(
        codes.to(torch.int8), 1.0, 0, *of_weight, 1.0, 0, torch.float32, "none", [], ""
    )


def _pack(weight: Tensor) -> Tensor:
    """Return INT8 codes in the order in which oneDNN reads them."""
    return torch.ops.onednn.qlinear_prepack(weight, None)


@functools.cache
def _zeros(rows: int) -> Tensor:
    """Return the zero points of output channels."""
    return torch.zeros(rows, dtype=torch.int64)


@functools.cache
def int8_product(rows: int, columns: int) -> Product:
    """Return the fastest exact product of weights [rows, columns] on this machine."""
    generator = torch.Generator().manual_seed(0)
    shapes = (TIMED_TOKENS, columns), (min(rows, TIMED_WEIGHTS // columns), columns)
    codes, weight = (
        torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8) for shape in shapes
    )
    codes[0], weight[0] = 127, 127  # the largest codes, whose sums 16 bits do not hold
    scale = torch.rand(len(weight), 1, generator=generator)
    factors = codes.float(), weight, scale
    expected = (codes.double() @ weight.double().t()).float() * scale.t()

    def seconds(product: Product) -> float:
        is_exact = torch.equal(product(*factors), expected)
        duration = _seconds(lambda: product(*factors)) if is_exact else math.inf
        _kept.pop(weight.data_ptr(), None)
        # Here a cache holds the weight. From memory the packed copy was read twice as fast.
        return duration * (1.5 if product is in_int8 else 1)

    return min((in_float32, in_int8, packed_int8), key=seconds)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether bfloat16 products are faster than float32 products on this machine."""
    x, weight = torch.ones(TIMED_TOKENS, 1024), torch.ones(1024, 1024)
    rounded = x.bfloat16(), weight.bfloat16()
    return _seconds(lambda: linear(*rounded)) < _seconds(lambda: linear(x, weight))


def _seconds(product: Callable[[], Tensor]) -> float:
    """Return the shortest of ten times that a product takes, after a first one."""
    product()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return min(times)


def sum_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply `x` [tokens, in] by `weight` [out, in]; return float32 sums [tokens, out].

    bfloat16 represents the values of both exactly; they are multiplied as such if that is faster.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if multiplies_bfloat16():
        matmul.fp32_precision = "bf16"  # torch then rounds the factors, which changes nothing here
    try:
        return linear(x.float(), kept(weight, Tensor.float))
    finally:
        matmul.fp32_precision = before


def multiply_unquantized(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply bfloat16 `x` [..., in] by `weight` [out, in]; return [..., out] bfloat16.

    Sums are float32 and rounded once; not at all if `x` is float32. On a CPU without instructions
    for them, bfloat16 products are ten times as slow as float32 products.
    """
    if x.dtype == torch.bfloat16 and multiplies_bfloat16() and not weight.is_cuda:
        return linear(x, weight, bias)
    out = linear(x.float(), kept(weight, Tensor.float))
    return (out if bias is None else out.add_(bias)).to(x.dtype)
