"""Smoothing changes no value before quantization, in any family, and makes channels even."""

import pytest
import torch
from torch import Tensor

from qurl_megatron.model.architecture import Architecture, Family
from qurl_megatron.model.transformers_model import checkpoint_tensors
from qurl_megatron.quantization.rounding import write_rounded
from qurl_megatron.quantization.smoothing import LARGEST_EXPONENT, Maxima
from tiny import (
    ARCHITECTURES,
    HYBRIDS,
    apply,
    build_tiny_model,
    logits,
    random_model,
    random_smoothing,
)

CPU = torch.device("cpu")
BLOCK = "model.layers.0."
UP, DOWN = BLOCK + "mlp.up_proj.weight", BLOCK + "mlp.down_proj.weight"
NORM = BLOCK + "input_layernorm.weight"
# What is divided, and what is multiplied by the same scales, in all families together.
GIVERS = ("input_layernorm", "post_attention_layernorm", "up_proj")
READERS = (
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate", "shared_expert_gate"),
    "down_proj",
)


@pytest.fixture(scope="module")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Architecture]:
    directory = tmp_path_factory.mktemp("models")
    families = (*ARCHITECTURES, *HYBRIDS)
    return {
        family: Architecture.from_directory(build_tiny_model(directory / family, family))
        for family in families
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*ARCHITECTURES, *HYBRIDS])
def test_logits_are_the_same_bit_for_bit(
    architectures: dict[Family, Architecture], family: Family, dtype: torch.dtype
) -> None:
    model = random_model(family, dtype=dtype)
    before = logits(model)
    assert before.abs().max() > 1  # not trivially equal
    smoothing = random_smoothing(architectures[family])
    changed = {
        name
        for name, weight in checkpoint_tensors(model)
        if not torch.equal(smoothing.apply(name, weight), weight)
    }
    modules = {name.removesuffix(".weight") for name in changed}
    assert all(module.endswith(GIVERS + READERS) for module in modules)
    expected = ["up_proj", "down_proj"]
    expected += [] if family in HYBRIDS else [*READERS[:5], *GIVERS]
    for ending in expected:
        assert any(module.endswith(ending) for module in modules), ending
    apply(model, smoothing.apply)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("wrong", ["not divided", "of other channels"])
def test_a_wrong_scale_shows(architectures: dict[Family, Architecture], wrong: str) -> None:
    model = random_model("qwen2", dtype=torch.float32)
    before = logits(model)
    smoothing = random_smoothing(architectures["qwen2"])
    if wrong == "not divided":
        del smoothing.rows[NORM]
    else:
        smoothing.columns[DOWN] = smoothing.columns[DOWN].roll(1)
    apply(model, smoothing.apply)
    assert (logits(model) - before).abs().max() > 1e-2


def test_scales_are_powers_of_two_that_share_an_outlier(
    architectures: dict[Family, Architecture],
) -> None:
    """Inputs of 1 and weights of 1, but for the channels named here; the mean exponent is 0."""
    architecture = architectures["llama"]
    maxima = Maxima(architecture, CPU)
    x, weight = torch.ones(3, 160), torch.ones(64, 160)
    x[1, 0], x[2, 1], weight[5, 2], x[:, 3], weight[:, 4] = -256, 64, -4, 0, 0
    maxima.add_input(DOWN, x)
    maxima.add_weight(DOWN, weight)
    smoothing = maxima.smoothing(0.5)
    scales = smoothing.columns[DOWN]
    # The exponents' mean, (4 + 3 - 1) / 158, moves none of them to another number.
    assert scales[:6].tolist() == [16, 8, 0.5, 1, 1, 1]
    assert torch.equal(smoothing.rows[UP], 1 / scales)
    assert torch.equal(smoothing.apply(DOWN, weight[:, 2:4], (0, 2)), weight[:, 2:4] * scales[2:4])
    assert torch.equal(
        smoothing.apply(UP, weight.T[1:3], (1, 0)), weight.T[1:3] / scales[1:3, None]
    )
    assert maxima.largest() == (256, DOWN)
    # All of an outlier goes into the weights with 1.
    assert maxima.smoothing(1.0).columns[DOWN][:3].tolist() == [256, 64, 1]


def test_what_reads_an_input_has_its_scales(architectures: dict[Family, Architecture]) -> None:
    smoothing = random_smoothing(architectures["llama"])
    attention = f"{BLOCK}self_attn."
    q, k, v = (smoothing.columns[f"{attention}{x}_proj.weight"] for x in "qkv")
    assert torch.equal(q, k) and torch.equal(k, v)
    assert torch.equal(smoothing.rows[NORM], 1 / q)
    assert len({*q.tolist()}) > 3
    untouched = {"model.embed_tokens.weight", "model.norm.weight", f"{attention}o_proj.weight"}
    assert untouched.isdisjoint(smoothing.columns.keys() | smoothing.rows.keys())


def test_parts_of_inputs_and_weights_give_the_scales_of_the_whole(
    architectures: dict[Family, Architecture],
) -> None:
    architecture = architectures["qwen3"]
    whole, parts = Maxima(architecture, CPU), Maxima(architecture, CPU)
    x, weight = (torch.randn(n, 160, generator=torch.Generator().manual_seed(n)) for n in (9, 64))
    whole.add_input(DOWN, x)
    whole.add_weight(DOWN, weight)
    for columns in (slice(0, 24), slice(24, 160)):
        for rows in (slice(0, 4), slice(4, 64)):
            parts.add_input(DOWN, x[rows, columns], columns.start)
            parts.add_weight(DOWN, weight[rows, columns], columns.start)
    assert torch.equal(parts.values, whole.values)


@pytest.mark.parametrize("exponent", [-LARGEST_EXPONENT, -1, 1, LARGEST_EXPONENT])
def test_scaling_masters_scales_their_dithered_values(exponent: int) -> None:
    values = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 1e-3

    def rounded(values: Tensor) -> Tensor:
        out = torch.empty(values.shape, dtype=torch.bfloat16)
        write_rounded(out, values, "name", "unbiased")
        return out

    scale = 2.0**exponent
    assert torch.equal(rounded(values * scale), rounded(values) * scale)


def test_of_an_expert_that_no_token_reached_nothing_changes(
    architectures: dict[Family, Architecture],
) -> None:
    maxima = Maxima(architectures["qwen3_moe"], CPU)
    name = f"{BLOCK}mlp.experts.0.down_proj.weight"
    maxima.add_weight(name, torch.ones(64, 4) * torch.arange(4))
    maxima.add_input(name, torch.ones(0, 4))
    assert {*maxima.smoothing(0.5).columns[name].tolist()} == {1.0}
