"""The checksum kernel computes the same sum as the CPU.

Without a GPU, the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import triton_program
from hopper import compiled_usage

# The interpreter must be chosen before Triton is imported, so the comparison runs in a new process.
COMPARISON = """
import torch
from qurl_megatron.quantization import checksum
from qurl_megatron.quantization.checksum_kernel import weighted_sum

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)
for dtype in (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32):
    for rows, columns in ((1, 1), (5, 1), (3, 511), (9, 513), (4, 1100)):
        tensor = (torch.randn(rows, columns, generator=generator) * 50).to(dtype)
        bits = tensor.view(checksum._INTEGERS[tensor.element_size()]).to(device)
        weights = [
            checksum._weights(start, count, factor, bits.device)
            for start, count, factor in ((7, rows, 3), (100, columns, 5))
        ]
        wide = bits.cpu().to(torch.int64)
        expected = (wide * weights[0].cpu()[:, None] * weights[1].cpu()).sum()
        assert weighted_sum(bits, *weights).cpu() == expected, (dtype, rows, columns)
print("equal")
"""


def test_the_kernel_computes_the_sum_that_the_cpu_does() -> None:
    ran = triton_program.run(COMPARISON)
    assert ran.stdout.strip() == "equal", ran.stderr[-3000:]


@pytest.mark.parametrize("bits", ["*i8", "*i16", "*i32"])
def test_the_kernel_compiles_for_hopper_and_keeps_its_sums_in_registers(
    bits: str, tmp_path: Path
) -> None:
    from qurl_megatron.quantization.checksum_kernel import BLOCK, NUM_WARPS, ROWS, _sum_rows

    signature = {
        "bits": bits,
        "row_weights": "*i64",
        "column_weights": "*i64",
        "sums": "*i64",
        "rows": "i32",
        "columns": "i32",
        "ROWS": "",
        "BLOCK": "",
    }
    constants = {"ROWS": ROWS, "BLOCK": BLOCK}
    usage = compiled_usage(_sum_rows, signature, constants, NUM_WARPS, tmp_path / "kernel")
    assert usage["STACK"] == 0 and usage["REG"] <= 128, usage
