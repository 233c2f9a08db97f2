"""The learner computes as servers do, in every layout, against transformers with quantized layers.

INT4 changes weights alone, so log-probs agree to float32 rounding. Activations are rounded too in
the other formats. A value on the boundary of two codes then tips either way, in few tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import score
from distributed import run_ranks
from learner_reference import (
    DIMS,
    DP2,
    EP2,
    ETP2,
    EXPERTS,
    HYBRID,
    PP2,
    TP2,
    learner_config,
    logprobs_and_entropy_of,
    make_rows,
)
from qurl_megatron.config.schema import OptimizerConfig, ServerConfig, WeightFormat
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.activations import activation_dtype, in_groups, quantize_tokens
from tiny import build_tiny_model

# Groups of 32 channels fit every layer; those of o_proj lie on both of two ranks.
GROUPS: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "qwen3", **DIMS, **GROUPS},
    "llama": {"architecture": "llama", "tied": True, **DIMS, **GROUPS},
    "experts": {"architecture": "qwen3_moe", **EXPERTS, **GROUPS, "moe_intermediate_size": 64},
    "hybrid": {
        "architecture": "qwen3_5_text",
        **HYBRID,
        **GROUPS,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
}
# Model, format, learner's layout, ranks of a server. Not every pair: each layout, format and model.
CASES: list[tuple[str, WeightFormat, dict[str, Any], int]] = [
    ("dense", "int8", {}, 1),
    ("dense", "int8", TP2, 1),
    ("dense", "int8", {**TP2, **PP2}, 2),
    ("dense", "fp8", TP2, 2),
    ("dense", "fp8-block", DP2, 1),
    ("dense", "fp8-tensor", {}, 2),
    ("llama", "int4-g32", TP2, 1),
    ("llama", "int8", PP2, 2),
    ("experts", "int4-g32", {**DP2, **EP2}, 1),
    ("experts", "int4-g32", {**TP2, **ETP2}, 1),
    ("hybrid", "int8", TP2, 1),
    ("hybrid", "int4-g32", PP2, 1),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(directory / name, **fields) for name, fields in MODELS.items()}


def served_logprobs(
    model: Path, weight_format: WeightFormat, layout: dict[str, Any], ranks_of_server: int
) -> dict[str, Tensor]:
    """Return the learner's log-probs before, within and after the context."""
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.reshard import Converter

    learner = Learner(model, learner_config(layout), OptimizerConfig())
    converter = Converter(learner, weight_format, 2**20)
    server = ServerConfig(tensor_parallel_size=ranks_of_server)
    tokens, results = make_rows().tokens, {}
    results["before"], _ = score(learner, tokens)
    with learner.as_served(converter, server):
        results["served"], _ = score(learner, tokens)
    results["after"], _ = score(learner, tokens)
    learner.close()
    return results


def with_quantized_layers(model: Any, weight_format: WeightFormat, ranks_of_server: int) -> Any:
    """Quantize the weights of a transformers model, and what its linear layers multiply."""
    code_dtype = activation_dtype(weight_format)

    def quantized(weight: Tensor) -> Tensor:
        values = quantize.dequantize(quantize.quantize(weight, weight_format))
        return values.bfloat16().float() if weight_format.startswith("int4") else values

    def round_input(columns: int, _: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = inputs
        assert code_dtype
        codes, scale = quantize_tokens(in_groups(x.flatten(0, -2), columns), code_dtype)
        return ((codes * scale).view(-1, x.shape[-1] + -x.shape[-1] % columns)[:, : x.shape[-1]].view_as(x),)

    with torch.no_grad():
        for name, module in model.named_modules():
            if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, Tensor):
                for experts in (module.gate_up_proj, module.down_proj):
                    experts.copy_(quantized(experts.flatten(0, 1)).view_as(experts))
            if not isinstance(module, torch.nn.Linear) or name.endswith(
                ("lm_head", "in_proj_a", "in_proj_b")
            ):
                continue
            if name.endswith("in_proj_qkv"):  # a server's scales of a tensor or a block are of parts
                assert weight_format not in ("fp8-tensor", "fp8-block")
            module.weight.copy_(quantized(module.weight))
            is_divided = name.endswith(("o_proj", "down_proj", "out_proj"))
            columns = module.in_features // (ranks_of_server if is_divided else 1)
            if weight_format == "fp8-block":
                columns = 128
            if code_dtype:
                module.register_forward_pre_hook(
                    lambda *args, columns=columns: round_input(columns, *args)
                )
    return model


@pytest.mark.parametrize(
    ("name", "weight_format", "layout", "ranks_of_server"),
    CASES,
    ids=lambda value: str(value).replace("_parallel_size", ""),
)
def test_log_probs_are_those_of_quantized_layers(
    models: dict[str, Path],
    name: str,
    weight_format: WeightFormat,
    layout: dict[str, Any],
    ranks_of_server: int,
) -> None:
    from transformers import AutoModelForCausalLM

    world_size = learner_config(layout).world_size
    results = run_ranks(
        served_logprobs, world_size, models[name], weight_format, layout, ranks_of_server
    )[0]
    model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    tokens = make_rows().tokens
    with torch.no_grad():
        exact, _ = logprobs_and_entropy_of(model, tokens, 1.0)
        model = with_quantized_layers(model, weight_format, ranks_of_server)
        expected, _ = logprobs_and_entropy_of(model, tokens, 1.0)
    torch.testing.assert_close(results["before"], exact, rtol=0, atol=1e-5)
    assert torch.equal(results["after"], results["before"])
    moved = (expected - exact).abs()
    difference = (results["served"] - expected).abs()
    print(name, weight_format, difference.max(), difference.median(), difference.quantile(0.8), moved.median())
    if activation_dtype(weight_format) is None:
        assert difference.max() < 1e-5 < moved.median()
    else:
        assert difference.quantile(0.8) < 0.02 * moved.quantile(0.8)
