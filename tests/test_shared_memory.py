"""A buffer told to another process is the same memory there."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from qurl_megatron.shared_memory import attach, describe

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def add_one(connection: Connection) -> None:
    """In a process that shares nothing with the test but what it is told."""
    header = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.uint8)
    attach(header).add_(1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    connection.send_bytes(b"done")


@pytest.mark.parametrize("device", DEVICES)
def test_a_reader_has_the_memory_itself(device: str) -> None:
    buffer = torch.arange(200, dtype=torch.uint8, device=device)
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    reader = context.Process(target=add_one, args=(theirs,))
    reader.start()
    own.send_bytes(describe(buffer).numpy().tobytes())
    theirs.close()
    assert own.recv_bytes() == b"done"
    reader.join()
    assert torch.equal(buffer.cpu(), torch.arange(1, 201, dtype=torch.uint8))
