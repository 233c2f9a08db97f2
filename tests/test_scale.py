"""Shapes of whole models of 30B to 235B values that every rank of a large layout holds and sends.

Megatron builds each pipeline stage's model on the meta device, in one process that acts as one rank
after another. Every shape and name is therefore Megatron's.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import sglang_loader
from distributed import run_ranks
from published import EXPERT_MODELS, MODELS, PARAMETERS
from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization import quantize

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
    from qurl_megatron.learner.model import Policy, build_chunks, parameters_of

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
                chunks = build_chunks(architecture, learner, Policy)
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


@pytest.mark.parametrize(
    ("name", "server_size", "weight_format"),
    [
        ("Qwen2.5-32B", 2, "int8"),
        ("Qwen2.5-32B", 4, "fp8-block"),
        ("Qwen3-32B", 2, "fp8-block"),
        ("Qwen3-32B", 4, "int8"),
    ],
)
def test_every_tensor_of_a_32b_model_has_its_place_in_a_server(
    name: str, server_size: int, weight_format: str, model_dirs: dict[str, Path], engine: None
) -> None:
    """SGLang's own loaders accept every tensor, and its ranks hold all of each and nothing else."""
    from qurl_megatron.sglang_plugin.weights import held_parts

    architecture = Architecture.from_directory(model_dirs[name])
    sent: dict[str, torch.Tensor] = {}
    for rule in weight_map.rules(architecture):
        for layer in range(architecture.num_layers) if rule.layered else [None]:
            for part, tensor_name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
                shape = weight_map.full_shape(part, architecture)
                sent[tensor_name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
                if rule.quantized:
                    codes = torch.int8 if weight_format == "int8" else torch.float8_e4m3fn
                    sent[tensor_name] = sent[tensor_name].to(codes)
                    rows = shape[0] if weight_format == "int8" else -(-shape[0] // 128)
                    columns = 1 if weight_format == "int8" else -(-shape[1] // 128)
                    scale_name = quantize.scale_name(tensor_name, weight_format)
                    sent[scale_name] = torch.empty(rows, columns, device="meta")
    places: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for rank in range(server_size):
        with sglang_loader.as_rank(rank, server_size), torch.device("meta"):
            model = sglang_loader.build(model_dirs[name], weight_format)
            model.load_weights(sent.items())
        for tensor_name, parts in held_parts(model).items():
            for tensor, row, column in parts:
                assert tensor.dtype == sent[tensor_name].dtype
                places[tensor_name].add((row, column, *tensor.shape))
    assert places.keys() == sent.keys()
    for tensor_name, tensor in sent.items():
        # Ranks hold the same part or disjoint parts, so the sizes of distinct parts add up.
        held = sum(math.prod(shape) for _, _, *shape in places[tensor_name])
        assert held == tensor.numel(), tensor_name
