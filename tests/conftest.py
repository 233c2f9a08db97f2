from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up SGLang's models and loaders, without a server."""
    import sglang_loader  # here, so that tests which do not need it do not import torch
    from tiny import build_tiny_model

    with sglang_loader.engine(build_tiny_model(tmp_path_factory.mktemp("engine"))):
        yield
