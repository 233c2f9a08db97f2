"""Learner ranks write into the parameters of SGLang's own models, in another process.

This process has the models, as the ranks of a server have them. The learner's ranks attach to their
parameters and write; the models then hold what quantizing the checkpoint directly gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_loader
from distributed import run_ranks
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, WeightFormat
from qurl_megatron.sglang_plugin.verify import handle
from tiny import UNEVEN, UNEVEN_BLOCKS, build_tiny_model, quantized

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the models of one process are on the CPU"
)

FORMATS: dict[WeightFormat, dict[str, Any]] = {
    "int8": UNEVEN,
    "fp8-tensor": UNEVEN,
    "bf16": UNEVEN,
    "fp8-block": UNEVEN_BLOCKS,
}
SERVER_SIZES = (1, 2, 4)
Servers = dict[str, list[dict[str, str]]]


def write_all(
    directory: Path, config: LearnerConfig, handed_out: dict[WeightFormat, Servers]
) -> dict[WeightFormat, list[tuple[dict[str, int], float]]]:
    """Write to all servers, with a learner for each format; return checksums and flipped codes.

    The second pass is without the first server. Its weights are negated.
    """
    from qurl_megatron import device
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.direct import ServerParameters
    from qurl_megatron.weight_sync.reshard import Converter

    device.initialize_distributed()  # the learners use it in turn
    results: dict[WeightFormat, list[tuple[dict[str, int], float]]] = {}
    for weight_format, servers in handed_out.items():
        learner = Learner(directory / weight_format, config, OptimizerConfig())
        converter = Converter(learner, weight_format, 40_000)
        parameters = ServerParameters()
        parameters.attach(servers)
        first, *others = servers
        passes = []
        for paused in ([first, *others], others):
            parameters.keep(servers, paused)
            conversion = converter.write(parameters)
            passes.append((conversion.checksums, conversion.total_drift.code_flip_fraction))
            for *_, shard in learner.shards():
                shard.neg_()
        results[weight_format] = passes
        learner.close()
    torch.distributed.destroy_process_group()
    return results


def hand_out(ranks: list[Any]) -> list[dict[str, str]]:
    checkers = [sglang_loader.checker_of(model) for model in ranks]
    return [handle(lambda *_, **__: None, each, "parameters")["checksums"] for each in checkers]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    "config",
    [
        LearnerConfig(dtype="float32"),
        LearnerConfig(tensor_parallel_size=2, pipeline_parallel_size=2, dtype="float32"),
    ],
    ids=["TP1", "TP2xPP2"],
)
def test_every_server_size_holds_what_quantizing_the_checkpoint_directly_gives(
    config: LearnerConfig, tmp_path: Path
) -> None:
    servers, handed_out = {}, {}
    for weight_format, dimensions in FORMATS.items():
        build_tiny_model(tmp_path / weight_format, "qwen2", tied=True, **dimensions)
        servers[weight_format] = {
            f"server of {size}": sglang_loader.build_ranks(
                tmp_path / weight_format, weight_format, size
            )
            for size in SERVER_SIZES
        }
        handed_out[weight_format] = {
            name: hand_out(ranks) for name, ranks in servers[weight_format].items()
        }
    leader, *_ = run_ranks(write_all, config.world_size, tmp_path, config, handed_out)
    for weight_format in FORMATS:
        positive = quantized(tmp_path / weight_format, weight_format)
        negative = quantized(tmp_path / weight_format, weight_format, lambda _, weight: -weight)
        (_, _), (_, flips) = leader[weight_format]
        if weight_format != "bf16":
            assert flips > 0.9
        for number, (name, ranks) in enumerate(servers[weight_format].items()):
            expected, last = (negative, 1) if number else (positive, 0)
            held = sglang_loader.whole_tensors(ranks, expected)
            for tensor_name, tensor in expected.items():
                assert torch.equal(held[tensor_name].view(torch.uint8), tensor.view(torch.uint8)), (
                    name,
                    tensor_name,
                )
            assert sglang_loader.checksums_of(ranks) == leader[weight_format][last][0]
