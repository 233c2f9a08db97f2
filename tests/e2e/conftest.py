from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Command


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    runs: list[Command] = []

    def starter(*words: str) -> Command:
        runs.append(Command(tmp_path, *words))
        return runs[-1]

    yield starter
    for run in runs:
        if run.poll() is None:
            run.process.terminate()
            run.process.wait(60)
