"""The log of a run holds each of its steps once, however often the run was stopped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qurl_megatron.config.schema import Config, RolloutConfig, StageConfig
from qurl_megatron.report.metrics import Evaluation, RunLog, StepMetrics, evaluation_directory

NOTHING: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(StepMetrics)}
NOTHING |= {"held_out_accuracy": None, "evaluation": None}
BEFORE = Evaluation(0.25)


def scored(mean: float) -> Evaluation:
    average = {"mean": mean, "standard_error": 0.01}
    return Evaluation(mean, {"aime": {"Avg@1": average, "Avg@4 sampled": average}})


def log_of(directory: Path, **fields: Any) -> RunLog:
    config = Config(output_dir=str(directory.parent), name=directory.name, steps=10, **fields)
    return RunLog(config, writes=True)


def write(log: RunLog, step: int, **measured: float) -> None:
    """A step that evaluates where its number is even."""
    values = NOTHING | {"step": step, "weight_version": step + 1} | measured
    log.write(StepMetrics(**values), scored(step / 10) if step % 2 == 0 else None)
    log.write_weights(step + 1, {"weight": {"code_flip_fraction": 0.5}})


def logged(directory: Path) -> tuple[list[int], list[int]]:
    """Steps of metrics.jsonl, weight versions of weights.jsonl."""
    lines = {
        name: [json.loads(line) for line in (directory / f"{name}.jsonl").open()]
        for name in ("metrics", "weights")
    }
    return (
        [line["step"] for line in lines["metrics"]],
        [line["weight_version"] for line in lines["weights"]],
    )


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: steps and values by tag."""
    shown = EventAccumulator(str(directory / "tensorboard")).Reload()
    return {
        tag: [(event.step, round(event.value, 6)) for event in shown.Scalars(tag)]
        for tag in shown.Tags()["scalars"]
    }


@pytest.mark.parametrize("torn", ["", '{"step": 6, "weigh'], ids=["whole", "last line cut short"])
def test_steps_after_the_checkpoint_are_taken_back_and_made_again(
    torn: str, tmp_path: Path
) -> None:
    log = log_of(tmp_path)
    log.start(BEFORE)
    for step in range(1, 6):
        write(log, step)
        evaluation_directory(tmp_path, step).mkdir(parents=True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)

    log = log_of(tmp_path)
    log.resume(3, time_s=100.0, before=BEFORE)
    assert logged(tmp_path) == ([1, 2, 3], [2, 3, 4])
    answers = sorted(path.name for path in (tmp_path / "evaluation").iterdir())
    assert answers == ["step_000001", "step_000002", "step_000003"]
    write(log, 4)
    log.finish(scored(0.75))
    assert logged(tmp_path) == ([1, 2, 3, 4], [2, 3, 4, 5])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["time_s"] > 100
    assert summary["held_out_accuracy_before"] == 0.25
    assert summary["evaluation_before"] == {}
    assert summary["evaluation_after"]["aime"]["Avg@1"]["mean"] == 0.75


def test_a_run_that_starts_over_logs_from_its_first_step(tmp_path: Path) -> None:
    for reward in (0.25, 0.5):  # the first was stopped before it had a checkpoint
        log = log_of(tmp_path)
        log.start(BEFORE)
        write(log, 1, reward_mean=reward)
        log.close()
    assert logged(tmp_path) == ([1], [2])
    assert curves(tmp_path)["held_out_accuracy"] == [(0, 0.25)]
    assert curves(tmp_path)["reward_mean"] == [(1, 0.5)]


def test_evaluations_are_logged_by_the_name_of_their_file(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.start(scored(0.1))
    for step in (1, 2):
        write(log, step)
    without, with_scores = (json.loads(line) for line in (tmp_path / "metrics.jsonl").open())
    assert without["evaluation"] is None and without["held_out_accuracy"] is None
    assert with_scores["evaluation"] == scored(0.2).files
    assert with_scores["held_out_accuracy"] == 0.2
    log.close()
    tag = "evaluation/aime/Avg@4 sampled/mean"
    assert curves(tmp_path)[tag] == [(0, 0.1), (2, 0.2)]


def test_tensorboard_shows_each_step_once_and_every_metric(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.start(BEFORE)
    for step in range(1, 6):
        write(log, step, reward_mean=step / 8)  # killed, and not closed: its last steps are lost
    log = log_of(tmp_path)
    log.resume(3, time_s=0.0, before=BEFORE)
    for step in (4, 5, 6):
        write(log, step, reward_mean=step / 4)
    log.close()
    shown = curves(tmp_path)
    assert shown["reward_mean"] == [
        (1, 0.125), (2, 0.25), (3, 0.375), (4, 1.0), (5, 1.25), (6, 1.5),
    ]  # fmt: skip
    assert shown["held_out_accuracy"] == [(0, 0.25), (2, 0.2), (4, 0.4), (6, 0.6)]
    numbers = set(NOTHING) - {"step", "evaluation"}
    assert numbers <= set(shown)


def told_to_wandb(run: Path) -> list[tuple[int, float]]:
    """Steps and rewards in what an offline run of Weights & Biases has kept to be sent."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (file,) = run.glob("*.wandb")
    store, found = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {".".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "reward_mean" in items:
                found.append((int(items["_step"]), float(items["reward_mean"])))
    return found


def test_weights_and_biases_is_told_each_part_of_a_run_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (run_dir := tmp_path / "run").mkdir()
    stages = RolloutConfig(stages={2: StageConfig(8, 2)})  # numbers as keys
    log = log_of(run_dir, wandb_project="project", rollout=stages)
    log.start(BEFORE)
    for step in (1, 2, 3):
        write(log, step, reward_mean=step / 8)
    log.close()
    log = log_of(run_dir, wandb_project="project")
    log.resume(2, time_s=0.0, before=BEFORE)
    write(log, 3, reward_mean=0.75)
    log.close()
    parts = sorted((run_dir / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert [told_to_wandb(part) for part in parts] == [
        [(1, 0.125), (2, 0.25), (3, 0.375)],
        [(3, 0.75)],
    ]


def test_a_run_that_does_not_ask_for_weights_and_biases_has_none(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.start(BEFORE)
    write(log, 1)
    log.close()
    assert not (tmp_path / "wandb").exists()
