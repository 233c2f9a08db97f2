"""Experts in the server's ranks: loaded, reloaded, changed in place, read back, and multiplied."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

import sglang_loader
from moe_layer import CONFIGS, EXPERTS, HIDDEN, INTERMEDIATE, build_layer, routed
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.quantization.activations import quantize_tokens
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.quantization.offline import quantize_directory
from qurl_megatron.sglang_plugin.formats import (
    Fp8BlockConfig,
    QuantizedExpertsMethod,
    apply_unquantized_experts,
)
from tiny import build_tiny_model, quantized

torch.set_num_threads(1)

FORMATS = ("bf16", "int8", "int4", "fp8", "fp8-block")
# Ranks of a server, and groups of them over which whole experts are divided.
LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
# Widths of every rank are whole blocks of 128.
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 512,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 1,
}


@pytest.fixture(scope="module", params=FORMATS)
def weights(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str, list[dict[str, Tensor]]]]:
    """Yield a tiny model's directory, a format, and two sets of weights to send in it."""
    directory, weight_format = tmp_path_factory.mktemp("moe"), request.param
    dims: dict[str, Any] = WHOLE_BLOCKS if weight_format in ("int4", "fp8-block") else {}
    models = [
        build_tiny_model(directory / str(seed), "qwen3_moe", seed=seed, **dims) for seed in (0, 1)
    ]
    yield models[0], weight_format, [quantized(model, weight_format) for model in models]


def parameters(ranks: list[Any]) -> list[tuple[int, int]]:
    """Return each parameter's identity and address."""
    return [(id(p), p.data_ptr()) for model in ranks for p in model.parameters()]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("size", "groups"), LAYOUTS)
def test_every_layout_holds_what_was_sent_in_the_same_memory(
    weights: tuple[Path, str, list[dict[str, Tensor]]], size: int, groups: int
) -> None:
    """Whole publishes, then a delta; experts' tensors have one name each."""
    model_dir, weight_format, (first, second) = weights
    ranks = sglang_loader.build_ranks(model_dir, weight_format, size, groups)
    built = parameters(ranks)
    for sent in (first, second):
        sglang_loader.load(ranks, sent, groups)
        assert sglang_loader.hold(ranks, sent)
    assert sglang_loader.checksums_of(ranks) == {
        name: checksum(tensor) for name, tensor in second.items()
    }
    sglang_loader.send_changes(ranks, second, first)
    assert sglang_loader.hold(ranks, first)
    assert parameters(ranks) == built


@pytest.mark.usefixtures("engine")
def test_each_group_of_ranks_has_its_own_experts_and_no_others(
    weights: tuple[Path, str, list[dict[str, Tensor]]],
) -> None:
    from qurl_megatron.sglang_plugin.weights import held_parts

    model_dir, weight_format, _ = weights
    ranks = sglang_loader.build_ranks(model_dir, weight_format, 4, 2)
    experts = [
        {int(name.split("experts.")[1].split(".")[0]) for name in held_parts(model)
         if "experts." in name}
        for model in ranks
    ]  # fmt: skip
    assert experts == [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}]


@pytest.mark.usefixtures("engine")
def test_a_quantized_directory_is_loaded_like_a_publish(
    weights: tuple[Path, str, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    model_dir, weight_format, (sent, _) = weights
    written = tmp_path / "quantized"
    quantize_directory(model_dir, written, cast(WeightFormat, weight_format), lambda *_: None)
    stored = load_file(written / "model.safetensors")
    assert sglang_loader.same_bytes(stored, sent)
    ranks = sglang_loader.build_ranks(written, weight_format, 2, 2)
    sglang_loader.load(ranks, stored, 2)
    assert sglang_loader.hold(ranks, sent)


def rounded(x: Tensor, weight_format: str) -> Tensor:
    """Return activations `[in]` as a token's codes and scales stand for them."""
    if weight_format == "int4-g32":
        return x.float()
    dtype = torch.int8 if weight_format == "int8" else torch.float8_e4m3fn
    blocks = x.float().split(128 if weight_format == "fp8-block" else len(x))
    parts = [quantize_tokens(block[None], dtype) for block in blocks]
    return torch.cat([(codes * scale)[0] for codes, scale in parts])


@pytest.mark.parametrize("weight_format", CONFIGS)
def test_experts_multiply_the_codes_of_each_token_and_are_summed_by_routing_weight(
    weight_format: str,
) -> None:
    layer, method, values = build_layer(weight_format)
    dispatched = routed()
    out = method.apply(layer, dispatched).hidden_states
    assert out.dtype == torch.bfloat16
    routing_weights, experts, _ = dispatched.topk_output
    for token, x in enumerate(dispatched.hidden_states):
        expected = torch.zeros(HIDDEN)
        for weight, expert in zip(routing_weights[token], experts[token].tolist(), strict=True):
            if expert >= 0:
                gate_up, down = values[expert]
                gate, up = (gate_up @ rounded(x, weight_format)).bfloat16().float().chunk(2)
                product = rounded((silu(gate) * up).bfloat16(), weight_format)
                expected += weight * (down @ product).bfloat16().float()
        # A rounding of the sum, and codes of the product that a last bit of a sum flips.
        torch.testing.assert_close(out[token].float(), expected, rtol=8e-3, atol=2e-2)
    assert out[4].count_nonzero() == 0


def test_unquantized_experts_skip_those_of_other_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = SimpleNamespace(
        w13_weight=torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator).bfloat16(),
        w2_weight=torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator).bfloat16(),
    )
    dispatched = routed()
    method: Any = None  # the method called uses no state
    out = apply_unquantized_experts(method, layer, dispatched).hidden_states
    assert out[4].count_nonzero() == 0
    weight, expert = (
        dispatched.topk_output.topk_weights[2, 1],
        dispatched.topk_output.topk_ids[2, 1],
    )
    gate_up = (layer.w13_weight[expert].float() @ dispatched.hidden_states[2].float()).bfloat16()
    gate, up = gate_up.float().chunk(2)
    down = layer.w2_weight[expert].float() @ (silu(gate) * up).bfloat16().float()
    torch.testing.assert_close(out[2], (weight * down.bfloat16().float()).bfloat16())


def test_a_block_that_would_belong_to_gate_and_up_is_an_error() -> None:
    config = Fp8BlockConfig()
    method = QuantizedExpertsMethod(config.linear_method(config))
    with pytest.raises(ValueError, match=r"192 channels of each expert.*multiple of 128"):
        method.create_weights(
            torch.nn.Module(), 2, 128, 192, torch.bfloat16, weight_loader=lambda *_: None
        )
