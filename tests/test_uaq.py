"""UAQ, update-aware quantization: its invariance (QuRL Eq. 11) and its effect on codes (Eq. 12)."""

import pytest
import torch

from qurl_megatron.config.schema import UaqConfig
from qurl_megatron.model.architecture import Family
from qurl_megatron.model.transformers_model import checkpoint_tensors
from qurl_megatron.quantization import uaq
from qurl_megatron.quantization.quantize import code_flips, dequantize, quantize
from tiny import ARCHITECTURES, HYBRIDS, apply, logits, random_model

torch.set_num_threads(1)
SCALED_DOWN = (
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate", "shared_expert_gate"),
    *("in_proj_qkv:query", "in_proj_qkv:key", "in_proj_qkv:value", "in_proj_z"),
    *("in_proj_b", "in_proj_a"),
)
SCALED_UP = ("input_layernorm", "post_attention_layernorm")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS])
def test_only_norm_fed_weights_and_their_norms_change(architecture: Family) -> None:
    scale = uaq.transform(UaqConfig(2.0), is_hybrid=architecture in HYBRIDS)
    for name, weight in checkpoint_tensors(random_model(architecture, dtype=torch.float32)):
        module, kind = name.split(".")[-2:]
        factor = 1.0
        if kind == "weight" and "layers" in name:
            factor = 0.5 if module in SCALED_DOWN else 2.0 if module in SCALED_UP else 1.0
        if architecture in HYBRIDS and factor == 2:  # what the norm multiplies by is 1 + weight
            weight, scaled = weight + 1, scale(name, weight) + 1
            torch.testing.assert_close(scaled, weight * factor, rtol=0, atol=5e-7)
        else:
            assert torch.equal(scale(name, weight), weight * factor), name


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS])
@pytest.mark.parametrize(
    "config",
    [
        UaqConfig(1.5),
        UaqConfig(3.0),
        UaqConfig(0.7),
        UaqConfig(1.5, through_value=True),
        UaqConfig(1.5, through_up=True),
        UaqConfig(1.5, through_value=True, through_up=True),
        UaqConfig(1.5, layer_scales={0: 3.0, 1: 0.7}),
    ],
)
def test_logits_are_the_same_up_to_rounding(architecture: Family, config: UaqConfig) -> None:
    model = random_model(architecture, dtype=torch.float32)
    before = logits(model)
    assert before.abs().max() > 1  # not trivially equal
    apply(model, uaq.transform(config, is_hybrid=architecture in HYBRIDS))
    tolerance = 5e-5 if architecture in HYBRIDS else 1e-5
    torch.testing.assert_close(logits(model), before, rtol=0, atol=tolerance)
    unscaled = random_model(architecture, dtype=torch.float32)
    apply(model, uaq.inverse(config, is_hybrid=architecture in HYBRIDS))
    for (name, own), (_, weight) in zip(*map(checkpoint_tensors, (model, unscaled)), strict=True):
        torch.testing.assert_close(own, weight, rtol=1e-6, atol=5e-7, msg=name)


def scaled_hybrid(factors: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits before and after full tensors are multiplied, by the ends of their names."""
    model = random_model("qwen3_5_text", dtype=torch.float32)
    before = logits(model)
    for end, factor in factors.items():
        chosen = [weight for name, weight in checkpoint_tensors(model) if name.endswith(end)]
        assert chosen, end
        for weight in chosen:
            is_norm = (
                end == "input_layernorm.weight" and factor != 3
            )  # 3: as if it were no hybrid's
            weight.data.copy_((1 + weight) * factor - 1 if is_norm else weight * factor)
    return before, logits(model)


QKV = [f"in_proj_qkv:{part}.weight" for part in ("query", "key", "value")]
FED = [*QKV, "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"]
OF_ATTENTION = [f"self_attn.{x}_proj.weight" for x in "qkv"]
NORM = {"input_layernorm.weight": 2.0, **dict.fromkeys(OF_ATTENTION, 0.5)}


@pytest.mark.parametrize(
    ("factors", "is_invariant"),
    [
        ({**NORM, **dict.fromkeys(FED, 0.5)}, True),
        ({"linear_attn.norm.weight": 2.0, "linear_attn.out_proj.weight": 0.5}, True),
        (
            {
                **{f"conv1d:{x}.weight": 2.0 for x in ("query", "key", "value")},
                **dict.fromkeys(QKV, 0.5),
            },
            True,
        ),
        ({"self_attn.v_proj.weight": 2.0, "self_attn.o_proj.weight": 0.5}, True),
        ({**dict.fromkeys([*OF_ATTENTION, *FED], 1 / 3), "input_layernorm.weight": 3.0}, False),
        ({**NORM, **dict.fromkeys(FED[:-1], 0.5)}, False),
        ({**NORM, **dict.fromkeys([*FED[:-2], FED[-1]], 0.5)}, False),
        ({**NORM, **dict.fromkeys(FED[:3] + FED[4:], 0.5)}, False),
        ({"in_proj_qkv:value.weight": 2.0, "linear_attn.out_proj.weight": 0.5}, False),
    ],
    ids=[
        *("all that the norm feeds", "the norm behind states", "the convolution", "values"),
        *("a norm without its 1", "without the decay", "without beta", "without z"),
        "values of linear attention",
    ],
)
def test_which_pairs_of_a_hybrid_are_invariant(
    factors: dict[str, float], is_invariant: bool
) -> None:
    """Each wrong one would train another model without a word."""
    before, after = scaled_hybrid(factors)
    difference = float((after - before).abs().max())
    assert difference < 2e-5 if is_invariant else difference > 0.1


def test_v_proj_and_up_proj_lose_what_o_proj_and_down_proj_gain() -> None:
    config = UaqConfig(2.0, through_value=True, through_up=True)
    for name, weight in random_model("qwen2", dtype=torch.float32).state_dict().items():
        module, kind = name.split(".")[-2:]
        factor = {"o_proj": 0.5, "down_proj": 0.5, "q_proj": 0.5, "k_proj": 0.5, "gate_proj": 0.5}
        expected = factor.get(module, 2.0 if module in SCALED_UP else 1.0)
        if kind == "bias":
            expected = 2.0 if module == "v_proj" else 1.0
        assert torch.equal(
            uaq.transform(config, is_hybrid=False)(name, weight), weight * expected
        ), name


def test_a_layer_can_have_its_own_scale() -> None:
    scale = uaq.transform(UaqConfig(2.0, layer_scales={1: 4.0}), is_hybrid=False)
    weight = torch.ones(2, 2)
    assert scale("model.layers.0.mlp.up_proj.weight", weight)[0, 0] == 1 / 2
    assert scale("model.layers.1.mlp.up_proj.weight", weight)[0, 0] == 1 / 4
    assert scale("model.layers.1.input_layernorm.weight", weight)[0, 0] == 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_bit_equal_for_a_power_of_two(architecture: Family) -> None:
    model = random_model(architecture, dtype=torch.float32)
    before = logits(model)
    apply(model, uaq.transform(UaqConfig(2.0), is_hybrid=False))
    assert torch.equal(logits(model), before)


def chosen_experts(scale: float) -> torch.Tensor:
    """Return which of 64 experts 2,000 tokens choose, with a scaled norm and router in BF16."""
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(2000, 128, generator=generator)
    norm = (1 + 0.1 * torch.randn(128, generator=generator)).bfloat16().float()
    router = (0.05 * torch.randn(64, 128, generator=generator)).bfloat16().float()
    names = (f"model.layers.0.{x}.weight" for x in ("post_attention_layernorm", "mlp.gate"))
    scaled = uaq.transform(UaqConfig(scale), is_hybrid=False)
    norm, router = (
        scaled(name, tensor).bfloat16() for name, tensor in zip(names, (norm, router), strict=True)
    )
    normalized = torch.nn.functional.rms_norm(hidden.bfloat16(), (128,), eps=1e-6)
    scores = (normalized * norm).float() @ router.float().T
    chosen = torch.zeros(2000, 64, dtype=torch.bool)
    return chosen.scatter(1, scores.topk(8).indices, True)


def test_a_scale_that_is_no_power_of_two_makes_tokens_choose_other_experts() -> None:
    """This is why `check_scales` refuses one: the choices of a policy in BF16 would change."""
    unscaled = chosen_experts(1.0)
    assert torch.equal(chosen_experts(2.0), unscaled)
    changed = (chosen_experts(1.5) != unscaled).any(1).double().mean()
    assert 0.01 < changed < 0.2


@pytest.mark.parametrize(("scale", "rounding"), [(1.0, 0), (2.0, 0), (0.25, 0), (1.5, 2.0**-22)])
def test_the_inverse_is_exact_for_powers_of_two_and_within_a_rounding_otherwise(
    scale: float, rounding: float
) -> None:
    transform, inverse = (
        uaq.transform(UaqConfig(scale), is_hybrid=False),
        uaq.inverse(UaqConfig(scale), is_hybrid=False),
    )
    for name, weight in random_model("qwen2", dtype=torch.float32).state_dict().items():
        error = (inverse(name, transform(name, weight)) - weight).abs()
        assert (error <= weight.abs() * rounding).all(), name


def matrix(dtype: torch.dtype) -> torch.Tensor:
    return 0.02 * torch.randn(512, 1024, generator=torch.Generator().manual_seed(3), dtype=dtype)


def test_codes_of_the_scaled_weight_are_those_of_the_weight() -> None:
    """In float32, rounding moves a few across a boundary."""
    weight = matrix(torch.float32)
    plain, scaled = quantize(weight, "int8"), quantize(weight / 1.5, "int8")
    assert code_flips(plain.codes, scaled.codes) <= 1e-5 * weight.numel()
    torch.testing.assert_close(scaled.scale, plain.scale / 1.5, rtol=2.0**-22, atol=0)


def test_the_same_update_flips_more_codes_of_the_scaled_weight() -> None:
    """Steps of the same size, like Adam's, cross 1.5 times as many code boundaries (Eq. 12)."""
    weight = matrix(torch.float32)
    generator = torch.Generator().manual_seed(4)
    step = 1e-6 * torch.randn(weight.shape, generator=generator).sign()

    def flips(scale: float) -> int:
        before, after = weight / scale, weight / scale + step
        return int(code_flips(quantize(before, "int8").codes, quantize(after, "int8").codes))

    assert flips(1.5) / flips(1.0) == pytest.approx(1.5, rel=0.1)


def test_the_relative_quantization_error_stays() -> None:
    """That is QuRL Eq. 14."""
    weight = matrix(torch.float64)

    def quant_error(scale: float) -> float:
        exact = (weight / scale).float()
        error = dequantize(quantize(exact, "int8")) - exact
        return float(error.double().square().sum() / exact.double().square().sum())

    assert quant_error(1.5) / quant_error(1.0) == pytest.approx(1, rel=1e-4)
