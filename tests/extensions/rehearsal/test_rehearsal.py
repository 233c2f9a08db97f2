"""Play ranks of large learners on fake GPUs: memory beside the plan, waits, and what is refused."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter

import pytest
from typer.testing import CliRunner

from benchmarks.rehearsal import IN_CI, rehearsal
from qurl_megatron.cli import app
from qurl_megatron.config.gpus import GIB, H100, Node
from qurl_megatron.extensions.rehearsal import page as rehearse_page
from qurl_megatron.extensions.rehearsal import transformer_engine
from qurl_megatron.extensions.rehearsal.rehearsal import Played, Rehearsal, play, ranks_that_differ
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.recipes import scaling_32b

# Where the host may wait for the GPU or copy to it without going on, and why. Shrink it.
IN_UPDATE = {
    "megatron/core/optimizer/clip_grads.py": "the norm of all gradients, to clip them",
    "megatron/core/distributed/finalize_model_grads.py": "whether Megatron divides gradients",
    "learner/learner.py": "the loss and its statistics",
    "learner/logprobs.py": "the positions that are scored, by chunk",
    "learner/model.py": "how many choices of experts have changed",
    "megatron/core/transformer/moe/": "how many tokens an expert gets sizes its exchange",
    "learner/host_memory.py": "memory for moments, which the first step has made, is mapped",
}


def waits(played: Played, name: str) -> Counter[str]:
    """Return how often a phase waits for the GPU, or for a copy to it, by file and line."""
    phase = played.phases[name]
    return Counter(phase["waits"]) + Counter(phase["copies"])


@pytest.fixture(scope="module")
def played() -> dict[str, Played]:
    """Play all layouts in one process, which imports the learner once.

    "plan" is what `qurl plan --rehearse` plays of a model of one layer.
    """
    assert transformer_engine.find() is not None, "make .venv/ready installs requirements-te.txt"
    planned: list[Rehearsal] = []

    def keep(each: Rehearsal) -> int:
        planned.append(each)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        one_layer = dataclasses.replace(KNOWN_MODELS["Qwen3-0.6B"], num_layers=1)
        patch.setitem(KNOWN_MODELS, "Qwen3-0.6B", one_layer)
        patch.setattr(rehearse_page, "play_and_print", keep)
        words = ["plan", "Qwen3-0.6B", "--gpus", "2", "--rehearse", "rollout.placement=separate"]
        assert CliRunner().invoke(app, words).exit_code == 0
    names = [*IN_CI, "adapters", "as served"]
    played = play([*map(rehearsal, names), *planned])
    return dict(zip([*names, "plan"], played, strict=True))


@pytest.mark.parametrize("name", [*IN_CI, "adapters", "as served", "plan"])
def test_a_rank_builds_scores_updates_and_publishes_on_a_gpu(
    played: dict[str, Played], name: str
) -> None:
    assert played[name].error is None


@pytest.mark.parametrize("name", IN_CI)
def test_the_plan_is_at_most_a_tenth_above_the_traced_memory(
    played: dict[str, Played], name: str
) -> None:
    """And not below it, but for tables, counters and the measured rows of weights."""
    planned = played[name].planned
    assert set(planned) == {"kept", "score", "update", "publish"}
    for peak, traced in played[name].traced.items():
        assert 0.99 <= planned[peak] / traced <= 1.10, peak


def test_a_plan_of_adapters_is_not_below_the_traced_memory(played: dict[str, Played]) -> None:
    """What it has too much in an update does not grow with the layers, of which there are two."""
    for peak, traced in played["adapters"].traced.items():
        most = 1.25 if peak == "update" else 1.10
        assert 0.99 <= played["adapters"].planned[peak] / traced <= most, peak


@pytest.mark.parametrize("name", [*IN_CI, "adapters", "as served"])
def test_an_update_waits_for_the_gpu_only_where_it_may(
    played: dict[str, Played], name: str
) -> None:
    assert not [at for at in waits(played[name], "update") if not at.startswith(tuple(IN_UPDATE))]


@pytest.mark.parametrize(
    ("name", "teams"),
    [("packs", 1), ("context", 1), ("virtual", 1), ("experts", 2), ("hybrid", 1)],
)
def test_a_publish_of_all_tensors_reads_from_the_gpu_once_for_each_team(
    played: dict[str, Played], name: str, teams: int
) -> None:
    """Ranks that share a layer are a team, and so are ranks that share an expert."""
    at = waits(played[name], "publish")
    assert at.total() == teams
    assert all(place.startswith("weight_sync/conversion.py") for place in at)


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


PROGRAM = """
import json, torch
from qurl_megatron.config.gpus import Node
from qurl_megatron.extensions.rehearsal import fake_gpu
from qurl_megatron.extensions.rehearsal.trace import Trace

allow_backward, fake_gpu._allow_backward = fake_gpu._allow_backward, lambda: None
fake_gpu.install(Node())
try:
    fake_gpu.check()
except fake_gpu.PatchFailed as error:
    failed = str(error)
allow_backward()
fake_gpu.check()
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
print(json.dumps([failed, shape, phase.peak_bytes, phase.flops, list(phase.waits.values()),
                  list(phase.copies.values()), refused]))
"""


def test_a_fake_gpu_measures_as_a_real_one_does_and_names_the_patch_that_does_not_fit() -> None:
    """In a process of its own, for its patches."""
    program = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True).stdout
    failed, shape, peak, flops, waits, copies, refused = json.loads(said)
    assert failed.startswith("torch ")
    assert "hasPrimaryContext" in failed
    assert shape == [2]
    assert peak == 4096 + 4 * 2**20
    assert flops == 2 * 64 * 128 * 32
    assert (waits, copies) == ([1], [1])
    assert "same device" in refused
