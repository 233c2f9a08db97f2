"""Every benchmark is a command that says what it does before it does anything."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from benchmarks.peers import trl_grpo
from benchmarks.peers.__main__ import adapter_words, settings
from qurl_megatron.config.text import with_overrides
from qurl_megatron.recipes import quickstart

REPOSITORY = Path(__file__).parents[1]
COMMANDS = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in (REPOSITORY / "benchmarks").rglob("*.py")
    if "def main(" in path.read_text()
)


def test_a_benchmark_that_runs_as_a_program_does_it_in_main() -> None:
    programs = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in (REPOSITORY / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text() or path.stem == "__main__"
    }
    assert programs == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_and_runs_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: ") and f"python -m {name.removesuffix('.__main__')}" in said


def test_a_peer_is_called_with_the_fields_that_it_takes(tmp_path: Path) -> None:
    words = adapter_words(8)
    fields = settings(with_overrides(quickstart.recipe(), words), tmp_path, tmp_path, seed=0)
    assert fields.keys() == inspect.signature(trl_grpo.train).parameters.keys()
    assert (fields["adapter_rank"], fields["learning_rate"]) == (8, 2e-3)
