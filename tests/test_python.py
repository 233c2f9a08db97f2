"""The interface of the package for other programs; `e2e/test_python.py` trains with it."""

import signal
import sys
import tempfile
from pathlib import Path

import pytest

import qurl_megatron
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.launch import local
from qurl_megatron.machine import environment as surroundings


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(callable(getattr(qurl_megatron, name)) for name in qurl_megatron.__all__)
    with pytest.raises(AttributeError, match="module 'qurl_megatron' has no attribute 'trian'"):
        qurl_megatron.trian  # noqa: B018


def test_a_recipe_is_loaded_as_a_command_line_has_it(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("recipe: quickstart\nsteps: 7\n")
    config = qurl_megatron.load(f"{tmp_path}/my.yaml", "optimizer.learning_rate=1e-6")
    assert isinstance(config, Config)
    assert (config.steps, config.optimizer.learning_rate) == (7, 1e-6)
    assert [Path(file).name for file in config.recipe_file] == ["my.yaml"]
    with pytest.raises(ConfigError, match="no such field; did you mean"):
        qurl_megatron.load("quickstart", "optimizer.learning_rat=1")


def test_a_run_is_read_by_the_text_of_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\S+/absent: not a run's directory"):
        qurl_megatron.read_run(f"{tmp_path}/absent")


@pytest.mark.usefixtures("short_quickstart")
@pytest.mark.parametrize(
    ("value", "message"), [("many", "^steps=many: input should be a valid integer"), (0, "steps=0")]
)
def test_a_changed_configuration_is_checked_before_anything_starts(
    value: object, message: str, tmp_path: Path
) -> None:
    config = qurl_megatron.load("quickstart", f"output_dir={tmp_path}/runs")
    config.steps = value  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=message):
        qurl_megatron.train(config)
    config.steps, config.optimizer.learning_rat = 1, 1.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="^optimizer.learning_rat: no such field; did you mean"):
        qurl_megatron.train(config)
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("short_quickstart")
def test_a_run_has_the_variables_that_a_command_would_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR is too long for the sockets of servers."""
    (long := tmp_path / "long" / ("job_" * 20)).mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv("TMPDIR", str(long))
    writing = "import os, pathlib; pathlib.Path('shown').write_text(os.environ['TMPDIR']); exit(3)"
    monkeypatch.setattr(local, "command", lambda _: [sys.executable, "-c", writing])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="runs/first has ended with code 3"):
        qurl_megatron.train("quickstart", "name=first")
    shown = (tmp_path / "shown").read_text()
    assert len(shown) <= surroundings.LONGEST_TMPDIR and Path(shown).resolve() == long.resolve()
    assert surroundings.mended.pop().startswith(f"TMPDIR={long} is too long")


LAUNCHER = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1], "ended").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, end)
time.sleep(60)
"""


@pytest.mark.usefixtures("short_quickstart")
def test_an_interrupt_ends_the_run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(run_dir: Path) -> list[str]:
        signal.setitimer(signal.ITIMER_REAL, 1)  # the launcher has its handler by then
        return [sys.executable, "-c", LAUNCHER, str(run_dir)]

    monkeypatch.setattr(local, "command", command)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            qurl_megatron.train("quickstart", f"output_dir={tmp_path}", "name=run")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert (tmp_path / "run" / "ended").exists()
