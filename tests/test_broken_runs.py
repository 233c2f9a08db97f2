"""What is broken in a run's directory is named with its file and line, and the rest is shown."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logs import evaluation, run_log, write, write_run
from qurl_megatron.commands.watch import status as show_status
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.text import load
from qurl_megatron.launch.status import newest_logs, slurm_jobs, status
from qurl_megatron.learner.checkpoint import CheckpointError, read_state
from qurl_megatron.report.record import read_run

DEEP = "[" * 5_000
LONG = "9" * 5_000
BILLION = "\n".join(  # values, of which each line has nine times those of the line before
    [f"a0: &a0 [{'x, ' * 9}]"] + [f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 9)]
)
LINES = {  # a line of metrics.jsonl, and what is said of it
    "{broken": "not JSON",
    "[1, 2]": "should be an object",
    '{"step": "x"}': "step: Input should be a valid integer",
    "{}": "step: Field required",
    DEEP: "recursion",
    f'{{"step": {LONG}}}': "digits",
    "\x1b[2J\x00": "not JSON",
}


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_broken_line_is_named_and_the_others_are_shown(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run")
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:], line]) + "\n")
    assert status(run_dir).startswith("step 40 of 100")
    assert len(read_run(run_dir).steps) == 40
    for told in capsys.readouterr().err.splitlines():
        assert told.startswith(f"qurl: {path}, line 3: ") and LINES[line] in told
        assert told.endswith("left out, and 1 more of its lines")
        assert told.isprintable() and len(told) < 500


BROKEN = {
    "summary.json": '{"steps": "x", "time_s": []}',
    "mismatch.json": '{"rollout": 3}',
    "weights.jsonl": '{"weight_version": 1, "weights": [1]}\n',
    "samples.jsonl": '{"step": 1}\n',
}


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_and_the_others_are_shown(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run")
    damages: list[Callable[[Path], object]] = [
        lambda path: path.write_text(BROKEN[name]),
        replace_by_pipe,
    ]
    for damage in damages:
        damage(run_dir / name)
        assert len(read_run(run_dir).steps) == 40
        assert f"qurl: {run_dir / name}" in capsys.readouterr().err
        assert status(run_dir).startswith("step 40 of 100")


@pytest.mark.parametrize("text", [DEEP, f"steps: {LONG}", "steps: x", "- 1", "\x00", BILLION])
def test_a_broken_configuration_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.yaml: ") as refused:
        load(tmp_path / "config.yaml")
    assert len(str(refused.value).splitlines()) == 1


def test_logs_are_shown_beside_a_broken_job_and_directories_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    (logs / "resumed_2").mkdir(parents=True)
    (logs / "resumed_notes").mkdir()
    (logs / "resumed_2" / "server.log").write_text("hello\n")
    (logs / "resumed_2" / "job.json").write_text('{"id"')
    assert newest_logs(tmp_path) == [logs / "resumed_2" / "server.log"]
    assert f"qurl: {logs / 'resumed_2' / 'job.json'}: not JSON" in capsys.readouterr().err
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "squeue").write_text("#!/bin/sh\n")
    (commands / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    assert slurm_jobs(tmp_path) == []


def test_a_resume_names_a_broken_line_and_keeps_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run_log(tmp_path)
    log.start(evaluation(0.25))
    for step in (1, 2, 3):
        write(log, step)
    log.close()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "{broken\n", *lines[1:]]))
    log = run_log(tmp_path)
    log.resume(2, time_s=0.0, before=evaluation(0.25))
    log.close()
    assert f"{path}, line 2: not JSON" in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in path.open()] == [1, 2]


def test_a_broken_run_does_not_hide_the_status_of_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, whole = tmp_path / "broken", write_run(tmp_path / "whole")
    broken.mkdir()
    (broken / "config.yaml").write_text("steps: x")
    with pytest.raises(SystemExit, match="2"):
        show_status([broken, whole])
    printed = capsys.readouterr()
    assert printed.err.startswith(f"qurl: {broken}/config.yaml: ")
    assert printed.out.startswith(f"{whole}: step 40 of 100")


@pytest.mark.parametrize("text", ["{broken", "[]", '{"step": 1}', "\x00"])
def test_a_broken_state_of_a_checkpoint_is_one_line_with_a_way_out(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/state.json: .*; remove ") as refused:
        read_state(tmp_path)
    assert len(str(refused.value).splitlines()) == 1


AVERAGE = {"mean": 0.5, "standard_error": 0.1}
HOSTILE = [  # metrics of a step, and what is said of them
    ({"evaluation": {"aime": {"Avg@1": {}}}}, "evaluation.aime.Avg@1: "),
    ({"evaluation": {"aime": {"Avg@1": AVERAGE | {"standard_error": -1.0}}}}, "aime.Avg@1: "),
    ({"evaluation": {"aime": {"Avg@1": AVERAGE | {"mean": 10**400}}}}, "larger than any number"),
    ({"by_staleness": []}, "by_staleness: "),
    ({"reward_counts": [[0.0, 0]]}, "reward_counts.0.1: "),
    ({"reward_counts": [[float("inf"), 2]]}, "reward_counts.0.0: "),
    ({"step": -5}, "step: "),
    ({"step": 10**400}, "larger than any number"),
    ({"grad_norm": 1e308}, "larger than any number"),
]


@pytest.mark.parametrize(("metrics", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_step_with_a_hostile_value_is_named_and_left_out(
    metrics: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", late=metrics)
    assert len(read_run(run_dir).steps) == 30
    assert reason in capsys.readouterr().err


def test_a_report_shows_hostile_names_and_infinities_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "<script>$\\frac{\0"
    metrics = {
        "evaluation": {name: {name: AVERAGE}},
        "by_staleness": {"0": {}, name: {"token_fraction": float("nan")}},
        "stale_token_fraction": 0.5,
        "grad_norm": float("inf"),
    }
    page = tmp_path / "page.html"
    pages = needed("report", "page", by="this test")
    pages.write_report([write_run(tmp_path / "run", late=metrics)], page)
    assert "&lt;script&gt;$" in page.read_text() and "<script>$" not in page.read_text()
    assert not capsys.readouterr().err
