"""Shapes of whole models of 30B to 235B values that every rank of a large layout holds and sends.

Megatron builds each pipeline stage's model on the meta device, in one process that acts as one rank
after another. Every shape and name is therefore Megatron's.
"""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from distributed import run_ranks
from published import EXPERT_MODELS, MODELS, PARAMETERS
from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture

LEARNER = LearnerConfig(tensor_parallel_size=8, pipeline_parallel_size=4)
EXPERT_LEARNER = LearnerConfig(
    tensor_parallel_size=4,
    pipeline_parallel_size=2,
    data_parallel_size=4,
    expert_parallel_size=8,
    expert_tensor_parallel_size=2,
)


def learner_of(name: str) -> LearnerConfig:
    return EXPERT_LEARNER if name in EXPERT_MODELS else LEARNER


def stage_shapes(
    model_dirs: dict[str, Path], learner: LearnerConfig
) -> dict[str, list[list[tuple]]]:
    """Return, by model and pipeline stage, each parameter's Megatron name, layer and shape.

    They are those of the stage's first rank.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from qurl_megatron.learner.cpu_runtime import megatron_runtime
    from qurl_megatron.learner.model import PolicyModel, build_chunks, parameters_of

    shapes: dict[str, list[list[tuple]]] = {name: [] for name in model_dirs}
    for stage in range(learner.pipeline_parallel_size):
        dist.init_process_group(
            "fake",
            store=FakeStore(),
            rank=stage * learner.world_size // learner.pipeline_parallel_size,
            world_size=learner.world_size,
        )
        with megatron_runtime(), torch.device("meta"):
            parallel_state.initialize_model_parallel(
                learner.tensor_parallel_size,
                learner.pipeline_parallel_size,
                expert_model_parallel_size=learner.expert_parallel_size,
                expert_tensor_parallel_size=learner.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
            )
            for model, directory in model_dirs.items():
                architecture = Architecture.from_directory(directory)
                chunks = build_chunks(architecture, learner, PolicyModel)
                shapes[model].append(
                    [
                        (name, layer, tuple(parameter.shape))
                        for name, _, layer, parameter in parameters_of(chunks, architecture)
                    ]
                )
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return shapes


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    for name, fields in (MODELS | EXPERT_MODELS).items():
        directories[name] = tmp_path_factory.mktemp(name)
        (directories[name] / "config.json").write_text(json.dumps(fields))
    return directories


@pytest.fixture(scope="module")
def shapes(model_dirs: dict[str, Path]) -> dict[str, list[list[tuple]]]:
    shapes: dict[str, list[list[tuple]]] = {}
    for learner in (LEARNER, EXPERT_LEARNER):
        models = {name: d for name, d in model_dirs.items() if learner_of(name) is learner}
        shapes |= run_ranks(stage_shapes, 1, models, learner)[0]
    return shapes


@pytest.mark.parametrize("name", MODELS | EXPERT_MODELS)
def test_every_tensor_of_a_whole_model_is_sent_once_and_whole(
    name: str, model_dirs: dict[str, Path], shapes: dict[str, list[list[tuple]]]
) -> None:
    """The parts of all 32 ranks tile the checkpoint without gap or overlap."""
    architecture = Architecture.from_directory(model_dirs[name])
    learner = learner_of(name)
    local_experts = architecture.num_experts // learner.expert_parallel_size
    sent: dict[str, int] = {}
    for stage, expert_rank in itertools.product(shapes[name], range(learner.expert_parallel_size)):
        for megatron_name, layer, shape in stage:
            rule, _ = weight_map.find_megatron(megatron_name, expert_rank * local_experts)
            size = learner.tensor_parallel_size
            if rule.of_experts:
                size = learner.expert_tensor_parallel_size
            elif expert_rank:
                continue
            by_rank = [
                weight_map.split(
                    rule, torch.empty(shape, device="meta"), architecture, layer, rank, size
                )
                for rank in range(size)
            ]
            for parts in zip(*by_rank, strict=True):
                first = parts[0]
                assert first.name not in sent, f"{first.name} is in two places"
                sent[first.name] = math.prod(first.full_shape)
                if first.dim is None:
                    assert all(tuple(part.tensor.shape) == first.full_shape for part in parts)
                    continue
                rows_or_columns = sum(part.tensor.shape[first.dim] for part in parts)
                assert rows_or_columns == first.full_shape[first.dim]
                for part, following in zip(parts, parts[1:], strict=False):
                    end = part.offset[first.dim] + part.tensor.shape[first.dim]
                    assert following.offset[first.dim] == end
    assert sent.keys() == weight_map.hugging_face_names(architecture)
    assert sum(sent.values()) == PARAMETERS[name]
