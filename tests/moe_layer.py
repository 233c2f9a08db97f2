"""A layer of random experts, and SGLang's fused kernels computing it in Triton's interpreter."""

from typing import Any

import torch
from sglang.srt.layers.moe import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from torch import Tensor
from torch.nn.functional import silu

from qurl_megatron.quantization.activations import quantize_tokens
from qurl_megatron.quantization.products import forget
from qurl_megatron.quantization.quantize import dequantize, engine_scale, quantize
from qurl_megatron.sglang_plugin.formats import (
    Fp8BlockConfig,
    Fp8Config,
    Int4Group32Config,
    Int8Config,
    QuantizedExpertsMethod,
    QurlConfig,
)

EXPERTS, HIDDEN, INTERMEDIATE = 3, 256, 128
CONFIGS: dict[str, type[QurlConfig]] = {
    "int8": Int8Config,
    "int4-g32": Int4Group32Config,
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
    sizes = {"hidden_size": HIDDEN, "intermediate_size_per_partition": INTERMEDIATE}
    experts = {"num_experts": 2 * EXPERTS, "num_local_experts": EXPERTS, "top_k": 2}
    method.create_moe_runner(layer, MoeRunnerConfig(**sizes, **experts, inplace=False))
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
            value = dequantize(weight)
            values[-1].append(value.bfloat16().float() if weight_format == "int4-g32" else value)
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


def rounded_as_by_kernels(
    layer: Any, method: QuantizedExpertsMethod, dispatched: StandardDispatchOutput
) -> Tensor:
    """Return the layer's output `[tokens, hidden]`, rounded to bfloat16 where the kernels round.

    They round gate and up, then SiLU, then its product with up, and each expert's part after it has
    been multiplied by its routing weight. The CPU's loop rounds SiLU only in its product.
    """
    forget()  # what is kept of weights: scales have changed
    x, (weights, experts, _) = dispatched.hidden_states, dispatched.topk_output
    parts = torch.zeros(*experts.shape, HIDDEN, dtype=torch.bfloat16)

    def multiply(x: Tensor, prefix: str, expert: int) -> Tensor:
        codes = getattr(layer, f"{prefix}_weight")[expert]
        scale = getattr(layer, f"{prefix}_{method.scale_suffix}")[expert]
        return method.linear.multiply_cpu(x.float(), codes, scale, None)

    for expert in range(EXPERTS):
        tokens, choice = torch.where(experts == expert)
        if len(tokens):
            gate, up = multiply(x[tokens], "w13", expert).bfloat16().chunk(2, dim=-1)
            down = multiply(silu(gate) * up, "w2", expert)
            parts[tokens, choice] = (down * weights[tokens, choice, None]).bfloat16()
    return parts.float().sum(1).bfloat16()


def compare_kernels() -> None:
    """Print how far SGLang's fused kernels are from the CPU, and how far they would be if it erred.

    A line for each format has the relative error, then that of a CPU for which one scale of the
    first expert is doubled: of a channel, of a block, or of its groups.

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
        info = method.get_triton_quant_info(layer)
        out = method.runner.run(dispatched, info).hidden_states.float()
        expected = rounded_as_by_kernels(layer, method, dispatched).float()
        getattr(layer, f"w2_{method.scale_suffix}").data[0, 0] *= 2
        spoilt = rounded_as_by_kernels(layer, method, dispatched).float()
        errors = [((out - each).norm() / expected.norm()).item() for each in (expected, spoilt)]
        print("relative error", weight_format, *errors)


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
