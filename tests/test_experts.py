"""A learner with experts against transformers and torch, in every kind of layout.

Experts are divided over ranks of tensor, context and data parallelism in another way than the rest
of the model. The layouts pair each of these with each way of dividing experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import test_learner
from distributed import run_ranks
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from test_learner import (
    BUDGET,
    CP2,
    DIMS,
    DP2,
    FULL,
    OFFLOAD,
    OPTIMIZER,
    PP2,
    SELECTIVE,
    TP2,
    VPP2,
    Measurement,
    Reference,
    assert_scores_match,
    gathered,
    learner_config,
    make_reference,
)
from tiny import build_tiny_model

EP2: dict[str, Any] = {"expert_parallel_size": 2}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
ETP2: dict[str, Any] = {"expert_tensor_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "DP2, EP2": {**DP2, **EP2, **BUDGET},
    "TP2, all experts on every rank": {**TP2, **SELECTIVE},
    "TP2, ETP2": {**TP2, **ETP2, **FULL},
    "CP2, EP2": {**CP2, **EP2},
    "TP2xDP2, EP2, each expert on two ranks": {**TP2, **DP2, **EP2, **OFFLOAD},
    "TP2xDP2, EP2, ETP2": {**TP2, **DP2, **EP2, **ETP2},
    "PP2xDP2, EP2": {**PP2, **DP2, **EP2, **BUDGET},
    "VPP2xTP2, EP2": {**VPP2, **TP2, **EP2, **SELECTIVE},
}
EXPERTS: dict[str, Any] = {**DIMS, "moe_intermediate_size": 40, "num_experts": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", **EXPERTS)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return make_reference(model)


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, model: Path) -> list[Measurement]:
    layout = LAYOUTS[request.param]
    world_size = learner_config(layout).world_size
    by_rank = run_ranks(test_learner.measure, world_size, {"model": model}, layout)
    return [rank["model"] for rank in by_rank]


def test_scores_match_transformers(ranks: list[Measurement], reference: Reference) -> None:
    for rank in ranks:
        assert_scores_match(rank, reference)


def test_experts_of_all_ranks_equal_the_checkpoint_bit_for_bit(
    ranks: list[Measurement], model: Path, reference: Reference
) -> None:
    tensors = gathered([rank.first_weights for rank in ranks])
    assert tensors.keys() == weight_map.hugging_face_names(Architecture.from_directory(model))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, reference.first_weights[name]), name


def test_optimizer_steps_match_torch(ranks: list[Measurement], reference: Reference) -> None:
    """Losses, gradient norms and weights after three clipped steps; copies stay equal."""
    assert all(rank.updates == ranks[0].updates for rank in ranks)
    updates = ranks[0].updates
    assert [u.loss for u in updates] == pytest.approx(reference.losses, abs=1e-5)
    assert [u.grad_norm for u in updates] == pytest.approx(reference.grad_norms, rel=1e-4)
    assert all(norm > OPTIMIZER.clip_grad for norm in reference.grad_norms), "nothing is clipped"
    for name, tensor in gathered([rank.last_weights for rank in ranks]).items():
        after = reference.last_weights[name]
        assert (after - reference.first_weights[name]).abs().max() > 1e-4, f"{name} stays"
        torch.testing.assert_close(tensor, after, rtol=0, atol=1e-5, msg=name)
