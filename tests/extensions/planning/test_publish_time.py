"""Check planned publishes against numbers computed by hand."""

import dataclasses
from typing import Any, get_args

import pytest

from published import PARAMETERS
from qurl_megatron.config.schema import Config, FormatName
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.planning.step_time import plan_publish
from qurl_megatron.memory import estimate as memory
from qurl_megatron.memory.estimate import published_by_stage
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.recipes.scaling_32b import study

QWEN2 = KNOWN_MODELS["Qwen2.5-32B"]
LINEAR = 2 * 5120 * 5120 + 2 * 1024 * 5120 + 3 * 27648 * 5120  # weights of a layer
SCALES = 5120 + 2 * 1024 + 5120 + 2 * 27648 + 5120
REST = 2 * 5120 + 5120 + 2 * 1024  # norms and biases of a layer
VOCABULARY = 152064 * 5120
INFINIBAND = 50e9  # bytes per second


def planned(weight_format: FormatName, *words: str) -> Config:
    """Return the study of 32B on 64 GPUs: a learner of 8 x 5, and six servers of four."""
    return with_overrides(study("", 64, weight_format), list(words))


def test_each_stage_sends_its_own_layers_and_what_lies_outside_of_them() -> None:
    """64 layers on five stages are 13, 13, 13, 13 and 12."""
    layer = LINEAR + 4 * SCALES + 2 * REST
    sent = [stage.dense for stage in published_by_stage(QWEN2, planned("int8"))]
    assert sent == [
        13 * layer + 2 * VOCABULARY,
        *[13 * layer] * 3,
        12 * layer + 2 * VOCABULARY + 2 * 5120,
    ]


def test_the_senders_send_all_tensors_once() -> None:
    words = ["quantization.keep=[model.layers.3, '*.o_proj']"]
    for weight_format in get_args(FormatName):
        config = planned(weight_format, *words)
        total = memory.published_bytes(QWEN2, weight_format, tuple(config.quantization.keep))
        assert sum(stage.dense for stage in published_by_stage(QWEN2, config)) == total


def test_a_sender_of_experts_has_those_of_its_expert_parallel_rank() -> None:
    architecture = KNOWN_MODELS["Qwen3-30B-A3B"]
    config = planned("bf16")
    config.learner = dataclasses.replace(
        config.learner,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        data_parallel_size=4,
        layers_in_last_pipeline_stage=None,
        expert_parallel_size=8,
    )
    experts = 48 * 128 * 2 * 3 * 768 * 2048
    (stage,) = published_by_stage(architecture, config)
    assert stage.experts == experts
    assert stage.dense + experts == memory.published_bytes(architecture, "bf16")
    publish = plan_publish(architecture, config)
    assert publish.time_s == pytest.approx(6 * (stage.dense + experts / 8) / INFINIBAND)


def test_the_fullest_sender_decides_and_sends_every_server_a_copy() -> None:
    fullest = 2 * (13 * (LINEAR + REST) + VOCABULARY)
    publish = plan_publish(QWEN2, planned("bf16"))
    assert publish.time_s == pytest.approx(6 * fullest / INFINIBAND)
    assert publish.num_bytes == 2 * PARAMETERS["Qwen2.5-32B"]


def test_no_publish_is_shorter_than_a_server_takes_to_receive_it() -> None:
    """With one server, five senders could send faster than it receives."""
    publish = plan_publish(QWEN2, planned("bf16", "rollout.servers=1"))
    assert publish.time_s == pytest.approx(2 * PARAMETERS["Qwen2.5-32B"] / INFINIBAND)


def small(**changes: Any) -> Config:
    """Return a learner of two ranks and two servers of two, in one node."""
    config = planned("int8", "rollout.server.tensor_parallel_size=2", "rollout.servers=2")
    config.learner = dataclasses.replace(
        config.learner,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        layers_in_last_pipeline_stage=None,
    )
    config.quantization = dataclasses.replace(config.quantization, **changes)
    return config


@pytest.mark.parametrize("transport", ["direct", "auto"])
def test_what_ranks_write_in_place_takes_no_time(transport: str) -> None:
    publish = plan_publish(QWEN2, small(transport=transport))
    assert publish.num_bytes == memory.published_bytes(QWEN2, "int8")
    assert publish.is_direct and publish.time_s == 0
    assert not plan_publish(QWEN2, small(transport="auto", publish="delta")).is_direct
    assert not plan_publish(QWEN2, small()).is_direct
