"""Mixture-of-experts layers on INT8 or FP8 codes, whose weights can be loaded any number of times.

SGLang fuses the experts of a layer that one rank holds into two parameters, gate and up behind each
other in the first:

    w13_weight   [experts, 2 * intermediate, hidden]   codes
    w2_weight    [experts, hidden, intermediate]       codes

Each has scales: `_scale` [experts, out, 1] float32, one per output channel, or `_scale_inv`
[experts, ceil(out / 128), ceil(in / 128)] float32, one per block of 128 x 128 codes. SGLang's own
loader writes the tensors of each expert into its place. As in `linear.py`, no parameter is ever
replaced, and activations are quantized per token, before gate and up and again before down:

    out = sum over a token's experts of its routing weight * down(silu(gate(x)) * up(x))

On a GPU, SGLang's fused Triton kernels compute this, with the codes and scales as they are held.
They take any widths with scales per channel. With blocks, hidden and intermediate channels of a
rank must be multiples of 128. On a CPU, the experts that have tokens are computed one after
another, by the linear layers' products, and summed in float32.

The router is not quantized. An unquantized layer of experts is computed on a CPU by the same loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe import MoeRunner, MoeRunnerBackend, MoeRunnerConfig
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoeWeightScaleSupported
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import set_weight_attrs
from torch import Tensor
from torch.nn.functional import silu

from qurl_megatron.sglang_plugin.linear import BLOCK, QuantizedLinearMethod, multiply_unquantized

Multiply = Callable[[Tensor, str, int], Tensor]
"""(x [tokens, in], "w13" or "w2", expert of this rank) -> [tokens, out], in the dtype of x."""


class QuantizedExpertsMethod(FusedMoEMethodBase):
    """The parameters and the arithmetic of a layer's experts, in the format of a linear method."""

    def __init__(self, linear: QuantizedLinearMethod) -> None:
        self.linear = linear
        self.quant_config = linear.quant_config
        self.has_blocks = hasattr(linear.quant_config, "weight_block_size")
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
            ValueError: a block would belong to gate and up, or to two ranks.
        """
        if self.has_blocks and intermediate_size_per_partition % BLOCK:
            raise ValueError(
                f"qurl_fp8_block: a rank has {intermediate_size_per_partition} channels of each "
                f"expert, which is no multiple of {BLOCK}, so a block would belong to two tensors; "
                "divide experts over ranks (expert parallel), or use format fp8"
            )
        supported = FusedMoeWeightScaleSupported
        kind = (supported.BLOCK if self.has_blocks else supported.CHANNEL).value
        for prefix, rows, columns in (
            ("w13", 2 * intermediate_size_per_partition, hidden_size),
            ("w2", hidden_size, intermediate_size_per_partition),
        ):
            codes = torch.zeros(num_experts, rows, columns, dtype=self.linear.code_dtype)
            scales = (-(-rows // BLOCK), -(-columns // BLOCK)) if self.has_blocks else (rows, 1)
            for suffix, values in (
                ("weight", codes),
                (self.scale_suffix, torch.ones(num_experts, *scales, dtype=torch.float32)),
            ):
                parameter = torch.nn.Parameter(values, requires_grad=False)
                # SGLang's loader reads from a scale's `quant_method` how it is divided over ranks.
                set_weight_attrs(parameter, {"weight_loader": weight_loader, "quant_method": kind})
                layer.register_parameter(f"{prefix}_{suffix}", parameter)

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: MoeRunnerConfig) -> None:
        """Choose SGLang's Triton kernels for a GPU."""
        self.runner = MoeRunner(MoeRunnerBackend.TRITON, moe_runner_config)

    def get_triton_quant_info(self, layer: Any) -> TritonMoeQuantInfo:
        """Describe the parameters to SGLang's Triton kernels."""
        return TritonMoeQuantInfo(
            w13_weight=layer.w13_weight,
            w2_weight=layer.w2_weight,
            w13_scale=getattr(layer, f"w13_{self.scale_suffix}"),
            w2_scale=getattr(layer, f"w2_{self.scale_suffix}"),
            use_int8_w8a8=self.linear.code_dtype == torch.int8,
            use_fp8_w8a8=self.linear.code_dtype == torch.float8_e4m3fn,
            per_channel_quant=not self.has_blocks,
            block_shape=[BLOCK, BLOCK] if self.has_blocks else None,
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

    SGLang's own loop takes a token of another rank's expert for an error, and multiplies in
    bfloat16.
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
    """Compute the experts that have tokens, one after another.

    An expert's number is -1 where another rank holds it.
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
