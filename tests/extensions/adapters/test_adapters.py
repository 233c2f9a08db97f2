"""Adapters over a quantized base against torch in float64, by layout, in real processes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import score, share_of
from distributed import run_ranks
from extensions.adapters.adapters_reference import (
    ALPHA,
    PLAIN,
    RANK,
    WHOLE_GROUPS,
    Adapted,
    adapt,
    base_of,
    write_b,
)
from learner_reference import (
    BUDGET,
    CP2,
    DIMS,
    DP2,
    EP2,
    EXPERTS,
    FOUR_LAYERS,
    FULL,
    ONE_LAYER,
    PP2,
    SELECTIVE,
    TP2,
    VPP2,
    gathered,
    learner_config,
    logprobs_and_entropy_of,
    make_batch,
    make_rows,
    parts_of,
    policy_gradient,
)
from quantized_reference import GROUPS, as_sent, scores_and_gradient, with_quantized_layers
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.extensions.adapters.layers import Adapters
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, Family
from qurl_megatron.model.huggingface import Weights
from qurl_megatron.quantization.checksum import checksum, part_of_key
from qurl_megatron.quantization.quantize import quantize
from tiny import build_tiny_model


@dataclass(frozen=True)
class Case:
    weight_format: WeightFormat
    layout: dict[str, Any]
    ranks: int
    family: Family = "qwen3"
    tied: bool = False
    targets: tuple[str, ...] = ()
    dims: dict[str, Any] | None = None


CASES = {
    "TP1": Case("int8", {}, 1, "qwen2", tied=True),
    "TP2, all computed again": Case("int4-g32", {**TP2, **FULL}, 2),
    "PP2": Case("fp8", PP2, 2, "qwen2", tied=True),
    "DP2": Case("fp8", {**DP2, **BUDGET}, 2, "llama"),
    "one layer computed again": Case("int8", ONE_LAYER, 1),
    "TP2xPP2, cheap parts computed again": Case("int8", {**TP2, **PP2, **SELECTIVE}, 4),
    "PP2 in 2 parts, all computed again": Case(
        "int4-g32", {**VPP2, **BUDGET, **FULL}, 2, dims=FOUR_LAYERS
    ),
    "CP2xDP2": Case("int8", {**CP2, **DP2, **BUDGET}, 4, "qwen2", tied=True),
    "TP4, fewer key-value heads": Case(
        "int8", {"tensor_parallel_size": 4}, 4, dims={"num_attention_heads": 8}
    ),
    "q and v alone": Case("int8", TP2, 2, targets=("q_proj", "model.layers.1.self_attn.v_proj")),
    "experts frozen, EP2xTP2": Case("int8", {**EP2, **TP2, **DP2}, 4, "qwen3_moe"),
}


def measure(model: Path, case: Case) -> dict[str, Any]:
    from qurl_megatron import device
    from qurl_megatron.extensions.adapters.learner import AdaptedLearner

    device.initialize_distributed()
    adapters = Adapters(RANK, ALPHA, case.weight_format, case.targets)
    learner = AdaptedLearner(model, learner_config(case.layout), PLAIN, adapters=adapters)
    write_b(learner)
    share, tokens = share_of(learner, make_batch()), make_rows().tokens
    found: dict[str, Any] = {"base_sums": learner._base_sums}
    found["scores"] = score(learner, tokens, temperature=0.7)
    with learner.as_reference():
        found["base"] = score(learner, tokens, temperature=0.7)
    found["first"] = adapters_of(learner, lambda parameter: parameter.detach())
    found["updates"] = [learner.update(share, policy_gradient, temperature=0.7)]
    found["gradients"] = adapters_of(learner, lambda parameter: parameter.main_grad)
    found["updates"] += [learner.update(share, policy_gradient, temperature=0.7)]
    found["last"] = adapters_of(learner, lambda parameter: parameter.detach())
    found["merged"] = parts_of(learner, learner.merged())
    found["trained"] = sum(
        p.numel() for c in learner.chunks for p in c.parameters() if p.requires_grad
    )
    learner.close()
    return found


def assert_codes(sums: dict[str, int], directory: Path, weight_format: WeightFormat) -> None:
    """Assert that a rank's codes are those of quantizing the model on a CPU."""
    weights = Weights(directory, Architecture.from_directory(directory))
    names = {part_of_key(key)[0]: total for key, total in sums.items()}
    of_codes = [each for each in names if weight_map.find_hugging_face(each)[0].quantized]
    assert of_codes
    for name in of_codes:
        codes = quantize(weights.read(name, ()), weight_format).codes
        assert names[name] == checksum(codes), name


def adapters_of(learner: Any, of: Any) -> list[weight_map.TensorPart]:
    held = [(r, layer, of(p)) for _, r, layer, p in learner._parameters() if r.is_adapter]
    return parts_of(learner, held)


@pytest.mark.parametrize("name", CASES)
def test_scores_gradients_and_steps_are_those_of_torch(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    dims = EXPERTS if case.family == "qwen3_moe" else DIMS
    dims = dims | (case.dims or {})
    if case.weight_format == "int4-g32":
        dims |= WHOLE_GROUPS
    directory = build_tiny_model(tmp_path, case.family, tied=case.tied, **dims)
    ranks = run_ranks(measure, case.ranks, directory, case)

    model, rows = base_of(directory, case.weight_format), make_rows()
    with torch.no_grad():
        of_base, _ = logprobs_and_entropy_of(model, rows.tokens, 0.7)
    first = gathered([rank["first"] for rank in ranks])
    held = adapt(model, first)
    assert held.keys() == first.keys()
    with torch.no_grad():
        expected, _ = logprobs_and_entropy_of(model, rows.tokens, 0.7)
    assert (expected - of_base).abs().max() > 0.05
    for rank in ranks:
        assert_codes(rank["base_sums"], directory, case.weight_format)
        torch.testing.assert_close(rank["base"][0], of_base.float(), rtol=0, atol=2e-5)
        torch.testing.assert_close(rank["scores"][0], expected.float(), rtol=0, atol=2e-5)

    optimizer = torch.optim.AdamW(
        held.values(),
        lr=PLAIN.learning_rate,
        betas=(PLAIN.beta1, PLAIN.beta2),
        eps=PLAIN.epsilon,
        weight_decay=0,
    )
    weights = rows.loss_mask / rows.loss_mask.sum()
    is_target = trained(held, case.targets)
    for step in range(2):
        optimizer.zero_grad()
        logprobs, entropy = logprobs_and_entropy_of(model, rows.tokens, 0.7)
        loss, _ = policy_gradient(logprobs, entropy, rows, weights)
        loss.backward()
        for other in held.keys() - is_target:
            held[other].grad = None
        gradients = {each: grad for each in is_target if (grad := held[each].grad) is not None}
        norm = float(torch.stack([each.norm() for each in gradients.values()]).norm())
        for rank in ranks:
            assert rank["updates"][step].grad_norm == pytest.approx(norm, rel=2e-5)
        if step == 0 and "data_parallel_size" not in case.layout:  # each rank has its own part
            assert_gradients_match(gathered([rank["gradients"] for rank in ranks]), gradients)
        optimizer.step()
    last = gathered([rank["last"] for rank in ranks])
    for each, parameter in held.items():
        torch.testing.assert_close(last[each], parameter.float(), rtol=0, atol=3e-5)
        assert torch.equal(last[each], first[each]) == (each not in is_target)
    assert_merged(model, gathered([rank["merged"] for rank in ranks]))


def trained(names: Iterable[str], targets: tuple[str, ...]) -> set[str]:
    if not targets:
        return {*names}
    chosen = {"q_proj": "", "v_proj": "layers.1."}
    return {n for n in names for each, at in chosen.items() if f".{each}." in n and at in n}


def assert_gradients_match(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare the gradient of every adapter; one that recomputation lost would be 0."""
    for name, gradient in expected.items():
        largest = gradient.abs().max()
        assert largest > 0
        assert (found[name] - gradient).abs().max() < 1e-4 * largest, name
    for name in found.keys() - expected.keys():
        assert not found[name].any(), name


def assert_merged(model: Any, merged: dict[str, Tensor]) -> None:
    for path, layer in model.named_modules():
        if isinstance(layer, Adapted):
            whole = layer.base.weight + ALPHA / RANK * layer.b @ layer.a
            torch.testing.assert_close(merged[f"{path}.weight"], whole.float(), rtol=0, atol=3e-5)


def adapters_and_gradient(directory: Path) -> list[list[weight_map.TensorPart]]:
    """Return this rank's parts of adapters over INT8, and of their gradient as servers compute."""
    from qurl_megatron import device
    from qurl_megatron.extensions.adapters.learner import AdaptedLearner
    from qurl_megatron.weight_sync.reshard import Converter

    device.initialize_distributed()
    adapters = Adapters(RANK, ALPHA, "int8")
    learner = AdaptedLearner(directory, learner_config(TP2 | FULL), PLAIN, adapters=adapters)
    write_b(learner)
    held = parts_of(learner, (each for each in learner.shards() if each[0].is_adapter))
    with learner.as_served(Converter(learner, "int8", 2**20), ServerConfig()):
        learner.update(share_of(learner, make_batch()), policy_gradient, temperature=1.0)
    parameters: Any = learner._parameters()
    gradients = ((r, n, p.main_grad) for _, r, n, p in parameters if r.is_adapter)
    parts = [held, parts_of(learner, gradients)]
    learner.close()
    return parts


def test_adapters_learn_over_a_base_that_rounds_its_inputs(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = build_tiny_model(tmp_path, "qwen3", **(DIMS | GROUPS))
    by_rank = run_ranks(adapters_and_gradient, 2, directory)
    adapters, found = (gathered(list(parts)) for parts in zip(*by_rank, strict=True))
    gradients: list[dict[str, Any]] = []
    for rounds_inputs in (False, True):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
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
