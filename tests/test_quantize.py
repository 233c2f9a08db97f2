"""Codes and scales of QuRL Eq. 2: properties of every tensor, and hand-computed numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl_megatron.quantization.quantize import (
    NonFiniteWeight,
    QuantizedTensor,
    block_absmax,
    block_shape,
    code_flips,
    code_values,
    dequantize,
    engine_scale,
    pack,
    packing,
    quantize,
    spread_scale,
    unpack,
)

torch.set_num_threads(1)
FORMATS = ("int8", "fp8")
LARGEST = {"int8": 127.0, "fp8": 448.0}
SMALLEST_SCALE = 2.0**-90

weights = st.builds(
    lambda rows, columns, exponent, seed, dtype: (
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).double()
        * 10.0**exponent
    ).to(dtype),
    rows=st.integers(1, 9),
    columns=st.integers(1, 33),
    exponent=st.integers(-42, 30),  # below -38: subnormal in float32
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)


def same_bytes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return int(code_flips(a.codes, b.codes)) == 0 and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize(("weight_format", "largest"), [("int8", 127), ("int4-g32", 7)])
@given(weight=weights)
def test_integer_codes_are_within_half_a_step_of_the_weight(
    weight_format: str, largest: int, weight: torch.Tensor
) -> None:
    weight = torch.cat([weight, weight], 1)  # INT4 needs an even number of columns
    quantized = quantize(weight, weight_format)
    assert code_values(quantized).abs().max() <= largest
    error = (dequantize(quantized).double() - weight.double()).abs()
    # weight / scale is rounded to float32 before it is rounded to an integer.
    division_rounding = largest * 2.0**-24
    scale = spread_scale(quantized).double()
    assert (error <= scale * (0.5 + division_rounding)).all()


def test_int4_groups_columns_and_packs_two_codes_into_a_byte() -> None:
    """Of two groups of 32: the first has absmax 7, the second 3.5, in the first row."""
    weight = torch.zeros(2, 64)
    weight[0, :4] = torch.tensor([7.0, -7.0, 2.5, -3.5])
    weight[0, 32:36] = torch.tensor([3.5, 0.25, 0.75, -1.75])
    weight[1, 40] = 7 * 0.3  # 0.3 is no BF16 number: the scale is 0.30078125
    quantized = quantize(weight, "int4-g32")
    assert quantized.scale.tolist() == [[1, 0.5], [1, 0.30078125]]
    assert engine_scale(quantized).dtype == torch.bfloat16
    codes = torch.zeros(2, 64, dtype=torch.int8)
    codes[0, :4] = torch.tensor([7, -7, 2, -4])  # halves to even
    codes[0, 32:36] = torch.tensor([7, 0, 2, -4])
    codes[1, 40] = 7  # 6.98
    assert torch.equal(code_values(quantized), codes)
    # Each code plus 8, the first of two in the lower half: 7 -> 15, -7 -> 1, 2 -> 10, -4 -> 4.
    assert quantized.codes.dtype == torch.uint8 and quantized.codes.shape == (2, 32)
    assert quantized.codes[0, :2].tolist() == [15 + 16 * 1, 10 + 16 * 4]
    assert quantized.codes[1].tolist() == [*[0x88] * 20, 15 + 16 * 8, *[0x88] * 11]
    assert dequantize(quantized)[0, 32:36].tolist() == [3.5, 0, 1, -2]
    # One group of 128 that the tensor ends within.
    assert quantize(weight, "int4").scale.tolist() == [[1], [0.30078125]]


def test_packed_codes_are_those_of_compressed_tensors() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(-7, 8, (5, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    packed = pack(codes.float()).to(torch.uint8)
    assert torch.equal(packed.view(torch.int32), pack_to_int32(codes, 4))
    assert torch.equal(unpack(packed), codes)


@given(weights)
def test_fp8_codes_are_the_saturated_cast_of_the_scaled_weight(weight: torch.Tensor) -> None:
    quantized = quantize(weight, "fp8")
    scaled = (weight.float() / quantized.scale).clamp(-448, 448)
    assert code_flips(quantized.codes, scaled.to(torch.float8_e4m3fn)) == 0


@pytest.mark.parametrize("weight_format", FORMATS)
@given(weight=weights)
def test_scale_is_absmax_divided_by_the_largest_code(
    weight_format: str, weight: torch.Tensor
) -> None:
    scale = quantize(weight, weight_format).scale
    expected = weight.float().abs().amax(dim=1, keepdim=True) / LARGEST[weight_format]
    expected[expected < SMALLEST_SCALE] = 1
    assert scale.dtype == torch.float32
    assert torch.equal(scale, expected)


@pytest.mark.parametrize("weight_format", FORMATS)
@given(weight=weights)
def test_quantizing_again_changes_no_code(weight_format: str, weight: torch.Tensor) -> None:
    once = quantize(weight, weight_format)
    twice = quantize(dequantize(once), weight_format)
    # Zeros may change sign, so compare values and not bytes.
    assert torch.equal(once.codes.float(), twice.codes.float())
    # 127 * scale / 127 may round to the neighbouring float32.
    one_ulp = 2.0**-23 * once.scale
    assert ((once.scale - twice.scale).abs() <= one_ulp).all()


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_with_the_absmax_of_the_row_give_the_bytes_of_the_whole(
    weight_format: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 96, generator=generator).to(dtype)
    weight[:, 90] *= 20  # the absmax of most rows is in the last shard
    whole = quantize(weight, weight_format)
    shards = weight.chunk(4, dim=1)
    absmax = torch.stack([block_absmax(shard, weight_format) for shard in shards]).amax(dim=0)
    assert torch.equal(absmax, block_absmax(weight, weight_format))
    for shard, codes in zip(shards, whole.codes.chunk(4, dim=1), strict=True):
        quantized = quantize(shard, weight_format, absmax)
        assert code_flips(quantized.codes, codes) == 0
        assert torch.equal(quantized.scale, whole.scale)
        # Without the row's absmax the codes differ.
        assert code_flips(quantize(shard, weight_format).codes, codes) > 0


@pytest.mark.parametrize("weight_format", FORMATS)
def test_chunk_size_changes_no_byte(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(53, 17, generator=torch.Generator().manual_seed(1))
    whole = quantize(weight, weight_format)
    monkeypatch.setattr("qurl_megatron.quantization.quantize.CHUNK_ELEMENTS", 3 * 17)
    assert same_bytes(quantize(weight, weight_format), whole)


def test_int8_rounds_halves_to_even_and_uses_127_on_both_sides() -> None:
    weight = torch.tensor([[127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 3.49]])
    quantized = quantize(weight, "int8")
    assert quantized.scale.item() == 1
    assert quantized.codes.tolist() == [[127, -127, 0, 2, 2, 0, -2, -2, 126, 3]]


def test_fp8_rounds_halves_to_even_and_saturates() -> None:
    """E4M3 steps by 32 below 448 and by 2^-9 next to zero."""
    weight = torch.tensor([[448, -448, 432, 400, 17, 19, 2**-9, 2**-10, 3 * 2**-10, 1e-9]])
    quantized = quantize(weight, "fp8")
    assert quantized.scale.item() == 1
    assert quantized.codes.float().tolist() == [[448, -448, 448, 384, 16, 20, 2**-9, 0, 2**-8, 0]]
    saturated = quantize(weight, "fp8", absmax=torch.tensor([[224.0]]))
    assert saturated.codes.float()[0, :2].tolist() == [448, -448]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-40, 1e-37])
def test_rows_of_zeros_and_tiny_numbers_get_scale_1_and_codes_0(
    weight_format: str, magnitude: float
) -> None:
    weight = torch.tensor([[magnitude, -magnitude, 0.0], [1.0, 2.0, 3.0]])
    quantized = quantize(weight, weight_format)
    assert quantized.scale[0].item() == 1
    assert quantized.codes[0].float().tolist() == [0, 0, 0]
    assert quantized.codes[1].float()[2].item() == LARGEST[weight_format]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_largest_float32_gets_the_largest_code(weight_format: str) -> None:
    largest = torch.finfo(torch.float32).max
    quantized = quantize(torch.tensor([[largest, -largest]]), weight_format)
    assert quantized.codes.float().tolist() == [[LARGEST[weight_format], -LARGEST[weight_format]]]


@pytest.mark.parametrize(
    ("weight_format", "where"),
    [
        ("int8", "row 290 of the weight"),
        ("fp8", "row 290 of the weight"),
        ("int4", "row 290 of the weight"),
        ("fp8-tensor", "the weight"),
        ("fp8-block", "a block from row 256 of the weight"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_or_infinity_is_an_error_that_says_where(
    weight_format: str, where: str, value: float, dtype: torch.dtype
) -> None:
    weight = torch.ones(300, 200, dtype=dtype)
    weight[290, 150] = value
    message = f"^{where} holds NaN or infinity"
    with pytest.raises(NonFiniteWeight, match=message):  # also before a maximum over shards
        block_absmax(weight, weight_format)
    with pytest.raises(NonFiniteWeight, match=message):  # of a shard
        block_absmax(weight[128:], weight_format, (128, 0))
    with pytest.raises(NonFiniteWeight, match=message):
        quantize(weight, weight_format)
    absmax = block_absmax(weight, weight_format, refuses=False)
    with pytest.raises(NonFiniteWeight, match=message):
        quantize(torch.ones(300, 200), weight_format, absmax)


def test_views_that_are_not_contiguous_are_quantized_like_their_copies() -> None:
    weight = torch.randn(12, 30, generator=torch.Generator().manual_seed(2))
    for view in (weight.t(), weight[:, ::3], weight[::2, 5:]):
        quantized = quantize(view, "int8")
        assert quantized.codes.is_contiguous()
        assert same_bytes(quantized, quantize(view.contiguous(), "int8"))


@pytest.mark.parametrize("weight_format", ["int8", "int4-g32", "fp8", "fp8-tensor", "fp8-block"])
def test_codes_are_written_into_columns_of_a_wider_tensor(
    weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qurl_megatron.quantization.quantize.CHUNK_ELEMENTS", 3 * 24)
    weight = torch.randn(7, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = quantize(weight, weight_format, with_checksum=True)
    wide = torch.zeros(7, 40, dtype=torch.uint8).view(expected.codes.dtype)
    end = 8 + 24 // packing(weight_format)
    part = quantize(weight, weight_format, out=wide[:, 8:end], with_checksum=True)
    assert torch.equal(wide[:, 8:end].view(torch.uint8), expected.codes.view(torch.uint8))
    assert not wide.view(torch.uint8)[:, :8].any() and not wide.view(torch.uint8)[:, end:].any()
    assert part.checksum == expected.checksum


@pytest.mark.parametrize("weight_format", FORMATS)
def test_code_flips_counts_changed_codes(weight_format: str) -> None:
    weight = torch.tensor([[448.0, 20.0, -20.0, 3.0]])
    moved = torch.tensor([[448.0, 20.01, 20.0, 100.0]])
    old, new = quantize(weight, weight_format).codes, quantize(moved, weight_format).codes
    assert code_flips(old, old.clone()) == 0
    assert code_flips(old, new) == 2


def test_an_unknown_format_and_an_absmax_of_the_wrong_shape_are_errors() -> None:
    weight = torch.ones(3, 4)
    with pytest.raises(ValueError, match="'int3'.*int8, int4, int4-g32, fp8"):
        quantize(weight, "int3")
    with pytest.raises(ValueError, match=r"float32 \[3\].*\[3, 4\].*\[3, 1\]"):
        quantize(weight, "int8", absmax=torch.ones(3))


# Transformer Engine's formats


def quantize_as_transformer_engine(
    weight: torch.Tensor, block: int | None
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the codes' values and the scales, by a copy of its formulas; no `block`: one block."""
    rows, columns = weight.shape
    exact = weight.float().numpy()
    largest = np.float32(torch.finfo(weight.dtype).max)
    codes = np.zeros((rows, columns), np.float32)
    height, width = (block, block) if block else (rows, columns)
    scales: list[list[float]] = []
    for top in range(0, rows, height):
        scales.append([])
        for left in range(0, columns, width):
            part = exact[top : top + height, left : left + width]
            absmax = np.abs(part).max()
            with np.errstate(divide="ignore", over="ignore"):
                factor = np.float32(448) / absmax
            if absmax == 0:
                factor = np.float32(1)
            elif np.isinf(factor):
                factor = largest
            if block:
                factor = np.float32(2.0 ** math.floor(math.log2(factor)))
            codes[top : top + height, left : left + width] = np.clip(part * factor, -448, 448)
            scales[-1].append(float(np.float32(1) / factor))
    # The tests above check the cast to E4M3.
    return torch.from_numpy(codes).to(torch.float8_e4m3fn).float().tolist(), scales


@pytest.mark.parametrize(("weight_format", "block"), [("fp8-tensor", None), ("fp8-block", 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 300), (300, 129)])
@pytest.mark.parametrize("magnitude", [0.0, 1e-39, 1e-5, 0.02, 3e37])
def test_fp8_tensor_and_fp8_block_follow_transformer_engines_formulas_bit_for_bit(
    weight_format: str,
    block: int | None,
    dtype: torch.dtype,
    shape: tuple[int, int],
    magnitude: float,
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).double() * magnitude
    weight = weight.to(dtype)
    codes, scales = quantize_as_transformer_engine(weight, block)
    quantized = quantize(weight, weight_format)
    assert quantized.codes.float().tolist() == codes
    assert quantized.scale.tolist() == scales


def test_multiplying_by_the_factor_differs_from_dividing_by_the_scale() -> None:
    """Transformer Engine multiplies; a few codes in a million differ."""
    weight = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(4))
    absmax = weight.abs().max()
    divided = (weight / (absmax / 448)).clamp(-448, 448).to(torch.float8_e4m3fn)
    flips = code_flips(quantize(weight, "fp8-tensor").codes, divided)
    assert 0 < flips < 1e-3 * weight.numel()


@pytest.mark.parametrize(
    "weight_format", ["int8", "int4", "int4-g32", "fp8", "fp8-tensor", "fp8-block"]
)
@pytest.mark.parametrize("offset", [(0, 0), (128, 256), (40, 0), (0, 100), (130, 70)])
def test_a_part_given_the_absmax_of_whole_blocks_has_the_codes_of_the_whole(
    weight_format: str, offset: tuple[int, int]
) -> None:
    weight = torch.randn(400, 500, generator=torch.Generator().manual_seed(6))
    weight *= torch.arange(1, 501)  # every block has its own absmax
    before = weight.clone()
    whole = quantize(weight, weight_format)
    absmax = block_absmax(weight, weight_format)
    rows, columns = (slice(start, start + 150) for start in offset)
    touched = tuple(
        slice(None) if block is None else slice(run.start // block, -(-run.stop // block))
        for run, block in zip((rows, columns), block_shape(weight_format), strict=True)
    )
    part = quantize(weight[rows, columns], weight_format, absmax[touched], offset=offset)
    alone = torch.zeros_like(weight)
    alone[rows, columns] = weight[rows, columns]
    own = block_absmax(weight[rows, columns], weight_format, offset)
    assert torch.equal(own, block_absmax(alone, weight_format)[touched])
    held = slice(*(at // packing(weight_format) for at in (columns.start, columns.stop)))
    assert code_flips(part.codes, whole.codes[rows, held].contiguous()) == 0
    assert torch.equal(part.scale, whole.scale[touched])
    assert torch.equal(dequantize(part), dequantize(whole)[rows, columns])
    assert torch.equal(weight, before)
