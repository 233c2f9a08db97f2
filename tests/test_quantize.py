"""Codes and scales of QuRL Eq. 2: what holds of every tensor, and single numbers by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_megatron import quantize
from qurl_megatron.quantize import (
    NonFiniteWeight,
    QuantisedTensor,
    code_flips,
    dequantise,
    quantisation_error_squares,
    quantise,
    row_absmax,
)

torch.set_num_threads(1)
FORMATS = ("int8", "fp8")
LARGEST = {"int8": 127.0, "fp8": 448.0}
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny

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


def same_bytes(a: QuantisedTensor, b: QuantisedTensor) -> bool:
    return code_flips(a.codes, b.codes) == 0 and torch.equal(a.scale, b.scale)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_itself_stays_as_it_was(weight_format: str, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = weight.clone()
    quantisation_error_squares(weight, quantise(weight, weight_format))
    assert torch.equal(weight, before)


@given(weights)
@settings(deadline=None)
def test_int8_is_within_half_a_step_of_the_weight(weight: torch.Tensor) -> None:
    quantised = quantise(weight, "int8")
    error = (quantised.codes.double() * quantised.scale.double() - weight.double()).abs()
    # weight / scale, at most 127, is rounded to float32 before it is rounded to an integer.
    division_rounding = 127 * 2.0**-24
    assert (error <= quantised.scale.double() * (0.5 + division_rounding)).all()


@given(weights)
@settings(deadline=None)
def test_fp8_codes_are_the_saturated_cast_of_the_scaled_weight(weight: torch.Tensor) -> None:
    quantised = quantise(weight, "fp8")
    scaled = (weight.float() / quantised.scale).clamp(-448, 448)
    assert code_flips(quantised.codes, scaled.to(torch.float8_e4m3fn)) == 0


@pytest.mark.parametrize("weight_format", FORMATS)
@given(weight=weights)
@settings(deadline=None)
def test_scale_is_absmax_by_the_largest_code(weight_format: str, weight: torch.Tensor) -> None:
    scale = quantise(weight, weight_format).scale
    expected = weight.float().abs().amax(dim=1, keepdim=True) / LARGEST[weight_format]
    expected[expected < SMALLEST_NORMAL] = 1
    assert scale.dtype == torch.float32
    assert torch.equal(scale, expected)


@pytest.mark.parametrize("weight_format", FORMATS)
@given(weight=weights)
@settings(deadline=None)
def test_codes_of_the_negative_are_the_negative_codes(
    weight_format: str, weight: torch.Tensor
) -> None:
    plus, minus = quantise(weight, weight_format), quantise(-weight, weight_format)
    assert torch.equal(plus.codes.float(), -minus.codes.float())
    assert torch.equal(plus.scale, minus.scale)


@pytest.mark.parametrize("weight_format", FORMATS)
@given(weight=weights)
@settings(deadline=None)
def test_quantising_again_changes_no_code(weight_format: str, weight: torch.Tensor) -> None:
    once = quantise(weight, weight_format)
    twice = quantise(dequantise(once), weight_format)
    # -0 comes back as +0 or -0 depending on nothing that matters: values, not bytes.
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
    weight[:, 90] *= 20  # the absmax of most rows sits in the last shard
    whole = quantise(weight, weight_format)
    shards = weight.chunk(4, dim=1)
    absmax = torch.stack([row_absmax(shard) for shard in shards]).amax(dim=0)
    assert torch.equal(absmax, row_absmax(weight))
    for shard, codes in zip(shards, whole.codes.chunk(4, dim=1), strict=True):
        assert same_bytes(
            quantise(shard, weight_format, absmax), QuantisedTensor(codes, whole.scale)
        )
        # Without it they would not be: the absmax is what makes the difference.
        assert code_flips(quantise(shard, weight_format).codes, codes) > 0
    for rows in (slice(0, 5), slice(5, 37)):
        assert same_bytes(
            quantise(weight[rows], weight_format),
            QuantisedTensor(whole.codes[rows], whole.scale[rows]),
        )


@pytest.mark.parametrize("weight_format", FORMATS)
def test_chunk_size_changes_no_byte(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(53, 17, generator=torch.Generator().manual_seed(1))
    whole = quantise(weight, weight_format)
    errors = quantisation_error_squares(weight, whole)
    monkeypatch.setattr(quantize, "CHUNK_ELEMENTS", 3 * 17)
    assert same_bytes(quantise(weight, weight_format), whole)
    torch.testing.assert_close(
        quantisation_error_squares(weight, whole), errors, rtol=1e-12, atol=0
    )


def test_int8_rounds_halves_to_even_and_uses_127_on_both_sides() -> None:
    weight = torch.tensor([[127, -127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 3.49]])
    quantised = quantise(weight, "int8")
    assert quantised.scale.item() == 1
    assert quantised.codes.tolist() == [[127, -127, 0, 2, 2, 0, -2, -2, 126, 3]]


def test_fp8_rounds_halves_to_even_and_saturates() -> None:
    """E4M3 steps by 32 below 448 and by 2^-9 next to zero."""
    weight = torch.tensor([[448, -448, 432, 400, 17, 19, 2**-9, 2**-10, 3 * 2**-10, 1e-9]])
    quantised = quantise(weight, "fp8")
    assert quantised.scale.item() == 1
    assert quantised.codes.float().tolist() == [[448, -448, 448, 384, 16, 20, 2**-9, 0, 2**-8, 0]]
    saturated = quantise(weight, "fp8", absmax=torch.tensor([[224.0]]))
    assert saturated.codes.float()[0, :2].tolist() == [448, -448]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-40, 1e-37])
def test_rows_of_zeros_or_next_to_it_get_scale_1_and_codes_0(
    weight_format: str, magnitude: float
) -> None:
    weight = torch.tensor([[magnitude, -magnitude, 0.0], [1.0, 2.0, 3.0]])
    quantised = quantise(weight, weight_format)
    assert quantised.scale[0].item() == 1
    assert quantised.codes[0].float().tolist() == [0, 0, 0]
    assert quantised.codes[1].float()[2].item() == LARGEST[weight_format]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_largest_float32_survives(weight_format: str) -> None:
    largest = torch.finfo(torch.float32).max
    quantised = quantise(torch.tensor([[largest, -largest]]), weight_format)
    assert quantised.codes.float().tolist() == [[LARGEST[weight_format], -LARGEST[weight_format]]]


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_or_infinity_is_refused_with_its_row(
    weight_format: str, value: float, dtype: torch.dtype
) -> None:
    weight = torch.ones(5, 7, dtype=dtype)
    weight[3, 2] = value
    with pytest.raises(NonFiniteWeight, match="row 3"):  # before a maximum over shards hides it
        row_absmax(weight)
    with pytest.raises(NonFiniteWeight, match="row 3"):
        quantise(weight, weight_format)
    with pytest.raises(NonFiniteWeight, match="row 3"):
        quantise(torch.ones(5, 7), weight_format, absmax=weight[:, 2:3].float())


def test_views_that_are_not_contiguous_quantise_like_their_copies() -> None:
    weight = torch.randn(12, 30, generator=torch.Generator().manual_seed(2))
    for view in (weight.t(), weight[:, ::3], weight[::2, 5:]):
        quantised = quantise(view, "int8")
        assert quantised.codes.is_contiguous()
        assert same_bytes(quantised, quantise(view.contiguous(), "int8"))


def test_error_squares_are_those_of_eq_14() -> None:
    """Row 1 is exact; in row 2, scale 1, 0.25 is lost and 3.5 becomes 4."""
    weight = torch.tensor([[254.0, 2.0, -4.0], [127.0, 0.25, 3.5]])
    error, square = quantisation_error_squares(weight, quantise(weight, "int8"))
    assert error.item() == 0.25**2 + 0.5**2
    assert square.item() == 254**2 + 2**2 + 4**2 + 127**2 + 0.25**2 + 3.5**2
    assert error.dtype == square.dtype == torch.float64


@pytest.mark.parametrize("weight_format", FORMATS)
def test_code_flips_counts_changed_codes(weight_format: str) -> None:
    weight = torch.tensor([[448.0, 20.0, -20.0, 3.0]])
    moved = torch.tensor([[448.0, 20.01, 20.0, 100.0]])
    old, new = quantise(weight, weight_format).codes, quantise(moved, weight_format).codes
    assert code_flips(old, old.clone()) == 0
    assert code_flips(old, new) == 2


def test_unknown_format_and_misshapen_absmax_are_refused() -> None:
    weight = torch.ones(3, 4)
    with pytest.raises(ValueError, match="'int4'.*int8, fp8"):
        quantise(weight, "int4")
    with pytest.raises(ValueError, match=r"float32 \[3\].*\[3, 4\].*\[3, 1\]"):
        quantise(weight, "int8", absmax=torch.ones(3))
