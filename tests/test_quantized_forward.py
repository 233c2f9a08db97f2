"""The learner computes as servers do, in every layout, against transformers with quantized layers.

INT4 changes weights alone, so log-probs and gradients agree to float32 rounding. Activations are
rounded too in the other formats. A value on the boundary of two codes then tips either way, in few
tokens.

With smoothing, the scales are those that transformers' own inputs give, and the model with them is
quantized.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from batches import negative_log_likelihood, ragged, score, share_of
from distributed import run_ranks
from learner_reference import (
    CP2,
    DIMS,
    DP2,
    EP2,
    ETP2,
    EXPERTS,
    FOUR_LAYERS,
    FULL,
    HYBRID,
    PP2,
    SELECTIVE,
    TP2,
    VPP2,
    gathered,
    learner_config,
    make_batch,
    make_rows,
    of_optimizer,
    parts_of,
    policy_gradient,
)
from quantized_reference import GROUPS, as_sent, scores_and_gradient, with_quantized_layers
from qurl_megatron.algorithm.objective import mismatch_sums
from qurl_megatron.config.schema import OptimizerConfig, ServerConfig, WeightFormat
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.transformers_model import checkpoint_tensors
from qurl_megatron.quantization.activations import activation_dtype
from qurl_megatron.quantization.smoothing import Maxima, Smoothing
from tiny import build_tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architecture": "qwen3", **DIMS, **GROUPS},
    "four layers": {"architecture": "qwen3", **DIMS, **FOUR_LAYERS, **GROUPS},
    "one key head": {"architecture": "qwen3", **DIMS, **GROUPS, "num_key_value_heads": 1},
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
OPTIMIZER = OptimizerConfig(clip_grad=1e9)  # gradients stay as they are
A = 0.5  # an exponent of smoothing
Case = tuple[str, WeightFormat, int, float]
"""Model, format, number of a server's ranks, exponent of smoothing."""
# For each layout of the learner. Not every product, but each layout, format and model, and servers
# with fewer ranks than the learner and with more.
CASES: dict[str, tuple[dict[str, Any], list[Case]]] = {
    "TP1": (
        {},
        [("dense", "int8", 1, A), ("dense", "fp8-tensor", 2, 0), ("hybrid", "int4-g32", 1, A)],
    ),
    "TP2, selective": (
        {**TP2, **SELECTIVE},
        [
            ("dense", "int8", 1, 0),
            ("one key head", "fp8-tensor", 1, 0),  # the other rank has none of its rows
            ("llama", "int4-g32", 1, A),
            ("hybrid", "int8", 2, A),
        ],
    ),
    "TP2xPP2, full": (
        {**TP2, **PP2, **FULL},
        [("dense", "fp8", 2, 0), ("dense", "int8", 4, A)],
    ),
    "DP2, EP2": (
        {**DP2, **EP2},
        [("dense", "fp8-block", 1, 0), ("experts", "int4-g32", 1, A)],
    ),
    "VPP2": (VPP2, [("four layers", "int8", 1, 0)]),
    "CP2": (CP2, [("dense", "int8", 1, A), ("llama", "int4-g32", 1, 0)]),
    "TP2, ETP2": ({**TP2, **ETP2}, [("experts", "int4-g32", 1, A)]),
}
SEEN = 3  # rows that smoothing sees: no whole number of micro batches, so that ranks add padding


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(directory / name, **fields) for name, fields in MODELS.items()}


def served_scores(
    models: dict[str, Path],
    layout: dict[str, Any],
    cases: list[Case],
) -> list[dict[str, Any]]:
    """Return, for each case, the learner's log-probs before, within and after the context.

    And its smoothing, and the parts of the gradient within it that this rank has.
    """
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.reshard import Converter

    device.initialize_distributed()  # once; each learner destroys its own groups
    results = []
    for name, weight_format, ranks_of_server, exponent in cases:
        is_expert = name == "experts"
        fields = layout if is_expert else {k: v for k, v in layout.items() if "expert" not in k}
        learner = Learner(models[name], learner_config(fields, micro_batch_size=2), OPTIMIZER)
        converter = Converter(learner, weight_format, 2**20)
        tokens = make_rows().tokens
        if exponent:
            learner.smooth(share_of(learner, ragged(tokens[:SEEN])), exponent)
        before, _ = score(learner, tokens)
        with learner.as_served(converter, ServerConfig(tensor_parallel_size=ranks_of_server)):
            served, _ = score(learner, tokens)
        after, _ = score(learner, tokens)
        with learner.as_served(converter, ServerConfig(tensor_parallel_size=ranks_of_server)):
            learner.update(share_of(learner, make_batch()), policy_gradient, temperature=1.0)
        gradient = parts_of(learner, of_optimizer(learner, "gradient"))
        scores = {"before": before, "served": served, "after": after}
        results.append({**scores, "gradient": gradient, "smoothing": learner.smoothing})
        learner.close()
    return results


def smoothing_of(model: Any, directory: Path, tokens: Tensor, exponent: float) -> Smoothing:
    """Return the scales that the inputs of a transformers model give."""
    maxima = Maxima(Architecture.from_directory(directory), torch.device("cpu"))
    for name, weight in checkpoint_tensors(model):
        if weight_map.find_hugging_face(name)[0].quantized:
            maxima.add_weight(name, weight)

    def see(name: str, _: Any, inputs: tuple[Tensor, ...]) -> None:
        maxima.add_input(f"{name}.weight", inputs[0].flatten(0, -2))

    def see_experts(name: str, experts: Any, inputs: tuple[Tensor, ...]) -> None:
        x, chosen, shares = inputs
        for number, weight in enumerate(experts.gate_up_proj):
            tokens, places = (chosen == number).nonzero(as_tuple=True)
            gate, up = (x[tokens] @ weight.t()).chunk(2, dim=1)
            # Megatron multiplies by the expert's share of a token before down_proj.
            product = silu(gate) * up * shares[tokens, places, None]
            maxima.add_input(f"{name}.{number}.gate_proj.weight", x[tokens])
            maxima.add_input(f"{name}.{number}.down_proj.weight", product)

    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, Tensor):
            hooks.append(module.register_forward_pre_hook(partial(see_experts, name)))
        elif isinstance(module, torch.nn.Linear) and name.endswith(("_proj", ".in_proj_z")):
            hooks.append(module.register_forward_pre_hook(partial(see, name)))
    model(tokens[:, :-1])  # the learner does not read the last one
    for hook in hooks:
        hook.remove()
    return maxima.smoothing(exponent)


def assert_same_scales(one: Smoothing, other: Smoothing) -> None:
    for own, expected in ((one.columns, other.columns), (one.rows, other.rows)):
        assert own.keys() == expected.keys()
        for name, scales in expected.items():
            assert torch.equal(own[name], scales), name
    assert len(torch.cat([*one.columns.values()]).unique()) > 2


@pytest.mark.parametrize("layout", CASES)
def test_log_probs_and_gradients_are_those_of_quantized_layers(
    models: dict[str, Path], layout: str
) -> None:
    from transformers import AutoModelForCausalLM

    fields, cases = CASES[layout]
    world_size = learner_config(fields).world_size
    by_rank = run_ranks(served_scores, world_size, models, fields, cases)
    for number, (name, weight_format, ranks_of_server, exponent) in enumerate(cases):
        result = by_rank[0][number]
        gradient = gathered([of_rank[number]["gradient"] for of_rank in by_rank])
        model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
        exact, exact_gradient = scores_and_gradient(model)
        smoothing = Smoothing({}, {})
        if exponent:
            tokens = make_rows().tokens[:SEEN]
            with torch.no_grad():
                smoothing = smoothing_of(model, models[name], tokens, exponent)
                assert_same_scales(result["smoothing"], smoothing)
                for tensor, weight in checkpoint_tensors(model):
                    weight.copy_(smoothing.apply(tensor, weight))
        model = with_quantized_layers(model, weight_format, ranks_of_server)
        expected, expected_gradient = scores_and_gradient(model)
        expected_gradient = {  # of the weights before they were multiplied
            tensor: smoothing.apply(tensor, value) for tensor, value in expected_gradient.items()
        }
        torch.testing.assert_close(result["before"], exact, rtol=0, atol=5e-5)
        assert torch.equal(result["after"], result["before"])
        moved = (expected - exact).abs()
        difference = (result["served"] - expected).abs()
        is_exact = activation_dtype(weight_format) is None
        if is_exact:
            assert difference.max() < 1e-4 < 1e-2 * moved.quantile(0.8), name
        else:
            assert difference.quantile(0.8) < 1e-3 * moved.quantile(0.8), name
        assert gradient.keys() == expected_gradient.keys()
        bound = 1e-4 if is_exact else 0.3  # of how far quantizing moves it
        for tensor, value in expected_gradient.items():
            error = (gradient[tensor] - value).norm()
            assert error < bound * (exact_gradient[tensor] - value).norm(), (name, tensor)


def train(directory: Path) -> list[Any]:
    """Train in full precision and as served; return losses, log-probs and weights afterwards."""
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.reshard import Converter

    device.initialize_distributed()
    results = []
    for what in (None, "all"):
        learner = Learner(directory, learner_config({}), OptimizerConfig(learning_rate=1e-2))
        converter = Converter(learner, "int4-g32", 2**20)
        with learner.as_served(converter, ServerConfig(), what):
            share = share_of(learner, make_batch())
            losses = [
                learner.update(share, negative_log_likelihood, temperature=1.0).loss
                for _ in range(2)
            ]
            logprobs, _ = score(learner, make_rows().tokens)
        results.append((losses, logprobs, parts_of(learner, learner.shards())))
        learner.close()
    return results


def test_what_was_trained_as_served_is_what_servers_compute(models: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    rows, k3 = make_rows(), []
    for losses, proximal, parts in run_ranks(train, 1, models["dense"])[0]:
        assert losses[-1] < losses[0] - 0.1
        weights = gathered([parts])
        weights |= as_sent({name: each for name, each in weights.items() if "_proj" not in name})
        model = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32)
        model.load_state_dict(weights)
        behaviour, _ = scores_and_gradient(with_quantized_layers(model, "int4-g32", 1))
        sums = mismatch_sums(proximal, behaviour, rows.loss_mask, ratio_cap=2.0)
        k3.append(float(sums["kl_behaviour_proximal_k3"] / sums["tokens"]))
    plain, aware = k3
    assert aware < 1e-9 < 1e-3 < plain, k3
