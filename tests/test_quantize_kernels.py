"""The kernels that quantize: their results are those of `quantize`, and their code is short.

Without a GPU, the kernels run in Triton's interpreter, and are compiled for GPUs of three
generations. The speed is that of memory as long as instructions are few: at 3 bytes a weight a
Hopper GPU has time for 28 of them, on all its schedulers.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import triton_program
from benchmarks.gpu.exact_interpreter import fused_multiply_add
from compiled import Compiled, compile_kernel, moved_bytes

# The interpreter must be chosen before Triton is imported, so the comparison runs in a new process.
COMPARISON = """
import torch
from qurl_megatron.quantization.checksum import hash_codes
from qurl_megatron.quantization import kernels
from qurl_megatron.quantization.kernels import fits, quantize_on_gpu
from qurl_megatron.quantization.quantize import (
    SMALLEST_SCALE, block_absmax, code_dtype, engine_scale, int4_values, quantize
)

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)


def awkward(shape, dtype):
    weight = torch.randn(shape, generator=generator)
    weight[0, 3] = -0.0
    halves = torch.arange(shape[1]) % 253 - 126.5
    weight[-1] = torch.cat([torch.tensor([127.0]), halves])[: shape[1]]
    if len(weight) > 5:
        weight[1] = 0.0
        weight[2] *= 1e-40  # below float32's normal numbers
        weight[3] *= 3e38 / weight[3].abs().max()
        weight[4] *= 127 * SMALLEST_SCALE * 1.01 / weight[4].abs().max()
        weight[5] *= 127 * SMALLEST_SCALE * 0.97 / weight[5].abs().max()
    return weight.to(dtype)


def larger(absmax):
    return (absmax * 3).clamp(max=torch.finfo(torch.float32).max)


def compare(weight, weight_format, absmax, offset):
    expected = quantize(weight, weight_format, absmax, offset=offset, with_checksum=True)
    codes = torch.empty(weight.shape, dtype=code_dtype(weight_format), device=device)
    given = None if absmax is None else absmax.to(device)
    assert fits(weight.to(device), codes, offset)
    _, scale, total = quantize_on_gpu(
        weight.to(device),
        given,
        codes,
        {"int8": 127.0, "fp8": 448.0, "fp8-block": 448.0}[weight_format],
        SMALLEST_SCALE,
        by_block=weight_format == "fp8-block",
        offset=offset,
        hashes=hash_codes(codes, *offset),
    )
    case = weight_format, weight.dtype, weight.shape, absmax is None, offset
    assert torch.equal(scale.cpu(), expected.scale), case
    assert torch.equal(codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8)), case
    assert total.cpu() == expected.checksum, case


for dtype in (torch.float32, torch.bfloat16):
    for weight_format in ("int8", "fp8"):
        # The sums are the same for all formats, so one has rows of more than 2^16.
        for shape in ((1, 16), (7, 528), (2, 65552 if weight_format == "int8" else 8208)):
            weight = awkward(shape, dtype)
            compare(weight, weight_format, None, (0, 0))
            compare(weight, weight_format, larger(block_absmax(weight, weight_format)), (32, 48))
    whole = awkward((300, 272), dtype)
    whole[:130, :140] = 0.0
    compare(whole, "fp8-block", None, (0, 0))
    for rows, columns in (
        (slice(0, 300), slice(0, 48)), (slice(100, 140), slice(96, 272)), (slice(7, 9), slice(16))
    ):
        offset = rows.start, columns.start or 0
        absmax = larger(block_absmax(whole[rows, columns], "fp8-block", offset))
        compare(whole[rows, columns], "fp8-block", absmax, offset)

blocks = torch.ones(512, 128)
blocks[129, 2], blocks[257, 3], blocks[385, 4] = float("nan"), float("inf"), -float("inf")
rows = blocks[1::128].contiguous()  # a row of each block
for bad in (rows, blocks):
    codes = torch.empty(bad.shape, dtype=torch.float8_e4m3fn, device=device)
    absmax = quantize_on_gpu(
        bad.to(device), None, codes, 448.0, SMALLEST_SCALE, by_block=bad is blocks
    )[0]
    assert absmax.isfinite().flatten().tolist() == [True, False, False, False], bad.shape
for rows, columns, weight_format in ((80, 192, "int4-g32"), (3, 256, "int4"), (33, 4096, "int4")):
    weight = quantize(torch.randn(rows, columns, generator=generator), weight_format)
    packed, scale = weight.codes, engine_scale(weight)
    found = kernels.int4_values(packed.to(device), scale.to(device))
    assert found.dtype == torch.bfloat16 and torch.equal(found.cpu(), int4_values(packed, scale))
print("equal")
"""

SMALLEST_SCALE = 2.0**-90
LARGEST = {"int8": 127.0, "fp8": 448.0}


def test_codes_scales_and_checksums_are_those_of_the_cpu() -> None:
    ran = triton_program.run(COMPARISON)
    assert ran.stdout.strip() == "equal", ran.stderr[-3000:]


def multiply_add(x: float, y: float, z: float) -> float:
    return float(fused_multiply_add(*(np.array([value], np.float32) for value in (x, y, z)))[0])


def test_a_multiply_add_of_numpy_rounds_once() -> None:
    assert multiply_add(1 + 2**-12, 1 + 2**-12, -1 - 2**-11) == 2.0**-24
    assert multiply_add(1 + 2**-23, 1 - 2**-23, -1) == -(2.0**-46)
    assert multiply_add(np.inf, 1, 1) == np.inf
    assert multiply_add(2**-80, 2**-69, 0) == 2.0**-149
    # 1 + 2^-24 lies half-way between two numbers; what float64 drops of the sum decides.
    assert multiply_add(2**-24, 1, 1) == 1
    assert multiply_add(2**-24, 1 + 2**-23, 1) == 1 + 2.0**-23
    assert multiply_add(1 + 2**-23, 2**-17 * (1 + 2**-23), 128) == 128 + 2.0**-16
    assert multiply_add(2**-60, 2**-60, 1 + 2**-23) == 1 + 2.0**-23


def quotients(weights: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the quotients that the channel kernel computes, with emulated multiply-adds."""
    reciprocal = np.float32(-1) / scales
    negative = weights * reciprocal
    rest = fused_multiply_add(negative, scales, weights)
    return -fused_multiply_add(rest, reciprocal, negative)


@pytest.mark.parametrize("exponent", [-90, -30, 0, 30, 118])
def test_the_kernels_division_is_rounded_to_nearest(exponent: int) -> None:
    """Quotients of normal size are bit for bit those of a division, ties and signs included."""
    generator = np.random.default_rng(exponent + 100)
    count = 100_000
    mantissas = generator.integers(2**23, 2**24, count)
    scales = np.ldexp(mantissas / 2**23, exponent).astype(np.float32)
    wanted = generator.integers(-255, 256, count) / 2  # whole and half codes, 0 among them
    ties = (wanted * scales).astype(np.float32)
    for weights in (
        ties,
        np.nextafter(ties, np.float32(np.inf)),
        np.nextafter(ties, np.float32(-np.inf)),
        np.where(wanted < 0, np.float32(-0.0), np.float32(0)),
        (generator.uniform(-127, 127, count) * scales).astype(np.float32),
    ):
        expected = weights / scales
        relevant = (np.abs(expected) >= 2.0**-11) | (weights == 0)
        found = quotients(weights, scales)[relevant].view(np.int32)
        assert np.array_equal(found, expected[relevant].view(np.int32))
        # Smaller quotients have the code 0 in every format, and keep their sign.
        small = quotients(weights, scales)[~relevant]
        assert (np.abs(small) < 2.0**-10).all()
        assert np.array_equal(np.signbit(small), np.signbit(weights[~relevant]))


POINTERS = {
    "absmax": "*fp32",
    "codes": "*u32",
    "scales": "*fp32",
    "row_weights": "*i64",
    "word_weights": "*i64",
    "sums": "*i64",
}


def channel_kernel(weight_format: str, sums: bool, columns: int, target: int) -> Compiled:
    from qurl_megatron.quantization.kernels import _quantize_row, count_warps

    types = {"weight": "*bf16", **POINTERS}
    types |= dict.fromkeys(("columns", "weight_stride", "words_stride"), "i32")
    warps = count_warps(columns)
    constants = {
        "LARGEST": LARGEST[weight_format],
        "SMALLEST_SCALE": SMALLEST_SCALE,
        "FINDS_ABSMAX": True,
        "IS_INTEGER": weight_format == "int8",
        "SUMS": sums,
        "BLOCK": 256 * warps,
    }
    return compile_kernel(_quantize_row, types, constants, warps, target)


def block_kernel(sums: bool, target: int) -> Compiled:
    from qurl_megatron.quantization.kernels import NUM_WARPS, SIDE, STRIP, _quantize_block

    types = {"weight": "*bf16", **POINTERS, "rows": "i32", "columns": "i32", "rows_before": "i32"}
    types |= dict.fromkeys(("columns_before", "weight_stride", "words_stride"), "i32")
    constants = {
        "LARGEST_FACTOR": torch.finfo(torch.bfloat16).max,
        "FINDS_ABSMAX": True,
        "SUMS": sums,
        "SIDE": SIDE,
        "STRIP": STRIP,
    }
    return compile_kernel(_quantize_block, types, constants, NUM_WARPS, target)


@pytest.mark.parametrize(
    ("weight_format", "sums", "columns", "most"),  # every two of the first three occur together
    [
        ("int8", False, 5120, 13),
        ("int8", True, 27648, 16),
        ("fp8", False, 27648, 13),
        ("fp8", True, 5120, 16),
    ],
)
def test_a_channels_weight_takes_few_instructions_on_hopper(
    weight_format: str, sums: bool, columns: int, most: int
) -> None:
    compiled = channel_kernel(weight_format, sums, columns, 90)
    finding, coding = compiled.loops
    assert not moved_bytes(finding, "STG")
    weights = moved_bytes(finding, "LDG") // 2
    codes = moved_bytes(coding, "STG")
    assert weights % 8 == 0 and codes % 8 == 0  # one wide load, 8 weights, at least
    assert len(finding) / weights + len(coding) / codes <= most
    assert compiled.stack_bytes == 0
    # A multiprocessor then runs 48 warps. A wide load in each is 3.2 MB on 132 multiprocessors: at
    # 3.35 TB/s memory is busy unless a load takes more than 0.97 us.
    assert compiled.registers <= 40


@pytest.mark.parametrize("sums", [False, True])
def test_a_blocks_weight_takes_few_instructions_on_hopper(sums: bool) -> None:
    compiled = block_kernel(sums, 90)
    finding, coding = compiled.loops
    weights_per_thread = 128 * 128 // (32 * 8)
    found, coded = moved_bytes(finding, "LDG") // 2, moved_bytes(coding, "STG")
    in_loops = len(finding) / found + len(coding) / coded
    assert in_loops + compiled.once / weights_per_thread <= (20 if sums else 16)
    assert compiled.stack_bytes == 0 and compiled.registers <= 32


@pytest.mark.parametrize("target", [80, 90, 100])
def test_values_of_int4_codes_take_few_instructions_and_wide_stores(target: int) -> None:
    """With two and a half bytes a weight, a Hopper GPU has time for 23 of them."""
    from qurl_megatron.quantization.kernels import PAIR_WARPS, PAIRS, _values_of_pairs

    types = {"packed": "*u8", "scales": "*bf16", "values": "*u32", "num_bytes": "i32"}
    constants = {"GROUP_BYTES": 64, "PAIRS": PAIRS}
    compiled = compile_kernel(_values_of_pairs, types, constants, PAIR_WARPS, target)
    weights = 2 * PAIRS // (32 * PAIR_WARPS)
    assert compiled.once <= 23 * weights
    assert compiled.stack_bytes == 0 and compiled.registers <= 64
    stores = [text for _, text in compiled.code if "STG" in text]
    assert moved_bytes(stores, "STG") == 2 * weights and all(".128" in each for each in stores)


@pytest.mark.parametrize("target", [80, 100])
def test_the_kernels_compile_for_other_gpus_without_spilling(target: int) -> None:
    """Ampere has no FP8; there INT8 is all."""
    kernels = [channel_kernel("int8", True, 27648, target)]
    if target >= 89:
        kernels += [channel_kernel("fp8", True, 27648, target), block_kernel(True, target)]
    for compiled in kernels:
        assert compiled.stack_bytes == 0 and compiled.registers <= 64, compiled.registers


def test_the_rows_that_a_multiprocessor_works_on_fit_its_cache() -> None:
    from qurl_megatron.quantization.kernels import WARPS_AT_ONCE, count_warps

    cache_bytes = 50 * 2**20 / 132  # of the L2 of an H100, for each multiprocessor
    for columns in (640, 3584, 5120, 13824, 18944, 27648):
        rows_at_once = WARPS_AT_ONCE // count_warps(columns)
        assert 2 * columns * rows_at_once <= cache_bytes, columns
