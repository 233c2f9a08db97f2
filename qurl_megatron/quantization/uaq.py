"""Update-aware quantization, UAQ (QuRL Eq. 11 and 12): scale weights down, so updates count more.

The problem: one optimizer step changes a weight by far less than the distance between two codes.
Most codes stay the same, and the quantized policy does not follow the learner. UAQ divides weights
by s > 1 once, before training, and multiplies their input by s:

    W x = (W / s)(s x)                                                    QuRL Eq. 11

The rule: the linear layers fed by a norm (q, k, v, gate, up) are divided by s, and the weight of
that norm, which produces their input x, is multiplied by s. The model computes the same function.
In a mixture of experts these are gate and up of every expert, and the router, which reads the same
input. In a hybrid they include the queries, keys, values, z, beta and decay of a linear attention,
and the gate of a shared expert.

A hybrid's norms multiply by 1 + w. Their w becomes (1 + w) s - 1, which float32 rounds by up to
1e-7, and BF16 by 2^-8 where w was near 0, also for a power of two.

Effects:
- The codes of W / s are those of W, and the scales are 1/s of W's, because scales are relative to
  the absmax. So the relative quantization error (Eq. 14) is the same.
- An optimizer step of a given size moves W / s across s times as many code boundaries (Eq. 12), and
  the relative update (Eq. 13) is s^2 times as large. The gradient of W / s, (dL/dy)(s x)^T, is s
  times as large too.

Biases stay as they are: in W x + b only the product is rewritten. Qwen3's q_norm and k_norm stay
as well, because they act on that product.

Two linear layers in a block are not fed by a norm. Two options, off by default, divide them by s
and multiply the layer that feeds them by s, at the expense of that layer:
- `through_value` divides o_proj by s and multiplies v_proj, bias included, by s, because attention
  is linear in its values. Together with the rule above, v_proj keeps its values. The states of a
  linear attention are linear in its values too, but the norm behind them cancels any factor. So
  there the option divides out_proj by s, and multiplies that norm, which has plain weights, by s.
- `through_up` divides down_proj by s and multiplies up_proj by s, because the gated product is
  linear in up (not in gate). Together with the rule above, up_proj keeps its values.

Rounding: W / 1.5 is not a BF16 number even if W is, so weights are scaled once, at load, as FP32
masters. A BF16 learner then computes with W / 1.5 rounded to BF16. For a Gaussian matrix, 5 % of
the INT8 codes then differ by one step from those of W in BF16 (2 % of the FP8 codes), and none if
both are FP32. Scaling by a power of two is exact. A router needs that: where two experts are almost
equally likely, rounding may choose the other one (`config.validate.check_scales`).

Example:

    scale = transform(UaqConfig(scale=2.0), is_hybrid=False)
    scale("model.layers.0.self_attn.q_proj.weight", weight)        # weight / 2
    scale("model.layers.0.input_layernorm.weight", weight)         # weight * 2
    scale("model.layers.0.mlp.down_proj.weight", weight)           # weight
"""

from collections.abc import Callable

from torch import Tensor

from qurl_megatron.config.schema import UaqConfig
from qurl_megatron.model import weight_map

_NORMS = {rule.fed_by for rule in weight_map.RULES if rule.fed_by}

Transform = Callable[[str, Tensor], Tensor]
"""(name in a Hugging Face checkpoint, value) -> new value."""


def transform(config: UaqConfig, *, is_hybrid: bool, direction: int = 1) -> Transform:
    """Return a function that applies QuRL Eq. 11 to one full tensor, or undoes it.

    It takes the tensor's name in the weight map and its value, of any shape. A tensor that UAQ
    scales must be float32; any other is returned as it is. With `direction` -1 it is the inverse.

    Args:
        is_hybrid: whether the norms are those of a hybrid.

    """

    def apply(name: str, weight: Tensor) -> Tensor:
        power = direction * _power(name, config)
        if power == 0:
            return weight
        _, layer = weight_map.find_hugging_face(name)
        scale = config.scale if layer is None else config.layer_scales.get(layer, config.scale)
        if is_hybrid and _is_norm(name, layer):
            return ((1 + weight.double()) * scale**power - 1).float()
        return weight * scale if power > 0 else weight / scale

    return apply


def inverse(config: UaqConfig, *, is_hybrid: bool) -> Transform:
    """Return the inverse of `transform`: exact for powers of two, else up to rounding.

    A hybrid's norms are always rounded.
    """
    return transform(config, is_hybrid=is_hybrid, direction=-1)


def _is_norm(name: str, layer: int | None) -> bool:
    """Return whether a tensor is a norm that UAQ scales."""
    return layer is not None and name in {norm.format(layer=layer) for norm in _NORMS}


def _power(name: str, config: UaqConfig) -> int:
    """Return the power of s that the parameter is multiplied by: -1, 0 or 1."""
    rule, layer = weight_map.find_hugging_face(name)
    module = name.rpartition(".")[0]
    is_weight = name.endswith(".weight")
    power = -1 if rule.fed_by and is_weight else 0
    if _is_norm(name, layer):
        power = 1
    for enabled, feeding, fed in (
        (config.through_value, ".v_proj", ".o_proj"),
        (config.through_value, ".linear_attn.norm", ".linear_attn.out_proj"),
        (config.through_up, ".up_proj", ".down_proj"),
    ):
        power += enabled * (module.endswith(feeding) - module.endswith(fed))
    return power
