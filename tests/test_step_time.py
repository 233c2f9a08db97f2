"""Planned times behave as a step's do."""

from __future__ import annotations

import pytest

from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.planning import step_time
from qurl_megatron.planning.step_time import Workload
from recipes.scaling_32b import ARCHITECTURES, study
from test_scale import PARAMETERS

QWEN2 = ARCHITECTURES["Qwen2.5-32B"]


def rollout_s(weight_format: str = "int8", servers: int = 4, **changes: float) -> float:
    return step_time.rollout_s(
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
    alone = 8192 * step_time.decode_s(QWEN2, "int8", 4, 1, 512 + 4096)
    assert rollout_s(servers=2048, mean=8192) == pytest.approx(alone, rel=0.01)


def test_every_token_of_a_rollout_is_decoded() -> None:
    """Without queue, tails and context: sequences x tokens / batch steps."""
    step_s = step_time.decode_s(QWEN2, "int8", 4, 200, 200 * (512 + 4096))
    assert rollout_s(servers=1, mean=8192) == pytest.approx(2048 * 8192 / 200 * step_s, rel=0.01)


def test_a_token_for_one_sequence_reads_the_weights_once() -> None:
    """BF16 on one GPU: 2 x (linear + output) / 3.35e12 / 0.93 s, and 64 layers' overhead."""
    linear = 64 * (5120 * 5120 * 2 + 2 * 1024 * 5120 + 3 * 27648 * 5120)
    expected = 2 * (linear + 152064 * 5120) / (3.35e12 * 0.93) + 64 * 55.6e-6 + 7.7e-6
    assert step_time.decode_s(QWEN2, "bf16", 1, 1, 0) == pytest.approx(expected, rel=1e-6)


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
    times = step_time.learner_s(QWEN2, config, workload)
    assert times["proximal"] == pytest.approx(layers + output, rel=1e-6)
    optimizer = 2 * 2 * 16 * PARAMETERS["Qwen2.5-32B"] / 3.35e12
    assert times["update"] == pytest.approx(3 * layers + 4 * output + optimizer, rel=1e-6)


def test_a_quantized_publish_takes_the_time_of_its_bytes() -> None:
    bf16, int8 = (step_time.publish_s(QWEN2, study("", 64, f)) for f in ("bf16", "int8"))
    assert int8 / bf16 == pytest.approx(0.5241, abs=1e-4)
