"""Play ranks of large learners on fake GPUs: memory beside the plan, waits, and what is refused."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from qurl_megatron.config.text import with_overrides
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.planning.gpus import Node
from qurl_megatron.recipes import qwen3_moe, scaling_32b
from qurl_megatron.rehearsal.rehearsal import Played, Rehearsal, play, ranks_that_differ

WHEEL = Path(__file__).parent.parent / ".venv" / "transformer-engine"  # `make .venv/ready`

# Two layers at the width of a 32B model, four if there are virtual stages. Each pair of settings
# that meet in a run meets here at least once, as far as so few layouts can.
PLAIN = """learner.layers_in_last_pipeline_stage=none learner.data_parallel_size=1
    learner.expert_parallel_size=1 learner.pipeline_parallel_size=1 learner.micro_batch_size=1
    learner.tokens_per_micro_batch=none learner.virtual_pipeline_parallel_size=1"""
LAYOUTS = {
    "packs": """Qwen2.5-32B 2 0 learner.tensor_parallel_size=8 learner.data_parallel_size=2
        learner.tokens_per_micro_batch=18432 quantization.format=int8""",
    "context": """Qwen3-32B 2 15 learner.tensor_parallel_size=4 learner.context_parallel_size=2
        learner.pipeline_parallel_size=2 learner.recompute=selective learner.offload_optimizer=true
        quantization.format=fp8 quantization.publish=delta""",
    "virtual": """Qwen2.5-32B 4 0 learner.tensor_parallel_size=2 learner.pipeline_parallel_size=2
        learner.virtual_pipeline_parallel_size=2 learner.data_parallel_size=2
        learner.recompute=full learner.recompute_layers=1 quantization.format=fp8-block""",
    "experts": """Qwen3-30B-A3B 2 0 learner.tensor_parallel_size=2 learner.data_parallel_size=4
        learner.expert_parallel_size=4 learner.expert_tensor_parallel_size=2
        quantization.transport=direct""",
}

# Waits for the GPU that an update may have, by the file in which they are, and why. Shrink it.
WAITS = {
    "megatron/core/optimizer/clip_grads.py": "the norm of all gradients, to clip them",
    "megatron/core/distributed/finalize_model_grads.py": "whether Megatron divides gradients",
    "learner/learner.py": "the loss and its statistics",
    "learner/logprobs.py": "the positions that are scored, by chunk",
    "learner/model.py": "how many choices of experts have changed",
    "megatron/core/transformer/moe/": "how many tokens an expert gets sizes its exchange",
    "learner/optimizer_shards.py": "moments that were offloaded are back",
}


def rehearsal(layout: str) -> tuple[Rehearsal, int]:
    """Return the rehearsal of a line of `LAYOUTS`, and the rank."""
    model, layers, rank, *words = layout.split()
    architecture = dataclasses.replace(KNOWN_MODELS[model], num_layers=int(layers))
    recipe = (qwen3_moe if architecture.num_experts else scaling_32b).recipe()
    config = with_overrides(recipe, [f"model={model}", *PLAIN.split(), *words])
    return Rehearsal(architecture, config, Node(), [int(rank)], WHEEL)


@pytest.fixture(scope="module")
def played() -> dict[str, Played]:
    """Play all layouts in one process, which imports the learner once."""
    rehearsals = [rehearsal(layout) for layout in LAYOUTS.values()]
    return dict(zip(LAYOUTS, play(rehearsals), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_builds_scores_updates_and_publishes_on_a_gpu(
    played: dict[str, Played], name: str
) -> None:
    assert played[name].error is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_is_at_most_a_tenth_above_the_traced_memory(
    played: dict[str, Played], name: str
) -> None:
    """And not below it, but for tables and counters of a few MiB."""
    traced, planned = played[name].traced, played[name].planned
    for peak in ("kept", "update"):
        assert 0.99 <= planned[peak] / traced[peak] <= 1.10, peak


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_update_waits_for_the_gpu_only_where_it_may(
    played: dict[str, Played], name: str
) -> None:
    phase = played[name].phases["update"]
    waits = Counter(phase["waits"]) + Counter(phase["copies"])
    assert not [place for place in waits if not place.startswith(tuple(WAITS))]


def test_a_publish_of_all_tensors_waits_for_the_gpu_once(played: dict[str, Played]) -> None:
    for name in ("packs", "virtual"):
        assert sum(played[name].phases["publish"]["waits"].values()) == 1


def test_ranks_that_differ_are_the_first_and_the_last_of_each_stage() -> None:
    learner = scaling_32b.study("", 64, "int8").learner  # 8 x 5
    assert ranks_that_differ(learner) == [0, 7, 8, 15, 16, 23, 24, 31, 32, 39]


def python(program: str) -> str:
    """Return the last line that a program says, in a process of its own, for its patches."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()][-1]


SETUP = """
import json, torch
from qurl_megatron.planning.gpus import Node
from qurl_megatron.rehearsal import fake_gpu
from qurl_megatron.rehearsal.trace import Trace
"""


def test_a_torch_to_which_a_patch_does_not_fit_is_refused_by_name() -> None:
    failed = python(
        SETUP
        + "fake_gpu._allow_backward = lambda: None; fake_gpu.install(Node()); fake_gpu.check()"
    )
    assert "PatchFailed: torch" in failed
    assert "hasPrimaryContext" in failed


def test_memory_waits_copies_and_errors_of_a_fake_gpu_are_those_of_a_real_one() -> None:
    program = """
fake_gpu.install(Node())
with Trace(Node()) as trace:
    kept = torch.zeros(1000, device="cuda")  # 4096 B in blocks of 512
    del_me = torch.zeros(2**20, device="cuda")
    del del_me
    mask = torch.tensor([True, False, True]).cuda()  # a copy that waits
    chosen = torch.arange(3, device="cuda")[mask]  # a mask as an index: its size is waited for
    shape = list(chosen.shape)
    product = torch.ones(64, 128, device="cuda") @ torch.ones(128, 32, device="cuda")
    try:
        kept[:3] + torch.ones(3)
    except RuntimeError as error:
        refused = str(error)
    trace.start("end")
phase = trace.phases["build"]
print(json.dumps([shape, phase.peak_bytes, phase.flops, list(phase.waits.values()),
                  list(phase.copies.values()), refused]))
"""
    shape, peak, flops, waits, copies, refused = json.loads(python(SETUP + program))
    assert shape == [2]
    assert peak == 4096 + 4 * 2**20
    assert flops == 2 * 64 * 128 * 32
    assert (waits, copies) == ([1], [1])
    assert "two different devices" in refused
