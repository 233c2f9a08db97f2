"""A learner with experts against transformers and torch, in every kind of layout.

Experts are divided over ranks of tensor, context and data parallelism in another way than the rest
of the model. The layouts pair each of these with each way of dividing experts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import share_of
from distributed import run_ranks
from learner_reference import (
    BUDGET,
    CP2,
    DIMS,
    DP2,
    EP2,
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
    make_batch,
    make_reference,
    measure,
    policy_gradient,
)
from qurl_megatron.config.schema import Config, UaqConfig
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from tiny import build_tiny_model

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
    by_rank = run_ranks(measure, world_size, {"model": model}, layout)
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


SAVED: dict[str, Any] = {**TP2, **DP2, **EP2}
RESUMED: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2, ETP2": {**TP2, **ETP2},
    "PP2xDP2, EP2": {**PP2, **DP2, **EP2},
}


def config_of(directory: Path, layout: dict[str, Any]) -> Config:
    config = Config(model=str(directory / "model"), output_dir=str(directory), name="run")
    config.learner = learner_config(layout, dtype="bfloat16")
    config.optimizer = OPTIMIZER
    config.quantization.uaq = UaqConfig(scale=2)
    return config


def save_or_resume(
    directory: Path, layout: dict[str, Any], *, saves: bool
) -> list[weight_map.TensorPart]:
    """Take a step and save, or resume from what was saved; return this rank's parts of masters.

    A rank that shares a master with others has it only if it is the first of them.
    """
    from qurl_megatron.learner.checkpoint import Checkpoints, RunState
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.learner.model import tensor_parallel_place

    config = config_of(directory, layout)
    learner = Learner(
        directory / "model", config.learner, OPTIMIZER, transform=lambda _, weight: weight / 3
    )
    checkpoints = Checkpoints(config, learner)
    if saves:
        batch = make_batch()
        learner.update(share_of(learner, batch.ragged()), policy_gradient, temperature=1.0)
        checkpoints.save(RunState(1, 2, 0.0, {}, {}))
        checkpoints.poll(wait=True)
    else:
        checkpoints.restore(checkpoints.newest() or Path())
    parts = [
        part
        for rule, layer, master in learner.masters()
        if master.numel()
        for part in weight_map.split(
            rule, master.clone(), learner.architecture, layer, *tensor_parallel_place(rule)
        )
    ]
    checkpoints.close()
    learner.close()
    return parts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return the directory of a run with a checkpoint, and the masters in it."""
    directory = tmp_path_factory.mktemp("saved")
    build_tiny_model(directory / "model", "qwen3_moe", **EXPERTS)
    world_size = learner_config(SAVED).world_size
    ranks = run_ranks(partial(save_or_resume, saves=True), world_size, directory, SAVED)
    return directory, gathered(ranks)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_loads_bit_for_bit_under_another_division_of_experts(
    name: str, saved: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    directory, masters = saved
    world_size = learner_config(RESUMED[name]).world_size
    resume = partial(save_or_resume, saves=False)
    ranks = run_ranks(resume, world_size, directory, RESUMED[name])
    resumed = gathered(ranks)
    assert resumed.keys() == masters.keys()
    for tensor_name, master in masters.items():
        assert torch.equal(resumed[tensor_name], master), tensor_name


def test_the_masters_of_experts_are_exported_from_a_checkpoint(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    from qurl_megatron.files import list_checkpoints
    from qurl_megatron.learner.checkpoint import read_masters

    directory, masters = saved
    (checkpoint,) = list_checkpoints(directory / "run")
    read = dict(pair for layer in read_masters(checkpoint, lambda *_: None) for pair in layer)
    assert read.keys() == masters.keys()
    assert all(torch.equal(read[name], master) for name, master in masters.items())
