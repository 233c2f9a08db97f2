"""Check what a step's time is divided into, against hand-computed numbers."""

from __future__ import annotations

import pytest

from published import PARAMETERS
from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.planning import step_time
from qurl_megatron.planning.limits import REMEDIES, largest_part
from qurl_megatron.planning.plan import Plan, plan
from qurl_megatron.planning.publish_time import stage_bytes
from qurl_megatron.planning.step_time import Workload
from qurl_megatron.recipes.scaling_32b import ARCHITECTURES, study

QWEN2 = ARCHITECTURES["Qwen2.5-32B"]
WORKLOAD = Workload(512, 4096)


def planned(gpus: int = 64, *words: str) -> Plan:
    return plan(QWEN2, with_overrides(study("", 64, "int8"), list(words)), gpus, WORKLOAD)


@pytest.mark.parametrize("staleness", [0, 1, 8])
def test_the_parts_add_up_to_the_step(staleness: int) -> None:
    whole = planned(64, f"rollout.max_staleness={staleness}")
    assert sum(whole.parts_s.values()) == pytest.approx(whole.total_s)
    assert set(whole.parts_s) <= set(REMEDIES)


def test_the_pipeline_bubble_is_that_of_its_formula() -> None:
    """1024 sequences of 4608 tokens in micro batches of 9216 are 512, over five stages."""
    parts = planned(64, "learner.tokens_per_micro_batch=9216").parts_s
    passes = {"proximal": 2, "update": 3}  # with a reference
    total = sum(passes.values())
    # The proximal passes run over both minibatches of 512 micro batches.
    fraction = (passes["proximal"] * 4 / 1024 + passes["update"] * 4 / 512) / total
    assert parts["pipeline bubble"] / parts["passes"] == pytest.approx(fraction, rel=0.03)


def test_gradients_are_summed_and_applied_for_each_minibatch() -> None:
    """Two replicas of 8 x 5 ranks; the first stage has the embedding and 13 of 64 layers."""
    words = ["learner.data_parallel_size=2", "objective.kl_coefficient=0"]
    parts = planned(128, *words).parts_s
    vocabulary = 152064 * 5120
    numel = (13 / 64 * (PARAMETERS["Qwen2.5-32B"] - 2 * vocabulary) + vocabulary) / 8
    summed = (1 / 2) * (4 + 2) * numel / step_time.INFINIBAND_BYTES_PER_S
    applied = 2 * 16 * (numel / 2) / step_time.HBM_BYTES_PER_S
    assert parts["gradients"] == pytest.approx(2 * (summed + applied), rel=0.001)


def test_more_servers_shorten_decoding_alone_and_lengthen_the_publish() -> None:
    few, many = planned(64).parts_s, planned(88).parts_s  # 6 and 12 servers of four GPUs
    assert few["longest response"] == many["longest response"]
    alone = 8192 * step_time.decode_s(QWEN2, "int8", 4, 1, 512 + 4096)
    assert many["longest response"] == pytest.approx(alone)
    assert many["decoding"] < 0.6 * few["decoding"]
    fullest = max(map(sum, stage_bytes(QWEN2, planned().config)))
    sent = 6 * fullest / step_time.INFINIBAND_BYTES_PER_S
    assert many["publish"] - few["publish"] == pytest.approx(sent)
    assert many["passes"] == few["passes"]


def test_a_run_ahead_of_the_learner_has_the_parts_that_decide() -> None:
    learner = {"passes", "pipeline bubble", "gradients", "publish"}
    assert set(planned(64, "rollout.max_staleness=8").parts_s) == learner
    few = ["rollout.max_staleness=1", "rollout.prompts_per_step=8"]
    ahead, in_turn = planned(512, *few).parts_s, planned(512, *few[1:]).parts_s
    assert set(ahead) == {"longest response", *learner}
    assert {name: ahead[name] for name in learner} == pytest.approx(
        {name: in_turn[name] / 2 for name in learner}
    )


def test_the_line_names_the_largest_part_and_what_shortens_it() -> None:
    line = largest_part({"passes": 30.0, "publish": 60.0, "decoding": 10.0})
    assert line == f"publish, 60 % of the step; {REMEDIES['publish']}"
