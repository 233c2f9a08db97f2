"""Adapters over a quantized base against torch in float64, by layout, in real processes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters_reference import (
    ALPHA,
    PLAIN,
    RANK,
    WHOLE_GROUPS,
    Adapted,
    adapt,
    base_of,
    write_b,
)
from batches import score, share_of
from distributed import run_ranks
from learner_reference import (
    BUDGET,
    CP2,
    DIMS,
    DP2,
    EP2,
    EXPERTS,
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
from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.learner.adapters import Adapters
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
    "PP2 in 2 parts, all computed again": Case("int4-g32", {**VPP2, **BUDGET, **FULL}, 2),
    "CP2xDP2": Case("int8", {**CP2, **DP2, **BUDGET}, 4, "qwen2", tied=True),
    "TP4, fewer key-value heads": Case(
        "int8", {"tensor_parallel_size": 4}, 4, dims={"num_attention_heads": 8}
    ),
    "q and v alone": Case("int8", TP2, 2, targets=("q_proj", "model.layers.1.self_attn.v_proj")),
    "experts frozen, EP2xTP2": Case("int8", {**EP2, **TP2, **DP2}, 4, "qwen3_moe"),
}


def measure(model: Path, case: Case) -> dict[str, Any]:
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    adapters = Adapters(RANK, ALPHA, case.weight_format, case.targets)
    learner = Learner(model, learner_config(case.layout), PLAIN, adapters=adapters)
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
