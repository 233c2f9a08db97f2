"""The checksum kernel computes the same sum as the CPU.

Without a GPU, the kernel runs in Triton's interpreter.
"""

import pytest

import triton_program
from compiled import compile_kernel

# The interpreter must be chosen before Triton is imported, so the comparison runs in a new process.
COMPARISON = """
import torch
from qurl_megatron.quantization.kernels import weighted_sum

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)
random = lambda count: torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
for dtype in (torch.uint8, torch.int16, torch.int32, torch.uint32):
    for rows, columns in ((1, 1), (5, 1), (3, 511), (9, 513), (4, 1100)):
        size = rows, columns * dtype.itemsize
        memory = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        bits, weights = memory.view(dtype), (random(rows), random(columns))
        expected = (bits.to(torch.int64) * weights[0][:, None] * weights[1]).sum()
        found = weighted_sum(bits.to(device), *(weight.to(device) for weight in weights))
        assert found.cpu() == expected, (dtype, rows, columns)
print("equal")
"""


def test_the_kernel_computes_the_sum_that_the_cpu_does() -> None:
    ran = triton_program.run(COMPARISON)
    assert ran.stdout.strip() == "equal", ran.stderr[-3000:]


@pytest.mark.parametrize(("bits", "most"), [("*u32", 9), ("*i16", 12), ("*i32", 12), ("*u8", 9)])
def test_the_kernel_keeps_its_sums_in_registers_on_hopper(bits: str, most: int) -> None:
    """A word holds four codes, so a code takes a quarter of its instructions."""
    from qurl_megatron.quantization.kernels import SUM_BLOCK, SUM_ROWS, SUM_WARPS, _sum_rows

    types = {"bits": bits, **dict.fromkeys(("row_weights", "column_weights", "sums"), "*i64")}
    types |= {"rows": "i32", "columns": "i32"}
    constants = {"ROWS": SUM_ROWS, "BLOCK": SUM_BLOCK}
    compiled = compile_kernel(_sum_rows, types, constants, SUM_WARPS, 90)
    (loop,) = compiled.loops
    assert len(loop) / (SUM_ROWS * SUM_BLOCK / 32 / SUM_WARPS) <= most
    assert compiled.stack_bytes == 0 and compiled.registers <= 128
