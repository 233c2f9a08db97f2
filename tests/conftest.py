from __future__ import annotations

from collections.abc import Iterator

import pytest

import sglang_loader
from tiny import build_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up SGLang's models and loaders, without a server."""
    with sglang_loader.engine(build_tiny_model(tmp_path_factory.mktemp("engine"))):
        yield
