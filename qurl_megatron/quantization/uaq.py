"""Update-Aware Quantization (QuRL Eq. 11 and 12): invariant scaling of the layers a norm feeds.

    W x = (W / s)(s x)

The linear layers fed by a norm (q, k, v, gate, up) are divided by s, and the norm's weight, which
makes their input x, is multiplied by s. The model computes what it did before; the gradient of
W / s, being (dL/dy)(s x)^T, grows s-fold.

Biases stay as they are: in `W x + b` only the product is rewritten, and the product has not
changed. The same goes for Qwen3's q_norm and k_norm, which act on that product.

The two linear layers that no norm feeds can be reached through those that feed them, and are not
by default, because what they gain those lose:

- `through_value`: o_proj is divided by s, and v_proj, bias included, multiplied by s: attention is
  linear in its values. With the division above, v_proj is left where it was.
- `through_up`: down_proj is divided by s, and up_proj multiplied by s: the gated product is linear
  in up's half, not in gate's. up_proj is left where it was.

What it does and does not do. With absmax scales the codes of W / s are those of W and the scales
are 1/s of them, so Eq. 14's relative error is the same as before. What changes is the update: an
optimizer step of the same size moves W / s across s times as many code boundaries (Eq. 12), and
Eq. 13 grows by s^2.

W / 1.5 is not a BF16 number even where W is: scaling happens once, at load, on FP32 masters.
A BF16 learner computes with the rounding of that: of a Gaussian matrix, 5 % of the INT8 codes then
differ from those of W in BF16, by one step (2 % of the FP8 codes), and none where both are FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qurl_megatron.config.schema import UaqConfig
from qurl_megatron.model import weight_map

_NORMS = {rule.fed_by for rule in weight_map.RULES if rule.fed_by}

Transform = Callable[[str, Tensor], Tensor]


def transform(config: UaqConfig) -> Transform:
    """`f(name, weight) -> weight` that applies Eq. 11 to a Hugging Face parameter.

    `name` is transformers' (`model.layers.0.self_attn.q_proj.weight`), `weight` any shape,
    float32; parameters that are left alone are returned as they are, of any dtype. Raises
    ValueError for a scale that is not a positive finite number, and for a parameter to be scaled
    that is not float32.
    """
    return _scaling(config, direction=1)


def inverse(config: UaqConfig) -> Transform:
    """The undoing of `transform(config)`: exact for powers of two, within a rounding otherwise."""
    return _scaling(config, direction=-1)


def _scaling(config: UaqConfig, direction: int) -> Transform:
    for scale in (config.scale, *config.layer_scales.values()):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"UAQ scale is {scale}; it must be a positive finite number")

    def apply(name: str, weight: Tensor) -> Tensor:
        power = direction * _power(name, config)
        if power == 0:
            return weight
        if weight.dtype != torch.float32:
            raise ValueError(f"UAQ scales float32 weights; {name} is {weight.dtype}: cast it first")
        _, layer = weight_map.find_hugging_face(name)
        scale = config.scale if layer is None else config.layer_scales.get(layer, config.scale)
        return weight * scale if power > 0 else weight / scale

    return apply


def _power(name: str, config: UaqConfig) -> int:
    """The power of s that the parameter is multiplied by: -1, 0 or 1."""
    rule, layer = weight_map.find_hugging_face(name)
    module = name.split(".")[-2]
    is_weight = name.endswith(".weight")
    power = -1 if rule.norm_fed and is_weight else 0
    if layer is not None and name in {norm.format(layer=layer) for norm in _NORMS}:
        power = 1
    for enabled, feeding, fed in (
        (config.through_value, "v_proj", "o_proj"),
        (config.through_up, "up_proj", "down_proj"),
    ):
        power += enabled * ((module == feeding) - (module == fed))
    return power
