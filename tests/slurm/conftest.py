from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """The Slurm of this session, idle before and after a test."""
    yield slurm
    slurm.cancel_all()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A Slurm of four nodes."""
    if why := missing():
        pytest.skip(why)
    directory = Path(tempfile.mkdtemp(prefix="qurl-slurm-"))
    environment = {
        **os.environ,
        "QURL_PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    started = Cluster(directory / "cluster", environment)
    yield started
    started.close()
    shutil.rmtree(directory)
