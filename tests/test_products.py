"""The products of servers without a GPU, and when what they keep of a weight is made anew."""

import pytest
import torch

from qurl_megatron.quantization import products


@pytest.mark.parametrize("width", [1, 63, 1024, 1025, 5000])
def test_int8_products_are_exact(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    codes = torch.randint(-127, 128, (5, width), generator=generator)
    weight = torch.randint(-127, 128, (7, width), generator=generator)
    codes[0], weight[0] = 127, 127  # the largest possible sum
    weight[1] = 127
    weight[1, ::2] = 126  # odd sums are the first to be rounded in float32
    scale = torch.rand(7, 1, generator=generator)
    expected = (codes @ weight.t()).float() * scale.t()
    factors = codes.float(), weight.to(torch.int8), scale
    for multiply in (products.int8_product(7, width), products.in_float32):
        products.forget()
        assert torch.equal(multiply(*factors), expected)


def test_lm_head_sums_bfloat16_values_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 896, generator=generator).bfloat16() for n in (5, 300))
    products.forget()
    torch.testing.assert_close(
        products.sum_bfloat16(x, weight).double(),
        x.double() @ weight.double().t(),
        rtol=0,
        atol=1e-4,  # bfloat16 would round by up to 0.25
    )


def test_an_inexact_product_of_int8_codes_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without VNNI sums of two products, of codes made positive, are cut off at 16 bits."""

    def saturating(codes: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        pairs = codes.unflatten(1, (-1, 2))[:, None] * weight.unflatten(1, (-1, 2))
        return pairs.sum(-1).clamp(-(2**14), 2**14 - 1).sum(-1) * scale.t()

    monkeypatch.setattr(products, "in_int8", saturating)
    monkeypatch.setattr(products, "packed_int8", saturating)
    assert products.int8_product.__wrapped__(8, 64) is products.in_float32


def test_what_is_kept_of_a_weight_is_made_anew_once_it_is_forgotten() -> None:
    weight = torch.ones(3, 4, dtype=torch.bfloat16)
    products.forget()
    first = products.kept(weight, torch.Tensor.float)
    assert products.kept(weight, torch.Tensor.float) is first
    weight.fill_(2)
    products.forget()
    assert torch.equal(products.kept(weight, torch.Tensor.float), torch.full((3, 4), 2.0))
