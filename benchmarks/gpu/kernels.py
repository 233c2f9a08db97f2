"""Time quantization and quantized linear layers on a GPU: `python -m benchmarks.gpu.kernels`.

First, the package's kernels compute a weight's absmax, scales and codes, without and with the
codes' checksum. They are compared with a device-to-device copy that moves the same number of
bytes. Bandwidth counts one read of each BF16 weight and one write of each code. Codes, scales
and checksum must equal the CPU's, byte for byte.

Then it times one linear layer with the server's kernels, by format and number of tokens, including
quantization of the activations. If throughput misses its goal, this shows which layer is slow.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import exact_interpreter, record, timing
from qurl_megatron import device
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.quantization.checksum import hash_codes
from qurl_megatron.quantization.quantize import (
    SMALLEST_SCALE,
    code_dtype,
    code_flips,
    quantize,
)

GOAL = 0.85  # fraction of a copy's bandwidth
FORMATS: tuple[WeightFormat, ...] = ("int8", "fp8", "fp8-block")
LARGEST = {"int8": 127.0, "fp8": 448.0, "fp8-block": 448.0}
WEIGHTS = {  # [out, in]
    "32B down": (5120, 27648),
    "32B gate": (27648, 5120),
    "32B query": (5120, 5120),
    "32B key": (1024, 5120),
    "14B down": (5120, 13824),
    "7B down": (3584, 18944),
    "7B gate": (18944, 3584),
}
TOKENS = (1, 16, 64, 256, 8192)  # decode at four batch sizes, and one prefill


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=21)
    arguments = parser.parse_args()
    results = record.Record("kernels", arguments)
    if results.rehearsal:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        exact_interpreter.install()
    weights = {"tiny": (33, 208)} if arguments.rehearsal else WEIGHTS
    tokens = (1, 16) if arguments.rehearsal else TOKENS
    for name, shape in weights.items():
        for weight_format in FORMATS:
            key = f"quantize {name} {weight_format}"
            if key not in results.rows:
                results.add(key, measure_quantize(shape, weight_format, arguments.repetitions))
    for name, shape in weights.items():
        for count in tokens:
            key = f"linear {name} {count} tokens"
            if key not in results.rows:
                results.add(key, measure_linear(shape, count, arguments.repetitions))
    results.finish()


def measure_quantize(
    shape: tuple[int, int], weight_format: WeightFormat, repetitions: int
) -> dict[str, Any]:
    """Time the kernel and a copy on a weight `[out, in]`; compare with the CPU."""
    generator = torch.Generator(device=device.device()).manual_seed(0)
    first = torch.empty(shape, device=device.device()).normal_(std=0.02, generator=generator)
    first = first.bfloat16()
    moved_bytes = first.nbytes + first.numel()
    count = timing.copies_to_rotate(moved_bytes)
    inputs = [first] + [first.clone() for _ in range(count - 1)]
    outputs = [torch.empty_like(first, dtype=code_dtype(weight_format)) for _ in inputs]
    sources = [torch.ones(moved_bytes // 2, dtype=torch.uint8, device=first.device) for _ in inputs]
    targets = [torch.empty_like(source) for source in sources]
    hashes = hash_codes(outputs[0], 0, 0)
    passes: dict[str, Callable[[int], object]] = {
        "kernel": lambda turn: run_kernel(
            inputs[turn % count], outputs[turn % count], weight_format, None
        ),
        "with_checksum": lambda turn: run_kernel(
            inputs[turn % count], outputs[turn % count], weight_format, hashes
        ),
        "copy": lambda turn: targets[turn % count].copy_(sources[turn % count]),
    }
    times = timing.take_turns(passes, repetitions)
    on_cpu = quantize(first.cpu(), weight_format, with_checksum=True)
    assert on_cpu.checksum is not None
    codes = torch.full(shape, 1.0, device=first.device).to(outputs[0].dtype)  # all overwritten
    _, scale, total = run_kernel(first, codes, weight_format, hashes)
    assert total is not None
    fractions = {
        f"{name}_of_a_copy": times["copy"]["median_s"] / times[name]["median_s"]
        for name in ("kernel", "with_checksum")
    }
    return {
        "kernel_gb_per_s": moved_bytes / times["kernel"]["median_s"] / 1e9,
        "copy_gb_per_s": moved_bytes / times["copy"]["median_s"] / 1e9,
        **fractions,
        "reaches_goal": fractions["kernel_of_a_copy"] >= GOAL,
        "codes_that_differ_from_the_cpu": int(code_flips(codes.cpu(), on_cpu.codes)),
        "scales_equal_the_cpu": torch.equal(scale.cpu(), on_cpu.scale),
        "checksum_equals_the_cpu": int(total) == int(on_cpu.checksum),
        "times": times,
    }


def run_kernel(
    weight: torch.Tensor,
    codes: torch.Tensor,
    weight_format: WeightFormat,
    hashes: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Run the kernel that `quantize` uses on a GPU; return absmax, scale and checksum."""
    from qurl_megatron.quantization.kernels import quantize_on_gpu

    largest, by_block = LARGEST[weight_format], weight_format == "fp8-block"
    return quantize_on_gpu(
        weight, None, codes, largest, SMALLEST_SCALE, by_block=by_block, hashes=hashes
    )


def measure_linear(shape: tuple[int, int], tokens: int, repetitions: int) -> dict[str, Any]:
    """Time a linear layer `[out, in]` over `tokens` tokens in BF16, INT8 and FP8.

    Relative errors are against a float64 product, for up to 256 tokens.
    """
    from qurl_megatron.sglang_plugin.formats import Fp8Config, Int8Config

    generator = torch.Generator(device=device.device()).manual_seed(0)
    weight = torch.empty(shape, device=device.device()).normal_(std=0.02, generator=generator)
    weight = weight.bfloat16()
    x = torch.empty(tokens, shape[1], device=weight.device).normal_(generator=generator).bfloat16()
    exact = (x.double() @ weight.double().t()).float() if tokens <= 256 else None
    count = timing.copies_to_rotate(weight.numel())
    bf16_weights = [weight.clone() for _ in range(count)]
    passes: dict[str, Any] = {
        "bf16": lambda turn: torch.nn.functional.linear(x, bf16_weights[turn % count])
    }
    errors: dict[str, float] = {}
    for weight_format, config in (("int8", Int8Config()), ("fp8", Fp8Config())):
        quantized = quantize(weight, weight_format)
        layers = []
        for _ in range(count):
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(quantized.codes.clone(), requires_grad=False)
            layer.weight_scale = torch.nn.Parameter(quantized.scale, requires_grad=False)
            layers.append(layer)
        method = config.linear_method(config)
        passes[weight_format] = lambda turn, m=method, ls=layers: m.apply(ls[turn % count], x)
        if exact is not None:
            error = passes[weight_format](0).float() - exact
            errors[f"{weight_format}_relative_error"] = float(error.norm() / exact.norm())
    times = timing.take_turns(passes, repetitions)
    return {
        **{
            f"{name}_over_bf16": times["bf16"]["median_s"] / times[name]["median_s"]
            for name in ("int8", "fp8")
        },
        **errors,
        "times": times,
    }


if __name__ == "__main__":
    main()
