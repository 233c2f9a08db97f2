"""Processes write into the memory of others: learner ranks into parameters of SGLang's own models.

This process has the models, as the ranks of a server have them. The learner's ranks attach to their
parameters and write; the models then hold what quantizing the checkpoint directly gives.
"""

import socket
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import sglang_loader
from distributed import rank_context, run_ranks
from learner_reference import CP2, DP2, EP2, PP2, TP2, VPP2
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, WeightFormat
from qurl_megatron.machine import memory
from qurl_megatron.sglang_plugin.weights import handle
from qurl_megatron.weight_sync.crossings import find_crossings
from qurl_megatron.weight_sync.delta import Change
from qurl_megatron.weight_sync.direct import attach, describe
from sent import as_bytes
from tiny import UNEVEN, UNEVEN_BLOCKS, Family, build_tiny_model, quantized

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
    from qurl_megatron.weight_sync.in_place import Writer
    from qurl_megatron.weight_sync.reshard import Converter

    device.initialize_distributed()  # the learners use it in turn
    layout = LearnerConfig(tensor_parallel_size=2, pipeline_parallel_size=2, dtype="float32")
    checksums = {}
    for weight_format, servers in handed_out.items():
        learner = Learner(directory / weight_format, layout, OptimizerConfig())
        converter = Converter(learner, weight_format, 40_000)
        parameters = ServerParameters()
        writer = Writer(converter, parameters)
        machines = dict.fromkeys(servers, socket.gethostname())
        parameters.attach(servers)
        parameters.keep(machines, servers)
        first = writer.write()
        for *_, shard in learner.shards():
            shard.neg_()
        parameters.keep(machines, list(servers)[1:])
        checksums[weight_format] = [first.checksums, writer.write().checksums]
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


@dataclass
class Case:
    """A learner's layout on machines, each of which has a server."""

    model: str
    weight_format: WeightFormat
    layout: dict[str, Any]  # of four ranks
    machines: str  # of each rank, a letter
    server_size: int
    crossings: int  # how often every tensor crosses between machines
    expert_crossings: int | None = None  # those of experts, if others


MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "uneven": ("qwen2", UNEVEN | {"tied": True, "num_hidden_layers": 4}),
    "blocks": ("qwen3", UNEVEN_BLOCKS),
    "experts": ("qwen3_moe", {"num_key_value_heads": 4}),
}
TP4: dict[str, Any] = {"tensor_parallel_size": 4}
DP4: dict[str, Any] = {"data_parallel_size": 4}
PP4: dict[str, Any] = {"pipeline_parallel_size": 4}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
CASES = {
    "TP2xPP2, a stage on each": Case("uneven", "int8", {**TP2, **PP2}, "aabb", 2, 1),
    "TP2xPP2, a rank on each": Case("blocks", "fp8-block", {**TP2, **PP2}, "abcd", 2, 3),
    "TP4": Case("uneven", "fp8-tensor", TP4, "aabb", 1, 1),
    "PP2 in 2 parts, DP2, a stage on each": Case("uneven", "bf16", {**VPP2, **DP2}, "aabb", 4, 1),
    "PP2 in 2 parts, DP2, a replica on each": Case("uneven", "int8", {**VPP2, **DP2}, "abab", 2, 0),
    "PP2xCP2, a rank on each": Case("blocks", "int8", {**PP2, **CP2}, "abcd", 1, 2),
    "PP4, three ranks on one": Case("uneven", "int8", PP4, "aaab", 2, 1),
    "DP4": Case("uneven", "int8", DP4, "abcd", 1, 0),
    "TP2xDP2, one machine": Case("blocks", "fp8-block", {**TP2, **DP2}, "aaaa", 4, 0),
    "experts, PP2xTP2, EP2": Case("experts", "int8", {**PP2, **TP2, **EP2}, "aabb", 4, 1),
    "experts, TP2xDP2, EP4": Case("experts", "bf16", {**TP2, **DP2, **EP4}, "abcd", 2, 2, 3),
    "experts, DP4, EP2": Case("experts", "fp8", {**DP4, **EP2}, "abba", 1, 0),
}


def write_on_machines(
    directory: Path, handed_out: dict[str, Servers]
) -> list[tuple[dict[str, int], dict[str, int], int]]:
    """Write the weights of each case, then, to all machines but the first, their negation.

    Return the checksums of both, and the bytes that this rank has sent to others in the first.
    """
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.direct import ServerParameters
    from qurl_megatron.weight_sync.in_place import Writer
    from qurl_megatron.weight_sync.reshard import Converter

    device.initialize_distributed()
    sent_bytes, exchange = 0, dist.batch_isend_irecv

    def count(operations: list[dist.P2POp]) -> Any:
        nonlocal sent_bytes
        sent_bytes += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return exchange(operations)

    monkeypatch = pytest.MonkeyPatch()  # of this process, which ends
    monkeypatch.setattr(dist, "batch_isend_irecv", count)
    results = []
    for name, case in CASES.items():
        here = case.machines[dist.get_rank()]
        monkeypatch.setattr(socket, "gethostname", partial(str, here))
        config = LearnerConfig(**case.layout, dtype="float32")
        learner = Learner(directory / case.model, config, OptimizerConfig())
        converter = Converter(learner, case.weight_format, 40_000)
        parameters = ServerParameters()
        writer = Writer(converter, parameters)
        machines = {machine: machine for machine in sorted(set(case.machines))}
        parameters.attach({here: handed_out[name][here]})
        parameters.keep(machines, list(machines))
        sent_bytes = 0
        first, sent = writer.write(), sent_bytes
        for *_, shard in learner.shards():
            shard.neg_()
        parameters.keep(machines, list(machines)[1:])
        results.append((first.checksums, writer.write().checksums, sent))
        learner.close()
    dist.destroy_process_group()
    return results


@pytest.mark.usefixtures("engine")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the models of one process are on the CPU")
def test_servers_of_each_machine_hold_what_quantizing_the_checkpoint_directly_gives(
    tmp_path: Path,
) -> None:
    """Machines are names: a rank attaches to servers of its own only."""
    for model, (architecture, dimensions) in MODELS.items():
        build_tiny_model(tmp_path / model, architecture, **dimensions)
    servers = {
        name: {
            machine: sglang_loader.build_ranks(
                tmp_path / case.model, case.weight_format, case.server_size
            )
            for machine in sorted(set(case.machines))
        }
        for name, case in CASES.items()
    }
    handed_out = {
        name: {machine: hand_out(ranks) for machine, ranks in each.items()}
        for name, each in servers.items()
    }
    by_rank = run_ranks(write_on_machines, 4, tmp_path, handed_out)
    for number, (name, case) in enumerate(CASES.items()):
        directory = tmp_path / case.model
        positive = quantized(directory, case.weight_format)
        negative = quantized(directory, case.weight_format, lambda _, weight: -weight)
        for machine, ranks in servers[name].items():
            expected = negative if machine != case.machines[0] else positive
            if len(servers[name]) == 1:
                expected = positive
            held = sglang_loader.whole_tensors(ranks, expected)
            for tensor_name, tensor in expected.items():
                assert as_bytes(held[tensor_name]) == as_bytes(tensor), (name, machine, tensor_name)
            version = 0 if expected is positive else 1
            assert sglang_loader.checksums_of(ranks) == by_rank[0][number][version]
        crossings = {False: case.crossings, True: case.expert_crossings or case.crossings}
        crossed = [crossings[".experts." in key] * t.nbytes for key, t in positive.items()]
        assert sum(results[number][2] for results in by_rank) == sum(crossed), name


def test_ranks_share_what_crosses_evenly() -> None:
    """Two machines of eight ranks: TP8, and a pipeline stage on each."""
    machines = ["a"] * 8 + ["b"] * 8
    routes = find_crossings(machines, [(rank,) for rank in range(16)], {"a", "b"})
    assert routes.writers == set(range(16))
    assert sorted(each.sender for each in routes.transfers) == [*range(16)]
    assert sorted(each.receiver for each in routes.transfers) == [*range(16)]
    assert {each.round for each in routes.transfers} == {0}
    onto_one = find_crossings(machines, [(rank,) for rank in range(16)], {"b"})
    assert {each.receiver for each in onto_one.transfers} == set(range(8, 16))
    replicas = find_crossings(machines, [(rank, rank + 8) for rank in range(8)] * 2, {"a", "b"})
    assert not replicas.transfers and replicas.writers == set(range(16))


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


def test_weights_that_do_not_fit_in_shared_memory_are_refused_and_end_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda path: 64_000)
    describe(torch.zeros(16_000))
    with pytest.raises(OSError, match=r"/dev/shm has 0.1 MB free, and 0.4 are needed; make room"):
        describe(torch.zeros(100_000))


def own(connection: Connection) -> None:
    """Hand a tensor out, and keep it; runs in a process of its own."""
    tensor = torch.ones(64)
    connection.send(describe(tensor))
    connection.recv()


def outlive(connection: Connection) -> None:
    """Attach to a tensor, and drop it once its owner has died; runs in a process of its own."""
    held = attach(connection.recv())
    connection.send("attached")
    connection.recv()
    held.add_(1)
    connection.send(held.tolist())


def test_who_is_attached_to_memory_of_a_process_that_dies_goes_on_and_ends_in_order() -> None:
    context = rank_context()
    to_owner, of_owner = context.Pipe()
    to_other, of_other = context.Pipe()
    owner = context.Process(target=own, args=(of_owner,))
    other = context.Process(target=outlive, args=(of_other,))
    owner.start()
    other.start()
    to_other.send(to_owner.recv())
    assert to_other.recv() == "attached"
    for process in [*psutil.Process(owner.pid).children(recursive=True), owner]:
        process.kill()
    owner.join()
    to_other.send("it has died")
    assert to_other.recv() == [2.0] * 64
    other.join()
    assert other.exitcode == 0


def test_a_rank_writes_into_parameters_on_another_gpu() -> None:
    """torch copies between devices; that a kernel would write there is not assumed."""
    with FakeTensorMode():
        held = torch.empty(256, 512, dtype=torch.int8, device="cuda:1")
        codes = torch.empty(128, 512, dtype=torch.int8, device="cuda:0")
        Change.whole("w", (128, 0), codes).write_to(held, 0, 0)
        with pytest.raises(RuntimeError, match="on the same device"):
            held + codes.new_empty(256, 512)  # so the test would see an operation on both
