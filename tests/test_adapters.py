"""Adapters over a quantized base against torch in float64, by layout, in real processes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
    OPTIMIZER,
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
from qurl_megatron.learner.adapters import Adapters, initial_a
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Family
from qurl_megatron.quantization import quantize
from tiny import build_tiny_model

RANK, ALPHA = 4, 8.0
PLAIN = replace(OPTIMIZER, clip_grad=0.0, warmup_steps=0, weight_decay=0.0)
# INT4's groups of 32 must be whole on each rank.
WHOLE_GROUPS = {"hidden_size": 96, "intermediate_size": 256, "head_dim": 32}


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
    "DP2": Case("fp8-tensor", {**DP2, **BUDGET}, 2, "llama"),
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


def random_b(name: str, shape: tuple[int, ...]) -> Tensor:
    return 0.3 * initial_a(name, shape, 5) * shape[1] ** 0.5


def measure(model: Path, case: Case) -> dict[str, Any]:
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    adapters = Adapters(RANK, ALPHA, case.weight_format, case.targets)
    learner = Learner(model, learner_config(case.layout), PLAIN, adapters=adapters)
    write_b(learner)
    share, tokens = share_of(learner, make_batch()), make_rows().tokens
    found: dict[str, Any] = {"scores": score(learner, tokens, temperature=0.7)}
    with learner.as_reference():
        found["base"] = score(learner, tokens, temperature=0.7)
    found["first"] = adapters_of(learner, lambda parameter: parameter.detach())
    found["updates"] = [learner.update(share, policy_gradient, temperature=0.7)]
    found["gradients"] = adapters_of(learner, lambda parameter: parameter.main_grad)
    found["updates"] += [learner.update(share, policy_gradient, temperature=0.7) for _ in range(2)]
    found["last"] = adapters_of(learner, lambda parameter: parameter.detach())
    found["merged"] = parts_of(learner, learner.merged())
    found["trained"] = sum(
        p.numel() for c in learner.chunks for p in c.parameters() if p.requires_grad
    )
    learner.close()
    return found


def write_b(learner: Any) -> None:
    """Give the B of every projection with an adapter the same values on any layout."""
    from qurl_megatron.config.keep import adapted_layers
    from qurl_megatron.learner.model import tensor_parallel_place

    targets = adapted_layers(learner.adapters.targets, learner.architecture)
    for _, rule, layer, parameter in learner._parameters():
        if not rule.megatron_names[0].endswith("lora_b"):
            continue
        place = tensor_parallel_place(rule)
        parts = []
        for part, name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
            index = weight_map.part_index(rule, part, learner.architecture, *place)
            whole = random_b(name, weight_map.full_shape(part, learner.architecture))
            is_target = name.removesuffix(".lora_B.weight") in targets
            parts.append(whole[index] * is_target)
        shard = weight_map.merge(rule, parts, learner.architecture, place[1])
        with torch.no_grad():
            parameter.copy_(shard)
        learner._optimizer_shards.write_master(parameter, shard)


def adapters_of(learner: Any, of: Any) -> list[weight_map.TensorPart]:
    held = [(r, layer, of(p)) for _, r, layer, p in learner._parameters() if r.is_adapter]
    return parts_of(learner, held)


class Adapted(torch.nn.Module):
    """A linear layer and its adapter, written down as the paper on LoRA has it."""

    def __init__(self, base: torch.nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = (torch.nn.Parameter(each.double()) for each in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.nn.functional.linear(x, self.a)
        update = torch.nn.functional.linear(low, self.b)
        return self.base(x) + ALPHA / RANK * update


def base_of(directory: Path, weight_format: WeightFormat) -> Any:
    """Return the model whose linear layers have the values of a server's codes, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    tensors = dict(model.named_parameters())
    for name in list(tensors):
        if ".experts." in name:  # stacked by transformers: gate and up, and down, of all experts
            for expert in tensors[name].data:
                for half in expert.chunk(2) if "gate_up" in name else [expert]:
                    half.copy_(rounded(half.clone(), weight_format))
        elif weight_map.find_hugging_face(name)[0].quantized:
            tensors[name].data = rounded(tensors[name].data, weight_format)
    return model.double().requires_grad_(False)


def rounded(weight: Tensor, weight_format: WeightFormat) -> Tensor:
    values = quantize.dequantize(quantize.quantize(weight, weight_format))
    return values.bfloat16().float() if weight_format.startswith("int4") else values


def adapt(model: Any, adapters: dict[str, Tensor]) -> dict[str, torch.nn.Parameter]:
    """Put adapters into a model; return them by name."""
    held: dict[str, torch.nn.Parameter] = {}
    for name, a in adapters.items():
        path, is_a, _ = name.partition(".lora_A.weight")
        if is_a:
            parent, _, last = path.rpartition(".")
            place = model.get_submodule(parent)
            layer = Adapted(getattr(place, last), a, adapters[f"{path}.lora_B.weight"])
            setattr(place, last, layer)
            held |= {name: layer.a, f"{path}.lora_B.weight": layer.b}
    return held


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
        torch.testing.assert_close(rank["scores"][0], expected.float(), rtol=0, atol=2e-5)
        torch.testing.assert_close(rank["base"][0], of_base.float(), rtol=0, atol=2e-5)

    optimizer = torch.optim.AdamW(
        held.values(),
        lr=PLAIN.learning_rate,
        betas=(PLAIN.beta1, PLAIN.beta2),
        eps=PLAIN.epsilon,
        weight_decay=0,
    )
    weights = rows.loss_mask / rows.loss_mask.sum()
    is_target = trained(held, case.targets)
    for step in range(3):
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
