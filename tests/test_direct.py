"""Processes write into the memory of others: learner ranks into parameters of SGLang's own models.

This process has the models, as the ranks of a server have them. The learner's ranks attach to their
parameters and write; the models then hold what quantizing the checkpoint directly gives.
"""

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sglang_loader
from distributed import rank_context, run_ranks
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, WeightFormat
from qurl_megatron.sglang_plugin.weights import handle
from qurl_megatron.weight_sync.delta import Change
from qurl_megatron.weight_sync.direct import attach, describe
from sent import as_bytes
from tiny import UNEVEN, UNEVEN_BLOCKS, build_tiny_model, quantized

FORMATS: dict[WeightFormat, dict[str, Any]] = {
    "int8": UNEVEN,
    "fp8-tensor": UNEVEN,
    "bf16": UNEVEN,
    "fp8-block": UNEVEN_BLOCKS,
}
SERVER_SIZES = (1, 2, 4)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
Servers = dict[str, list[dict[str, str]]]


def write_all(
    directory: Path, handed_out: dict[WeightFormat, Servers]
) -> dict[WeightFormat, list[dict[str, int]]]:
    """Write to all servers, with a learner for each format, then others to all but the first.

    Return the checksums. The second weights are the first ones negated.
    """
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.direct import ServerParameters
    from qurl_megatron.weight_sync.reshard import Converter

    device.initialize_distributed()  # the learners use it in turn
    layout = LearnerConfig(tensor_parallel_size=2, pipeline_parallel_size=2, dtype="float32")
    checksums = {}
    for weight_format, servers in handed_out.items():
        learner = Learner(directory / weight_format, layout, OptimizerConfig())
        converter = Converter(learner, weight_format, 40_000)
        parameters = ServerParameters()
        parameters.attach(servers)
        parameters.keep(servers, servers)
        first = converter.write(parameters)
        for *_, shard in learner.shards():
            shard.neg_()
        parameters.keep(servers, list(servers)[1:])
        checksums[weight_format] = [first.checksums, converter.write(parameters).checksums]
        learner.close()
    torch.distributed.destroy_process_group()
    return checksums


def hand_out(ranks: list[Any]) -> list[dict[str, str]]:
    checkers = [sglang_loader.checker_of(model) for model in ranks]
    return [
        handle(lambda *_, **__: None, each, "parameters", role="target")["checksums"]
        for each in checkers
    ]


@pytest.mark.usefixtures("engine")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the models of one process are on the CPU")
def test_every_server_size_holds_what_quantizing_the_checkpoint_directly_gives(
    tmp_path: Path,
) -> None:
    servers: dict[WeightFormat, dict[str, list[Any]]] = {}
    for weight_format, dimensions in FORMATS.items():
        model = build_tiny_model(tmp_path / weight_format, "qwen2", tied=True, **dimensions)
        servers[weight_format] = {
            f"server of {size}": sglang_loader.build_ranks(model, weight_format, size)
            for size in SERVER_SIZES
        }
    handed_out = {
        weight_format: {name: hand_out(ranks) for name, ranks in each.items()}
        for weight_format, each in servers.items()
    }
    leader, *_ = run_ranks(write_all, 4, tmp_path, handed_out)
    for weight_format in FORMATS:
        positive = quantized(tmp_path / weight_format, weight_format)
        negative = quantized(tmp_path / weight_format, weight_format, lambda _, weight: -weight)
        for number, (name, ranks) in enumerate(servers[weight_format].items()):
            expected, version = (negative, 1) if number else (positive, 0)
            held = sglang_loader.whole_tensors(ranks, expected)
            for tensor_name, tensor in expected.items():
                assert as_bytes(held[tensor_name]) == as_bytes(tensor), (name, tensor_name)
            assert sglang_loader.checksums_of(ranks) == leader[weight_format][version]


def add_one(connection: Connection) -> None:
    """Attach to the described tensor and add one to it; runs in a process of its own."""
    attach(connection.recv()).add_(1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    connection.send("done")


@pytest.mark.parametrize("device", DEVICES)
def test_another_process_writes_to_the_owners_memory(device: str) -> None:
    whole = torch.arange(200, dtype=torch.bfloat16, device=device).view(20, 10)
    context = rank_context()
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


def test_a_rank_writes_into_parameters_on_another_gpu() -> None:
    """torch copies between devices; that a kernel would write there is not assumed."""
    with FakeTensorMode():
        held = torch.empty(256, 512, dtype=torch.int8, device="cuda:1")
        codes = torch.empty(128, 512, dtype=torch.int8, device="cuda:0")
        Change.whole("w", (128, 0), codes).write_to(held, 0, 0)
        with pytest.raises(RuntimeError, match="on the same device"):
            held + codes.new_empty(256, 512)  # so the test would see an operation on both
