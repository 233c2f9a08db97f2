"""The bytes that are planned for a GPU are those that are there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from distributed import run_ranks
from learner_memory import allocated
from qurl_megatron import device
from qurl_megatron.config.schema import Config, LearnerConfig, RolloutConfig
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.planning import memory
from qurl_megatron.planning.memory import Savings
from qurl_megatron.weight_sync import drift
from recipes.scaling_32b import ARCHITECTURES, study
from test_scale import MODELS, PARAMETERS
from tiny import build_tiny_model

QWEN2 = ARCHITECTURES["Qwen2.5-32B"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_32b_model_has_the_parameters_it_is_published_with(name: str, tmp_path: Path) -> None:
    assert memory.num_parameters(ARCHITECTURES[name]) == PARAMETERS[name]
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    read = Architecture.from_directory(tmp_path)
    eos = ARCHITECTURES[name].eos_token_ids
    assert dataclasses.replace(read, eos_token_ids=eos) == ARCHITECTURES[name]


def test_a_token_of_qwen_32b_takes_a_quarter_mebibyte_of_cache() -> None:
    """2 (key, value) x 64 layers x 8 heads x 128 x 2 B; a rank has one head at least."""
    assert memory.kv_bytes_per_token(QWEN2) == 2 * 64 * 8 * 128 * 2 == 2**18
    assert memory.kv_bytes_per_token(QWEN2, 4) == 2**16
    assert memory.kv_bytes_per_token(QWEN2, 16) == memory.kv_bytes_per_token(QWEN2, 8) == 2**15


def test_a_quantized_policy_has_half_the_bytes_but_for_what_is_not_quantized() -> None:
    """Qwen2.5-32B: 31.2e9 weights in linear layers with 4.8e6 scales, 1.56e9 that stay in BF16."""
    rows = 5120 + 2 * 1024 + 5120 + 2 * 27648 + 5120  # q; k, v; o; gate, up; down
    linear = 64 * (5120 * 5120 * 2 + 2 * 1024 * 5120 + 3 * 27648 * 5120)
    rest = PARAMETERS["Qwen2.5-32B"] - linear
    assert memory.published_bytes(QWEN2, "bf16") == 2 * PARAMETERS["Qwen2.5-32B"]
    for weight_format in ("int8", "fp8", "fp8-tensor"):
        expected = linear + 4 * 64 * rows + 2 * rest
        assert memory.published_bytes(QWEN2, weight_format) == expected  # type: ignore[arg-type]
    blocks = 64 * (40 * 40 * 2 + 2 * 8 * 40 + 3 * 216 * 40)
    assert memory.published_bytes(QWEN2, "fp8-block") == linear + 4 * blocks + 2 * rest
    in_layers = (linear + 4 * 64 * rows) / (2 * linear)
    assert in_layers == pytest.approx(0.5003, abs=1e-4)
    whole = memory.published_bytes(QWEN2, "int8") / memory.published_bytes(QWEN2, "bf16")
    assert whole == pytest.approx(0.5241, abs=1e-4)


def test_a_servers_gpus_hold_the_policy_between_them() -> None:
    """On four GPUs each, norms and the scales of o and down are whole, the rest is a quarter."""
    alone = memory.server_weight_bytes(QWEN2, "int8", 1)
    shared = memory.server_weight_bytes(QWEN2, "int8", 4)
    scales_twice = 4 * 64 * (5120 + 5120)
    assert 4 * shared["linear"] == alone["linear"] + 3 * scales_twice
    norms = 2 * (64 * 2 + 1) * 5120
    assert 4 * shared["unquantized"] == alone["unquantized"] + 3 * norms


def test_32b_with_adam_is_18_bytes_a_parameter_on_every_copy() -> None:
    """Over tensor and pipeline ranks; over data-parallel ones only if the optimizer is."""
    config = study("", 64, "int8")
    config = dataclasses.replace(
        config,
        learner=dataclasses.replace(
            config.learner,
            pipeline_parallel_size=4,
            data_parallel_size=2,
            layers_in_last_pipeline_stage=None,
        ),
    )
    parts = memory.learner_memory(QWEN2, config, 1, Savings())
    numel = memory.rank_parameters(QWEN2, config.learner, 1)
    sharded = (5120 * 5120 * 2 + 2 * 1024 * 5120 + 3 * 27648 * 5120 + 5120 + 2 * 1024) // 8
    assert numel == 16 * (sharded + 2 * 5120)
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (
        2 * numel,
        4 * numel,
        12 * numel,
    )
    halved = memory.learner_memory(QWEN2, config, 1, Savings(distributed_optimizer=True))
    assert halved["optimizer"] == 6 * numel
    assert {k: v for k, v in halved.items() if k != "optimizer"} == {
        k: v for k, v in parts.items() if k != "optimizer"
    }


def test_recomputation_keeps_a_layers_input_only() -> None:
    config = study("", 64, "int8")
    tokens, layers = 9216, 13
    layer = memory.layer_activation_bytes(QWEN2, config.learner, 1, tokens)
    # Norms and inputs 8h + 8 B, on eight ranks 6(Q + K) + 160 + 6F, and rotary tables.
    assert layer == tokens * (8 * 5120 + 8 + (6 * 6144 + 160 + 6 * 27648) // 8) + 8 * 128 * tokens
    kept = memory.learner_memory(QWEN2, config, 0, Savings())["activations"]
    assert kept == 5 * layers * layer  # five stages, so five micro batches in flight
    config.learner.recompute_activations = True
    recomputed = memory.learner_memory(QWEN2, config, 0, Savings())["activations"]
    assert recomputed == (5 * layers - 1) * tokens * 2 * 5120 + layer


LEARNERS = [
    LearnerConfig(),
    LearnerConfig(dtype="float32"),
    LearnerConfig(tensor_parallel_size=2),
    LearnerConfig(tensor_parallel_size=2, dtype="float32"),
    LearnerConfig(pipeline_parallel_size=2),
    LearnerConfig(data_parallel_size=2),
    LearnerConfig(recompute_activations=True),
    LearnerConfig(tensor_parallel_size=2, dtype="float32", recompute_activations=True),
]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "learner",
    LEARNERS,
    ids=lambda c: (
        f"{c.dtype}-{c.tensor_parallel_size}x{c.pipeline_parallel_size}x{c.data_parallel_size}"
        + "-recomputed" * c.recompute_activations
    ),
)
def test_a_real_learner_allocates_what_is_planned(
    family: str, learner: LearnerConfig, tmp_path: Path
) -> None:
    """To the byte, on every rank; activations too, of the layers and what stands around them."""
    build_tiny_model(tmp_path, family)  # type: ignore[arg-type]
    architecture = Architecture.from_directory(tmp_path)
    rows, time = 3, 21
    rollout = RolloutConfig(prompts_per_step=2, completions_per_prompt=2)
    config = Config(learner=learner, rollout=rollout)
    by_rank = run_ranks(
        allocated, learner.world_size, tmp_path, learner, rows * learner.data_parallel_size, time
    )
    for rank, found in enumerate(by_rank):
        # Ranks are numbered tensor, then data, then pipeline parallel.
        stage = rank // (learner.tensor_parallel_size * learner.data_parallel_size)
        planned = memory.learner_memory(architecture, config, stage, Savings())
        for part in ("weights", "gradients", "optimizer"):
            assert found[part] == planned[part], part
        layers = memory.stage_layers(architecture, learner)[stage]
        layer = memory.layer_activation_bytes(architecture, learner, rows, time, fused=False)
        if learner.recompute_activations:
            # When the last layer is made again, what stands around the layers is used and gone.
            inputs = rows * time * architecture.hidden_size * memory.element_bytes(learner)
            kept = (layers - 1) * inputs + layer
            assert abs(found["activations"] - kept) < 0.1 * kept
        else:
            assert 0 <= found["activations"] - layers * layer < 0.2 * layers * layer


def test_a_tied_model_keeps_a_second_embedding_on_its_last_stage(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, tied=True)
    architecture = Architecture.from_directory(tmp_path)
    for learner in (LearnerConfig(), LearnerConfig(pipeline_parallel_size=2)):
        by_rank = run_ranks(allocated, learner.world_size, tmp_path, learner, 2, 5)
        for stage, found in enumerate(by_rank):
            assert found["weights"] == 2 * memory.rank_parameters(architecture, learner, stage)


def test_constants_of_other_rooms_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    assert device.logit_chunk_elements(QWEN2.vocab_size) == memory.LOGIT_CHUNK_ELEMENTS
    assert drift.MEASURED_ROWS == memory.MEASURED_ROWS
