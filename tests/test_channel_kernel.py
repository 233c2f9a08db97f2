"""The channel kernel's codes and scales equal those of `quantize` byte for byte.

Without a GPU, the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import triton_program
from hopper import compiled_usage

# The interpreter must be chosen before Triton is imported, so the comparison runs in a new process.
COMPARISON = """
import torch
from qurl_megatron.quantization.channel_kernel import quantize_channels
from qurl_megatron.quantization.quantize import block_absmax, quantize

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
for weight_format, dtype, largest in (
    ("int8", torch.int8, 127.0), ("fp8", torch.float8_e4m3fn, 448.0)
):
    for weight_dtype in (torch.float32, torch.bfloat16):
        for shape in ((1, 1), (3, 128), (7, 129), (2, 5000)):
            weight = torch.randn(shape, generator=generator).to(weight_dtype)
            weight[0] = 0.0
            if len(weight) > 1:
                weight[1] *= 1e-40  # below float32's normal numbers
            halves = torch.arange(shape[1]) % 253 - 126.5
            weight[-1] = torch.cat([torch.tensor([127.0]), halves])[: shape[1]]
            for absmax in (None, block_absmax(weight, weight_format) * 3):
                expected = quantize(weight, weight_format, absmax)
                codes = torch.empty(shape, dtype=dtype, device=device)
                given = None if absmax is None else absmax.to(device)
                _, scale = quantize_channels(weight.to(device), given, codes, largest)
                case = weight_format, weight_dtype, shape, absmax is None
                assert torch.equal(scale.cpu(), expected.scale), case
                assert torch.equal(
                    codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8)
                ), case
bad = torch.ones(4, 8)
bad[1, 2], bad[2, 3], bad[3, 4] = float("nan"), float("inf"), -float("inf")
codes = torch.empty(4, 8, dtype=torch.int8, device=device)
absmax, _ = quantize_channels(bad.to(device), None, codes, 127.0)
assert absmax.isfinite().flatten().tolist() == [True, False, False, False]
print("equal")
"""


def test_codes_and_scales_are_those_of_quantize() -> None:
    ran = triton_program.run(COMPARISON)
    assert ran.stdout.strip() == "equal", ran.stderr[-3000:]


def test_rows_longer_than_the_kernel_holds_are_an_error() -> None:
    from qurl_megatron.quantization.channel_kernel import LONGEST_ROW, quantize_channels

    weight = torch.zeros(1, LONGEST_ROW + 1)
    with pytest.raises(ValueError, match=f"at most {LONGEST_ROW}"):
        quantize_channels(weight, None, weight.to(torch.int8), 127.0)


@pytest.mark.parametrize("codes", ["*i8", "*fp8e4nv"])
@pytest.mark.parametrize("columns", [128, 5120, 18944, 27648])
def test_the_kernel_compiles_for_hopper_and_holds_a_row_in_registers(
    codes: str, columns: int, tmp_path: Path
) -> None:
    """The longest row is that of a 32B model; a longer one would spill to memory."""
    from qurl_megatron.quantization.channel_kernel import _quantize_row, launch_size

    block, warps = launch_size(columns)
    signature = {
        "weight": "*bf16",
        "absmax": "*fp32",
        "codes": codes,
        "scales": "*fp32",
        "columns": "i32",
        "weight_stride": "i32",
        "codes_stride": "i32",
        "LARGEST": "",
        "FINDS_ABSMAX": "",
        "IS_INTEGER": "",
        "BLOCK": "",
    }
    constants = {
        "LARGEST": 127.0 if codes == "*i8" else 448.0,
        "FINDS_ABSMAX": True,
        "IS_INTEGER": codes == "*i8",
        "BLOCK": block,
    }
    usage = compiled_usage(_quantize_row, signature, constants, warps, tmp_path / "kernel")
    assert usage["STACK"] == 0, usage
    assert usage["REG"] * 32 * warps <= 65536, usage
