"""The learner against transformers and torch, in every layout, in real processes.

All dimensions differ (hidden, intermediate, heads x head_dim). The vocabulary needs padding, three
query heads share a key-value head, rows differ in length and do not divide evenly among replicas.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from batches import random_rows, score, share_of
from distributed import run_ranks
from learner_reference import (
    BUDGET,
    CP2,
    DIMS,
    DP2,
    EP2,
    ETP2,
    EXPERTS,
    FOUR_LAYERS,
    FULL,
    HYBRID,
    OFFLOAD,
    ONE_LAYER,
    OPTIMIZER,
    PP2,
    SCALED_ROPES,
    SELECTIVE,
    TP2,
    VPP2,
    Measurement,
    Reference,
    assert_scores_match,
    gathered,
    learner_config,
    logprobs_and_entropy_of,
    make_batch,
    make_reference,
    make_rows,
    measure,
    of_optimizer,
    parts_of,
    policy_gradient,
)
from qurl_megatron.config.schema import OptimizerConfig, Rounding
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, Family
from qurl_megatron.model.delta_net import CHUNK
from qurl_megatron.quantization.rounding import write_rounded
from tiny import build_tiny_model

FAMILIES: tuple[Family, ...] = ("qwen2", "qwen3", "llama")
DENSE: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": TP2,
    "PP2": PP2,
    "DP2": {**DP2, **BUDGET},
    "TP2xPP2": {**TP2, **PP2},
    "PP2 in 2 parts": {**VPP2, **BUDGET, **SELECTIVE},
    "PP2 of 3 and 1": {**PP2, "layers_in_last_pipeline_stage": 1, **ONE_LAYER},
    "CP2xDP2": {**CP2, **DP2, **BUDGET, **FULL},
    "CP2xTP2": {**CP2, **TP2, **SELECTIVE},
    "CP2xVPP2": {**CP2, **VPP2},
    "TP2xDP2": {**TP2, **DP2, **SELECTIVE, **OFFLOAD},
}
# Experts are divided over ranks of tensor, context and data parallelism in another way than the
# rest of the model. Each of these is paired with each way of dividing experts.
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "experts on one rank": {},
    "DP2, EP2": {**DP2, **EP2, **BUDGET},
    "TP2, all experts on every rank": {**TP2, **SELECTIVE},
    "CP2, EP2": {**CP2, **EP2},
    "TP2, ETP2": {**TP2, **ETP2, **FULL},
    "TP2xDP2, EP2, each expert on two ranks": {**TP2, **DP2, **EP2, **OFFLOAD},
    "TP2xDP2, EP2, ETP2": {**TP2, **DP2, **EP2, **ETP2},
    "PP2xDP2, EP2": {**PP2, **DP2, **EP2, **BUDGET},
    "VPP2xTP2, EP2": {**VPP2, **TP2, **EP2, **SELECTIVE},
}
# Together these have every division of a hybrid's layers.
OF_HYBRIDS = ("TP1", "TP2xPP2", "PP2 in 2 parts", "TP2xDP2")
OF_HYBRID_EXPERTS = ("TP2xDP2, EP2, ETP2", "VPP2xTP2, EP2")
# Two key-value heads on four ranks: the fused QKV weight is divided within its groups.
SHARED_HEADS: dict[str, dict[str, Any]] = {"TP4": {"tensor_parallel_size": 4}}
LAYOUTS = {**DENSE, **OF_EXPERTS, **SHARED_HEADS}
FOUR_EXPERTS = EXPERTS | {"num_experts": 4}  # which two ranks share
MODELS: dict[str, dict[str, Any]] = {
    f"{family}-{'tied' if tied else 'untied'}": {"architecture": family, "tied": tied, **DIMS}
    for family in FAMILIES
    for tied in (True, False)
} | {
    "experts": {"architecture": "qwen3_moe", **FOUR_EXPERTS},
    "hybrid-tied": {"architecture": "qwen3_5_text", "tied": True, **HYBRID},
    "hybrid-untied": {"architecture": "qwen3_5_text", **HYBRID},
    "hybrid, 8 heads": {
        "architecture": "qwen3_5_text",
        **HYBRID,
        "num_attention_heads": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
    "hybrid experts": {
        "architecture": "qwen3_5_moe_text",
        **FOUR_EXPERTS,
        **HYBRID,
        "shared_expert_intermediate_size": 56,
    },
    **{
        f"{family}, 8 heads": {
            "architecture": family,
            **DIMS,
            "num_attention_heads": 8,
        }
        for family in FAMILIES[:2]
    },
}
MODELS |= {
    f"{name}, 4 layers": MODELS[name] | FOUR_LAYERS
    for name in ("qwen2-untied", "qwen3-tied", "experts")
}


def models_of(layout: str) -> list[str]:
    """Return the models that a layout is tested with: families in turn, tied and untied in turn.

    Llama has no weight that the two other families lack; it is tested on one rank and on four.
    Hybrids have no context parallelism. Stages of unequal size, or in parts, need four layers.
    """
    needs_four = {"virtual_pipeline_parallel_size", "layers_in_last_pipeline_stage"}
    layers = ", 4 layers" if needs_four & LAYOUTS[layout].keys() else ""
    if layout in OF_EXPERTS:
        hybrids = ["hybrid experts"] if layout in OF_HYBRID_EXPERTS else []
        return [f"experts{layers}", *hybrids]
    if layout in SHARED_HEADS:
        return [name for name in MODELS if "8 heads" in name]
    place = list(DENSE).index(layout)
    families = {"TP1": FAMILIES, "TP2xPP2": ("llama",)}.get(layout, (FAMILIES[place % 2],))
    tied = "tied" if place // 2 % 2 == 0 else "untied"
    hybrid = [f"hybrid-{tied}"] if layout in OF_HYBRIDS else []
    return [f"{family}-{tied}{layers}" for family in families] + hybrid


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(directory / name, **fields) for name, fields in MODELS.items()}


@pytest.fixture(scope="module")
def references(models: dict[str, Path]) -> dict[str, Reference]:
    return {name: make_reference(model) for name, model in models.items()}


@dataclass
class Case:
    """What each rank of a layout measured of a model, and what transformers and torch give."""

    model: Path
    ranks: list[Measurement]
    reference: Reference

    @property
    def rounding(self) -> float:
        """How much more float32 rounds results than those of other families.

        A hybrid's norm behind linear attention divides by what is near 0 for some tokens. A change
        of its weights by one rounding changes gradients by 1e-4.
        """
        return 10.0 if "hybrid" in self.model.name else 1.0


@pytest.fixture(scope="module", params=LAYOUTS)
def cases(
    request: pytest.FixtureRequest, models: dict[str, Path], references: dict[str, Reference]
) -> list[Case]:
    """Measure one layout, with one model after the other."""
    layout, names = LAYOUTS[request.param], models_of(request.param)
    own = {name: models[name] for name in names}
    ranks = run_ranks(measure, learner_config(layout).world_size, own, layout)
    return [Case(models[name], [rank[name] for rank in ranks], references[name]) for name in names]


def test_logprobs_and_entropy_match_transformers(cases: list[Case]) -> None:
    for case in cases:
        for rank in case.ranks:
            assert_scores_match(rank, case.reference, case.rounding * 1e-5)


def test_shards_of_all_ranks_equal_the_checkpoint_bit_for_bit(cases: list[Case]) -> None:
    for case in cases:
        for rank in case.ranks:  # which yields each tensor once
            names = [part.name for part in rank.first_weights]
            assert len(names) == len(set(names))
        tensors = gathered([rank.first_weights for rank in case.ranks])
        architecture = Architecture.from_directory(case.model)
        assert tensors.keys() == weight_map.hugging_face_names(architecture)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, case.reference.first_weights[name]), (case.model, name)


def test_the_gradient_of_each_tensor_matches_torch(cases: list[Case]) -> None:
    """Adam's steps hardly depend on the size of a gradient, and the norm of all on no small one."""
    for case in cases:
        for name, gradient in gathered([rank.gradients for rank in case.ranks]).items():
            expected = case.reference.gradients[name]
            scale = float(expected.abs().max())
            assert scale > 1e-7 or ".experts." in name, f"{name} has no gradient"
            torch.testing.assert_close(gradient, expected, rtol=0, atol=5e-3 * scale, msg=name)


def test_optimizer_steps_match_torch(cases: list[Case]) -> None:
    """Losses, gradient norms and weights after two clipped steps; copies stay equal."""
    for case in cases:
        assert all(rank.updates == case.ranks[0].updates for rank in case.ranks), case.model
        updates, reference = case.ranks[0].updates, case.reference
        atol, relative = case.rounding * 1e-5, case.rounding * 1e-4
        assert [u.learning_rate for u in updates] == pytest.approx([5e-4, 1e-3])
        assert [u.loss for u in updates] == pytest.approx(reference.losses, abs=atol)
        assert [u.grad_norm for u in updates] == pytest.approx(reference.grad_norms, rel=relative)
        assert all(norm > OPTIMIZER.clip_grad for norm in reference.grad_norms), (
            "nothing is clipped"
        )
        for name, tensor in gathered([rank.last_weights for rank in case.ranks]).items():
            after = reference.last_weights[name]
            change = (after - reference.first_weights[name]).abs().max()
            assert change > 1e-4, f"{name} does not change"
            torch.testing.assert_close(tensor, after, rtol=0, atol=atol, msg=name)


def test_current_equals_proximal_until_the_first_update(cases: list[Case]) -> None:
    for case in cases:
        first, second = case.ranks[0].updates
        assert first.stats == {"tokens": int(make_batch().loss_mask.sum()), "moved": 0.0}
        assert second.stats["moved"] > 1e-3


RECOMPUTED = {"full": FULL, "one layer": ONE_LAYER, "selective": SELECTIVE, "offload": OFFLOAD}


def train_with_each_recomputation(
    model: Path, layout: dict[str, Any], dtype: str, modes: list[str]
) -> dict[str, tuple[list[Any], list[Tensor]]]:
    """Return updates and last weights with each way of recomputing, and without."""
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    found = {}
    for name in ("nothing", *modes):
        config = learner_config(layout, dtype=dtype, **RECOMPUTED.get(name, {}))
        learner = Learner(model, config, OPTIMIZER)
        share = share_of(learner, make_batch())
        updates = [learner.update(share, policy_gradient, temperature=0.7) for _ in range(2)]
        found[name] = updates, [weight.clone() for *_, weight in learner.shards()]
        learner.close()
    return found


@pytest.mark.parametrize(
    ("layout", "dtype", "name", "modes"),
    [
        (TP2, "bfloat16", "qwen3-untied", [*RECOMPUTED]),
        (VPP2, "float32", "hybrid-untied", ["full", "selective"]),
    ],
    ids=["TP2", "VPP, hybrid"],
)
def test_recomputed_activations_give_the_same_updates(
    layout: dict[str, Any], dtype: str, name: str, modes: list[str], models: dict[str, Path]
) -> None:
    """They are bit for bit the same, but for selective, where a sum has another order.

    `test_memory` shows that activations are not kept.
    """
    world_size, model = learner_config(layout).world_size, models[name]
    given = model, layout, dtype, modes
    for by_mode in run_ranks(train_with_each_recomputation, world_size, *given):
        (kept, weights), (selective, _) = by_mode.pop("nothing"), by_mode.pop("selective")
        for mode, (recomputed, own) in by_mode.items():
            assert recomputed == kept, mode
            assert all(torch.equal(*both) for both in zip(own, weights, strict=True)), mode
        assert selective[0].loss == kept[0].loss
        norms = [update.grad_norm for update in selective]
        tolerance = 1e-2 if dtype == "bfloat16" else 1e-4
        assert norms == pytest.approx([u.grad_norm for u in kept], rel=tolerance)


def spoil(model: Path, layout: dict[str, Any], culprit: int) -> dict[str, str]:
    """Put NaN into a loss, a gradient and a weight of rank `culprit`; return what each raises."""
    from qurl_megatron.learner.learner import Learner, NonFinite

    learner = Learner(model, learner_config(layout), OPTIMIZER)
    is_culprit = dist.get_rank() == culprit
    weights = {name: parameter for name, *_, parameter in learner._parameters()}
    weight = weights["decoder.layers.1.mlp.linear_fc2.weight"]
    messages = {}

    def train(loss: Any = policy_gradient) -> None:
        learner.update(share_of(learner, make_batch()), loss, temperature=1.0)

    def score_all() -> None:
        score(learner, make_rows().tokens)

    def nan_loss(*args: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, stats = policy_gradient(*args)
        return loss * (torch.nan if is_culprit else 1), stats

    def attempt(what: str, work: Callable[[], None]) -> None:
        before = {name: parameter.detach().clone() for name, parameter in weights.items()}
        with pytest.raises(NonFinite) as failure:
            work()
        messages[what] = str(failure.value)
        with torch.no_grad():
            for name, parameter in weights.items():
                parameter.copy_(before[name])
        score_all()  # all is well again

    attempt("loss", lambda: train(nan_loss))
    if is_culprit:
        hook = weight.register_hook(lambda gradient: gradient * torch.nan)
    attempt("gradient", train)
    if is_culprit:
        hook.remove()

    def score_spoilt() -> None:
        if is_culprit:
            with torch.no_grad():
                weight[0, 0] = torch.nan
        score_all()

    attempt("weight", score_spoilt)
    learner.close()
    return messages


@pytest.mark.parametrize("layout", ["TP2", "PP2", "DP2"])
def test_nan_on_one_rank_ends_every_rank_with_one_line_that_names_rank_and_tensor(
    layout: str, models: dict[str, Path]
) -> None:
    first, second = run_ranks(spoil, 2, models["qwen2-untied, 4 layers"], LAYOUTS[layout], 1)
    assert first == second
    layer = 3 if layout == "PP2" else 1  # of the whole model
    down = f"model.layers.{layer}.mlp.down_proj.weight"
    # Replicas add their gradients up, so a NaN is on the rank that has that part of the sum.
    rank = "[01]" if layout == "DP2" else "1"
    assert first["loss"].startswith(
        "the gradient norm is nan: on learner rank 1 the loss holds NaN"
    )
    spoilt = rf"on learner rank {rank} the gradient of {re.escape(down)} holds NaN"
    assert re.search(spoilt, first["gradient"])
    assert f"on learner rank 1 the weight {down} holds NaN" in first["weight"]
    assert all(len(message.splitlines()) == 1 for message in first.values())


ROWS = (7, 1)  # 1: fewer rows than replicas


def first_updates(
    model: Path, layout: dict[str, Any], micro_batch_sizes: list[int]
) -> dict[int, list[Any]]:
    """Return the first update with each micro batch size, by number of rows."""
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    updates: dict[int, list[Any]] = {rows: [] for rows in ROWS}
    for rows in ROWS:
        for size in micro_batch_sizes:
            learner = Learner(model, learner_config(layout, micro_batch_size=size), OPTIMIZER)
            share = share_of(learner, make_batch().select(range(rows)))
            updates[rows].append(learner.update(share, policy_gradient, temperature=1.0))
            learner.close()
    return updates


def test_gradients_depend_on_neither_micro_batches_nor_replicas(models: dict[str, Path]) -> None:
    model = models["qwen2-tied"]
    one_rank, *_ = run_ranks(first_updates, 1, model, {}, [7, 2, 1])
    replicas, *_ = run_ranks(first_updates, 2, model, DP2, [4, 1])
    for rows in ROWS:
        expected = one_rank[rows][0]
        for measured in [*one_rank[rows], *replicas[rows]]:
            assert measured.loss == pytest.approx(expected.loss, rel=1e-6)
            assert measured.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
            assert measured.stats == expected.stats


def bfloat16_update(model: Path, layout: dict[str, Any]) -> dict[str, Any]:
    from qurl_megatron.learner.learner import Learner

    def divide_by_three(name: str, tensor: Tensor) -> Tensor:
        assert tensor.dtype == torch.float32
        return tensor / 3 if name.endswith("_proj.weight") else tensor

    learner = Learner(
        model,
        learner_config(layout, dtype="bfloat16"),
        OptimizerConfig(learning_rate=1e-6),
        transform=divide_by_three,
    )
    parameters = dict(learner.chunks[0].module.named_parameters())

    def masters_of() -> dict[str, Tensor]:
        masters = {name: learner._optimizer_shards.master(p) for name, p in parameters.items()}
        return {name: master.clone() for name, master in masters.items() if len(master)}

    masters, name = masters_of(), "decoder.layers.0.mlp.linear_fc2.weight"
    computed_with = parameters[name].detach().clone()
    share = share_of(learner, make_batch())
    grad_norm = learner.update(share, policy_gradient, temperature=1.0).grad_norm
    changes = {name: master - masters[name] for name, master in masters_of().items()}
    learner.close()
    return {
        "grad_norm": grad_norm,
        "master": masters[name],
        "computed_with": computed_with,
        "changes": {name: float(change.abs().max()) for name, change in changes.items()},
    }


def test_bfloat16_computes_with_rounded_weights_and_keeps_unrounded_masters(
    models: dict[str, Path], references: dict[str, Reference]
) -> None:
    rank, _ = run_ranks(bfloat16_update, 2, models["qwen3-tied"], TP2)
    stored = references["qwen3-tied"].first_weights["model.layers.0.mlp.down_proj.weight"]
    expected = stored[:, : rank["computed_with"].shape[1]] / 3
    assert torch.equal(rank["master"].view_as(expected), expected)
    rounded = torch.empty_like(expected, dtype=torch.bfloat16)
    write_rounded(rounded, expected, "model.layers.0.mlp.down_proj.weight", "unbiased")
    assert torch.equal(rank["computed_with"], rounded)
    assert not torch.equal(rank["computed_with"].float(), expected)
    # The change is far below bfloat16's resolution.
    assert all(5e-7 < change < 2e-6 for change in rank["changes"].values()), rank["changes"]
    assert 0 < rank["grad_norm"] < 100


ROUNDED: dict[str, dict[str, Any]] = {
    "TP1": {"architecture": "llama", "tied": True, **DIMS},
    "TP4": {"architecture": "qwen2", **DIMS, "num_attention_heads": 8},  # cuts groups of heads
    "TP2xDP2": {"architecture": "qwen3", "tied": True, **DIMS},  # its optimizer is offloaded
    "CP2xVPP2": {"architecture": "qwen2", "tied": True, **DIMS, **FOUR_LAYERS},
    "PP2xDP2, EP2": {"architecture": "qwen3_moe", **FOUR_EXPERTS},
    "TP2": {"architecture": "qwen3_5_text", **HYBRID},
}


def round_masters(
    model: Path, layout: dict[str, Any], rounding: Rounding, sampled: int = 4096
) -> list[Any]:
    """Return weights and masters as loaded, after a step without gradients, and after two steps.

    With each, the fraction of the update that is shown, by a sample of each parameter.
    """
    from qurl_megatron.learner import optimizer_shards
    from qurl_megatron.learner.learner import Learner

    optimizer_shards.SAMPLED = sampled

    def divide(name: str, tensor: Tensor) -> Tensor:
        return tensor / 3 if rounding == "unbiased" and name.endswith("_proj.weight") else tensor

    optimizer = OptimizerConfig(learning_rate=1e-5, rounding=rounding)
    config = learner_config(layout, dtype="bfloat16")
    learner = Learner(model, config, optimizer, transform=divide)
    share = share_of(learner, make_batch())
    states = []
    for factor in (None, 0, 1, 1):

        def loss(*args: Any, factor: Any = factor) -> tuple[Tensor, dict[str, Tensor]]:
            total, stats = policy_gradient(*args)
            return total * factor, stats

        if factor is not None:
            learner.update(share, loss, temperature=1.0)
        masters = parts_of(learner, of_optimizer(learner, "master"))
        weights = parts_of(learner, learner.shards())
        states.append((weights, masters, learner.update_shown()))
    learner.close()
    return states


@pytest.mark.parametrize("layout", ROUNDED)
def test_every_layout_rounds_masters_by_their_position_in_the_full_tensors(
    layout: str, tmp_path: Path
) -> None:
    """At load and after each step; a step without gradients changes nothing."""
    model = build_tiny_model(tmp_path / "model", dtype=torch.float32, **ROUNDED[layout])
    world_size = learner_config(LAYOUTS[layout]).world_size
    ranks = run_ranks(round_masters, world_size, model, LAYOUTS[layout], "unbiased")
    states = [
        [gathered([rank[number][kind] for rank in ranks]) for kind in (0, 1)] for number in range(4)
    ]
    for weights, masters in states:
        assert weights.keys() == masters.keys()
        for name, master in masters.items():
            expected = torch.empty(master.shape, dtype=weights[name].dtype)
            write_rounded(expected, master, name, "unbiased")
            assert torch.equal(weights[name], expected), name
    (loaded, _), (untouched, _), _, (trained, _) = states
    assert all(torch.equal(loaded[name], untouched[name]) for name in loaded)
    moved = {name for name in loaded if not torch.equal(loaded[name], trained[name])}
    assert moved >= {name for name in loaded if name.endswith("_proj.weight")}
    at_load, without_gradients, *shown = (state[2] for state in ranks[0])
    assert at_load is without_gradients is None
    assert shown == pytest.approx([1, 1], abs=0.1)


def test_masters_are_rounded_to_the_nearest_number_if_asked(models: dict[str, Path]) -> None:
    """A sample of each parameter tells what all values show, small parameters or large."""
    (states,) = run_ranks(round_masters, 1, models["qwen3-tied"], {}, "nearest", 100)
    for weights, masters, _ in states:
        for weight, master in zip(weights, masters, strict=True):
            assert torch.equal(weight.tensor, master.tensor.to(weight.tensor.dtype)), weight.name
    shown, moved = (
        torch.cat([part.tensor.flatten().double() for part in last])
        - torch.cat([part.tensor.flatten().double() for part in first])
        for first, last in zip(states[0][:2], states[-1][:2], strict=True)
    )
    exact = float(moved @ shown / moved.square().sum())
    assert 0 < exact < 0.3
    assert states[-1][2] == pytest.approx(exact, rel=0.2)


def losses_of_small_steps(model: Path) -> dict[tuple[str, str], list[float]]:
    """Return the losses of steps that move a weight by a fiftieth of BF16's distances."""
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    losses = {}
    ways: list[tuple[Any, Any]] = [("float32", "unbiased")]
    ways += [("bfloat16", "unbiased"), ("bfloat16", "nearest")]
    for dtype, rounding in ways:
        optimizer = OptimizerConfig(learning_rate=1e-5, rounding=rounding)
        learner = Learner(model, learner_config({}, dtype=dtype), optimizer)
        share = share_of(learner, make_batch())
        updates = [learner.update(share, policy_gradient, temperature=1.0) for _ in range(11)]
        losses[dtype, rounding] = [update.loss for update in updates]
        learner.close()
    return losses


def test_small_steps_act_in_bfloat16_as_in_float32_unless_rounded_to_nearest(
    models: dict[str, Path],
) -> None:
    (losses,) = run_ranks(losses_of_small_steps, 1, models["llama-tied"])
    progress = {way: first - last for way, (first, *_, last) in losses.items()}
    of_float32 = progress["float32", "unbiased"]
    assert progress["bfloat16", "unbiased"] / of_float32 == pytest.approx(1, abs=0.1)
    assert progress["bfloat16", "nearest"] / of_float32 < 0.5


def logprobs_on_one_rank(model: Path, dtype: str) -> Tensor:
    from qurl_megatron.learner.learner import Learner

    learner = Learner(model, learner_config({}, dtype=dtype), OPTIMIZER)
    logprobs, _ = score(learner, make_rows().tokens)
    learner.close()
    assert not torch.distributed.is_initialized()  # the learner created the default group
    return logprobs


@pytest.mark.parametrize(("name", "rounding"), [("qwen2-untied", 3e-2), ("hybrid-tied", 5e-2)])
def test_bfloat16_logprobs_differ_from_float32_by_rounding_only(
    name: str, rounding: float, models: dict[str, Path], references: dict[str, Reference]
) -> None:
    """Those of transformers' hybrid in BF16 differ by 0.034."""
    (logprobs,) = run_ranks(logprobs_on_one_rank, 1, models[name], "bfloat16")
    difference = (logprobs - references[name].scores[1.0][0]).abs()
    assert 1e-4 < difference.mean() < rounding


def score_long_rows(model: Path) -> Tensor:
    from qurl_megatron.learner.learner import Learner

    learner = Learner(model, learner_config({**TP2, **BUDGET}), OPTIMIZER)
    logprobs, _ = score(learner, long_rows())
    learner.close()
    return logprobs


def long_rows() -> Tensor:
    """Return rows that a linear attention computes in several chunks."""
    return random_rows(3, 2 * CHUNK + 9, range(DIMS["vocab_size"])).tokens


def test_states_of_linear_attention_go_from_chunk_to_chunk(models: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["hybrid-untied"], dtype=torch.float32)
    with torch.no_grad():
        expected, _ = logprobs_and_entropy_of(model, long_rows(), 1.0)
    for logprobs in run_ranks(score_long_rows, 2, models["hybrid-untied"]):
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("layout", [{}, CP2], ids=["one rank", "CP2"])
def test_scaled_rotary_positions_match_transformers(layout: dict[str, Any], tmp_path: Path) -> None:
    families: dict[str, Family] = {"linear": "qwen2", "YaRN": "qwen3"}
    models = {
        name: build_tiny_model(
            tmp_path / name,
            families.get(name, "llama"),
            rope_parameters={"rope_theta": 100.0, **rope},
            **DIMS,
        )
        for name, rope in SCALED_ROPES.items()
    }
    for name, model in models.items():
        assert Architecture.from_directory(model).rope_scaling, name
    references = {name: make_reference(model) for name, model in models.items()}
    for measured in run_ranks(measure, 2 if layout else 1, models, layout):
        for name, reference in references.items():
            assert_scores_match(measured[name], reference)


def use_a_group_of_the_caller(model: Path) -> bool:
    """Return whether the group is there after its learner."""
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    Learner(model, learner_config({}), OPTIMIZER).close()
    is_there = dist.is_initialized()
    dist.destroy_process_group()
    return is_there


def test_a_group_of_the_caller_outlives_its_learner(models: dict[str, Path]) -> None:
    assert run_ranks(use_a_group_of_the_caller, 1, models["llama-tied"]) == [True]


REFUSED_LAYOUTS: dict[str, dict[str, Any]] = {
    "2 key-value heads": {"tensor_parallel_size": 3},
    "4 layers": {"pipeline_parallel_size": 3},
    "start 2 ranks": TP2,
    "are 1 x 1 x 1 x 2; start 2 ranks": DP2,
    "are 1 x 1 x 2 x 1; start 2 ranks": CP2,
    "leave it at 1": {"virtual_pipeline_parallel_size": 2},
    "virtual_pipeline_parallel_size=3 does not divide a stage's 2 layers": {
        **PP2,
        "virtual_pipeline_parallel_size": 3,
    },
    "leaves 1 layers": {"pipeline_parallel_size": 3, "layers_in_last_pipeline_stage": 3},
}


def refuse_layouts(model: Path) -> list[str]:
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.model.architecture import ArchitectureError

    messages = []
    for layout in REFUSED_LAYOUTS.values():
        with pytest.raises(ArchitectureError) as refusal:
            Learner(model, learner_config(layout), OPTIMIZER)
        messages.append(str(refusal.value))
    return messages


def test_a_layout_that_does_not_fit_is_refused(models: dict[str, Path]) -> None:
    (messages,) = run_ranks(refuse_layouts, 1, models["qwen2-untied, 4 layers"])
    for expected, message in zip(REFUSED_LAYOUTS, messages, strict=True):
        assert expected in message and "\n" not in message


def score_with_a_reference(model: Path, layout: dict[str, Any]) -> list[Tensor]:
    """Return log-probs before an update, of the reference, and of the updated policy twice."""
    from qurl_megatron.learner.learner import Learner

    optimizer = OptimizerConfig(learning_rate=1e-2)
    learner = Learner(model, learner_config(layout, dtype="bfloat16"), optimizer)
    learner.keep_reference()

    def logprobs() -> Tensor:
        return score(learner, make_rows().tokens)[0]

    before = logprobs()
    learner.update(share_of(learner, make_batch()), policy_gradient, temperature=1.0)
    updated = logprobs()
    with learner.as_reference():
        reference = logprobs()
    results = [before, reference, updated, logprobs()]
    learner.close()
    return results


@pytest.mark.parametrize("layout", [PP2, DP2], ids=["PP2 tied", "DP2"])
def test_the_reference_does_not_change_with_the_policy(
    layout: dict[str, Any], models: dict[str, Path]
) -> None:
    results, *_ = run_ranks(score_with_a_reference, 2, models["qwen2-tied"], layout)
    before, reference, updated, after_reference = results
    assert torch.equal(reference, before)
    assert torch.equal(after_reference, updated)
    assert (updated - before).abs().max() > 0.01


def train_and_leave(model: Path, layout: dict[str, Any], dtype: str) -> list[Any]:
    """Take the same steps twice; the second learner leaves before each of them, and comes back."""
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner

    device.initialize_distributed()
    results: list[Any] = []
    for leaves in (False, True):
        learner = Learner(model, learner_config(layout, dtype=dtype), OPTIMIZER)
        learner.keep_reference()
        share = share_of(learner, make_batch())
        updates = []
        for _ in range(2):
            if leaves:
                learner.leave()
                assert bytes_of(learner) == 0
                learner.come_back()
                assert bytes_of(learner) > 0
            updates.append(learner.update(share, policy_gradient, temperature=0.7))
        weights = [shard.clone() for *_, shard in learner.shards()]
        masters = [master.clone() for *_, master in learner.masters()]
        with learner.as_reference():
            results.append([updates, weights, masters, score(learner, make_rows().tokens)])
        learner.close()
    dist.destroy_process_group()
    return results


def bytes_of(learner: Any) -> int:
    """Return the memory of a learner's weights, gradients and optimizer."""
    parameters = [parameter for chunk in learner.chunks for parameter in chunk.parameters()]
    gradients = [parameter.main_grad for parameter in parameters]
    optimizer = list(learner._optimizer_shards.storages())
    return sum(each.untyped_storage().nbytes() for each in (*parameters, *gradients, *optimizer))


@pytest.mark.parametrize(
    ("layout", "family", "dtype"),
    [
        ("TP2xDP2", "qwen3-tied", "bfloat16"),
        ("DP2, EP2", "experts", "bfloat16"),
        ("PP2 in 2 parts", "hybrid-untied", "bfloat16"),
        ("PP2 in 2 parts", "qwen2-untied, 4 layers", "float32"),
    ],
)
def test_a_learner_that_left_and_came_back_goes_on_bit_for_bit(
    models: dict[str, Path], layout: str, family: str, dtype: str
) -> None:
    world_size = learner_config(LAYOUTS[layout]).world_size
    for stayed, left in run_ranks(
        train_and_leave, world_size, models[family], LAYOUTS[layout], dtype
    ):
        assert stayed[0] == left[0]
        for before, after in zip(stayed[1:], left[1:], strict=True):
            assert all(torch.equal(*both) for both in zip(before, after, strict=True))
