"""The server's quantized layers compute the same on a GPU and on the CPU."""

from typing import Any

import pytest
import torch

from qurl_megatron.quantization.quantize import engine_scale, quantize
from qurl_megatron.sglang_plugin.formats import (
    Fp8BlockConfig,
    Fp8Config,
    Int4Group32Config,
    Int8Config,
    QurlConfig,
)

TOLERANCES = {"int8": 3e-3, "int4-g32": 3e-3, "fp8": 5e-3, "fp8-block": 7e-3}
FORMATS = {
    "int8": Int8Config,
    "int4-g32": Int4Group32Config,
    "fp8": Fp8Config,
    "fp8-block": Fp8BlockConfig,
}


def build_layer(weight: torch.Tensor, weight_format: str, device: str) -> Any:
    quantized = quantize(weight, weight_format)
    layer = torch.nn.Module()
    name = "weight_scale_inv" if weight_format == "fp8-block" else "weight_scale"
    for parameter, values in (("weight", quantized.codes), (name, engine_scale(quantized))):
        layer.register_parameter(
            parameter, torch.nn.Parameter(values.to(device), requires_grad=False)
        )
    return layer


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize(("out_size", "in_size"), [(128, 128), (384, 256), (1024, 4096)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gpu_products_are_those_of_the_cpu(
    weight_format: str, tokens: int, out_size: int, in_size: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_size, in_size, generator=generator).bfloat16()
    x = torch.randn(tokens, in_size, generator=generator).bfloat16()
    bias = torch.randn(out_size, generator=generator).bfloat16() if with_bias else None
    config: QurlConfig = FORMATS[weight_format]()
    method = config.linear_method(config)
    expected, actual = (
        method.apply(
            build_layer(weight, weight_format, device),
            x.to(device),
            None if bias is None else bias.to(device),
        )
        for device in ("cpu", "cuda")
    )
    assert actual.dtype == torch.bfloat16 and actual.shape == expected.shape
    error = (actual.cpu().float() - expected.float()).norm() / expected.float().norm()
    # Rounding to bfloat16 and activations halfway between two codes cause the difference; with FP8
    # also sums of 14 bits, which give 2.5e-3 at 4096 inputs. A wrong scale or order of channels
    # would give an error of 1, a wrong format 1 % to 4 %.
    assert error < TOLERANCES[weight_format], error


@pytest.mark.parametrize("weight_format", ["int8", "int4-g32", "fp8"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_gpu_products_with_adapters_are_those_of_the_cpu(weight_format: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(384, 256, generator=generator).bfloat16()
    x = torch.randn(tokens, 256, generator=generator).bfloat16()
    adapters = [torch.randn(size, generator=generator) for size in ((32, 256), (384, 32))]
    config: QurlConfig = FORMATS[weight_format]()
    config.adapter_rank, config.adapter_scaling = 16, 0.5
    method = config.linear_method(config)
    plain, expected, actual = (
        method.apply(with_adapters(build_layer(weight, weight_format, device), b), x.to(device))
        for device, b in (
            ("cpu", [adapters[0], 0 * adapters[1]]),
            ("cpu", adapters),
            ("cuda", adapters),
        )
    )
    error = (actual.cpu().float() - expected.float()).norm() / expected.float().norm()
    # On a GPU what the base gives and x @ lora_a.T are rounded to bfloat16 first.
    assert error < 2 * TOLERANCES[weight_format], error
    assert (expected.float() - plain.float()).norm() > 0.5 * plain.float().norm()


def with_adapters(layer: Any, adapters: list[torch.Tensor]) -> Any:
    for name, values in zip(("lora_a", "lora_b"), adapters, strict=True):
        held = values.bfloat16().to(layer.weight.device)
        layer.register_parameter(name, torch.nn.Parameter(held, requires_grad=False))
    return layer


def test_a_captured_cuda_graph_uses_reloaded_weights() -> None:
    """The layer's parameters are never replaced, so the graph reads the new values."""
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    config = Int8Config()
    method, layer = config.linear_method(config), build_layer(weight, "int8", "cuda")
    x = torch.randn(16, 128, device="cuda").bfloat16()
    method.apply(layer, x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = method.apply(layer, x)
    graph.replay()
    first = out.clone()
    codes = layer.weight.clone()
    layer.weight.copy_(-codes)
    graph.replay()
    assert torch.equal(out, -first)
    layer.weight.copy_(codes)
    graph.replay()
    assert torch.equal(out, first)
