from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def starter(*words: str) -> Run:
        runs.append(Run(tmp_path, *words))
        return runs[-1]

    yield starter
    for run in runs:
        if run.poll() is None:
            run.process.terminate()
            run.process.wait(60)
