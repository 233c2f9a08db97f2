"""Play ranks of large learners on fake GPUs: memory beside the plan, waits, and what is refused."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter

import pytest

from benchmarks.rehearsal import IN_CI, rehearsal
from qurl_megatron.commands import rehearse_page
from qurl_megatron.planning.gpus import GIB, H100, Node
from qurl_megatron.recipes import scaling_32b
from qurl_megatron.rehearsal import transformer_engine
from qurl_megatron.rehearsal.rehearsal import Played, play, ranks_that_differ

# Where the host may wait for the GPU or copy to it without going on, and why. Shrink it.
IN_UPDATE = {
    "megatron/core/optimizer/clip_grads.py": "the norm of all gradients, to clip them",
    "megatron/core/distributed/finalize_model_grads.py": "whether Megatron divides gradients",
    "learner/learner.py": "the loss and its statistics",
    "learner/logprobs.py": "the positions that are scored, by chunk",
    "learner/model.py": "how many choices of experts have changed",
    "megatron/core/transformer/moe/": "how many tokens an expert gets sizes its exchange",
    "learner/optimizer_shards.py": "moments that were offloaded are back",
}
IN_PUBLISH = {
    "weight_sync/conversion.py": "all that was measured, once",
    "quantization/checksum.py": "the order of a bucket's parts",
}


def waits(played: Played, name: str) -> Counter[str]:
    """Return how often a phase waits for the GPU, or for a copy to it, by file and line."""
    phase = played.phases[name]
    return Counter(phase["waits"]) + Counter(phase["copies"])


@pytest.fixture(scope="module")
def played() -> dict[str, Played]:
    """Play all layouts in one process, which imports the learner once."""
    assert transformer_engine.find() is not None, "make .venv/ready installs requirements-te.txt"
    return dict(zip(IN_CI, play([rehearsal(name) for name in IN_CI]), strict=True))


@pytest.mark.parametrize("name", IN_CI)
def test_a_rank_builds_scores_updates_and_publishes_on_a_gpu(
    played: dict[str, Played], name: str
) -> None:
    assert played[name].error is None


@pytest.mark.parametrize("name", IN_CI)
def test_the_plan_is_at_most_a_tenth_above_the_traced_memory(
    played: dict[str, Played], name: str
) -> None:
    """And not below it, but for tables and counters of a few MiB."""
    planned = played[name].planned
    assert set(planned) == {"kept", "score", "update", "publish"}
    for peak, traced in played[name].traced.items():
        assert 0.99 <= planned[peak] / traced <= 1.10, peak


@pytest.mark.parametrize("name", IN_CI)
def test_an_update_waits_for_the_gpu_only_where_it_may(
    played: dict[str, Played], name: str
) -> None:
    assert not [at for at in waits(played[name], "update") if not at.startswith(tuple(IN_UPDATE))]


@pytest.mark.parametrize(("name", "teams"), [("packs", 1), ("virtual", 1), ("experts", 2)])
def test_a_publish_of_all_tensors_reads_from_the_gpu_once_for_each_team(
    played: dict[str, Played], name: str, teams: int
) -> None:
    """The ranks that share a layer are a team, and those that share an expert."""
    at = waits(played[name], "publish")
    assert not [place for place in at if not place.startswith(tuple(IN_PUBLISH))]
    assert sum(n for place, n in at.items() if "conversion.py" in place) == teams


def test_the_page_names_what_does_not_fit_and_the_first_error(
    played: dict[str, Played], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fits = played["packs"]
    small = dataclasses.replace(H100, memory_bytes=9 * GIB)  # of which 4 are set aside
    smaller = dataclasses.replace(fits.rehearsal, node=Node(small))
    rows = {
        0: [fits],
        1: [dataclasses.replace(fits, rehearsal=smaller)],
        2: [fits, Played(fits.rehearsal, 1, {}, "learner/model.py:1: RuntimeError: two devices")],
    }
    pages = []
    for number, found in rows.items():
        monkeypatch.setattr(rehearse_page, "play", lambda _, found=found: found)
        assert rehearse_page.play_and_print(fits.rehearsal) == min(number, 1)
        pages.append(capsys.readouterr().out)
    assert "too large" not in pages[0] and "error" not in pages[0]
    assert "too large" in pages[1]
    assert "error: learner/model.py:1: RuntimeError: two devices" in pages[2]
    for part in ("optimizer", "logits", "TP allgather_base", "learner/learner.py", "Not seen"):
        assert part in pages[0]


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
    assert "same device" in refused
