"""The converter's invariants for experts: what is sent in any layout, deltas, checksums, exports.

The first rank of the ranks that share an expert sends it. Other tests show that SGLang's layers
load what these tests expect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bits import as_bytes
from distributed import run_ranks
from learner_reference import DP2, EP2, PP2, TP2
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, UaqConfig, WeightFormat
from qurl_megatron.learner.learner import Learner
from qurl_megatron.quantization import uaq
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.export import export
from qurl_megatron.weight_sync.reshard import Converter
from sent import tensors_in
from tiny import build_tiny_model, quantized

# All sizes differ; blocks of 128 lie across the halves of an expert, and across those of a layer.
DIMENSIONS: dict[str, Any] = {
    "vocab_size": 251,
    "hidden_size": 144,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "moe_intermediate_size": 80,
}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
ETP2: dict[str, Any] = {"expert_tensor_parallel_size": 2}
# Layouts, and which of the ranks send.
LAYOUTS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "one rank": ({}, [0]),
    "TP2, all experts on every rank": (TP2, [0]),
    "TP2, ETP2": ({**TP2, **ETP2}, [0]),
    "DP2, EP2": ({**DP2, **EP2}, [0, 1]),
    "TP2xDP2, EP4": ({**TP2, **DP2, **EP4}, [0, 1, 2, 3]),
    "TP2xDP2, EP2, ETP2": ({**TP2, **DP2, **EP2, **ETP2}, [0, 2]),
    "PP2xTP2, EP2": ({**PP2, **TP2, **EP2}, [0, 1, 2, 3]),
}
FORMATS: tuple[WeightFormat, ...] = ("int8", "fp8", "fp8-block", "bf16")
BUCKET_BYTES = 60_000
SCALING = UaqConfig(2.0)


@dataclass
class Sent:
    """What one rank sent of the first weights, and as a delta after an update."""

    whole: list[Bucket] = field(default_factory=list)
    changed: list[Bucket] = field(default_factory=list)  # all tensors after the update
    delta: list[Bucket] = field(default_factory=list)
    checksums: list[dict[str, int]] = field(default_factory=list)  # of both versions
    num_codes: float = 0  # counted by the drift of the second
    flips: float = 0


def convert(model_dir: Path, config: LearnerConfig) -> dict[str, Sent]:
    """Convert to every format, then change some weights and convert the changes."""
    from megatron.core import parallel_state

    learner = Learner(model_dir, config, OptimizerConfig(), transform=uaq.transform(SCALING))
    converters = {f: Converter(learner, f, BUCKET_BYTES, keeps_codes=True) for f in FORMATS}
    results: dict[str, Sent] = {weight_format: Sent() for weight_format in FORMATS}
    for weight_format, converter in converters.items():
        sent = results[weight_format]
        sent.checksums.append(converter.convert(sent.whole.append).checksums)
    export(learner, model_dir, model_dir / "exported", SCALING)
    last = parallel_state.get_expert_model_parallel_rank() == config.expert_parallel_size - 1
    for rule, _, shard in learner.shards(of_experts=True):
        if last and rule.expert == 7:
            shard.neg_()  # the last expert of every layer
    for weight_format, converter in converters.items():
        sent = results[weight_format]
        Converter(learner, weight_format, BUCKET_BYTES).convert(sent.changed.append)
        second = converter.convert(sent.delta.append, base=0)
        sent.checksums.append(second.checksums)
        sent.num_codes = second.total_drift.num_codes
        sent.flips = second.total_drift.code_flips
    learner.close()
    return results


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_are_sent_as_quantizing_the_checkpoint_gives_them(
    name: str, tmp_path: Path
) -> None:
    layout, senders = LAYOUTS[name]
    build_tiny_model(tmp_path, "qwen3_moe", **DIMENSIONS)
    config = LearnerConfig(**layout, dtype="float32")
    ranks = run_ranks(convert, config.world_size, tmp_path, config)
    for weight_format in FORMATS:
        by_rank = [rank[weight_format] for rank in ranks]
        assert [rank for rank, sent in enumerate(by_rank) if sent.whole] == senders
        whole = tensors_in([bucket for sent in by_rank for bucket in sent.whole])
        first, second = by_rank[0].checksums
        expected = quantized(tmp_path, weight_format, uaq.transform(SCALING))
        assert whole.keys() == expected.keys()
        for tensor_name, tensor in expected.items():
            assert whole[tensor_name].dtype == tensor.dtype
            assert as_bytes(whole[tensor_name]) == as_bytes(tensor), tensor_name
        assert first == {name: checksum(tensor) for name, tensor in expected.items()}
        # A delta turns the first tensors into the second.
        changed = tensors_in([bucket for sent in by_rank for bucket in sent.changed])
        for bucket in [bucket for sent in by_rank for bucket in sent.delta]:
            for change in delta.unpack(bucket.flat):
                assert ".experts.7." in change.name
                change.write_to(whole[change.name], 0, 0)
        assert all(as_bytes(whole[name]) == as_bytes(tensor) for name, tensor in changed.items())
        assert second == {name: checksum(tensor) for name, tensor in changed.items()}
        if weight_format != "bf16":
            assert by_rank[0].num_codes == sum(t.numel() for t in whole.values() if t.itemsize == 1)
            # One of eight experts is negated, so nearly all its codes change.
            of_expert = sum(t.numel() for n, t in whole.items() if ".7." in n and t.itemsize == 1)
            assert 0.8 < by_rank[0].flips / of_expert <= 1
    written = exported(tmp_path / "exported")
    for tensor_name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(written[tensor_name], tensor), tensor_name


def exported(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors
