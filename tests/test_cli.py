"""Bad input ends `qurl train` with one line that names it, exit code 2, and nothing left behind."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import recipes
from qurl_megatron.cli import prepare
from qurl_megatron.config import ConfigError, load
from qurl_megatron.data import DataError
from tiny import build_tiny_model

QURL = Path(sys.executable).with_name("qurl")
PROBLEM = {"question": "What is 2 + 2?", "answer": "4"}


def grpo_words(directory: Path, problems: list[str]) -> list[str]:
    """A right `grpo` command on a tiny model, but for what `problems` holds."""
    build_tiny_model(directory / "model")
    (directory / "problems.jsonl").write_text("\n".join(problems) + "\n")
    return [
        f"model={directory / 'model'}",
        f"data={directory / 'problems.jsonl'}",
        f"output_dir={directory / 'runs'}",
        "rollout.max_prompt_length=100",
        "rollout.max_response_length=100",
    ]


def good_problems(count: int = 40) -> list[str]:
    return [json.dumps({**PROBLEM, "question": f"What is {n} + 2?"}) for n in range(count)]


def test_a_good_command_leaves_a_directory_with_its_configuration(tmp_path: Path) -> None:
    config = prepare("grpo", [*grpo_words(tmp_path, good_problems()), "name=first"])
    assert load(tmp_path / "runs" / "first" / "config.yaml") == config


def test_a_recipe_that_builds_its_model_puts_it_into_the_run_directory(tmp_path: Path) -> None:
    config = prepare("quickstart", [f"output_dir={tmp_path}", "name=first"])
    assert config.model == str(tmp_path / "first" / "model")
    assert (tmp_path / "first" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(recipes.__path__)])
@pytest.mark.parametrize("weight_format", ["bf16", "int8", "fp8"])
def test_every_recipe_is_ready_to_start_in_every_format(
    name: str, weight_format: str, tmp_path: Path
) -> None:
    words = [f"output_dir={tmp_path}", "name=first", f"quantization.format={weight_format}"]
    if not hasattr(importlib.import_module(f"recipes.{name}"), "build_model"):
        build_tiny_model(tmp_path / "model", max_position_embeddings=32768)
        (tmp_path / "problems.jsonl").write_text("\n".join(good_problems()))
        words += [f"model={tmp_path / 'model'}", f"data={tmp_path / 'problems.jsonl'}"]
    config = prepare(name, words)
    assert load(tmp_path / "first" / "config.yaml") == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model=/no/such/model", "/no/such/model"),
        ("data=/no/such/file.jsonl", "/no/such/file.jsonl"),
        ("data=reasoning_gym:no_such_task", "no_such_task"),
        ("learner.tensor_parallel_size=3", "3"),
        ("learner.pipeline_parallel_size=5", "5"),
        ("rollout.top_p=0.9", "rollout.top_p=0.9"),
        ("rollout.max_prompt_length=3", "3"),
        ("no_such_field=1", "no_such_field"),
    ],
)
def test_what_is_wrong_is_named_and_no_directory_appears(
    tmp_path: Path, change: str, message: str
) -> None:
    words = grpo_words(tmp_path, good_problems())
    with pytest.raises((ConfigError, DataError)) as refused:
        prepare("grpo", [*words, change])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "What', "problems.jsonl line 3"),
        ('{"question": "What is 2 + 2?"}', "problems.jsonl line 3"),
        ('{"question": "What is 2 + 2?", "answer": ""}', "problems.jsonl line 3"),
        ('{"answer": "4"}', "problems.jsonl line 3"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    problems = good_problems()
    problems[2] = line
    with pytest.raises(DataError, match=message):
        prepare("grpo", grpo_words(tmp_path, problems))


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    words = grpo_words(tmp_path, good_problems())
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text()) | {"architectures": ["MambaForCausalLM"]}
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="MambaForCausalLM"):
        prepare("grpo", words)


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    words = [*grpo_words(tmp_path, good_problems()), "name=first"]
    prepare("grpo", words)
    with pytest.raises(ConfigError, match="exists; choose another"):
        prepare("grpo", words)


@pytest.mark.parametrize("words", [["no_such_recipe"], ["quickstart", "steps=none at all"]])
def test_the_command_prints_one_line_and_exits_with_2(tmp_path: Path, words: list[str]) -> None:
    ended = subprocess.run(
        [QURL, "train", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("qurl: ")
    assert list(tmp_path.iterdir()) == []
