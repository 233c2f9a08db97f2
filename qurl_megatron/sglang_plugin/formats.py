"""The formats in which a server can hold weights, which SGLang chooses by name, and the experts.

A format gives each layer its method: linear layers those of `linear.py`, experts
`QuantizedExpertsMethod`, and all others SGLang's own.

SGLang fuses a rank's experts of a layer into two parameters. The first holds gate and up:

    w13_weight   [experts, 2 * intermediate, hidden]   codes
    w2_weight    [experts, hidden, intermediate]       codes

Each has scales: `_scale` [experts, out, 1] float32, one per output channel, or `_scale_inv`
[experts, ceil(out / 128), ceil(in / 128)] float32, one per block of 128 x 128 codes. INT4 has two
codes a byte, and `_scale` [experts, out, in / group size] bfloat16. SGLang's own loader writes the
tensors of each expert into its place. As in `linear.py`, no parameter is ever replaced. Except for
INT4, activations are quantized per token, before gate and up and again before down:

    out = sum over a token's experts of its routing weight * down(silu(gate(x)) * up(x))

On a GPU, SGLang's fused Triton kernels compute this, with the codes and scales as they are held.
With scales per channel they take any widths. With blocks or groups, a rank's hidden and
intermediate channels must be whole ones. On a CPU, the experts that have tokens are computed one
after another, by the linear layers' products, and summed in float32.

The router is not quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe import MoeRunner, MoeRunnerBackend, MoeRunnerConfig
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE, FusedMoeWeightScaleSupported
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization.base_config import (
    FusedMoEMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.utils import set_weight_attrs
from torch import Tensor
from torch.nn.functional import silu

from qurl_megatron.quantization.activations import BLOCK
from qurl_megatron.quantization.products import multiply_unquantized
from qurl_megatron.sglang_plugin.linear import (
    Fp8BlockLinearMethod,
    Fp8LinearMethod,
    Int4Group32LinearMethod,
    Int4LinearMethod,
    Int8LinearMethod,
    QuantizedLinearMethod,
)

Multiply = Callable[[Tensor, str, int], Tensor]
"""(x [tokens, in], "w13" or "w2", expert of this rank) -> [tokens, out], in the dtype of x."""


class QuantizedExpertsMethod(FusedMoEMethodBase):
    """The parameters and the arithmetic of a layer's experts, in the format of a linear method."""

    def __init__(self, linear: QuantizedLinearMethod) -> None:
        self.linear = linear
        self.quant_config = linear.quant_config
        self.block = linear.block
        self.scale_suffix = linear.scale_name

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Callable[..., None],
        **attributes: Any,
    ) -> None:
        """Register this rank's experts, with codes 0 and scales 1 until weights arrive.

        Raises:
            ValueError: a block would span gate and up, or two ranks.
        """
        height, width = self.block
        if width and intermediate_size_per_partition % width:
            raise ValueError(
                f"{self.linear.quant_config.get_name()}: a rank has "
                f"{intermediate_size_per_partition} channels of each expert, which is not a "
                f"multiple of {width}, so a block would belong to two tensors; divide experts over "
                "ranks (expert parallel), or use a format with one scale per channel"
            )
        supported = FusedMoeWeightScaleSupported
        kind = (supported.BLOCK if width else supported.CHANNEL).value
        for prefix, rows, columns in (
            ("w13", 2 * intermediate_size_per_partition, hidden_size),
            ("w2", hidden_size, intermediate_size_per_partition),
        ):
            codes = self.linear.zero_codes(num_experts, rows, columns)
            scales = -(-rows // height), -(-columns // width) if width else 1
            for suffix, values in (
                ("weight", codes),
                (
                    self.scale_suffix,
                    torch.ones(num_experts, *scales, dtype=self.linear.scale_dtype),
                ),
            ):
                parameter = torch.nn.Parameter(values, requires_grad=False)
                # SGLang's loader reads from a scale's `quant_method` how ranks divide the scale.
                set_weight_attrs(parameter, {"weight_loader": weight_loader, "quant_method": kind})
                layer.register_parameter(f"{prefix}_{suffix}", parameter)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Choose SGLang's Triton kernels, which `apply` uses on a GPU."""
        self.runner = MoeRunner(MoeRunnerBackend.TRITON, moe_runner_config)

    def get_triton_quant_info(self, layer: Any) -> TritonMoeQuantInfo:
        """Describe the parameters to SGLang's Triton kernels."""
        height, width = self.block
        return TritonMoeQuantInfo(
            w13_weight=layer.w13_weight,
            w2_weight=layer.w2_weight,
            w13_scale=getattr(layer, f"w13_{self.scale_suffix}"),
            w2_scale=getattr(layer, f"w2_{self.scale_suffix}"),
            use_int8_w8a8=self.linear.code_dtype == torch.int8,
            use_fp8_w8a8=self.linear.code_dtype == torch.float8_e4m3fn,
            use_int4_w4a16=self.linear.code_dtype == torch.uint8,
            per_channel_quant=width is None,
            # The W4A16 kernel wants 0 for the height of a group, which has one row.
            block_shape=[0 if height == 1 else height, width] if width else None,
        )

    def apply(self, layer: Any, dispatch_output: StandardDispatchOutput) -> Any:
        """Return the sum of each token's experts on this rank, `[tokens, hidden]` bfloat16."""
        if dispatch_output.hidden_states.is_cuda:
            return self.runner.run(dispatch_output, self.get_triton_quant_info(layer))

        def multiply(x: Tensor, prefix: str, expert: int) -> Tensor:
            weight = getattr(layer, f"{prefix}_weight")[expert]
            scale = getattr(layer, f"{prefix}_{self.scale_suffix}")[expert]
            return self.linear.multiply_cpu(x, weight, scale, None)

        return sum_over_experts(dispatch_output, multiply)


def apply_unquantized_experts(
    method: FusedMoEMethodBase, layer: Any, dispatch_output: StandardDispatchOutput
) -> StandardCombineInput:
    """Compute unquantized experts on a CPU, in place of `UnquantizedFusedMoEMethod`.

    SGLang's own loop fails if a token's expert is on another rank, and it multiplies in bfloat16.
    """
    return sum_over_experts(
        dispatch_output,
        lambda x, prefix, expert: multiply_unquantized(
            x, getattr(layer, f"{prefix}_weight")[expert]
        ),
    )


def sum_over_experts(
    dispatch_output: StandardDispatchOutput, multiply: Multiply
) -> StandardCombineInput:
    """Compute the experts that have tokens, one after another; return their sums [tokens, hidden].

    An expert's number is -1 if another rank holds the expert.
    """
    x = dispatch_output.hidden_states
    routing_weights, experts, _ = dispatch_output.topk_output
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if expert < 0:
            continue
        tokens, choice = torch.where(experts == expert)
        gate, up = multiply(x[tokens], "w13", expert).float().chunk(2, dim=-1)
        down = multiply((silu(gate) * up).to(x.dtype), "w2", expert)
        out.index_add_(0, tokens, down.float() * routing_weights[tokens, choice, None])
    return StandardCombineInput(hidden_states=out.to(x.dtype))


_FUSED = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}  # SGLang knows the other fused layers


class QurlConfig(QuantizationConfig):
    """Base class of the quantization configs that SGLang chooses from by name.

    The name is given as `--quantization qurl_int8`, or in a model's config.json as
    `"quantization_config": {"quant_method": "qurl_int8"}`. Its `modules_to_not_convert` lists the
    linear layers that stay in BF16. Its `adapters` has the `rank` and the `alpha` of adapters; all
    linear layers have them, except those of experts.
    """

    name: str
    linear_method: type[QuantizedLinearMethod]
    min_capability: int  # compute capability of the oldest GPU: 75 is 7.5

    def __init__(
        self, kept_layers: Sequence[str] = (), adapters: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self.kept_layers = list(kept_layers)
        self.adapter_rank = int(adapters["rank"]) if adapters else 0
        self.adapter_scaling = adapters["alpha"] / adapters["rank"] if adapters else 0.0

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_min_capability(cls) -> int:
        return cls.min_capability

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QurlConfig:
        return cls(config.get("modules_to_not_convert") or (), config.get("adapters"))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method of a linear layer or of experts; None for embeddings and lm_head."""
        if isinstance(layer, FusedMoE):
            if any(name.startswith(f"{prefix}.") for name in self.kept_layers):
                return None  # `config.keep` keeps all experts of a layer or none
            return QuantizedExpertsMethod(self.linear_method(self))
        if not isinstance(layer, LinearBase):
            return None
        # The projections of beta and decay have two rows a head, and decide what a state keeps.
        if prefix.endswith(".in_proj_ba") or is_layer_skipped(prefix, self.kept_layers, _FUSED):
            return UnquantizedLinearMethod()
        return self.linear_method(self)

    def get_scaled_act_names(self) -> list[str]:
        return []


class Int8Config(QurlConfig):
    """INT8 codes with a scale per output channel."""

    name = "qurl_int8"
    linear_method = Int8LinearMethod
    min_capability = 75


class Int4Config(QurlConfig):
    """INT4 codes with a scale per output channel and group of 128 input channels."""

    name = "qurl_int4"
    linear_method = Int4LinearMethod
    min_capability = 80


class Int4Group32Config(QurlConfig):
    """INT4 codes with a scale per output channel and group of 32 input channels."""

    name = "qurl_int4_g32"
    linear_method = Int4Group32LinearMethod
    min_capability = 80


class Fp8Config(QurlConfig):
    """FP8 codes with a scale per output channel; with `fp8-tensor` all scales are equal."""

    name = "qurl_fp8"
    linear_method = Fp8LinearMethod
    min_capability = 89


class Fp8BlockConfig(QurlConfig):
    """FP8 codes with a scale per block of 128 x 128."""

    name = "qurl_fp8_block"
    linear_method = Fp8BlockLinearMethod
    min_capability = 90
    weight_block_size = (BLOCK, BLOCK)  # SGLang's loaders of fused layers read it


CONFIGS: dict[str, type[QurlConfig]] = {
    config.get_name(): config
    for config in (Int8Config, Int4Config, Int4Group32Config, Fp8Config, Fp8BlockConfig)
}
