"""Update-Aware Quantization (QuRL Eq. 11 and 12): invariant scaling of the layers a norm feeds.

    W x = (W / s)(s x)

The linear layers fed by a norm (q, k, v, gate, up) are divided by s, and the norm's weight, which
makes their input x, is multiplied by s. The model computes what it did before; the gradient of
W / s, being (dL/dy)(s x)^T, grows s-fold.

Biases stay as they are: in `W x + b` only the product is rewritten, and the product has not
changed. The same goes for Qwen3's q_norm and k_norm, which act on that product.

What it does and does not do. With one scale a row from absmax, the codes of W / s are those of W
and the scales are 1/s of them, so Eq. 14's relative error is the same as before. What changes is
the update: an optimizer step of the same size moves W / s across s times as many code boundaries
(Eq. 12).

W / 1.5 is not a BF16 number even where W is: scaling happens once, at load, on FP32 masters.
A BF16 learner computes with the rounding of that: of a Gaussian matrix, 5 % of the INT8 codes then
differ from those of W in BF16, by one step (2 % of the FP8 codes), and none where both are FP32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import Tensor

_LINEAR = re.compile(r"\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.weight$")
_NORM = re.compile(r"\.(input_layernorm|post_attention_layernorm)\.weight$")

Transform = Callable[[str, Tensor], Tensor]


def transform(scale: float) -> Transform:
    """`f(name, weight) -> weight` that applies Eq. 11 with s = `scale` to a Hugging Face parameter.

    `name` is transformers' (`model.layers.0.self_attn.q_proj.weight`), `weight` any shape,
    float32; parameters that Eq. 11 leaves alone are returned as they are, of any dtype. Raises
    ValueError for a scale that is not a positive finite number, and for a parameter to be scaled
    that is not float32.
    """
    _check(scale)
    return _rule(linear=lambda weight: weight / scale, norm=lambda weight: weight * scale)


def inverse(scale: float) -> Transform:
    """The undoing of `transform(scale)`: exact for powers of two, within a rounding otherwise."""
    _check(scale)
    return _rule(linear=lambda weight: weight * scale, norm=lambda weight: weight / scale)


def _rule(linear: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor]) -> Transform:
    def apply(name: str, weight: Tensor) -> Tensor:
        change = linear if _LINEAR.search(name) else norm if _NORM.search(name) else None
        if change is None:
            return weight
        if weight.dtype != torch.float32:
            raise ValueError(f"UAQ scales float32 weights; {name} is {weight.dtype}: cast it first")
        return change(weight)

    return apply


def _check(scale: float) -> None:
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"UAQ scale is {scale}; it must be a positive finite number")
