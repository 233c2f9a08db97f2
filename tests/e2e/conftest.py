from collections.abc import Iterator
from pathlib import Path

# Its pytest plugin imports it after the last test, where Python 3.11 can fail with "AST constructor
# recursion depth mismatch": parsing after exceptions that crossed C code.
import hypothesis  # noqa: F401
import pytest

from e2e import forked
from e2e.running import Command, Start
from qurl_megatron import device
from qurl_megatron.rollout import preload


@pytest.hookimpl(tryfirst=True)  # before the one that starts another process of workers
def pytest_xdist_setupnodes() -> None:
    """Have workers be forks of the process that programs are forks of, unless there is a GPU."""
    import qurl_megatron.cli  # noqa: F401  # sets variables that the imports there read

    if device.accelerator() == "cpu":
        forked.begin()


@pytest.fixture(scope="session", autouse=True)
def shared_imports() -> Iterator[None]:
    """Have programs be forks of a process that has done their imports, unless there is a GPU."""
    import qurl_megatron.cli  # noqa: F401  # sets variables that the imports there read

    with pytest.MonkeyPatch.context() as monkeypatch:
        if device.accelerator() == "cpu":
            forked.begin()
            monkeypatch.setattr(preload, "start", forked.start)
        yield


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts `qurl` in the test's directory; end the commands after it."""
    runs: list[Command] = []

    def starter(*words: object) -> Command:
        runs.append(Command(tmp_path, *words))
        return runs[-1]

    yield starter
    for run in runs:
        run.end()
