"""Rounding to BF16 without bias: against a statement in float64, and over all of BF16's numbers."""

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import triton_program
from compiled import compile_kernel
from qurl_megatron.quantization import rounding
from qurl_megatron.quantization.rounding import add_dither, row_keys, write_rounded

torch.set_num_threads(1)
NAME = "model.layers.3.self_attn.q_proj.weight"
CPU = torch.device("cpu")
ALL_DITHERS = torch.arange(2**16, dtype=torch.int32)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def from_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def rounded(values: Tensor, name: str = NAME, offset: tuple[int, int] = (0, 0)) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    write_rounded(out, values, name, "unbiased", offset)
    return out


def with_dither(values: Tensor, dither: Tensor) -> Tensor:
    values, dither = (each.clone() for each in torch.broadcast_tensors(values, dither))
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    add_dither(out, values, dither)
    return out


def expected(value: float, dither: float) -> float:
    """Return sign(w) * floor(|w| / ulp + u) * ulp, or the largest BF16 number if that is more."""
    exponent = max(math.frexp(value)[1] - 1, -126)  # of subnormal numbers, that of the smallest
    ulp = 2.0 ** (exponent - 7)
    magnitude = math.floor(abs(value) / ulp + dither) * ulp
    return math.copysign(min(magnitude, torch.finfo(torch.bfloat16).max), value)


def hashed(number: int, final: bool = True) -> int:
    """Return the hash of 32 bits, in integers that do not wrap around; shifts keep the sign."""

    def signed(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    number = signed(number)
    number = signed((number ^ number >> 16) * 0x7FEB352D)
    number = signed((number ^ number >> 15) * 0x846CA68B)
    return (number ^ number >> 16 if final else number) % 2**32


def dither_at(name: str, row: int, column: int) -> int:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    keys = hashed(row * 0x9E3779B9 + seed) + hashed(column * 0x9E3779B9)
    return hashed(keys, final=False) >> 16


@given(value=floats, dither=st.integers(0, 2**16 - 1))
def test_a_value_is_rounded_as_in_float64(value: float, dither: int) -> None:
    result = with_dither(torch.tensor([value]), torch.tensor([dither], dtype=torch.int32))
    assert float(result) == expected(value, dither / 2**16)
    assert math.copysign(1, float(result)) == math.copysign(1, value)


@given(
    value=floats,
    name=st.sampled_from([NAME, "lm_head.weight"]),
    row=st.integers(0, 2**18),
    column=st.integers(0, 2**15),
)
def test_the_dither_is_a_hash_of_name_and_position(
    value: float, name: str, row: int, column: int
) -> None:
    result = rounded(torch.tensor([[value]]), name, (row, column))
    assert float(result) == expected(value, dither_at(name, row, column) / 2**16)


def test_every_number_of_bf16_stays_as_it_is() -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for dither in (0, 1, 0x8000, 0xFFFF):
        result = with_dither(numbers.float(), torch.tensor(dither, dtype=torch.int32))
        is_nan = numbers.isnan()
        assert torch.equal(result.isnan(), is_nan)
        same = result.view(torch.int16) == numbers.view(torch.int16)
        assert same[~is_nan].all()


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_no_finite_value_becomes_infinite_and_nan_stays_nan(sign: int) -> None:
    largest = from_bits(sign | 0x7F7F0000)
    finite = from_bits(sign | 0x7F7F0001, sign | 0x7F7F8000, sign | 0x7F7FFFFF)
    assert torch.equal(with_dither(finite[:, None], ALL_DITHERS).float().unique(), largest)
    below = with_dither(from_bits(sign | 0x7F7EFFFF), ALL_DITHERS).float().abs()
    assert below.unique().tolist() == from_bits(0x7F7E0000, 0x7F7F0000).tolist()
    infinite = with_dither(from_bits(sign | 0x7F800000), ALL_DITHERS)
    assert infinite.isinf().all() and infinite.float().unique().tolist() == [
        -math.inf if sign else math.inf
    ]
    nan = from_bits(sign | 0x7F800001, sign | 0x7FC00000, sign | 0x7FFFFFFF)
    assert with_dither(nan[:, None], ALL_DITHERS).isnan().all()


@given(value=st.floats(-(2.0**127), 2.0**127, width=32))
def test_the_mean_over_all_dithers_is_the_value(value: float) -> None:
    mean = with_dither(torch.tensor(value), ALL_DITHERS).double().sum() / 2**16
    assert float(mean) == value


@given(values=st.lists(floats, min_size=2, max_size=30), dither=st.integers(0, 2**16 - 1))
def test_the_result_never_falls_while_the_value_rises_and_is_symmetric(
    values: list[float], dither: int
) -> None:
    ascending = torch.tensor(sorted(values))
    result = with_dither(ascending, torch.tensor(dither, dtype=torch.int32)).float()
    assert (result.diff() >= 0).all()
    negated = with_dither(-ascending, torch.tensor(dither, dtype=torch.int32)).float()
    assert torch.equal(negated, -result)


@pytest.mark.parametrize("shape", [(1000, 1000), (10**6,), (1, 10**6)])
def test_the_mean_error_over_a_million_positions_is_zero(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    on_grid = torch.randn(shape, generator=generator).bfloat16().float()
    moved = on_grid * (1 + 1e-4 * torch.rand(shape, generator=generator))
    ulp = 2.0 ** (on_grid.abs().log2().floor() - 7)
    error = ((rounded(moved).float() - moved) / ulp).double() * on_grid.sign()
    up = ((moved - on_grid) / ulp).double().abs()  # the fraction that goes up
    sigma = (up * (1 - up)).sum().sqrt() / error.numel()
    assert error.mean().abs() < 4 * sigma
    nearest = ((moved.bfloat16().float() - moved) / ulp).double() * on_grid.sign()
    assert nearest.mean().abs() > 20 * sigma


def test_dithers_of_rows_columns_and_tensors_have_nothing_in_common() -> None:
    """Neither a shift of one row's dithers against another's, nor a pattern of low rank."""
    size = 512

    def dithers(name: str) -> Tensor:
        ones = torch.full((size, size), 1 + 2.0**-8)  # halfway, so it goes up where u >= 1 / 2
        return (rounded(ones, name).float() > 1).double() * 2 - 1

    one, another = dithers(NAME), dithers(NAME.replace("3", "4"))
    assert (one * another).mean().abs() < 4 / size
    largest = torch.linalg.matrix_norm(one, 2) / (2 * math.sqrt(size))  # 1 of random signs
    assert 0.95 < largest < 1.05
    for matrix in (one, one.T):
        products = (matrix @ matrix.T / math.sqrt(size)).fill_diagonal_(0)
        assert products.abs().max() < 6
        assert products.std() == pytest.approx(1, abs=0.05)


@given(data=st.data())
def test_a_part_is_rounded_as_in_the_whole(data: st.DataObject) -> None:
    whole = torch.randn(9, 14, generator=torch.Generator().manual_seed(1))
    index = []
    for size in whole.shape:
        start = data.draw(st.integers(0, size))
        index.append(slice(start, data.draw(st.integers(start, size))))
    part = rounded(whole[index[0], index[1]], offset=(index[0].start, index[1].start))
    assert torch.equal(part, rounded(whole)[index[0], index[1]])
    assert torch.equal(rounded(whole[:, 0]), rounded(whole)[:, 0])


def test_chunks_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(30, 7, generator=torch.Generator().manual_seed(2))
    expected = rounded(whole)
    monkeypatch.setattr("qurl_megatron.quantization.rounding.CHUNK_ELEMENTS", 20)
    assert torch.equal(rounded(whole), expected)


# The interpreter must be chosen before Triton is imported, so this runs in a new process.
COMPARISON = """
import torch
from qurl_megatron.quantization import kernels, rounding

device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.Generator().manual_seed(0)
for rows, columns, first in ((1, 1, 5), (70, 1, 0), (7, 1023, 3), (5, 2049, 0)):
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, columns), generator=generator)
    values = bits.to(torch.int32).view(torch.float32)
    special = [0x7F800001, 0x7F800000, 0x7F7FFFFF, 0x7F7EFFFF, 1, 0][: rows * columns]
    values.view(torch.int32).view(-1)[:6] = torch.tensor(special, dtype=torch.int32)
    keys = rounding.row_keys("a", 3, rows, torch.device("cpu"))
    expected, found = (torch.empty(rows, columns, dtype=torch.bfloat16) for _ in "12")
    rounding.round_rows(expected, values, keys, first)
    found = found.to(device)
    columns = rounding._column_keys(first, columns, torch.device("cpu")).to(device)
    factors = rounding._FIRST, rounding._SECOND
    kernels.round_rows(found, values.to(device), keys.to(device), columns, factors)
    found, nan = found.cpu(), values.isnan()
    assert torch.equal(found.isnan(), nan) and torch.equal(expected.isnan(), nan)
    assert torch.equal(found[~nan].view(torch.int16), expected[~nan].view(torch.int16))
print("equal")
"""


def test_the_kernel_rounds_as_the_cpu_does() -> None:
    ran = triton_program.run(COMPARISON)
    assert ran.stdout.strip() == "equal", ran.stderr[-3000:]


def test_the_kernel_is_as_fast_as_memory_on_hopper() -> None:
    """At 6 bytes a weight there is time for 56 instructions, as `test_quantize_kernels` counts."""
    from qurl_megatron.quantization.kernels import ROUND_WARPS, ROUNDED, _round_row

    types = {"out": "*i16", "values": "*fp32", "row_keys": "*i32", "column_keys": "*i32"}
    types |= dict.fromkeys(("columns", "out_stride", "values_stride"), "i32")
    constants = {"FIRST": rounding._FIRST, "SECOND": rounding._SECOND, "ROUNDED": ROUNDED}
    compiled = compile_kernel(_round_row, types, constants, ROUND_WARPS, 90)
    assert compiled.once / (ROUNDED / 32 / ROUND_WARPS) <= 24
    assert compiled.stack_bytes == 0 and compiled.registers <= 64


def test_only_float32_to_bf16_is_dithered_and_only_if_asked() -> None:
    values = torch.randn(50, 40, generator=torch.Generator().manual_seed(3))
    nearest, same = torch.empty(50, 40, dtype=torch.bfloat16), torch.empty(50, 40)
    write_rounded(nearest, values, NAME, "nearest")
    assert torch.equal(nearest, values.bfloat16())
    assert not torch.equal(nearest, rounded(values))
    write_rounded(same, values, NAME, "unbiased")
    assert torch.equal(same, values)
    assert torch.equal(rounded(nearest), nearest)
    assert row_keys(NAME, 0, 4, CPU)[2:].tolist() == row_keys(NAME, 2, 2, CPU).tolist()
