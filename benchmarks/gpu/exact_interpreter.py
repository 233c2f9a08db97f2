"""Make Triton's interpreter compute what a GPU computes.

Its multiply-add rounds twice, its casts to FP8 and BF16 do not round to even, its sums of integers
are wider than their type, and its products of matrices take the bits of BF16 for integers.
`install` replaces these.
"""

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def fused_multiply_add(
    x: NDArray[np.float32], y: NDArray[np.float32], z: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return x * y + z, rounded once to the nearest float32, halves to even.

    A product of two float32 is exact in float64. The sum is rounded to odd in float64, which makes
    the last rounding to float32 right.
    """
    product = x.astype(np.float64) * y.astype(np.float64)
    exact = z.astype(np.float64)
    total = product + exact
    with np.errstate(invalid="ignore"):  # infinities have no rest
        part = total - exact
        rest = (product - part) + (exact - (total - part))  # what the sum lost
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    lost = np.isfinite(total) & (rest != 0) & is_even
    return np.where(lost, odd, total).astype(np.float32)


def install() -> None:
    """Replace these operations, if Triton interprets kernels in this process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

    own_cast = InterpreterBuilder.create_fp_to_fp
    own_truncation = InterpreterBuilder.create_fp_trunc
    own_dot = InterpreterBuilder.create_dot

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle(fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.scalar != tl.float8e4nv or source.data.dtype != np.float32:
            return own_cast(self, source, target, rounding)
        values = torch.from_numpy(source.data.copy())
        codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return TensorHandle(codes, target.scalar)

    def create_fp_trunc(self: Any, source: Any, target: Any) -> Any:
        if target.scalar != tl.bfloat16 or source.data.dtype != np.float32:
            return own_truncation(self, source, target)
        values = torch.from_numpy(source.data.copy()).bfloat16()
        return TensorHandle(values.view(torch.uint16).numpy(), target.scalar)

    def create_dot(self: Any, x: Any, y: Any, z: Any, *settings: Any) -> Any:
        x, y = (
            TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            if factor.dtype.scalar == tl.bfloat16
            else factor
            for factor in (x, y)
        )
        return own_dot(self, x, y, z, *settings)

    def sum_in_type(self: Any, values: Any) -> Any:
        data = values.handle.data
        total = np.sum(data, axis=self.axis, keepdims=self.keep_dims, dtype=data.dtype)
        return self.to_tensor(total, values.dtype)

    InterpreterBuilder.create_fma = create_fma
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_fp_trunc = create_fp_trunc
    InterpreterBuilder.create_dot = create_dot
    ReduceOps.sum = sum_in_type
