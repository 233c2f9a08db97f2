"""Transformer Engine's layers in the learner: parameters, checkpoints. No GPU is needed.

What Transformer Engine would build is found by `tests/transformer_engine_program.py`, in a process
that can import it.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import run_ranks
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from tiny import build_tiny_model
from transformer_engine_models import (
    MODELS,
    batch_of,
    checkpoint_of,
    config_of,
    learner_of,
    masters_of,
    state_of_step_1,
)

TESTS = Path(__file__).parent
WHEEL = TESTS.parent / ".venv" / "transformer-engine"  # where `make .venv/ready` installs it
INSTALL = ".venv/bin/pip install --no-deps --target .venv/transformer-engine -r requirements-te.txt"


def train_with_local_layers(directory: Path, *, resumes: bool) -> dict[str, list[Any]]:
    """Return what each model is after steps 1 and 2, the first of which is saved.

    With `resumes` step 1 is loaded, from a checkpoint by Transformer Engine's layers.
    """
    from batches import negative_log_likelihood
    from qurl_megatron.learner.checkpoint import Checkpoints

    models: dict[str, list[Any]] = {}
    for name in MODELS:
        config = config_of(directory / name)
        learner = learner_of(config)
        if resumes:
            config.output_dir = str(directory / name / "saved by Transformer Engine")
        checkpoints = Checkpoints(config, learner)
        steps: list[Any] = []
        for step in (1, 2):
            if resumes and step == 1:
                checkpoints.restore(checkpoint_of(config))
                continue
            share = learner.share(batch_of(step))
            update = learner.update(share, negative_log_likelihood, temperature=1.0)
            steps.append((update.loss, update.grad_norm, masters_of(learner)))
            if step == 1:
                checkpoints.save(state_of_step_1())
        checkpoints.poll(wait=True)
        checkpoints.close()
        learner.close()
        models[name] = steps
    return models


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with each model in a directory of its own."""
    assert WHEEL.is_dir(), f"Transformer Engine's wheel is missing; in {TESTS.parent}: {INSTALL}"
    directory = tmp_path_factory.mktemp("transformer-engine")
    for name, fields in MODELS.items():
        build_tiny_model(directory / name / "model", **fields)
    return directory


@pytest.fixture(scope="module")
def steps(directory: Path) -> dict[str, list[Any]]:
    return run_ranks(partial(train_with_local_layers, resumes=False), 1, directory)[0]


@pytest.fixture(scope="module")
def reports(directory: Path, steps: dict[str, Any]) -> dict[str, Any]:
    """Return what the program wrote; its learners load the checkpoints of `steps`."""
    path = [str(WHEEL), str(TESTS), str(TESTS.parent)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "NVTE_PROJECT_BUILDING": "1",  # its own switch: look for no CUDA libraries at import
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, TESTS / "transformer_engine_program.py", directory],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reports: dict[str, Any] = torch.load(directory / "reports.pt", weights_only=False)
    return reports


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_a_rule_and_the_name_and_shape_that_the_rule_gives_it(
    name: str, reports: dict[str, Any], directory: Path
) -> None:
    assert reports[name]["layer"] == "TELayerNormColumnParallelLinear"
    assert reports[name]["adam"].startswith("transformer_engine.")
    assert reports[name]["fuses"]
    assert all(reports[name]["fuses"])
    architecture = Architecture.from_directory(directory / name / "model")
    expected = {}
    rules = weight_map.rules(architecture)
    for rule in rules:
        shapes = [weight_map.full_shape(tensor, architecture) for tensor in rule.tensors]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        for layer in range(architecture.num_layers) if rule.layered else [None]:
            expected[rule.megatron_names[-1].format(layer=layer)] = shape
    assert reports[name]["shapes"] == expected
    assert set(reports[name]["rules"]) == {rule.megatron_names[0] for rule in rules}


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_local_layers_loads_into_transformer_engines_bit_for_bit(
    name: str, reports: dict[str, Any], steps: dict[str, Any]
) -> None:
    (*_, saved), _ = steps[name]
    loaded = reports[name]["masters"]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)


def test_local_layers_resume_from_transformer_engines_as_if_they_had_never_stopped(
    directory: Path, reports: dict[str, Any], steps: dict[str, Any]
) -> None:
    resumed = run_ranks(partial(train_with_local_layers, resumes=True), 1, directory)[0]
    for name, (_, (loss, grad_norm, masters)) in steps.items():
        ((resumed_loss, resumed_norm, resumed_masters),) = resumed[name]
        assert (resumed_loss, resumed_norm) == (loss, grad_norm)
        assert all(torch.equal(resumed_masters[key], masters[key]) for key in masters)
