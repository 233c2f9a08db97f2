"""A buffer told to another process is the same memory there."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from distributed import run_ranks
from qurl_megatron.weight_sync.shared_memory import attach, describe

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


def receive_or_send() -> dict[str, torch.Tensor]:
    """Rank 0 tells rank 1 of its buffer; rank 1 loads from it as a server does."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from qurl_megatron import device
    from qurl_megatron.sglang_plugin.receive import update_bucket
    from qurl_megatron.weight_sync.shared_memory import SHARED

    device.initialize_distributed()
    loaded: dict[str, torch.Tensor] = {}
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(-60, 60, dtype=torch.int8).view(8, 15)}
    if device.rank() == 0:
        flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors.values()])
        flat = flat.to(device.device())
        dist.broadcast(describe(flat), src=0)
        loaded = tensors
    else:
        model = SimpleNamespace(load_weights=lambda named: loaded.update(named))
        name = f"learner{SHARED}"
        updater = SimpleNamespace(
            _model_update_group={name: dist.group.WORLD}, get_model=lambda: model
        )
        answer = update_bucket(
            refused, updater, list(tensors), ["float32", "int8"], [[3, 5], [8, 15]], name
        )
        assert answer == (True, "Succeeded to update parameter online."), answer
        assert (
            update_bucket(lambda *_: (True, "SGLang's"), updater, [], [], [], "x")[1] == "SGLang's"
        )
    results = {name: tensor.clone() for name, tensor in loaded.items()}
    dist.barrier()  # the buffer stays until its reader is done
    dist.destroy_process_group()
    return results


def refused(*_: object) -> tuple[bool, str]:
    raise AssertionError("SGLang's own way was taken")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the header goes over gloo alone")
def test_a_server_loads_the_senders_tensors_bit_for_bit() -> None:
    sent, received = run_ranks(receive_or_send, 2)
    assert received.keys() == sent.keys()
    # Each rank drew its own random tensor: what was received is the sender's.
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor)
