"""The log of a run holds each of its steps once, however often the run was stopped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qurl_megatron.config import Config
from qurl_megatron.metrics import RunLog, StepMetrics

NOTHING = {field.name: 0 for field in dataclasses.fields(StepMetrics)}


def log_of(directory: Path) -> RunLog:
    config = Config(output_dir=str(directory.parent), name=directory.name, steps=10)
    return RunLog(config, writes=True)


def write(log: RunLog, step: int) -> None:
    log.write(StepMetrics(**NOTHING | {"step": step, "weight_version": step + 1}), None)
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


@pytest.mark.parametrize("torn", ["", '{"step": 6, "weigh'], ids=["whole", "last line cut short"])
def test_steps_after_the_checkpoint_are_taken_back_and_made_again(
    torn: str, tmp_path: Path
) -> None:
    log = log_of(tmp_path)
    log.start(0.25)
    for step in range(1, 6):
        write(log, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)

    log = log_of(tmp_path)
    log.resume(3, time_s=100.0, held_out_accuracy_before=0.25)
    assert logged(tmp_path) == ([1, 2, 3], [2, 3, 4])
    write(log, 4)
    log.finish(0.75)
    assert logged(tmp_path) == ([1, 2, 3, 4], [2, 3, 4, 5])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["time_s"] > 100
    assert summary["held_out_accuracy_before"] == 0.25


def test_a_run_that_starts_over_logs_from_its_first_step(tmp_path: Path) -> None:
    for _ in range(2):  # the first was stopped before it had a checkpoint
        log = log_of(tmp_path)
        log.start(None)
        write(log, 1)
    assert logged(tmp_path) == ([1], [2])
