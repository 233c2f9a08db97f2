"""Check the table, the CSV and the picture of a run on several numbers of GPUs."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from logs import ZEROS
from qurl_megatron.cli import app
from qurl_megatron.config import text
from qurl_megatron.config.gpus import DGX_H100
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.planning.lengths import Workload
from qurl_megatron.extensions.planning.plan import plan, plan_run
from qurl_megatron.extensions.planning.scaling import Row, write
from qurl_megatron.launch.experiment import named_runs
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.report.metrics import PHASES
from tiny import build_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    build_tiny_model(directory, max_position_embeddings=16384)
    return directory


def qurl_plan(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def write_run(directory: Path, model: Path, *words: str) -> Config:
    """Write a run of three steps, of which the first is slow; its phases take 1, 2, 3, ... s."""
    directory.mkdir()
    config = with_overrides(Config(), [f"model={model}", "learner.data_parallel_size=2", *words])
    text.save(config, directory / "config.yaml")
    lines = []
    for step, length in ((1, 900.0), (2, 100.0), (3, 300.0)):
        slow = 50.0 if step == 1 else 0.0
        times = {f"time_{phase}_s": slow + n for n, phase in enumerate(PHASES, 1)}
        line = ZEROS | times | {"step": step, "completion_length_mean": length}
        lines.append(json.dumps(line) + "\n")
    (directory / "metrics.jsonl").write_text("".join(lines))
    return config


def test_a_table_has_a_line_for_each_number_of_gpus_and_says_why_others_do_not_fit(
    tmp_path: Path,
) -> None:
    file = tmp_path / "study.csv"
    shown = qurl_plan("Qwen2.5-14B", "--gpus", "2,8,64", "--output", file)
    assert shown.exit_code == 0, shown.output
    assert "2: no layout of 2 GPUs fits" in shown.stdout
    assert "A step has 256 prompts x 8 completions. Prompts have 512 tokens" in shown.stdout
    assert "Qwen2.5-14B has the settings of the recipe scaling_32b here" in shown.stdout
    eight, more = read_csv(file)
    assert (eight["gpus"], more["gpus"]) == ("8", "64")
    assert eight["of_ideal"] == "1.0"
    step_s = [float(row["step_s"]) for row in (eight, more)]
    assert float(more["of_ideal"]) == pytest.approx(step_s[0] / step_s[1] / 8)
    for row in (eight, more):
        parts = [float(row[name]) for name in row if name.startswith("part_")]
        assert sum(parts) == pytest.approx(float(row["step_s"]))
        hours = 800 * float(row["step_s"]) / 3600
        assert float(row["gpu_hours"]) == pytest.approx(hours * int(row["gpus"]))
        assert f"{row['gpus']} H100:\n{row['layout']}\n" in shown.stdout
        assert row["measured_step_s"] == row["run"] == ""


def test_a_run_is_set_beside_the_plan_of_its_own_layout_and_lengths(
    tmp_path: Path, model: Path
) -> None:
    config = write_run(tmp_path / "measured", model, "evaluation.problems=0")
    file, picture = tmp_path / "study.csv", tmp_path / "study.svg"
    shown = qurl_plan(
        model, "--gpus", "4,8", "--measured", tmp_path / "measured", "--mean-prompt", "100",
        "--output", file, "--output", picture,
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    *planned, measured = read_csv(file)
    assert [row["gpus"] for row in planned] == ["4", "8"]
    assert (measured["run"], measured["gpus"]) == ("measured", "3")  # two ranks and a server
    # Medians without the first step: 1 + 2 + 3 + 4 + 5 s, and 200 tokens on average.
    assert float(measured["measured_step_s"]) == 15
    assert float(measured["measured_update_s"]) == 4
    expected = plan_run(Architecture.from_directory(model), config, Workload(100, 200), DGX_H100)
    assert float(measured["step_s"]) == pytest.approx(expected.total_s)
    assert all(word in picture.read_text() for word in ("planned", "measured", "H100"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "study.pdf"], "--output study.pdf: must end in .csv, .svg or .png"),
        (["--output", "none/study.csv"], "--output none/study.csv: there is no directory none"),
        (["--measured", "model"], "model: not a run's directory, it has no config.yaml"),
        (["--measured", "other"], "--measured other: "),
        (["--measured", "ppo"], "--measured ppo: objective.advantage_estimator=gae: plans do not"),
    ],
)
def test_wrong_files_and_runs_are_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    build_tiny_model(tmp_path / "wide", hidden_size=128)
    write_run(tmp_path / "other", tmp_path / "wide")
    write_run(tmp_path / "ppo", model, "objective.advantage_estimator=gae")
    result = qurl_plan(model, "--gpus", "4", *words)
    assert result.exit_code == 2
    assert result.stderr.removeprefix("qurl: ").startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_a_reader_that_leaves_early_gets_the_files_and_no_error(tmp_path: Path) -> None:
    code = "from qurl_megatron.cli import main; main()"
    words = [sys.executable, "-c", code, "plan", "Qwen2.5-0.5B", "--gpus", "2,4"]
    words += ["--output", str(tmp_path / "plan.csv")]
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    command.stdout.close()
    assert (command.communicate()[1], command.returncode) == (b"", 0)
    assert (tmp_path / "plan.csv").exists()


def test_a_table_of_plans_is_a_sweep_over_its_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [Row(plan(KNOWN_MODELS["Qwen2.5-0.5B"], Config(), gpus)) for gpus in (8, 16)]
    write(rows, table := Path("study.csv"))
    small, large = named_runs("grpo", "study", ["seed=1"], table)
    assert (small[-1], large[-1]) == ("name=study-8gpus-1", "name=study-16gpus-1")
    layouts = [with_overrides(Config(), words) for words in (small, large)]
    assert [run.rollout.servers for run in layouts] == [
        row.plan.config.rollout.servers for row in rows
    ]
    twice = table.read_text() + table.read_text().splitlines()[1] + "\n"
    for wrong in ("", "gpus,layout\n", "a,b\n1,2\n", twice):
        table.write_text(wrong)
        with pytest.raises(ConfigError, match="^--layouts study.csv: "):
            named_runs("grpo", "", [], table)
