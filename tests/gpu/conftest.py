"""Skip these tests on a machine without a GPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU; benchmarks/gpu/README.md says how to run it on one")
