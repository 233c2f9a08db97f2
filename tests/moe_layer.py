"""A layer of random experts, and SGLang's fused kernels computing it in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from torch import Tensor

from qurl_megatron.quantization.quantize import dequantize, engine_scale, quantize
from qurl_megatron.sglang_plugin.formats import Fp8BlockConfig, Fp8Config, Int8Config, QurlConfig
from qurl_megatron.sglang_plugin.linear import quantize_tokens
from qurl_megatron.sglang_plugin.moe import QuantizedExpertsMethod

EXPERTS, HIDDEN, INTERMEDIATE = 5, 256, 128
CONFIGS: dict[str, type[QurlConfig]] = {
    "int8": Int8Config,
    "fp8": Fp8Config,
    "fp8-block": Fp8BlockConfig,
}


def build_layer(weight_format: str) -> tuple[Any, QuantizedExpertsMethod, list[list[Tensor]]]:
    """Return a layer of experts, its method, and the values of each expert's two matrices."""
    generator = torch.Generator().manual_seed(0)
    config = CONFIGS[weight_format]()
    method, layer = QuantizedExpertsMethod(config.linear_method(config)), torch.nn.Module()
    method.create_weights(
        layer, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16, weight_loader=lambda *_: None
    )
    values: list[list[Tensor]] = []
    for expert in range(EXPERTS):
        values.append([])
        for prefix, shape in (
            ("w13", (2 * INTERMEDIATE, HIDDEN)),
            ("w2", (HIDDEN, INTERMEDIATE)),
        ):
            weight = quantize(torch.randn(shape, generator=generator) * 0.1, weight_format)
            getattr(layer, f"{prefix}_weight").data[expert] = weight.codes
            scale = getattr(layer, f"{prefix}_{method.scale_suffix}")
            scale.data[expert] = engine_scale(weight)
            values[-1].append(dequantize(weight))
    return layer, method, values


def routed() -> StandardDispatchOutput:
    """Return activations of seven tokens and two experts of each; -1 is one of another rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(7, EXPERTS, generator=generator)
    scores[:, 1] = 0  # an expert without tokens
    routing_weights, experts = scores.topk(2)
    experts[2, 0] = experts[4, 0] = experts[4, 1] = -1
    return StandardDispatchOutput(
        x, None, StandardTopKOutput(routing_weights, experts.int(), scores)
    )


def compare_kernels() -> None:
    """Print, for each format, how far SGLang's fused kernels are from the CPU's loop.

    The kernels run in Triton's interpreter, with the tile sizes that SGLang chooses for an H100.
    Sorting tokens by expert and quantizing activations are CUDA extensions; plain torch stands for
    them here.
    """
    from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config

    patched: Any = fused_moe_triton_config
    patched.get_device_name = lambda: "NVIDIA H100 80GB HBM3"
    patched = kernels
    patched.per_token_quant_int8 = lambda x: _codes(x, torch.int8, x.shape[1])
    patched.scaled_fp8_quant = lambda x, scale, use_per_token_if_dynamic: _codes(
        x, torch.float8_e4m3fn, x.shape[1]
    )
    patched.per_token_group_quant_fp8 = lambda x, group: _codes(x, torch.float8_e4m3fn, group)
    patched = fused_moe
    patched.moe_align_block_size = _align
    operator = torch.ops.sglang.outplace_fused_experts.default
    names = [argument.name for argument in operator._schema.arguments]
    patched.outplace_fused_experts = lambda *given, **named: fused_moe.fused_experts_impl(
        inplace=False, **dict(zip(names, given, strict=False)), **named
    )
    dispatched = routed()
    for weight_format in CONFIGS:
        layer, method, _ = build_layer(weight_format)
        method.create_moe_runner(
            layer,
            MoeRunnerConfig(
                num_experts=2 * EXPERTS,
                num_local_experts=EXPERTS,
                hidden_size=HIDDEN,
                intermediate_size_per_partition=INTERMEDIATE,
                top_k=2,
                inplace=False,
            ),
        )
        expected = method.apply(layer, dispatched).hidden_states.float()
        info = method.get_triton_quant_info(layer)
        out = method.runner.run(dispatched, info).hidden_states.float()
        print("relative error", weight_format, ((out - expected).norm() / expected.norm()).item())


def _codes(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Return the codes of activations, and a scale for each token and `group` of channels."""
    codes, scale = quantize_tokens(x.reshape(-1, group), dtype)
    return codes.to(dtype).view(x.shape), scale.view(len(x), -1)


def _align(chosen: Tensor, block: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs of token and expert by expert, each padded to whole blocks, as SGLang does."""
    pairs, experts = chosen.flatten().tolist(), []
    order: list[int] = []
    for expert in range(-1, num_experts):
        own = [number for number, each in enumerate(pairs) if each == expert]
        own += [len(pairs)] * (-len(own) % block)
        order += own
        experts += [expert] * (len(own) // block)
    as_tensor = [torch.tensor(values, dtype=torch.int32) for values in (order, experts)]
    return as_tensor[0], as_tensor[1], torch.tensor([len(order)], dtype=torch.int32)


def main() -> None:
    """Set up what SGLang needs, and compare."""
    import tempfile
    from pathlib import Path

    import sglang_loader
    from tiny import build_tiny_model

    with tempfile.TemporaryDirectory() as directory:
        with sglang_loader.engine(build_tiny_model(Path(directory))):
            compare_kernels()
