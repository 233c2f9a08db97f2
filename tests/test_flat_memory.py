"""Publishing for days takes no more memory than publishing once."""

import asyncio
import ctypes
import gc
import os
import ssl
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import psutil

from distributed import run_ranks
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, QuantizationConfig
from qurl_megatron.learner.learner import Learner
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server, answers, revive
from qurl_megatron.weight_sync.publish import Publisher
from tiny import build_tiny_model

HOLE_BYTES, HOLES = 100_000, 200


def publish_often(model_dir: Path) -> tuple[list[Counter[str]], int]:
    """Return what lives after more and more publishes, and the bytes that one gives back."""
    learner = Learner(model_dir, LearnerConfig(dtype="float32"), OptimizerConfig())
    settings = QuantizationConfig(bucket_bytes=2**16)
    publisher = Publisher(learner, Fleet("rollout", {}), settings)
    alive = []
    for _ in range(4):
        for _ in range(5):
            publisher.publish()
        gc.collect()
        alive.append(Counter(str(type(each)) for each in gc.get_objects()))
    leave_holes()
    kept = psutil.Process().memory_info().rss
    publisher.publish()
    trimmed = psutil.Process().memory_info().rss
    publisher.close()
    learner.close()
    return alive, kept - trimmed


def leave_holes() -> None:
    """Free every other one of many pieces of memory; the kernel gets none of it back by that."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(HOLE_BYTES) for _ in range(2 * HOLES)]
    for piece in pieces:
        ctypes.memset(piece, 1, HOLE_BYTES)
    for piece in pieces[::2]:
        libc.free(piece)


def test_publishes_leave_no_object_behind_and_give_freed_memory_back(tmp_path: Path) -> None:
    model_dir = build_tiny_model(tmp_path / "model")
    ((alive, given_back),) = run_ranks(publish_often, 1, model_dir, timeout_s=400)
    growth = [later - earlier for earlier, later in zip(alive[1:], alive[2:], strict=False)]
    own = str(Counter)  # the measurement's own
    # A thread may hold the last tensor that it sent; what is left behind grows every time.
    assert set.intersection(*map(set, growth)) <= {own}, growth
    assert given_back > HOLES * HOLE_BYTES / 2


def test_connections_read_the_certificates_at_most_once() -> None:
    nobody = "http://127.0.0.1:9"
    server = Server(nobody, "a key", "elsewhere", 0, None, 1, [], log_file=os.devnull)

    async def connect() -> None:
        await RolloutClient(Fleet("rollout", {}), None, [])._connector.close()

    with patch.object(ssl, "create_default_context", wraps=ssl.create_default_context) as read:
        for _ in range(2):
            assert not answers(server) and not revive([server])
            asyncio.run(connect())
    assert read.call_count <= 1
