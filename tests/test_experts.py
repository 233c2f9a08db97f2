"""Checkpoints of a learner with experts, under other divisions of the experts over ranks.

`tests/test_learner.py` trains it in every kind of layout.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from batches import share_of
from distributed import run_ranks
from learner_reference import (
    DP2,
    EP2,
    ETP2,
    EXPERTS,
    OPTIMIZER,
    PP2,
    TP2,
    gathered,
    learner_config,
    make_batch,
    parts_of,
    policy_gradient,
)
from qurl_megatron.config.schema import Config, UaqConfig
from qurl_megatron.model import weight_map
from tiny import build_tiny_model

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

    config = config_of(directory, layout)
    learner = Learner(
        directory / "model", config.learner, OPTIMIZER, transform=lambda _, weight: weight / 3
    )
    checkpoints = Checkpoints(config, learner)
    if saves:
        learner.update(share_of(learner, make_batch()), policy_gradient, temperature=1.0)
        checkpoints.save(RunState(1, 2, 0.0, {}, {}))
        checkpoints.poll(wait=True)
    else:
        checkpoints.restore(checkpoints.newest() or Path())
    parts = parts_of(learner, learner.masters())
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
    from qurl_megatron.learner.saved_masters import read_masters
    from qurl_megatron.report.record import list_checkpoints

    directory, masters = saved
    (checkpoint,) = list_checkpoints(directory / "run")
    read = dict(pair for layer in read_masters(checkpoint, lambda *_: None) for pair in layer)
    assert read.keys() == masters.keys()
    assert all(torch.equal(read[name], master) for name, master in masters.items())
