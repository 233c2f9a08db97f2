"""What does not fit is refused, what is suggested fits, and the command says either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.planning import plan
from qurl_megatron.planning.memory import GIB, GPU_BYTES, Savings, kv_bytes_per_token
from qurl_megatron.planning.step_time import Workload
from recipes.scaling_32b import ARCHITECTURES, FORMATS, LAYOUTS, study
from tiny import build_tiny_model

QURL = Path(sys.executable).with_name("qurl")
QWEN2, QWEN3 = ARCHITECTURES["Qwen2.5-32B"], ARCHITECTURES["Qwen3-32B"]


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
    config = with_overrides(study("", 64, "int8"), ["rollout.max_response_length=31744"])
    half = Workload.half(config)
    with pytest.raises(
        ConfigError, match="no layout of 16 GPUs fits .* 32768 tokens; a learner with"
    ):
        plan.plan_or_suggest(QWEN2, config, 16, Savings(), half, has_layout=False)
    with pytest.raises(ConfigError, match="not even with"):
        plan.plan_or_suggest(QWEN2, config, 4, Savings(), half, has_layout=False)
    everything = Savings(True, True)
    found = plan.plan_or_suggest(QWEN2, config, 16, everything, half, has_layout=False)
    assert found.learner_total_bytes < GPU_BYTES


def test_a_servers_memory_adds_up_to_a_gpu() -> None:
    found = plan.plan(QWEN3, study("", 64, "fp8"), 64)
    assert sum(found.server_bytes.values()) == pytest.approx(GPU_BYTES, abs=GIB / 1024)
    assert found.kv_tokens * kv_bytes_per_token(QWEN3, 4) == found.server_bytes["KV cache"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (
            ["Qwen3-32B", "--gpus", "32", "quantization.format=fp8"],
            0,
            "rollout.servers=3, in fp8, of 4 GPUs",
        ),
        (["MODEL", "--gpus", "4", "--mean-response", "100"], 0, "4 H100: learner."),
        (["scaling_32b", "model=Qwen2.5-32B"], 0, "learner, 40 GPUs"),
        (["scaling_32b"], 2, "model=: missing"),
        (["Qwen2.5-32B", "--gpus", "8"], 2, "no layout of 8 GPUs fits"),
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
