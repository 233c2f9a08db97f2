"""Resumed runs equal uninterrupted ones, in any layout; incomplete checkpoints are refused.

A run asks for the disk of all its checkpoints before it starts.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import time
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from batches import ragged, score, update
from distributed import run_ranks
from learner_reference import CP2, DP2, EP2, PP2, TP2, VPP2, gathered, of_optimizer, parts_of
from logs import evaluation, run_log, write
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.cli import app
from qurl_megatron.config.schema import (
    CheckpointConfig,
    Config,
    CriticConfig,
    LearnerConfig,
    OptimizerConfig,
)
from qurl_megatron.config.text import with_overrides
from qurl_megatron.data.prompts import sum_of
from qurl_megatron.files import partial_of
from qurl_megatron.learner.checkpoint import (
    CheckpointError,
    Checkpoints,
    RunState,
    measure_of,
    read_state,
)
from qurl_megatron.learner.saved_masters import CONTENTS, read_config
from qurl_megatron.memory.disk import check_disk, checkpoint_bytes
from qurl_megatron.model.architecture import Architecture, Family
from qurl_megatron.model.transformers_model import checkpoint_tensors
from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.report.record import list_checkpoints
from qurl_megatron.report.run_log import RunLog
from qurl_megatron.weight_sync.export_checkpoint import export_checkpoint
from tiny import build_tiny_model

TOKENS = torch.arange(3, 43).view(2, 20)
DP3: dict[str, Any] = {"data_parallel_size": 3}


def config_of(directory: Path, dtype: str, layout: dict[str, Any]) -> Config:
    config = Config(model=str(directory / "model"), output_dir=str(directory), name="run")
    config.learner = LearnerConfig(**{"dtype": dtype, "micro_batch_size": 2, **layout})
    config.optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=3, weight_decay=0.1)
    config.critic = CriticConfig(
        tensor_parallel_size=1, pipeline_parallel_size=1, optimizer=config.optimizer
    )
    return config


def train(
    directory: Path,
    dtype: str,
    layout: dict[str, Any],
    steps: range,
    killed_at: int | None = None,
    accuracies: dict[int, float] | None = None,
) -> list[float]:
    """Train policy and critic; return loss, gradient norm, rate and value loss of each step.

    Training resumes from the newest checkpoint, if there is one. Every step starts while the
    checkpoint of the step before is still being written. With `accuracies`, only the best of them
    are saved, when their evaluation ends.
    """
    from batches import negative_log_likelihood
    from qurl_megatron.algorithm.batch import TrainBatch
    from qurl_megatron.config.extensions import needed
    from qurl_megatron.learner.checkpoint import Checkpoints, RunState
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.quantization import uaq

    config = config_of(directory, dtype, layout)
    transform = uaq.transform(config.quantization.uaq, is_hybrid=False)
    learner = Learner(Path(config.model), config.learner, config.optimizer, transform=transform)
    critic = needed("ppo", "critic", by="this test").Critic(config)
    checkpoints = Checkpoints(config, learner, critic)
    if newest := checkpoints.newest():
        checkpoints.restore(newest)
    results = []
    for step in steps:
        tokens = torch.randint(2, 90, (4, 12), generator=torch.Generator().manual_seed(step))
        batch = ragged(tokens, rewards=(tokens > 45).float())
        metrics = critic.step(batch if dist.get_rank() == 0 else TrainBatch.empty())
        weights = torch.full((tokens.numel(),), 1 / tokens.numel())
        done = update(learner, batch, weights, negative_log_likelihood)
        results += [done.loss, done.grad_norm, done.learning_rate, metrics["value_loss"]]
        checkpoints.poll()
        accuracy = (accuracies or {}).get(step)
        state = RunState(step, step + 1, 0.0, {}, {"position": step}, accuracy)
        if accuracies is None or checkpoints.is_best(accuracy):
            checkpoints.save(state)
        if step == killed_at:
            manager: Any = checkpoints._manager
            (directory / "manager").write_text(str(manager._process.pid))
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.poll(wait=True)
    logprobs, _ = score(learner, TOKENS)
    torch.save(logprobs, directory / "logprobs.pt")
    checkpoints.close()
    critic.close()
    learner.close()
    return results


def names(directory: Path) -> list[str]:
    """Return the names of all checkpoint directories."""
    return sorted(path.name for path in (directory / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_repeats_the_steps_of_an_uninterrupted_one(
    dtype: str, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path / "model")
    checkpoints = tmp_path / "run" / "checkpoints"
    uninterrupted, _ = run_ranks(train, 2, tmp_path, dtype, TP2, range(1, 4))
    logprobs = torch.load(tmp_path / "logprobs.pt")
    assert names(tmp_path) == ["step_000002", "step_000003"]  # the oldest is removed
    assert read_state(checkpoints / "step_000002").prompts == {"position": 2}
    # The estimate of the disk that a checkpoint takes: no more than it does, and no less by far.
    config = config_of(tmp_path, dtype, TP2)
    config.objective.advantage_estimator = "gae"
    estimate = checkpoint_bytes(Architecture.from_directory(tmp_path / "model"), config)
    files = (checkpoints / "step_000002" / "megatron").iterdir()
    assert 0.9 < sum(path.stat().st_size for path in files) / estimate < 1.2
    shutil.rmtree(checkpoints / "step_000003")
    resumed, _ = run_ranks(train, 2, tmp_path, dtype, TP2, range(3, 4))
    assert resumed == uninterrupted[-4:]
    assert torch.equal(torch.load(tmp_path / "logprobs.pt"), logprobs)
    assert uninterrupted[-8] != uninterrupted[-4], "the loss does not change"
    assert uninterrupted[-5] != uninterrupted[-1], "the value loss does not change"


def test_the_checkpoint_of_the_best_evaluation_is_kept_beside_the_newest(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model")
    accuracies = {2: -0.5, 3: 0.75, 4: 0.5, 5: 0.75}
    run_ranks(train, 1, tmp_path, "float32", {}, range(1, 6), None, accuracies)
    assert names(tmp_path) == ["best", "step_000002", "step_000003"]  # the others are not better
    run_ranks(train, 1, tmp_path, "float32", {}, range(6, 9))
    assert names(tmp_path) == ["best", "step_000003", "step_000007", "step_000008"]
    best = tmp_path / "run" / "checkpoints" / "best"
    assert best.readlink() == Path("step_000003")
    assert (read_state(best).accuracy, read_state(best).highest) == (0.75, [0.75, 0.0])
    assert best not in list_checkpoints(tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    exported = tmp_path / "exported"
    source = tmp_path / "moved" / "checkpoints" / "best"
    result = CliRunner().invoke(app, ["export", str(source), str(exported)])
    assert result.exit_code == 0 and (exported / "config.json").exists(), result.output

    def find_a_better_one(*_: int) -> None:  # as the run may, while one is exported
        source.unlink()
        source.symlink_to("step_000008")

    again = tmp_path / "again"
    export_checkpoint(source, again, find_a_better_one)
    one, other = (each / "model.safetensors" for each in (exported, again))
    assert one.read_bytes() == other.read_bytes()
    older = source.with_name("step_000007")
    with pytest.raises(CheckpointError, match="step_000007: cannot be read, if its run has not"):
        export_checkpoint(older, tmp_path / "none", lambda *_: shutil.rmtree(older))
    assert not list(tmp_path.glob("none*"))


def test_of_evaluations_that_cannot_be_told_apart_the_newest_is_the_best(tmp_path: Path) -> None:
    """32 problems: 53 % and 38 % are within two standard errors of each other, 20 % is not."""
    config = Config(output_dir=str(tmp_path), name="run")
    checkpoints = Checkpoints.__new__(Checkpoints)
    checkpoints._config, checkpoints._directory = config, config.run_dir / "checkpoints"
    checkpoints._highest, checkpoints._bytes, checkpoints._measure = [], 0, measure_of(config)
    config.model = str(build_tiny_model(tmp_path / "model"))
    best = checkpoints._directory / "best"

    def save(step: int, accuracy: float | None) -> str:
        error = None if accuracy is None else math.sqrt(accuracy * (1 - accuracy) / 31)
        whole = checkpoints._directory / f"step_{step:06}"
        partial = partial_of(whole)
        state = RunState(step, step, 0.0, {}, {}, accuracy, error)
        checkpoints._prepare(partial, state)
        (partial / "megatron" / "shard").touch()
        checkpoints._complete(partial, whole)
        return str(best.readlink()) if best.is_symlink() else ""

    assert [save(step, None) for step in (1, 2)] == ["", ""]
    assert save(6, 0.53) == "step_000006"
    assert save(8, None) == "step_000006"
    assert save(12, 0.38) == "step_000012"
    assert save(16, 0.20) == "step_000012"  # level with 38 %, but not with the highest
    assert names(tmp_path) == ["best", "step_000012", "step_000016"]
    assert save(20, 0.20) == "step_000012"
    assert read_state(best).highest[0] == 0.53
    assert save(24, 0.90) == save(28, 0.53) == "step_000024"
    # A resume with another measure begins anew; until there is a score by that, the best stays.
    resumed = with_overrides(config, ["rollout.max_completion_length=9", "evaluation.k=4"])
    checkpoints._highest, checkpoints._measure = [], measure_of(resumed)
    assert not checkpoints.compares(read_state(best))
    assert [save(step, None) for step in (30, 32, 34)] == ["step_000024"] * 3
    assert save(36, 0.10) == "step_000036" and read_state(best).highest[0] == 0.10
    older = json.loads((best / "state.json").read_text())
    del older["measure"]
    (best / "state.json").write_text(json.dumps(older))
    assert checkpoints.compares(read_state(best))  # as an older version wrote it


def test_scores_over_other_problems_are_not_compared() -> None:
    config, checkpoints = Config(), Checkpoints.__new__(Checkpoints)
    asked = [Prompt("id", "1 + 1?", answer, [1]) for answer in ("2", "3")]
    measures = [measure_of(config) | {"problems": sum_of([prompt])} for prompt in asked]
    checkpoints._measure = measures[0]
    states = [RunState(1, 2, 0.0, {}, {}, 0.5, measure=each) for each in measures]
    assert [*map(checkpoints.compares, states)] == [True, False]
    older = RunState(1, 2, 0.0, {}, {}, 0.5, measure=measure_of(config))
    assert checkpoints.compares(older)


def test_a_score_over_held_out_problems_does_not_depend_on_how_files_are_sampled() -> None:
    config = Config()
    more = with_overrides(config, ["evaluation.k=4", "quantization.format=int4"])
    assert measure_of(more) == measure_of(config)
    for word in ("evaluation.problems=0", "evaluation.quantized=true"):
        changed = [measure_of(with_overrides(each, [word])) for each in (config, more)]
        assert changed[0] != changed[1]


@pytest.mark.parametrize("setting", ["keep_best", "every_steps"])
def test_without_keep_best_or_checkpoints_no_evaluation_is_saved(setting: str) -> None:
    config = Config()
    setattr(config.checkpoint, setting, 0)
    checkpoints: Any = SimpleNamespace(_config=config)
    assert not Checkpoints.is_best(checkpoints, 1.0)


@pytest.mark.parametrize(
    ("settings", "step", "saved_s_ago", "is_due"),
    [
        ({}, 1, None, True),  # nothing is saved yet
        ({}, 2, 1e6, False),
        ({}, 20, 0, True),
        ({"every_minutes": 30}, 2, 1790, False),
        ({"every_minutes": 30}, 2, 1810, True),
        ({"every_steps": 0, "every_minutes": 30}, 2, 1810, False),
        ({"every_steps": 0}, 1, None, False),
    ],
)
def test_a_checkpoint_is_due_after_the_first_step_and_by_steps_or_minutes(
    settings: dict[str, Any],
    step: int,
    saved_s_ago: float | None,
    is_due: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qurl_megatron.learner.checkpoint.from_rank_zero", lambda work: work())
    config = Config(checkpoint=CheckpointConfig(**settings))
    saved_at = None if saved_s_ago is None else time.monotonic() - saved_s_ago
    checkpoints: Any = SimpleNamespace(_config=config, _saved_at=saved_at)
    assert Checkpoints.is_due(checkpoints, step, is_last=False) == is_due


SAVED_AND_RESUMED: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {  # tied, layouts
    "tied, VPP2 to TP2": (True, VPP2, TP2),
    "untied, DP3 to CP2xTP2": (False, DP3, {**CP2, **TP2}),
}
# Those of untied models have masters beside their weights.
DTYPES = {True: "float32", False: "bfloat16"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[float]]:
    """Return what one rank measures in three steps, of the tied model and of the untied one."""
    results = {}
    for tied, dtype in DTYPES.items():
        directory = tmp_path_factory.mktemp("uninterrupted")
        build_model(directory, tied)
        results[tied], *_ = run_ranks(train, 1, directory, dtype, {}, range(1, 4))
    return results


def build_model(directory: Path, tied: bool) -> None:
    # The padding of a vocabulary of 250 differs between layouts; two stages in two parts have the
    # layers of the tied model.
    layers = 4 if tied else 2
    build_tiny_model(directory / "model", tied=tied, num_hidden_layers=layers, vocab_size=250)


@pytest.mark.parametrize("name", SAVED_AND_RESUMED)
def test_any_layout_can_resume_from_another(
    name: str, uninterrupted: dict[bool, list[float]], tmp_path: Path
) -> None:
    """The loss of step 3 depends on the moments that the second layout resumed with."""
    tied, *layouts = SAVED_AND_RESUMED[name]
    dtype = DTYPES[tied]
    build_model(tmp_path, tied)
    resumed: list[float] = []
    for layout, steps in zip(layouts, (range(1, 2), range(2, 4)), strict=True):
        ranks = config_of(tmp_path, dtype, layout).learner.world_size
        resumed += run_ranks(train, ranks, tmp_path, dtype, layout, steps)[0]
    tolerance = 1e-4 if dtype == "float32" else 2e-2  # layouts round differently
    assert resumed == pytest.approx(uninterrupted[tied], rel=tolerance)


# `test_experts.py` has more layouts of experts. Llama has no weight that the others lack.
OF_FAMILIES: dict[str, tuple[Family, str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", "bfloat16", {**VPP2, **DP2}, TP2),
    "qwen3": ("qwen3", "float32", {**PP2, **DP2}, {**TP2, **CP2}),
    "hybrid": ("qwen3_5_text", "bfloat16", TP2, VPP2),
    "hybrid experts": ("qwen3_5_moe_text", "bfloat16", {**TP2, **EP2}, PP2),
}
STATES = ("master", "exp_avg", "exp_avg_sq", "step")


def save_or_restore(
    directory: Path, dtype: str, layout: dict[str, Any], *, saves: bool
) -> list[list[TensorPart]]:
    """Train a step and save it, or restore what is saved; return this rank's parts of the state.

    They are those of the weights, of the masters, and of Adam's two moments and count of updates.
    The learner that restores has more updates a step, and so has its schedule.
    """
    from batches import negative_log_likelihood
    from qurl_megatron.learner.checkpoint import RunState
    from qurl_megatron.learner.learner import Learner

    config = config_of(directory, dtype, layout)
    config.optimizer.minibatches_per_step = 1 if saves else 3
    learner = Learner(Path(config.model), config.learner, config.optimizer)
    checkpoints = Checkpoints(config, learner)
    if saves:
        weights = torch.full((TOKENS.numel(),), 1 / TOKENS.numel())
        update(learner, ragged(TOKENS), weights, negative_log_likelihood)
        checkpoints.save(RunState(1, 2, 0.0, {}, {}))
        checkpoints.poll(wait=True)
    else:
        newest = checkpoints.newest()
        assert newest is not None
        checkpoints.restore(newest)
        assert learner.scheduler.num_steps == 3
    state = [parts_of(learner, learner.shards())]
    state += [parts_of(learner, of_optimizer(learner, name)) for name in STATES]
    checkpoints.close()
    learner.close()
    return state


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_weights_and_moments_of_every_family_are_equal_in_another_layout(
    name: str, tmp_path: Path
) -> None:
    """An export of the checkpoint has these weights too, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    family, dtype, saved, restored = OF_FAMILIES[name]
    layers = 2 if family == "qwen3" else 4  # for hybrids, and for stages in two parts
    fields = {"vocab_size": 250, "num_hidden_layers": layers, "dtype": torch.float32}
    build_tiny_model(tmp_path / "model", family, **fields)
    states = []
    for layout, saves in ((saved, True), (restored, False)):
        run = partial(save_or_restore, saves=saves)
        ranks = config_of(tmp_path, dtype, layout).learner.world_size
        states.append(run_ranks(run, ranks, tmp_path, dtype, layout))
    before, after = (
        [gathered([rank[kind] for rank in state]) for kind in range(5)] for state in states
    )
    for own, expected in zip(after, before, strict=True):
        assert own.keys() == expected.keys()
        for tensor, values in expected.items():
            assert torch.equal(own[tensor], values), (tensor, "differs in the second layout")
    exported = tmp_path / "exported"
    export_checkpoint(tmp_path / "run/checkpoints/step_000001", exported, lambda *_: None)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tensors = dict(checkpoint_tensors(model))
    masters, moments = before[1], before[2]
    assert tensors.keys() == masters.keys() == moments.keys()
    for tensor, values in masters.items():
        assert torch.equal(tensors[tensor], values), (tensor, "differs in the export")
        assert moments[tensor].any() or ".experts." in tensor, f"{tensor} has no gradient"
    original = dict(checkpoint_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "model")))
    assert all(not torch.equal(masters[tensor], original[tensor]) for tensor in masters)


def test_a_rank_that_loaded_another_base_than_the_launcher_saw_does_not_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model may be on a disk of each machine; `prepare_resume` reads that of one."""
    from qurl_megatron.loop import assemble

    monkeypatch.setattr(assemble.device, "from_rank_zero", lambda work: work())
    state = RunState(3, 4, 1.0, evaluation_before={}, prompts={}, base="of this model")
    (tmp_path / "state.json").write_text(json.dumps(asdict(state)))
    parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(assemble.Run))
    parts["learner"] = SimpleNamespace(base_hash=lambda: "of another")
    parts["checkpoints"] = SimpleNamespace(newest=lambda: tmp_path)
    with pytest.raises(CheckpointError, match="trained over another base than MODEL is now"):
        assemble.Run(**parts | {"model": "MODEL"}).resume()


@pytest.mark.parametrize("compares", [True, False])
def test_a_resume_that_measures_otherwise_has_no_score_from_before_rl(
    compares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qurl_megatron.loop import assemble

    monkeypatch.setattr(assemble.device, "from_rank_zero", lambda work: work())
    monkeypatch.setattr(RunLog, "_open_curves", lambda log, after_step: None)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    log, said = run_log(tmp_path / "run"), list[str]()
    monkeypatch.setattr(log, "say", said.append)
    log.start(evaluation(0.25))
    write(log, 1)
    state = RunState(1, 2, 1.0, asdict(log.before), prompts={})
    (checkpoint / "state.json").write_text(json.dumps(asdict(state)))
    parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(assemble.Run))
    parts["learner"] = SimpleNamespace(base_hash=str)
    parts["publisher"], parts["sampler"] = SimpleNamespace(), SimpleNamespace(restore=print)
    whether = {"compares": lambda state: compares, "restore": print}
    parts["checkpoints"] = SimpleNamespace(newest=lambda: checkpoint, **whether)
    assert assemble.Run(**parts | {"log": log}).resume() == 1
    assert any("are forgotten" in line for line in said) != compares
    log.finish(evaluation(0.75))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["held_out_accuracy_before"] == 0.25) == compares
    assert bool(summary["evaluation_before"]) == compares


def test_a_killed_save_leaves_no_checkpoint_and_the_next_one_removes_it(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model")
    run_ranks(train, 1, tmp_path, "float32", {}, range(1, 2))
    with pytest.raises(RuntimeError, match="died without a result"):
        run_ranks(train, 1, tmp_path, "float32", {}, range(2, 3), 2)
    assert names(tmp_path) == ["step_000001", "step_000002.partial"]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step_000001"]
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "manager").read_text())).wait(timeout=10)
    run_ranks(train, 1, tmp_path, "float32", {}, range(2, 3))
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_transformers_computes_the_learners_logprobs_from_an_exported_checkpoint(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_tiny_model(tmp_path / "model", tied=True, vocab_size=250, dtype=torch.float32)
    run_ranks(train, 2, tmp_path, "float32", PP2, range(1, 2))
    source, destination = tmp_path / "run" / "checkpoints" / "step_000001", tmp_path / "exported"
    shutil.rmtree(tmp_path / "model")  # the checkpoint alone is enough
    result = CliRunner().invoke(app, ["export", str(source), str(destination)])
    assert result.exit_code == 0, result.output
    AutoTokenizer.from_pretrained(destination)
    model = AutoModelForCausalLM.from_pretrained(destination)
    assert model.dtype == torch.float32
    with torch.no_grad():
        all_logprobs = model(TOKENS).logits[:, :-1].log_softmax(-1)
    expected = all_logprobs.gather(2, TOKENS[:, 1:, None]).squeeze(2)
    logprobs = torch.load(tmp_path / "logprobs.pt")[:, 1:]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        ("step_000003", (), "not a checkpoint, it lacks megatron"),
        ("step_000003", ("config.yaml",), "not a checkpoint, it lacks megatron"),
        ("step_000003.partial", CONTENTS, "it was left by an interrupted save"),
    ],
)
def test_a_directory_that_is_not_a_whole_checkpoint_is_refused(
    name: str, contents: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    for content in contents:
        (tmp_path / name / content).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=words):
        read_config(tmp_path / name)


def train_until_full(directory: Path, *, foresee: bool) -> str:
    """Train and save every step until the disk is full; return the message."""
    from qurl_megatron.learner import checkpoint

    if not foresee:  # as if another program filled the disk while a checkpoint is written
        checkpoint.Checkpoints._check_space = lambda self, step: None  # type: ignore[method-assign]
    try:
        train(directory, "float32", {}, range(1, 9))
    except checkpoint.CheckpointError as error:
        return str(error)
    raise AssertionError("the disk was not full")


@pytest.mark.parametrize("foresee", [True, False], ids=["before a save", "during a save"])
def test_a_full_disk_is_named_with_the_last_whole_checkpoint(
    small_disk: Path, foresee: bool
) -> None:
    build_tiny_model(small_disk.parent / "model")
    (message,) = run_ranks(partial(train_until_full, foresee=foresee), 1, small_disk.parent)
    newest = list_checkpoints(small_disk)[-1]
    assert "the disk is full" in message
    assert f"the last whole one is {newest}" in message
    assert read_state(newest).step >= 1


@pytest.mark.parametrize(
    ("words", "written", "checkpoints"),
    [
        ("checkpoint.keep_last=2", 0, 4),  # two last ones, the best, and one being written
        ("checkpoint.keep_last=2 checkpoint.keep_best=false", 0, 3),
        ("checkpoint.keep_last=2 evaluation.problems=0", 0, 3),  # nothing is evaluated
        ("checkpoint.every_steps=0", 0, 0),
        ("checkpoint.keep_last=2", 2, 2),  # what is there is not asked for again
    ],
)
def test_a_run_asks_for_every_checkpoint_that_the_disk_holds_at_once(
    words: str, written: int, checkpoints: int, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path / "model")
    config = Config(model=str(tmp_path / "model"), output_dir=str(tmp_path), name="run")
    for step in range(written):
        (config.run_dir / "checkpoints" / f"step_{step:06}").mkdir(parents=True)
    line = check_disk(with_overrides(config, words.split()))
    assert f"for {checkpoints} checkpoints and the final model" in line
