"""The learner computes as servers do, in every layout, against transformers with quantized layers.

INT4 changes weights alone, so log-probs and gradients agree to float32 rounding. Activations are
rounded too in the other formats. A value on the boundary of two codes then tips either way, in few
tokens.

With smoothing, the scales are those that transformers' own inputs give, and the model with them is
quantized.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from adapters_reference import ALPHA, PLAIN, RANK, adapt, write_b
from batches import negative_log_likelihood, ragged, score, share_of
from distributed import run_ranks
from learner_reference import (
    DIMS,
    DP2,
    EP2,
    ETP2,
    EXPERTS,
    FULL,
    HYBRID,
    PP2,
    SELECTIVE,
    TP2,
    VPP2,
    gathered,
    learner_config,
    logprobs_and_entropy_of,
    make_batch,
    make_rows,
    of_optimizer,
    parts_of,
    policy_gradient,
)
from qurl_megatron.algorithm.objective import mismatch_sums
from qurl_megatron.config.schema import OptimizerConfig, ServerConfig, WeightFormat
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import checkpoint_tensors
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.activations import activation_dtype, in_groups, quantize_tokens
from qurl_megatron.quantization.rounding import write_rounded
from qurl_megatron.quantization.smoothing import Maxima, Smoothing
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
        [("dense", "int8", 1, 0), ("llama", "int4-g32", 1, A), ("hybrid", "int8", 2, A)],
    ),
    "TP2xPP2, full": (
        {**TP2, **PP2, **FULL},
        [("dense", "fp8", 2, 0), ("dense", "int8", 4, A)],
    ),
    "DP2, EP2": (
        {**DP2, **EP2},
        [("dense", "fp8-block", 1, 0), ("experts", "int4-g32", 1, A)],
    ),
    "VPP2": (VPP2, [("dense", "int8", 1, 0)]),
    "TP2, ETP2": ({**TP2, **ETP2}, [("experts", "int4-g32", 1, A)]),
}
SEEN = 4  # rows that smoothing sees: as many in each micro batch, so that no rank adds padding


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


class _With(torch.autograd.Function):
    """Other values in place of a tensor's, which gets their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def scores_and_gradient(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs and the gradient of a transformers model, named as in a checkpoint."""
    rows = make_rows()
    logprobs, entropy = logprobs_and_entropy_of(model, rows.tokens, 1.0)
    weights = rows.loss_mask / rows.loss_mask.sum()
    model.zero_grad()
    policy_gradient(logprobs, entropy, rows, weights)[0].backward()
    of = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    names: Any = SimpleNamespace(named_parameters=of.items, config=model.config)
    return logprobs.detach(), dict(checkpoint_tensors(names))


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


def with_quantized_layers(model: Any, weight_format: WeightFormat, ranks_of_server: int) -> Any:
    """Quantize the weights of a transformers model, and what its linear layers multiply."""
    code_dtype = activation_dtype(weight_format)

    def quantized(weight: Tensor) -> Tensor:
        values = quantize.dequantize(quantize.quantize(weight, weight_format))
        return values.bfloat16().float() if weight_format.startswith("int4") else values

    def round_input(columns: int, _: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0].detach()
        assert code_dtype
        codes, scale = quantize_tokens(in_groups(x.flatten(0, -2), columns), code_dtype)
        values = (codes * scale).view(x.shape[0] * x.shape[1], -1)[:, : x.shape[-1]].view_as(x)
        return (_With.apply(inputs[0], values.to(x.dtype)),)

    with torch.no_grad():
        for name, module in model.named_modules():
            if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, Tensor):
                for experts in (module.gate_up_proj, module.down_proj):
                    experts.copy_(quantized(experts.flatten(0, 1)).view_as(experts))
            if not isinstance(module, torch.nn.Linear) or name.endswith(
                ("lm_head", "in_proj_a", "in_proj_b")
            ):
                continue
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


def as_sent(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return unquantized weights as servers get them, in BF16."""
    sent = {name: weight.bfloat16() for name, weight in weights.items()}
    for name, weight in weights.items():
        write_rounded(sent[name], weight, name, "unbiased")
    return {name: weight.float() for name, weight in sent.items()}


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


def adapters_and_gradient(directory: Path) -> list[list[weight_map.TensorPart]]:
    """Return this rank's parts of adapters over INT8, and of their gradient as servers compute."""
    from qurl_megatron import device
    from qurl_megatron.learner.adapters import Adapters
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.reshard import Converter

    device.initialize_distributed()
    adapters = Adapters(RANK, ALPHA, "int8")
    learner = Learner(directory, learner_config(TP2 | FULL), PLAIN, adapters=adapters)
    write_b(learner)
    held = parts_of(learner, (each for each in learner.shards() if each[0].is_adapter))
    with learner.as_served(Converter(learner, "int8", 2**20), ServerConfig()):
        learner.update(share_of(learner, make_batch()), policy_gradient, temperature=1.0)
    parameters: Any = learner._parameters()
    gradients = ((r, n, p.main_grad) for _, r, n, p in parameters if r.is_adapter)
    parts = [held, parts_of(learner, gradients)]
    learner.close()
    return parts


def test_adapters_learn_over_a_base_that_rounds_its_inputs(models: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    by_rank = run_ranks(adapters_and_gradient, 2, models["dense"])
    adapters, found = (gathered(list(parts)) for parts in zip(*by_rank, strict=True))
    gradients: list[dict[str, Any]] = []
    for rounds_inputs in (False, True):
        model = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32)
        model = with_quantized_layers(model, "int8", 1)
        if not rounds_inputs:
            for module in model.modules():
                module._forward_pre_hooks.clear()
        held = adapt(model.double().requires_grad_(False), as_sent(adapters))
        scores_and_gradient(model)
        gradients.append({name: parameter.grad for name, parameter in held.items()})
    exact, expected = gradients
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm()
        assert error < 0.2 * (exact[name] - value).norm(), name
