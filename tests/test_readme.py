"""The runs of README and of a laptop start: as they are printed, up to the servers."""

import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qurl_megatron.cli import app
from recipe_inputs import good_problems
from tiny import build_tiny_model

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
OWN_MODEL = (REPOSITORY / "docs" / "own-model.md").read_text()
MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


def block(heading: str, page: str = README) -> str:
    """Return the first indented block after a line of a page."""
    found = re.search(rf"^{re.escape(heading)}\n\n((?:    .*\n|\n)+)", page, re.MULTILINE)
    assert found, heading
    return textwrap.dedent(found[1]).strip() + "\n"


def run(command: str) -> str:
    program, *words = shlex.split(command)
    assert program == ".venv/bin/qurl"
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def test_the_first_screen_is_short() -> None:
    assert len(README.split()) <= 800


def test_the_run_of_ones_own_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = build_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    settings = block("`my.yaml`:")
    assert settings.count("\n") <= 12
    Path("my.yaml").write_text(settings.replace(MODEL, str(model)))
    reward = block("`mine.py`:")
    assert reward.count("\n") <= 6
    Path("mine.py").write_text(reward)
    Path("problems.jsonl").write_text("\n".join(good_problems()))
    train, launch = block("On one machine, and as a Slurm job:").splitlines()
    summary = run(f"{train} --dry-run")
    assert "700 entries" in summary and "first prompt" in summary
    assert "#SBATCH" in run(f"{launch} --dry-run")
    (plan,) = re.findall(r"`(qurl plan my\.yaml[^`]*)`", README)
    assert "time of a step" in run(f".venv/bin/{plan}")


def test_the_run_of_a_real_model_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another model: `tests/e2e/test_smollm2.py` has its own."""
    monkeypatch.chdir(tmp_path)
    model = build_tiny_model(tmp_path / "model", "llama")
    summary = run(f"{block('## A real model').strip()} --dry-run model={model}")
    assert "held out" in summary and re.search(r"\d+ [-+*] \d+", summary)


def test_a_file_that_says_much_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = build_tiny_model(tmp_path / "model", "llama")
    heading = (
        "Each of several files may have its own k and reward, as in this `my.yaml`, which also"
    )
    Path("my.yaml").write_text(block(f"{heading} shows what else a file can say:", OWN_MODEL))
    Path("rewards.py").write_text(
        "def brief(completion, problem):\n    return -len(completion)\n\n"
        "def names(completion, problem):\n    return problem.answer in completion\n"
    )
    cities = {"question": "The capital of Spain?", "answer": "Madrid", "data_source": "capitals"}
    Path("capitals.jsonl").write_text(json.dumps(cities))
    Path("cities.csv").write_text("question,answer\nThe capital of Peru?,Lima\n")
    Path("sums.jsonl").write_text("\n".join(good_problems(3)))
    summary = run(f".venv/bin/qurl train my.yaml --dry-run model={model}")
    assert "evaluation.data.cities: cities.csv\n  1 entries: 1 to evaluate on" in summary
    assert "evaluation.data.sums: sums.jsonl\n  3 entries: 3 to evaluate on" in summary


def test_the_run_of_a_laptop_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = build_tiny_model(tmp_path / "model", "llama", max_position_embeddings=4096)
    settings = block("On two cores, without a GPU, `my.yaml`:", OWN_MODEL)
    assert settings.count("\n") <= 12
    (name,) = re.findall(r"^model: (\S+)", settings, re.MULTILINE)
    Path("my.yaml").write_text(settings.replace(name, str(model)))
    Path("problems.jsonl").write_text("\n".join(good_problems(40)))
    summary = run(".venv/bin/qurl train my.yaml --dry-run")
    assert "40 entries" in summary and "first prompt" in summary
