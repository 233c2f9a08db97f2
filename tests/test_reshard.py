"""The converter's invariants, on real learner ranks, in every layout.

All dimensions differ and no layout divides the vocabulary evenly, so a transposed, misplaced or
padded tensor is noticed. `test_sglang_loader.py` and `test_sglang_moe.py` load the tensors that
these tests expect into SGLang's layers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from distributed import run_ranks
from learner_reference import DP2, EP2, PP2, TP2, VPP2
from operations import Exchanged, HostReads
from qurl_megatron.config.schema import (
    LearnerConfig,
    OptimizerConfig,
    QuantizationConfig,
    UaqConfig,
    WeightFormat,
)
from qurl_megatron.launch.nodes import sending_ranks
from qurl_megatron.learner.learner import Learner, NonFinite, Source
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization import quantize, uaq
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.quantization.rounding import write_rounded
from qurl_megatron.quantization.smoothing import Smoothing
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.conversion import Conversion
from qurl_megatron.weight_sync.publish import Publisher, PublishError
from qurl_megatron.weight_sync.reshard import Converter
from sent import as_bytes, tensors_in
from tiny import UNEVEN, Family, build_tiny_model, quantized, random_smoothing

DIMENSIONS = UNEVEN | {"num_hidden_layers": 4}
# Models, which alternate between the layouts. TP4 divides Qwen2's biases.
MODELS: dict[Family, dict[str, Any]] = {
    "qwen2": DIMENSIONS | {"tied": True},
    "qwen3": DIMENSIONS,
    # Blocks of 128 lie across the halves of an expert, and across those of a layer.
    "qwen3_moe": {
        "vocab_size": 251,
        "hidden_size": 144,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "moe_intermediate_size": 80,
    },
}
TP4: dict[str, Any] = {"tensor_parallel_size": 4}
PP3: dict[str, Any] = {"pipeline_parallel_size": 3, "layers_in_last_pipeline_stage": 2}
EP4: dict[str, Any] = {"expert_parallel_size": 4}
ETP2: dict[str, Any] = {"expert_tensor_parallel_size": 2}
# Layouts, and which of the ranks send.
CASES: dict[str, tuple[Family, dict[str, Any], list[int]]] = {
    "TP1": ("qwen2", {}, [0]),
    "PP2": ("qwen2", PP2, [0, 1]),
    "TP2xPP2": ("qwen3", {**TP2, **PP2}, [0, 2]),
    "TP2xDP2": ("qwen2", {**TP2, **DP2}, [0]),
    "TP4, two to a key-value head": ("qwen2", TP4, [0]),
    "PP3 of 1, 1 and 2 layers": ("qwen2", PP3, [0, 1, 2]),
    "PP2 in 2 parts": ("qwen3", VPP2, [0, 1]),
    "experts": ("qwen3_moe", {}, [0]),
    "TP2, all experts on every rank": ("qwen3_moe", TP2, [0]),
    "TP2, ETP2": ("qwen3_moe", {**TP2, **ETP2}, [0]),
    "DP2, EP2": ("qwen3_moe", {**DP2, **EP2}, [0, 1]),
    "TP2xDP2, EP4": ("qwen3_moe", {**TP2, **DP2, **EP4}, [0, 1, 2, 3]),
    "TP2xDP2, EP2, ETP2": ("qwen3_moe", {**TP2, **DP2, **EP2, **ETP2}, [0, 2]),
    "PP2xTP2, EP2": ("qwen3_moe", {**PP2, **TP2, **EP2}, [0, 1, 2, 3]),
}
ONE_RANK = LearnerConfig(dtype="float32")
TP2_PP2 = LearnerConfig(tensor_parallel_size=2, pipeline_parallel_size=2, dtype="float32")
SCALE = 1.5
BUCKET_BYTES = 40_000
SETTINGS = QuantizationConfig(bucket_bytes=BUCKET_BYTES)
FORMATS: tuple[WeightFormat, ...] = ("int8", "int4-g32", "fp8", "fp8-tensor", "fp8-block", "bf16")
KEEP = ["model.layers.1.mlp", "*.o_proj"]
KEPT = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
KEPT += [f"model.layers.{layer}.self_attn.o_proj" for layer in range(4)]
# The converters of a test: the layers that stay in BF16, by name and format.
CONVERTERS: dict[str, tuple[WeightFormat, list[str]]] = {name: (name, []) for name in FORMATS}
CONVERTERS["int8 and BF16"] = "int8", KEPT
CONVERTERS["int4"] = "int4", []
SMOOTHED = ("int4-g32", "fp8-block", "int8 and BF16", "int4")
OF_EXPERTS = {name: CONVERTERS[name] for name in ("int8", "int4", "fp8-block", "bf16")}


@dataclass
class Sent:
    """What one rank sent of the first weights, and after an update: whole, and as a delta."""

    first: list[Bucket] = field(default_factory=list)
    second: list[Bucket] = field(default_factory=list)
    delta: list[Bucket] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)  # of both versions


def build_learner(model_dir: Path, config: LearnerConfig) -> Learner:
    transform = uaq.transform(UaqConfig(SCALE), is_hybrid=False)
    return Learner(model_dir, config, OptimizerConfig(), transform=transform)


def convert(model_dir: Path, config: LearnerConfig) -> dict[str, Sent]:
    """Convert the weights, negate those of layer 1 or of expert 7, and convert the changes."""
    learner = build_learner(model_dir, config)
    has_experts = bool(learner.architecture.num_experts)
    smoothing = random_smoothing(learner.architecture)
    results: dict[str, Sent] = {}
    converters = {}
    for name, (weight_format, kept) in (OF_EXPERTS if has_experts else CONVERTERS).items():
        keep = KEEP if kept else []
        converter = Converter(learner, weight_format, BUCKET_BYTES, sends_deltas=True, keep=keep)
        another = Converter(learner, weight_format, BUCKET_BYTES, keep=keep)
        learner.smoothing = smoothing if name in SMOOTHED else None
        converters[name], results[name] = (converter, another), Sent()
        results[name].conversions.append(converter.convert(results[name].first.append))
    for rule, layer, shard in learner.shards():
        if rule.expert == 7 if has_experts else layer == 1:
            shard.neg_()
    for name, (converter, another) in converters.items():
        learner.smoothing = smoothing if name in SMOOTHED else None
        another.convert(results[name].second.append)
        results[name].conversions.append(converter.convert(results[name].delta.append, since=0))
    learner.close()
    return results


def smoothed(transform: uaq.Transform, smoothing: Smoothing) -> uaq.Transform:
    return lambda name, weight: smoothing.apply(name, transform(name, weight))


@pytest.mark.parametrize("name", CASES)
def test_every_layout_sends_what_quantizing_the_checkpoint_directly_gives(
    name: str, tmp_path: Path
) -> None:
    architecture, layout, senders = CASES[name]
    config = LearnerConfig(**layout, dtype="float32")
    build_tiny_model(tmp_path, architecture, **MODELS[architecture])
    moving = ".experts.7." if architecture == "qwen3_moe" else ".layers.1."
    ranks = run_ranks(convert, config.world_size, tmp_path, config)
    for converter in ranks[0]:
        weight_format, kept = CONVERTERS[converter]
        by_rank = [results[converter] for results in ranks]
        first, second = by_rank[0].conversions
        assert [rank for rank, sent in enumerate(by_rank) if sent.first] == senders
        assert sending_ranks(config) == senders
        buckets = [bucket for sent in by_rank for bucket in sent.first]
        tensors = tensors_in(buckets)
        transform = uaq.transform(UaqConfig(SCALE), is_hybrid=False)
        if converter in SMOOTHED:
            smoothing = random_smoothing(Architecture.from_directory(tmp_path))
            transform = smoothed(transform, smoothing)
        expected = quantized(tmp_path, weight_format, transform, kept)
        assert tensors.keys() == expected.keys()
        scaled = {name for name in expected if {f"{name}_scale", f"{name}_scale_inv"} & {*expected}}
        assert first.drift.keys() == scaled
        for tensor_name, tensor in expected.items():
            sent = tensors[tensor_name]
            assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape), tensor_name
            assert as_bytes(sent) == as_bytes(tensor), tensor_name
        assert first.checksums == {name: checksum(tensor) for name, tensor in expected.items()}
        largest = max(tensor.nbytes for tensor in expected.values())
        assert all(bucket.flat.numel() <= max(BUCKET_BYTES, largest) for bucket in buckets)
        assert len(buckets) > 1

        # A delta turns the first tensors into the second.
        changed = tensors_in([bucket for sent in by_rank for bucket in sent.second])
        for bucket in [bucket for sent in by_rank for bucket in sent.delta]:
            for change in delta.unpack(bucket.flat):
                assert moving in change.name
                change.write_to(tensors[change.name], 0, 0)
        assert all(as_bytes(tensors[name]) == as_bytes(t) for name, t in changed.items())
        assert second.checksums == {name: checksum(tensor) for name, tensor in changed.items()}
        packing = quantize.packing(weight_format) if scaled else 1
        codes = {name: tensors[name].numel() * packing for name in scaled}
        drift = second.total_drift
        assert drift.num_codes == pytest.approx(sum(codes.values()))
        if scaled:  # nearly all codes of what is negated change, if few are 0
            flips = drift.code_flips / sum(codes[name] for name in scaled if moving in name)
            assert (0.3 if converter in SMOOTHED else 0.8) < flips <= 1.000001


def convert_bf16(model_dir: Path) -> tuple[list[Bucket], list[Bucket]]:
    """Return what a BF16 learner sends in INT8, and its float32 masters."""
    learner = build_learner(model_dir, LearnerConfig(dtype="bfloat16"))
    sent: list[Bucket] = []
    masters: list[Bucket] = []
    Converter(learner, "int8", BUCKET_BYTES).convert(sent.append)
    Converter(learner, "masters", BUCKET_BYTES).convert(masters.append)
    learner.close()
    return sent, masters


def test_what_is_quantized_is_the_bf16_that_the_learner_computes_with(tmp_path: Path) -> None:
    """Codes of the float32 masters are others: the mismatch would be 25 times as large."""
    build_tiny_model(tmp_path, **DIMENSIONS)
    ((buckets, of_masters),) = run_ranks(convert_bf16, 1, tmp_path)
    sent, masters = tensors_in(buckets), tensors_in(of_masters)
    quantized_names = [name for name, tensor in sent.items() if tensor.dtype == torch.int8]
    assert len(quantized_names) > 7
    differing = 0
    for name in quantized_names:
        master = masters[name]
        assert master.dtype == torch.float32
        computed_with = torch.empty(master.shape, dtype=torch.bfloat16)
        write_rounded(computed_with, master, name, "unbiased")
        right = quantize.quantize(computed_with, "int8")
        assert torch.equal(sent[name], right.codes)
        assert torch.equal(sent[quantize.scale_name(name, "int8")], right.scale)
        differing += int((quantize.quantize(master, "int8").codes != right.codes).sum())
    assert differing > 0  # the scale of UAQ has made masters that BF16 does not hold


def count_exchanged(
    model_dir: Path, config: LearnerConfig
) -> dict[str, tuple[dict[str, int], int]]:
    """Return the bytes of each collective in a pass, and those of this rank's parts."""
    learner = build_learner(model_dir, config)
    results = {}
    for name, (weight_format, kept) in CONVERTERS.items():
        converter = Converter(learner, weight_format, BUCKET_BYTES, keep=KEEP if kept else [])
        converter.convert(lambda bucket: None)
        with Exchanged() as exchanged:
            converter.convert(lambda bucket: None)
        plan = converter.plan(converter.teams[0], changing=False)
        num_bytes = sum(planned.manifest_on(dist.get_rank()).num_bytes for planned in plan)
        results[name] = dict(exchanged.num_bytes), num_bytes
    learner.close()
    return results


def test_only_codes_scales_and_unquantized_tensors_cross_ranks(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, **DIMENSIONS)
    _, results = run_ranks(count_exchanged, 2, tmp_path, LearnerConfig(**TP2, dtype="float32"))
    for name, (weight_format, kept) in CONVERTERS.items():
        exchanged, of_parts = results[name]
        whole = sum(t.nbytes for t in quantized(tmp_path, weight_format, kept=kept).values())
        assert exchanged.keys() == {"send", "allreduce_"}, name
        assert exchanged["send"] == of_parts <= whole / 2, name
        # Absmax of shared rows or groups, checksums, drift.
        shared = 12 if weight_format.startswith("int4") else 40
        assert exchanged["allreduce_"] < whole / shared, name


def count_live_buckets(model_dir: Path, config: LearnerConfig) -> list[int]:
    """Return, for each call of `send`, how many buckets sent so far are still in memory."""
    learner = build_learner(model_dir, config)
    storages: list[StorageWeakRef] = []
    counts = []

    def send(bucket: Bucket) -> None:
        storages.append(StorageWeakRef(bucket.flat.untyped_storage()))
        counts.append(sum(not storage.expired() for storage in storages))

    Converter(learner, "int8", BUCKET_BYTES).convert(send)
    learner.close()
    return counts


@pytest.mark.parametrize("config", [ONE_RANK, TP2_PP2], ids=["one rank", "TP2xPP2"])
def test_a_bucket_is_released_before_the_next_is_sent(
    config: LearnerConfig, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path, **DIMENSIONS)
    counts, *_ = run_ranks(count_live_buckets, config.world_size, tmp_path, config)
    assert counts == [1] * len(counts) and len(counts) > 1


def sum_of_squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def convert_scaled(model_dir: Path, config: LearnerConfig) -> list[Conversion]:
    """Convert the weights as they are, then doubled, then negated."""
    learner = build_learner(model_dir, config)
    converter = Converter(learner, "int8", BUCKET_BYTES)
    conversions = []
    for factor in (1, 2, -1):
        for _, _, shard in learner.shards():
            shard.mul_(factor)
        conversions.append(converter.convert(lambda bucket: None))
    learner.close()
    return conversions


def test_update_and_error_norms_are_those_of_the_whole_model(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, **DIMENSIONS)
    leader, *_ = run_ranks(convert_scaled, 4, tmp_path, TP2_PP2)
    first, doubled, negated = leader

    error = weight_squares = 0.0
    for name, stored in load_file(tmp_path / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weight = uaq.transform(UaqConfig(SCALE), is_hybrid=False)(name, stored.float())
            error += sum_of_squares(quantize.dequantize(quantize.quantize(weight, "int8")) - weight)
            weight_squares += sum_of_squares(weight)
    assert first.total_drift.quant_error == pytest.approx(error / weight_squares, rel=1e-6)
    assert first.total_drift.update_norm == 0
    # |2w - w|^2 / |w|^2 and |-2w - 2w|^2 / |2w|^2
    assert doubled.total_drift.update_norm == pytest.approx(1, rel=1e-6)
    assert negated.total_drift.update_norm == pytest.approx(4, rel=1e-6)
    # Codes are relative to their row's absmax: doubling changes none, negating changes all but 0.
    assert doubled.total_drift.code_flip_fraction == 0
    assert 0.95 < negated.total_drift.code_flip_fraction < 1


def count_host_reads(model_dir: Path, config: LearnerConfig) -> list[int]:
    """Return how often a GPU would be waited for in a pass, with 1, 2 and then all layers."""
    learner = build_learner(model_dir, config)
    shards = list(learner.shards())
    counts = []
    for layers in (1, 2, learner.architecture.num_layers):
        chosen = [shard for shard in shards if shard[1] is None or shard[1] < layers]
        some: Any = SimpleNamespace(
            architecture=learner.architecture,
            rounding="unbiased",
            smoothing=None,
            source=lambda _, c=chosen: Source(lambda of_experts: c),
        )
        converter = Converter(some, "int8", BUCKET_BYTES)
        converter.convert(lambda bucket: None)
        with HostReads() as reads:
            converter.convert(lambda bucket: None)
        counts.append(reads.number)
    learner.close()
    return counts


def test_a_pass_waits_for_the_device_a_few_times_whatever_the_number_of_layers(
    tmp_path: Path,
) -> None:
    build_tiny_model(tmp_path, **DIMENSIONS)
    config = LearnerConfig(**TP2, dtype="float32")
    for counts in run_ranks(count_host_reads, config.world_size, tmp_path, config):
        assert set(counts) == {counts[0]}
        assert 1 <= counts[0] <= 5


def publish_with_nan(model_dir: Path, config: LearnerConfig, spoilt: str, culprit: int) -> str:
    """Publish weights, one of which holds NaN on one rank, to no server; return the error."""
    learner = build_learner(model_dir, config)
    publisher = Publisher(learner, Fleet("rollout", {}), SETTINGS)
    publisher.publish()
    for rule, layer, shard in learner.shards():
        if dist.get_rank() == culprit and rule.hugging_face_names(layer)[-1] == spoilt:
            shard.view(-1)[-1] = torch.nan
    with pytest.raises(NonFinite) as failure:
        publisher.publish()
    publisher.close()
    learner.close()
    return str(failure.value)


@pytest.mark.parametrize(
    ("config", "culprit", "spoilt", "row"),
    [
        (ONE_RANK, 0, "model.layers.1.mlp.up_proj.weight", "row 143"),
        (TP2_PP2, 1, "model.layers.1.mlp.down_proj.weight", "row 47"),  # its blocks are shared
        (TP2_PP2, 3, "model.layers.3.mlp.down_proj.weight", "row 47"),  # of the second stage
    ],
)
def test_nan_in_a_weight_of_one_rank_is_an_error_on_every_rank_that_names_both(
    config: LearnerConfig, culprit: int, spoilt: str, row: str, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path, **DIMENSIONS)
    messages = run_ranks(publish_with_nan, config.world_size, tmp_path, config, spoilt, culprit)
    (message,) = set(messages)
    assert message.startswith(f"on learner rank {culprit} the weight {spoilt}: {row}")
    assert len(message.splitlines()) == 1


def publish_and_admit(model_dir: Path) -> tuple[float, float, int, str]:
    """Publish, admit, double the weights, publish and admit, to no server; then change weights."""
    learner = build_learner(model_dir, ONE_RANK)
    publisher = Publisher(learner, Fleet("rollout", {}), SETTINGS)
    publisher.publish()
    publisher.admit()
    for *_, shard in learner.shards():
        shard *= 2
    doubled = publisher.publish().conversion.total_drift
    publisher.admit()
    with pytest.raises(PublishError) as failure:
        for *_, shard in learner.shards():
            shard *= -1
        publisher.admit()
    learner.close()
    return doubled.update_norm, doubled.code_flip_fraction, publisher.version, str(failure.value)


def test_admitting_servers_changes_neither_version_nor_drift(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, **DIMENSIONS)
    ((update_norm, flips, version, failure),) = run_ranks(publish_and_admit, 1, tmp_path)
    assert update_norm == pytest.approx(1, rel=1e-6) and flips == 0
    assert version == 2
    assert failure == "the learner no longer has the weights of version 2"
