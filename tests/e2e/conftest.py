from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Its pytest plugin imports it after the last test, where Python 3.11 can fail with "AST constructor
# recursion depth mismatch": parsing after exceptions that crossed C code.
import hypothesis  # noqa: F401
import pytest

from e2e.running import FORKED, Command, Start
from qurl_megatron.launch.local import LEARNER
from qurl_megatron.rollout.preload import Preload, preloaded_sglang


@pytest.fixture(scope="session")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preload | None]:
    """Yield the process that servers and commands are forks of; None on a machine with a GPU."""
    import qurl_megatron.cli  # noqa: F401  # sets variables that the imports there read

    log = tmp_path_factory.mktemp("preload") / "preload.log"
    with preloaded_sglang(log, also=[f"{FORKED}:import_commands", LEARNER]) as parent:
        yield parent


@pytest.fixture
def start(tmp_path: Path, preload: Preload | None) -> Iterator[Start]:
    """Yield a function that starts `qurl` in the test's directory; end the commands after it."""
    runs: list[Command] = []

    def starter(*words: object) -> Command:
        runs.append(Command(tmp_path, *words, preload=preload))
        return runs[-1]

    yield starter
    for run in runs:
        run.end()
