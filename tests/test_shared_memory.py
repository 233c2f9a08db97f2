"""A process that attaches to a described tensor shares its memory."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from qurl_megatron.weight_sync.shared_memory import attach, describe

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def add_one(connection: Connection) -> None:
    """Attach to the described tensor and add one to it; runs in a process of its own."""
    attach(connection.recv()).add_(1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    connection.send("done")


@pytest.mark.parametrize("device", DEVICES)
def test_another_process_writes_to_the_owners_memory(device: str) -> None:
    whole = torch.arange(200, dtype=torch.bfloat16, device=device).view(20, 10)
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    reader = context.Process(target=add_one, args=(theirs,))
    reader.start()
    own.send(describe(whole[3:5, ::2]))
    theirs.close()
    assert own.recv() == "done"
    reader.join()
    expected = torch.arange(200, dtype=torch.bfloat16).view(20, 10)
    expected[3:5, ::2] += 1
    assert torch.equal(whole.cpu(), expected)
