"""The plan counts what is there, and its times behave as a step's do."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from distributed import run_ranks
from learner_memory import allocated
from qurl_megatron import device, plan, reshard
from qurl_megatron.architecture import Architecture
from qurl_megatron.config import Config, ConfigError, LearnerConfig, RolloutConfig, with_overrides
from qurl_megatron.plan import GIB, Savings, Workload
from recipes.scaling_32b import ARCHITECTURES, FORMATS, LAYOUTS, study
from test_scale import MODELS, PARAMETERS
from tiny import build_tiny_model

QURL = Path(sys.executable).with_name("qurl")
QWEN2, QWEN3 = ARCHITECTURES["Qwen2.5-32B"], ARCHITECTURES["Qwen3-32B"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_32b_model_has_the_parameters_it_is_published_with(name: str, tmp_path: Path) -> None:
    import json

    assert plan.num_parameters(ARCHITECTURES[name]) == PARAMETERS[name]
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    read = Architecture.from_directory(tmp_path)
    eos = ARCHITECTURES[name].eos_token_ids
    assert dataclasses.replace(read, eos_token_ids=eos) == ARCHITECTURES[name]


def test_a_token_of_qwen_32b_takes_a_quarter_mebibyte_of_cache() -> None:
    """2 (key, value) x 64 layers x 8 heads x 128 x 2 B; a rank has one head at least."""
    assert plan.kv_bytes_per_token(QWEN2) == 2 * 64 * 8 * 128 * 2 == 2**18
    assert plan.kv_bytes_per_token(QWEN2, 4) == 2**16
    assert plan.kv_bytes_per_token(QWEN2, 16) == plan.kv_bytes_per_token(QWEN2, 8) == 2**15


def test_a_quantised_policy_has_half_the_bytes_but_for_what_is_not_quantised() -> None:
    """Qwen2.5-32B: 31.2e9 weights in linear layers with 4.8e6 scales, 1.56e9 that stay in BF16."""
    rows = 5120 + 2 * 1024 + 5120 + 2 * 27648 + 5120  # q; k, v; o; gate, up; down
    linear = 64 * (5120 * 5120 * 2 + 2 * 1024 * 5120 + 3 * 27648 * 5120)
    rest = PARAMETERS["Qwen2.5-32B"] - linear
    assert plan.published_bytes(QWEN2, "bf16") == 2 * PARAMETERS["Qwen2.5-32B"]
    for weight_format in ("int8", "fp8", "fp8-tensor"):
        expected = linear + 4 * 64 * rows + 2 * rest
        assert plan.published_bytes(QWEN2, weight_format) == expected  # type: ignore[arg-type]
    blocks = 64 * (40 * 40 * 2 + 2 * 8 * 40 + 3 * 216 * 40)
    assert plan.published_bytes(QWEN2, "fp8-block") == linear + 4 * blocks + 2 * rest
    in_layers = (linear + 4 * 64 * rows) / (2 * linear)
    assert in_layers == pytest.approx(0.5003, abs=1e-4)
    whole = plan.published_bytes(QWEN2, "int8") / plan.published_bytes(QWEN2, "bf16")
    assert whole == pytest.approx(0.5241, abs=1e-4)


def test_a_servers_gpus_hold_the_policy_between_them() -> None:
    """On four GPUs each, norms and the scales of o and down are whole, the rest is a quarter."""
    alone = plan.server_weight_bytes(QWEN2, "int8", 1)
    shared = plan.server_weight_bytes(QWEN2, "int8", 4)
    scales_twice = 4 * 64 * (5120 + 5120)
    assert 4 * shared["linear"] == alone["linear"] + 3 * scales_twice
    norms = 2 * (64 * 2 + 1) * 5120
    assert 4 * shared["unquantised"] == alone["unquantised"] + 3 * norms


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
    parts = plan.learner_memory(QWEN2, config, 1, Savings())
    numel = plan.rank_parameters(QWEN2, config.learner, 1)
    sharded = (5120 * 5120 * 2 + 2 * 1024 * 5120 + 3 * 27648 * 5120 + 5120 + 2 * 1024) // 8
    assert numel == 16 * (sharded + 2 * 5120)
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (
        2 * numel,
        4 * numel,
        12 * numel,
    )
    halved = plan.learner_memory(QWEN2, config, 1, Savings(distributed_optimizer=True))
    assert halved["optimizer"] == 6 * numel
    assert {k: v for k, v in halved.items() if k != "optimizer"} == {
        k: v for k, v in parts.items() if k != "optimizer"
    }


def test_recomputation_keeps_a_layers_input_only() -> None:
    config = study("", 64, "int8")
    tokens, layers = 9216, 13
    layer = plan.layer_activation_bytes(QWEN2, config.learner, 1, tokens)
    # Norms and inputs 8h + 8 B, on eight ranks 6(Q + K) + 160 + 6F, and rotary tables.
    assert layer == tokens * (8 * 5120 + 8 + (6 * 6144 + 160 + 6 * 27648) // 8) + 8 * 128 * tokens
    kept = plan.learner_memory(QWEN2, config, 0, Savings())["activations"]
    assert kept == 5 * layers * layer  # five stages, so five micro batches in flight
    recomputed = plan.learner_memory(QWEN2, config, 0, Savings(recompute=True))["activations"]
    assert recomputed == 5 * layers * tokens * 2 * 5120 + layer


LEARNERS = [
    LearnerConfig(),
    LearnerConfig(dtype="float32"),
    LearnerConfig(tensor_parallel_size=2),
    LearnerConfig(tensor_parallel_size=2, dtype="float32"),
    LearnerConfig(pipeline_parallel_size=2),
    LearnerConfig(data_parallel_size=2),
]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "learner",
    LEARNERS,
    ids=lambda c: (
        f"{c.dtype}-{c.tensor_parallel_size}x{c.pipeline_parallel_size}x{c.data_parallel_size}"
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
        planned = plan.learner_memory(architecture, config, stage, Savings())
        for part in ("weights", "gradients", "optimizer"):
            assert found[part] == planned[part], part
        layers = plan.stage_layers(architecture, learner)[stage]
        layer = plan.layer_activation_bytes(architecture, learner, rows, time, fused=False)
        assert 0 <= found["activations"] - layers * layer < 0.2 * layers * layer


def test_a_tied_model_keeps_a_second_embedding_on_its_last_stage(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, tied=True)
    architecture = Architecture.from_directory(tmp_path)
    for learner in (LearnerConfig(), LearnerConfig(pipeline_parallel_size=2)):
        by_rank = run_ranks(allocated, learner.world_size, tmp_path, learner, 2, 5)
        for stage, found in enumerate(by_rank):
            assert found["weights"] == 2 * plan.rank_parameters(architecture, learner, stage)


def test_constants_of_other_rooms_are_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    assert device.logit_chunk_elements(QWEN2.vocab_size) == plan.LOGIT_CHUNK_ELEMENTS
    assert reshard.MEASURED_ROWS == plan.MEASURED_ROWS


def rollout_s(weight_format: str = "int8", servers: int = 4, **changes: float) -> float:
    return plan.rollout_s(
        QWEN2,
        weight_format,  # type: ignore[arg-type]
        4,
        sequences=2048 / servers,
        prompts=256 / servers,
        slots=int(changes.get("slots", 200)),
        workload=Workload(512, changes.get("mean", 4096)),
        max_response=8192,
    )


def test_rollout_is_never_slower_with_more_servers_or_slots_nor_faster_with_longer_answers() -> (
    None
):
    by_servers = [rollout_s(servers=servers) for servers in range(1, 65)]
    assert by_servers == sorted(by_servers, reverse=True)
    by_slots = [rollout_s(slots=slots) for slots in (16, 32, 64, 128, 256)]
    assert by_slots == sorted(by_slots, reverse=True)
    by_length = [rollout_s(mean=mean) for mean in (512, 1024, 4096, 6000, 8192)]
    assert by_length == sorted(by_length)


def test_the_longest_response_is_the_floor_of_a_rollout() -> None:
    """One sequence a server: 8192 tokens one after another, however many servers there are."""
    alone = 8192 * plan.decode_s(QWEN2, "int8", 4, 1, 512 + 4096)
    assert rollout_s(servers=2048, mean=8192) == pytest.approx(alone, rel=0.01)


def test_every_token_of_a_rollout_is_decoded() -> None:
    """Without queue, tails and context: sequences x tokens / batch steps."""
    step_s = plan.decode_s(QWEN2, "int8", 4, 200, 200 * (512 + 4096))
    assert rollout_s(servers=1, mean=8192) == pytest.approx(2048 * 8192 / 200 * step_s, rel=0.01)


def test_a_token_for_one_sequence_reads_the_weights_once() -> None:
    """BF16 on one GPU: 2 x (linear + output) / 3.35e12 / 0.93 s, and 64 layers' overhead."""
    linear = 64 * (5120 * 5120 * 2 + 2 * 1024 * 5120 + 3 * 27648 * 5120)
    expected = 2 * (linear + 152064 * 5120) / (3.35e12 * 0.93) + 64 * 55.6e-6 + 7.7e-6
    assert plan.decode_s(QWEN2, "bf16", 1, 1, 0) == pytest.approx(expected, rel=1e-6)


def test_a_pass_costs_two_operations_a_weight_and_token() -> None:
    """One GPU, no parallelism: an update is three passes, and four of the output layer."""
    config = with_overrides(
        study("", 64, "int8"),
        [
            "learner.tensor_parallel_size=1",
            "learner.pipeline_parallel_size=1",
            "learner.layers_in_last_pipeline_stage=none",
            "objective.kl_coefficient=0",
        ],
    )
    workload = Workload(100, 900)
    linear = 64 * (5120 * 5120 * 2 + 2 * 1024 * 5120 + 3 * 27648 * 5120)
    layers = 2048 * (2 * linear * 1000 + 64 * 2 * 1000**2 * 5120) / 389e12
    output = 2048 * 900 * 2 * 152064 * 5120 / 389e12
    times = plan.learner_s(QWEN2, config, workload, Savings())
    assert times["proximal"] == pytest.approx(layers + output, rel=1e-6)
    optimizer = 2 * 2 * 16 * PARAMETERS["Qwen2.5-32B"] / 3.35e12
    assert times["update"] == pytest.approx(3 * layers + 4 * output + optimizer, rel=1e-6)


def test_a_quantised_publish_takes_the_time_of_its_bytes() -> None:
    bf16, int8 = (plan.publish_s(QWEN2, study("", 64, f)) for f in ("bf16", "int8"))
    assert int8 / bf16 == pytest.approx(0.5241, abs=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("gpus", LAYOUTS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_run_of_the_study_fits_and_is_near_the_best_layout(
    name: str, gpus: int, weight_format: str
) -> None:
    config = study(name, gpus, weight_format)  # type: ignore[arg-type]
    planned = plan.plan(ARCHITECTURES[name], config, gpus)
    best = plan.suggest(ARCHITECTURES[name], config, gpus)
    assert best is not None
    assert best.total_s <= planned.total_s < 1.1 * best.total_s
    assert planned.servers == config.rollout.servers


@pytest.mark.parametrize(
    ("words", "gpus", "message"),
    [
        ("learner.tensor_parallel_size=4 learner.pipeline_parallel_size=1 "
         "learner.layers_in_last_pipeline_stage=none", 64,
         "optimizer break it: a rank of stage 0 needs"),
        ("learner.tensor_parallel_size=4", 64, "activations break it"),
        ("rollout.server.tensor_parallel_size=1 rollout.server.mem_fraction_static=0.79 "
         "quantization.format=bf16", 64,
         "the KV cache break it: a GPU holds 61.0 GiB of bf16 weights"),
        ("rollout.server.mem_fraction_static=0.2 rollout.server.tensor_parallel_size=2", 64,
         "weights break it"),
        ("learner.tensor_parallel_size=3", 64, "40 attention heads do not divide by"),
        ("advantage_estimator=gae", 64, "a critic is not planned for"),
        ("rollout.server.tensor_parallel_size=5", 64, "must divide the 8 GPUs of a node"),
        ("", 40, "the learner's 40 leave 0, and a rollout server takes 4"),
        ("evaluation.problems=8 evaluation.server.tensor_parallel_size=4", 44,
         "the learner's 40 and the evaluation server leave 0"),
        ("learner.data_parallel_size=3", 192, "2048 completions do not divide into 6"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_the_part_that_breaks_it(
    words: str, gpus: int, message: str
) -> None:
    config = with_overrides(study("Qwen2.5-32B", 64, "int8"), words.split())
    with pytest.raises(ConfigError) as refused:
        plan.plan(QWEN2, config, gpus)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_suggested_layout_is_one_that_fits() -> None:
    config = with_overrides(study("Qwen2.5-32B", 64, "int8"), ["learner.tensor_parallel_size=4"])
    half = Workload.half(config)
    with pytest.raises(ConfigError, match="what fits: ") as refused:
        plan.plan_or_suggest(QWEN2, config, 64, Savings(), half, has_layout=True)
    words = str(refused.value).partition("what fits: ")[2].split()
    plan.plan(QWEN2, with_overrides(config, words), 64)


def test_where_no_layout_fits_it_is_said_what_the_learner_lacks() -> None:
    config = study("Qwen2.5-32B", 64, "int8")
    half = Workload.half(config)
    with pytest.raises(
        ConfigError, match="no layout of 16 GPUs fits .* 9216 tokens; a learner with"
    ):
        plan.plan_or_suggest(QWEN2, config, 16, Savings(), half, has_layout=False)
    with pytest.raises(ConfigError, match="not even with"):
        plan.plan_or_suggest(QWEN2, config, 4, Savings(), half, has_layout=False)
    everything = Savings(True, True, True)
    found = plan.plan_or_suggest(QWEN2, config, 16, everything, half, has_layout=False)
    assert found.learner_total_bytes < plan.GPU_BYTES


def test_a_servers_memory_adds_up_to_a_gpu() -> None:
    found = plan.plan(QWEN3, study("", 64, "fp8"), 64)
    assert sum(found.server_bytes.values()) == pytest.approx(plan.GPU_BYTES, abs=GIB / 1024)
    assert found.kv_tokens * plan.kv_bytes_per_token(QWEN3, 4) == found.server_bytes["KV cache"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (
            ["Qwen3-32B", "--gpus", "32", "quantization.format=fp8"],
            0,
            "rollout.servers=2, in fp8, of 4 GPUs",
        ),
        (["MODEL", "--gpus", "4", "--mean-response", "100"], 0, "4 H100: learner."),
        (["scaling_32b", "model=Qwen2.5-32B"], 0, "learner, 40 GPUs"),
        (["scaling_32b"], 2, "model=: missing"),
        (["Qwen2.5-32B", "--gpus", "16"], 2, "no layout of 16 GPUs fits"),
        (["Qwen4-32B"], 2, "Qwen4-32B: no such directory, model (Qwen2.5-32B, Qwen3-32B)"),
    ],
)
def test_the_command_prints_a_plan_or_one_line(
    tmp_path: Path, words: list[str], code: int, text: str
) -> None:
    """A directory with nothing but config.json is enough."""
    if "MODEL" in words:
        build_tiny_model(tmp_path, max_position_embeddings=16384)
        for path in tmp_path.iterdir():
            if path.name != "config.json":
                path.unlink()
        words = [str(tmp_path) if word == "MODEL" else word for word in words]
    ended = subprocess.run([QURL, "plan", *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert text in (ended.stdout if code == 0 else ended.stderr)
    if code:
        assert len(ended.stderr.splitlines()) == 1 and not ended.stdout
