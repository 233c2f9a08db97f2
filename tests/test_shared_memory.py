"""A process that attaches to a described buffer shares its memory."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from distributed import run_ranks
from qurl_megatron.rollout.wire import dtype_names
from qurl_megatron.weight_sync.shared_memory import attach, describe

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def add_one(connection: Connection) -> None:
    """Receive a header, attach to its buffer and add one to it; runs in a process of its own."""
    header = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.uint8)
    attach(header).add_(1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    connection.send_bytes(b"done")


@pytest.mark.parametrize("device", DEVICES)
def test_a_reader_writes_to_the_owners_memory(device: str) -> None:
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


def send_or_load() -> dict[str, torch.Tensor]:
    """Rank 0 describes a bucket to rank 1, which loads it as a server does; return the tensors."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from qurl_megatron import device
    from qurl_megatron.sglang_plugin.receive import update_bucket
    from qurl_megatron.weight_sync.bucket import Bucket
    from qurl_megatron.weight_sync.shared_memory import GROUP_SUFFIX
    from qurl_megatron.weight_sync.stream import announce, channel_name

    device.initialize_distributed()
    tensors = {
        "m.a": torch.randn(3, 5),
        "m.b": torch.arange(-60, 60, dtype=torch.int8).view(8, 15),
    }
    bucket = Bucket.pack({name: t.to(device.device()) for name, t in tensors.items()})
    if device.rank() == 0:
        dist.broadcast(describe(bucket.flat), src=0)
        dist.barrier()  # rank 0 keeps the bucket until rank 1 has loaded it
    else:
        held = torch.nn.ParameterDict(
            {
                name[2:]: torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
                for name, tensor in tensors.items()
            }
        )
        model = torch.nn.ModuleDict({"m": held})
        tensors = {f"m.{name}": parameter.data for name, parameter in held.items()}
        name = channel_name("learner", 0, GROUP_SUFFIX)
        updater = SimpleNamespace(
            _model_update_group={name: dist.group.WORLD}, get_model=lambda: model, device="cpu"
        )
        names, dtypes, shapes = announce([[bucket]])
        words = dtype_names(dtypes)
        answer = update_bucket(fail, updater, names, words, shapes, name)
        assert answer == (True, "Succeeded to update parameter online."), answer
        answer = update_bucket(lambda *_: (True, "SGLang's"), updater, [], [], [], "other group")
        assert answer == (True, "SGLang's")
    results = {name: tensor.clone() for name, tensor in tensors.items()}
    dist.destroy_process_group()
    return results


def fail(*_: object) -> tuple[bool, str]:
    raise AssertionError("SGLang received the bucket itself")


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the header needs gloo, and ranks use NCCL on a GPU"
)
def test_a_server_loads_the_senders_tensors_bit_for_bit() -> None:
    sent, received = run_ranks(send_or_load, 2)
    assert received.keys() == sent.keys() != set()
    # Each rank drew its own random tensor, so these are the sender's.
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor)
