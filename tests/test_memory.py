"""Check planned bytes against hand-computed numbers and against what real learners allocate."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Literal

import pytest

from distributed import run_ranks
from learner_memory import activations_of, allocated
from published import EXPERT_MODELS, HYBRID_MODELS, MODELS, PARAMETERS
from qurl_megatron.config.schema import (
    Config,
    LearnerConfig,
    RecomputeMode,
    WeightFormat,
)
from qurl_megatron.config.text import with_overrides
from qurl_megatron.learner import packing
from qurl_megatron.memory import estimate as memory
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, Family
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.recipes.scaling_32b import study
from tiny import build_tiny_model

QWEN2 = KNOWN_MODELS["Qwen2.5-32B"]
PUBLISHED = MODELS | EXPERT_MODELS | HYBRID_MODELS
# Weights in the linear layers of a block of Qwen2.5-32B: q and o, k and v, gate and up and down.
LAYER_WEIGHTS = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 27648 * 5120
FOUR_STAGES = ["pipeline_parallel_size=4", "layers_in_last_pipeline_stage=none"]


def with_learner(*words: str) -> Config:
    """Return the study of Qwen2.5-32B in INT8 on 64 GPUs, with changed fields of its learner."""
    return with_overrides(study("", 64, "int8"), [f"learner.{word}" for word in words])


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_model_known_by_name_has_the_published_number_of_parameters(name: str) -> None:
    assert weight_map.num_parameters(KNOWN_MODELS[name]) == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(KNOWN_MODELS.keys() & PUBLISHED.keys()))
def test_a_model_known_by_name_is_the_one_in_its_config_json(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    read = Architecture.from_directory(tmp_path)
    eos = KNOWN_MODELS[name].eos_token_ids
    assert dataclasses.replace(read, eos_token_ids=eos) == KNOWN_MODELS[name]


def test_a_token_of_qwen_32b_takes_a_quarter_mebibyte_of_kv_cache() -> None:
    """2 (key, value) x 64 layers x 8 heads x 128 x 2 B; each rank has at least one head."""
    assert memory.kv_bytes_per_token(QWEN2) == 2 * 64 * 8 * 128 * 2 == 2**18
    assert memory.kv_bytes_per_token(QWEN2, 4) == 2**16
    assert memory.kv_bytes_per_token(QWEN2, 16) == memory.kv_bytes_per_token(QWEN2, 8) == 2**15


@pytest.mark.parametrize(
    ("name", "token", "state"),
    [("Qwen3.5-27B", 65_536, 153_944_064), ("Qwen3.5-9B", 32_768, 51_511_296)],
)
def test_a_hybrid_has_keys_of_every_fourth_layer_and_states_of_the_others(
    name: str, token: int, state: int
) -> None:
    """27B: 2 x 16 layers x 4 heads x 256 x 2 B; 48 layers x 48 heads x 128 x 128 x 4 B.

    Of the convolution the last three inputs of 10,240 channels stay, in BF16.
    """
    model = KNOWN_MODELS[name]
    assert memory.kv_bytes_per_token(model) == token
    assert memory.state_bytes_per_sequence(model) == state
    assert memory.state_bytes_per_sequence(model, 4) == state // 4
    assert memory.state_bytes_per_sequence(QWEN2) == 0


def test_a_stage_of_a_hybrid_has_the_weights_of_its_own_kinds_of_layers() -> None:
    """Of 4 layers on 4 stages the last has attention, and on 2 with virtual ones the second."""
    model = KNOWN_MODELS["Qwen3.5-27B"]
    linear = model.delta_net and dataclasses.replace(
        model.delta_net, layers=model.delta_net.layers[:4]
    )
    model = dataclasses.replace(model, num_layers=4, delta_net=linear, vocab_size=8)

    def weights(stages: int, virtual: int) -> list[int]:
        words = [f"pipeline_parallel_size={stages}", f"virtual_pipeline_parallel_size={virtual}"]
        one = ["tensor_parallel_size=1", "layers_in_last_pipeline_stage=none"]
        learner = with_learner(*one, *words).learner
        return [sum(memory.values_by_copies(model, learner, s).values()) for s in range(stages)]

    first, second, third, fourth = weights(4, 1)
    assert second == third != fourth - 5120 - 8 * 5120  # with the last norm and the output layer
    assert weights(2, 2) == [first + third, second + fourth]


def test_a_quantized_policy_has_half_the_bytes_in_its_linear_layers() -> None:
    """Qwen2.5-32B has 31.2e9 weights in linear layers with 4.8e6 scales; 1.56e9 stay in BF16."""
    rows = 5120 + 2 * 1024 + 5120 + 2 * 27648 + 5120  # q; k, v; o; gate, up; down
    linear = 64 * LAYER_WEIGHTS
    rest = PARAMETERS["Qwen2.5-32B"] - linear
    assert memory.published_bytes(QWEN2, "bf16") == 2 * PARAMETERS["Qwen2.5-32B"]
    formats: tuple[WeightFormat, ...] = ("int8", "fp8", "fp8-tensor")
    for weight_format in formats:
        expected = linear + 4 * 64 * rows + 2 * rest
        assert memory.published_bytes(QWEN2, weight_format) == expected
    blocks = 64 * (40 * 40 * 2 + 2 * 8 * 40 + 3 * 216 * 40)
    assert memory.published_bytes(QWEN2, "fp8-block") == linear + 4 * blocks + 2 * rest
    # Half a byte per weight, and two bytes for each group of them.
    assert memory.published_bytes(QWEN2, "int4") == linear * (1 / 2 + 2 / 128) + 2 * rest
    assert memory.published_bytes(QWEN2, "int4-g32") == linear * (1 / 2 + 2 / 32) + 2 * rest
    # All scales are divided, those of row-parallel layers too.
    on_four = memory.server_weight_bytes(QWEN2, "int4", 4)["linear"]
    assert on_four == linear * (1 / 2 + 2 / 128) / 4
    whole = memory.published_bytes(QWEN2, "int8") / memory.published_bytes(QWEN2, "bf16")
    assert whole == pytest.approx(0.5241, abs=1e-4)


def test_gpus_of_a_server_divide_the_weights_but_copy_norms_and_row_parallel_scales() -> None:
    """Each of four GPUs has all norms and all scales of o and down, and a quarter of the rest."""
    on_one = memory.server_weight_bytes(QWEN2, "int8", 1)
    on_each = memory.server_weight_bytes(QWEN2, "int8", 4)
    row_parallel_scales = 4 * 64 * (5120 + 5120)
    assert 4 * on_each["linear"] == on_one["linear"] + 3 * row_parallel_scales
    norms = 2 * (64 * 2 + 1) * 5120
    assert 4 * on_each["unquantized"] == on_one["unquantized"] + 3 * norms


def test_a_parameter_takes_6_bytes_and_its_share_of_12_for_adam() -> None:
    """Data- and context-parallel ranks share Adam's state. All sizes are multiples of 64."""
    config = with_learner(*FOUR_STAGES, "data_parallel_size=2", "context_parallel_size=2")
    tensor = config.learner.tensor_parallel_size
    parts = memory.learner_memory(QWEN2, config, 1)
    numel = sum(memory.values_by_copies(QWEN2, config.learner, 1).values())
    sharded = (LAYER_WEIGHTS + 5120 + 2 * 1024) // tensor  # with the biases of q, k and v
    assert numel == 16 * (sharded + 2 * 5120)
    assert (parts["weights"], parts["gradients"]) == (2 * numel, 4 * numel)
    assert parts["optimizer"] == 12 * numel // 4


def test_training_as_served_takes_codes_of_the_linear_layers_and_values_of_one_weight() -> None:
    config = study("", 64, "int8")
    without = memory.learner_memory(QWEN2, config, 1)
    config.learner.quantized_forward = "all"
    parts = memory.learner_memory(QWEN2, config, 1)
    layers = memory.stage_layers(QWEN2, config.learner)[1]
    codes = layers * LAYER_WEIGHTS // config.learner.tensor_parallel_size
    values = parts.pop("backward") - without.pop("backward")
    assert parts == {**without, "served codes": codes}
    assert 0 < values < 2 * codes
    before, after = ({**each, "backward": 0} for each in (without, parts))
    of_pass = {"score", "update"}
    for phase, num_bytes in memory.peaks(after).items():
        assert num_bytes - memory.peaks(before)[phase] == (codes if phase in of_pass else 0)


def test_micro_batches_have_the_tokens_of_their_budget_but_at_least_the_longest_sequence() -> None:
    """The longest has 9216 tokens."""

    def tokens(*words: str) -> int:
        return memory.micro_batch_tokens(with_learner(*words))

    assert tokens("tokens_per_micro_batch=20000") == 20000
    assert tokens("tokens_per_micro_batch=4096") == 9216
    assert tokens("tokens_per_micro_batch=none", "micro_batch_size=2") == 2 * 9216
    assert tokens("context_parallel_size=2") == 9216 // 2


def test_recomputation_keeps_inputs_of_layers_or_leaves_out_what_is_cheap() -> None:
    config = study("", 64, "int8")
    tokens, layers = 9216, 13
    layer = memory.layer_activation_bytes(QWEN2, config.learner, tokens, tokens)
    # Norms and inputs 8h + 8 B, 6(Q + K) + 160 + 6F, all on eight ranks, and rotary tables.
    assert layer == tokens * (8 * 5120 + 8 + 6 * 6144 + 160 + 6 * 27648) // 8 + 8 * 128 * tokens
    kept = memory.learner_memory(QWEN2, config, 0)["activations"]
    assert kept == 5 * layers * layer  # stage 0 of five has five micro batches in flight

    def activations(*words: str) -> int:
        return memory.learner_memory(QWEN2, with_learner(*words), 0)["activations"]

    inputs = tokens * 2 * 5120 // 8
    assert activations("recompute=full") == (5 * layers - 1) * inputs + layer
    # Nine layers keep everything. One that is recomputed finds the room of another micro batch's.
    assert activations("recompute=full", "recompute_layers=4") == 5 * (4 * inputs + 9 * layer)
    without_product = layer - tokens * 2 * 27648 // 8  # SwiGLU's output, the input of fc2
    assert activations("recompute=selective") == (5 * layers - 1) * without_product + layer


def test_layers_are_recomputed_in_each_virtual_stage() -> None:
    learner = LearnerConfig(recompute="full", recompute_layers=3, virtual_pipeline_parallel_size=2)
    assert memory.recomputed_layers(learner, 16) == 2 * 3
    assert memory.recomputed_layers(learner, 4) == 4


def test_buckets_replace_activations_and_an_offloaded_optimizer_makes_room_for_them() -> None:
    """Beside the passes it is in memory, with the buckets of a publish."""
    parts = {"weights": 10, "activations": 5, "backward": 3, "logits": 2, "buckets": 4}
    assert memory.peaks(parts) == {
        "kept": 10,
        "score": 10 + 3,
        "update": 10 + 5 + 3,
        "publish": 10 + 4,
    }
    parts[memory.OFFLOADED] = 6
    assert memory.peaks(parts) == {"kept": 16, "score": 19, "update": 18, "publish": 20}
    assert memory.total_bytes(parts | {"buckets": 7}) == 10 + 6 + 7


def test_virtual_stages_keep_more_activations() -> None:
    """4 stages of 16 layers with v = 2 keep 16 x 4 x (1 + 3 / 8) = 88 layers on the first."""
    config = with_learner(*FOUR_STAGES, "virtual_pipeline_parallel_size=2")
    layer = memory.layer_activation_bytes(QWEN2, config.learner, 9216, 9216)
    for stage, layers in ((0, 88), (2, 8 * (2 + 4 + 1))):
        assert memory.learner_memory(QWEN2, config, stage)["activations"] == layers * layer
    config.rollout.prompts_per_step = 4 * config.learner.data_parallel_size
    config.rollout.completions_per_prompt = config.optimizer.minibatches_per_step = 1
    # Four micro batches, each with the activations of all 16 layers.
    assert memory.learner_memory(QWEN2, config, 0)["activations"] == 4 * 16 * layer


def test_logits_and_their_gradients_are_on_the_last_stage() -> None:
    """152064 / 8 = 19008 vocabulary rows; a chunk of 2^26 logits takes 6 B each backward."""
    config = study("", 64, "int8")
    assert memory.learner_memory(QWEN2, config, 0)["logits"] == 0
    parts = memory.learner_memory(QWEN2, config, 4)
    assert parts["logits"] == 6 * 2**26 + 6 * 19008 * 5120
    # 3F / t + 2h values per token, and the gradient of the output layer, the largest weight.
    assert parts["backward"] == 2 * 9216 * (3 * 27648 // 8 + 5120) + 2 * 19008 * 5120
    assert parts["gathered"] == 2 * 9216 * 5120


def test_for_deltas_a_rank_keeps_its_part_of_what_its_stage_publishes() -> None:
    """A byte per code, two per other parameter, and scales."""
    full = study("", 64, "int8")
    config = with_overrides(full, ["quantization.publish=delta"])
    kept = 13 * LAYER_WEIGHTS // 8 + 2 * 5120 * 19008  # an eighth of 13 layers and of the embedding
    assert memory.learner_memory(QWEN2, config, 0)["converter"] == pytest.approx(kept, rel=0.02)
    assert memory.learner_memory(QWEN2, full, 0)["converter"] == 0


def test_a_sender_holds_two_buckets_that_may_be_as_large_as_its_largest_tensor() -> None:
    """The embedding has 1.56e9 B: more than 512 MiB and less than 2 GiB. Stage 1 has none."""
    embedding = 2 * 152064 * 5120
    config = study("", 64, "int8")
    assert [memory.bucket_bytes(QWEN2, config, stage) for stage in (0, 1)] == [2 * embedding, 2**30]
    config.quantization.bucket_bytes = 2**31
    assert memory.bucket_bytes(QWEN2, config, 0) == 2**32
    config.quantization.transport = "direct"  # a rank needs its own part of a bucket
    assert memory.bucket_bytes(QWEN2, config, 0) == 2**31 // 8


DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
LEARNERS = [
    LearnerConfig(),
    LearnerConfig(dtype="float32"),
    LearnerConfig(tensor_parallel_size=2),
    LearnerConfig(tensor_parallel_size=2, dtype="float32"),
    LearnerConfig(pipeline_parallel_size=2),
    LearnerConfig(data_parallel_size=2),
    LearnerConfig(recompute="full"),
    LearnerConfig(recompute="full", recompute_layers=1),
    LearnerConfig(recompute="selective", offload_optimizer=True),
    LearnerConfig(tensor_parallel_size=2, dtype="float32", recompute="selective"),
]
EXPERT_LEARNERS = [
    LearnerConfig(dtype="float32"),
    LearnerConfig(data_parallel_size=2, expert_parallel_size=2),
    LearnerConfig(tensor_parallel_size=2, data_parallel_size=2, expert_parallel_size=2),
]
DENSE: tuple[Family, ...] = ("qwen2", "qwen3")  # in turn
REAL: list[tuple[Family, LearnerConfig]] = [
    *zip(itertools.cycle(DENSE), LEARNERS),
    *[("qwen3_moe", learner) for learner in EXPERT_LEARNERS],
]


@pytest.mark.parametrize(
    ("family", "learner"),
    REAL,
    ids=[
        f"{family}-{learner.dtype}-{learner.world_size} ranks-{learner.recompute}"
        for family, learner in REAL
    ],
)
def test_a_real_learner_allocates_the_planned_bytes(
    family: Family, learner: LearnerConfig, tmp_path: Path
) -> None:
    """Weights and gradients match but for the alignment of parameters, which tiny models feel.

    The optimizer matches to the byte over all ranks. Experts have a buffer of their own, and other
    copies than the rest of the model.

    Activations are planned for the layers alone: the embedding, the last norm, the log-probs and
    the places of packed tokens keep up to a quarter more.
    """
    build_tiny_model(tmp_path, family)
    architecture = Architecture.from_directory(tmp_path)
    rows, time = 3, 21
    config = Config(learner=learner)
    replicas = learner.data_parallel_size
    by_rank = run_ranks(allocated, learner.world_size, tmp_path, learner, rows * replicas, time)
    # Tensor-parallel ranks compute a multiple of their number.
    tokens = packing.round_up(rows * time, learner.tensor_parallel_size)
    for stage in range(learner.pipeline_parallel_size):
        planned = memory.learner_memory(architecture, config, stage)
        # Ranks are numbered tensor, then data, then pipeline parallel.
        per_stage = learner.tensor_parallel_size * replicas
        of_stage = by_rank[stage * per_stage : (stage + 1) * per_stage]
        values = memory.values_by_copies(architecture, learner, stage)
        numel = sum(per_stage * count // copies for copies, count in values.items())
        state = memory.state_bytes(learner) * numel
        assert sum(measured["optimizer"] for measured in of_stage) == state
        for measured in of_stage:
            for part in ("weights", "gradients"):
                assert planned[part] <= measured[part] < 1.02 * planned[part], part
            share = planned[memory.OFFLOADED if learner.offload_optimizer else "optimizer"]
            assert measured["optimizer"] == pytest.approx(share, rel=0.05)
            in_passes = 0 if learner.offload_optimizer else measured["optimizer"]
            assert measured["optimizer in passes"] == in_passes
            if architecture.num_experts:
                continue  # they get unequally many tokens
            layers = memory.stage_layers(architecture, learner)[stage]
            whole, kept = (
                memory.layer_activation_bytes(
                    architecture, learner, tokens, time, recompute=recompute, fused=False
                )
                for recompute in (None, learner.recompute)
            )
            recomputed = memory.recomputed_layers(learner, layers)
            activations = recomputed * kept + (layers - recomputed) * whole
            if learner.recompute == "full" and recomputed == layers:
                # The backward pass recomputes the last layer after it has freed the log-probs.
                activations += whole - kept
                assert abs(measured["activations"] - activations) < 0.1 * activations
            else:
                assert 0 <= measured["activations"] - activations < 0.25 * layers * whole


def test_a_token_passes_through_the_experts_that_it_chooses() -> None:
    """Qwen3-30B-A3B has 30.5B values, of which 3.3B are active; A22B of 235B, 22B."""
    for name, active in (("Qwen3-30B-A3B", 3.3e9), ("Qwen3-235B-A22B", 22e9)):
        architecture = KNOWN_MODELS[name]
        vocabulary = 2 * memory.num_output_weights(architecture)
        total = architecture.num_linear_weights + vocabulary
        assert total == pytest.approx(active, rel=0.03)
        on_server = memory.server_weight_bytes(architecture, "int8", 1)
        experts = architecture.num_layers * 128 * 3 * architecture.hidden_size
        assert on_server["experts"] > experts * architecture.moe_intermediate_size
        assert on_server["experts"] > 10 * on_server["linear"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_further_layer_keeps_the_planned_bytes_in_every_mode(
    family: Family, tmp_path: Path
) -> None:
    """What a mode saves matches to the byte. What does not grow with the layers cancels out."""
    few, many = 1, 4
    models = [
        build_tiny_model(tmp_path / str(layers), family, num_hidden_layers=layers)
        for layers in (few, many)
    ]
    rows, time = 3, 21
    modes: tuple[RecomputeMode | None, ...] = (None, "selective", "full")
    learners = [LearnerConfig(dtype=dtype, recompute=mode) for dtype in DTYPES for mode in modes]
    ((of_few, of_many),) = run_ranks(activations_of, 1, models, learners, rows, time)
    architecture = Architecture.from_directory(models[0])
    for dtype in DTYPES:
        measured, planned = {}, {}
        for learner, less, more in zip(learners, of_few, of_many, strict=True):
            if learner.dtype == dtype:
                measured[learner.recompute] = (more - less) / (many - few)
                planned[learner.recompute] = memory.layer_activation_bytes(
                    architecture,
                    learner,
                    rows * time,
                    time,
                    recompute=learner.recompute,
                    fused=False,
                )
        assert measured["full"] == planned["full"]
        assert measured[None] - measured["selective"] == planned[None] - planned["selective"] > 0
        assert planned[None] <= measured[None] < 1.1 * planned[None]  # the places of packed tokens


def test_layers_of_a_hybrid_keep_the_planned_bytes_without_a_gpu(tmp_path: Path) -> None:
    """Linear attention in chunks of 64 tokens, attention with gates; within a tenth."""
    rows, time = 2, 128
    learners = [LearnerConfig(dtype=dtype, recompute=r) for dtype in DTYPES for r in (None, "full")]
    models = {
        (kind, layers): _of_one_kind(tmp_path / f"{kind}-{layers}", kind, layers)
        for kind in ("linear_attention", "full_attention")
        for layers in (1, 3)
    }
    (measured,) = run_ranks(activations_of, 1, [*models.values()], learners, rows, time)
    found = dict(zip(models, measured, strict=True))
    for kind, few in ((kind, layers) for kind, layers in models if layers == 1):
        model = Architecture.from_directory(models[kind, few])
        for number, learner in enumerate(learners):
            planned = memory.layer_activation_bytes(
                model,
                learner,
                rows * time,
                time,
                recompute=learner.recompute,
                fused=False,
                linear=kind == "linear_attention",
            )
            layer = (found[kind, 3][number] - found[kind, 1][number]) / 2
            assert planned == pytest.approx(layer, rel=0.2 if learner.recompute else 0.1)


def _of_one_kind(directory: Path, kind: str, layers: int) -> Path:
    """Write a hybrid all of whose layers are of one kind."""
    every = 1 if kind == "full_attention" else layers + 1
    build_tiny_model(
        directory, "qwen3_5_text", num_hidden_layers=layers, layer_types=[kind] * layers
    )
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"full_attention_interval": every}))
    return directory


def test_a_tied_model_has_a_second_embedding_on_its_last_stage(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, tied=True)
    architecture = Architecture.from_directory(tmp_path)
    for learner in (LearnerConfig(), LearnerConfig(pipeline_parallel_size=2)):
        by_rank = run_ranks(allocated, learner.world_size, tmp_path, learner, 2, 5)
        for stage, measured in enumerate(by_rank):
            planned = memory.learner_memory(architecture, Config(learner=learner), stage)
            # Megatron aligns some forty parameters to 64 values each.
            assert 0 <= measured["weights"] - planned["weights"] < 2 * 64 * 40
