import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.cluster import Cluster, reason_to_skip

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def cluster(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield the session's Slurm, idle before and after each test, which is in its own directory."""
    monkeypatch.chdir(tmp_path)
    yield slurm
    slurm.cancel_all()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Start a Slurm cluster of four nodes, or skip the tests."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="qurl-slurm-"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    started = Cluster(directory / "cluster", environment)
    yield started
    started.close()
    shutil.rmtree(directory)
