"""Deltas of a real learner, written into SGLang's own models, leave what a full publish leaves.

A learner on several ranks converts a sequence of updates, each whole and as a delta. Models of
servers of 1, 2 and 4 ranks then take random sequences of them: deltas, relative deltas, key frames
(whole publishes), deltas of which a message is lost or comes twice.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sglang_loader
from distributed import run_ranks
from fleets import make_server
from qurl_megatron import device
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import (
    Config,
    LearnerConfig,
    OptimizerConfig,
    QuantizationConfig,
    WeightFormat,
)
from qurl_megatron.learner.learner import Learner
from qurl_megatron.memory.estimate import learner_memory
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server, UpdateRefused
from qurl_megatron.sglang_plugin.weights import write_bucket
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync import publish as publishing
from qurl_megatron.weight_sync import transport as transports
from qurl_megatron.weight_sync.bucket import Bucket, changed_version
from qurl_megatron.weight_sync.publish import Publisher, PublishError
from qurl_megatron.weight_sync.reshard import Converter
from qurl_megatron.weight_sync.transport import Delivery, Transport
from tiny import UNEVEN, UNEVEN_BLOCKS, build_tiny_model

FORMATS_OF: dict[str, list[WeightFormat]] = {  # by model
    "small": ["int8", "fp8", "fp8-tensor", "bf16"],
    "blocks": ["fp8-block", "int4-g32"],
}
FORMATS = [each for formats in FORMATS_OF.values() for each in formats]
BUCKET_BYTES = 500  # so that a delta has several buckets
ENTRY_BYTES = 80  # most of an entry in a header, beside its name
MESSAGE_BYTES = 30  # two lengths, and what fills the parts up
SERVER_SIZES = (1, 2, 4)
LAYOUT = LearnerConfig(tensor_parallel_size=2, pipeline_parallel_size=2)  # in bfloat16
UPDATES = ("sparse", "row", "none", "sparse", "dense", "sparse")


@dataclass
class Version:
    """A version of the weights, as the senders send it."""

    whole: list[Bucket] = field(default_factory=list)
    delta: list[Bucket] = field(default_factory=list)
    relative: list[Bucket] = field(default_factory=list)
    checksums: dict[str, int] = field(default_factory=dict)
    kept_bytes: int = 0  # that this rank keeps for the next delta

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for bucket in self.whole for name, tensor in bucket.tensors()}


def record_versions(directory: Path) -> dict[WeightFormat, list[Version]]:
    """Update a learner's weights several times, and convert them to all formats each time."""
    device.initialize_distributed()  # both learners use it
    versions: dict[WeightFormat, list[Version]] = {}
    for name, formats in FORMATS_OF.items():
        learner = Learner(directory / name, LAYOUT, OptimizerConfig())
        converters = {
            f: [Converter(learner, f, BUCKET_BYTES, sends_deltas=True) for _ in range(2)]
            for f in formats
        }
        generator = torch.Generator().manual_seed(dist.get_rank())
        for number, update in enumerate(("none", *UPDATES)):
            for *_, shard in learner.shards():
                change_weights(shard, update, generator)
            for weight_format, (converter, another) in converters.items():
                version = Version()
                whole = Converter(learner, weight_format, BUCKET_BYTES).convert(
                    version.whole.append
                )
                since = number - 1 if number else None
                conversion = converter.convert(version.delta.append, since=since)
                another.convert(version.relative.append, since=since, is_relative=True)
                version.checksums = conversion.checksums
                version.kept_bytes = sum(
                    len(bucket.flat) for bucket in (converter._kept or {})[False]
                )
                assert conversion.checksums == whole.checksums
                assert conversion.num_bytes == whole.num_bytes
                versions.setdefault(weight_format, []).append(version)
        learner.close()
    dist.destroy_process_group()
    return versions


def change_weights(shard: Tensor, update: str, generator: torch.Generator) -> None:
    """Change a hundredth of the elements, all of a row, all or none."""
    fraction = {"sparse": 0.01, "row": 0.0, "none": 0.0, "dense": 1.0}[update]
    noise = torch.randn(shard.shape, generator=generator) * 0.05
    mask = torch.rand(shard.shape, generator=generator) < fraction
    shard += (noise * mask).to(shard.dtype)
    if update == "row":
        shard[-1] *= 1.5


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the model of each set of formats."""
    directory = tmp_path_factory.mktemp("models")
    build_tiny_model(directory / "small", "qwen2", tied=True, **UNEVEN)
    build_tiny_model(directory / "blocks", "qwen3", **UNEVEN_BLOCKS)
    return directory


@pytest.fixture(scope="module")
def versions(model_dirs: Path) -> dict[WeightFormat, list[Version]]:
    leader, *others = run_ranks(record_versions, 4, model_dirs, timeout_s=400)
    for rank, other in enumerate(others, start=1):
        sends = rank == 2  # the first of another stage
        for weight_format, recorded in other.items():
            for own, total in zip(recorded, leader[weight_format], strict=True):
                assert bool(own.whole) == sends
                assert sends or not own.delta
                total.whole += own.whole
                total.delta += own.delta
                total.relative += own.relative
    return leader


def write(ranks: list[Any], buckets: list[Bucket]) -> None:
    """Write buckets as a server does that receives them."""
    for bucket in buckets:
        for model in ranks:
            write_bucket(model, bucket)


def assert_hold(ranks: list[Any], version: Version) -> None:
    """Check a server's tensors against a full publish, byte for byte, and its checksums."""
    sent = version.tensors()
    for name, held in sglang_loader.whole_tensors(ranks, sent).items():
        assert torch.equal(held.view(torch.uint8), sent[name].view(torch.uint8)), name
    assert sglang_loader.checksums_of(ranks) == version.checksums


def addresses(ranks: list[Any]) -> list[int]:
    return [parameter.data_ptr() for model in ranks for parameter in model.parameters()]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_any_sequence_of_messages_gives_what_a_full_publish_gives_or_is_noticed(
    versions: dict[WeightFormat, list[Version]], weight_format: WeightFormat, model_dirs: Path
) -> None:
    recorded = versions[weight_format]
    model = next(name for name, formats in FORMATS_OF.items() if weight_format in formats)
    for size in SERVER_SIZES:
        chance = random.Random(size)
        ranks = sglang_loader.build_ranks(model_dirs / model, weight_format, size)
        sglang_loader.load(ranks, recorded[0].tensors())
        before = addresses(ranks)
        for version in recorded[1:]:
            ways = ["delta", "relative", "twice", "key frame"]
            losable = [b for b in version.delta if any(delta.unpack(b.flat))]
            ways += ["lost"] * (len(losable) > 1)
            way = chance.choice(ways)
            if way == "delta":
                write(ranks, version.delta)
            elif way == "relative":
                write(ranks, version.relative)
            elif way == "twice":
                repeated = version.delta + chance.sample(version.delta, len(version.delta))
                write(ranks, repeated)
            elif way == "lost":
                lost = chance.choice(losable)
                write(ranks, [bucket for bucket in version.delta if bucket is not lost])
                assert sglang_loader.checksums_of(ranks) != version.checksums
            if way in ("lost", "key frame"):
                write(ranks, version.whole)
            assert_hold(ranks, version)
        assert addresses(ranks) == before


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_delta_is_as_small_as_what_changed(
    versions: dict[WeightFormat, list[Version]], weight_format: WeightFormat
) -> None:
    for version, update in zip(versions[weight_format][1:], UPDATES, strict=True):
        whole = sum(bucket.flat.numel() for bucket in version.whole)
        changes = [change for bucket in version.delta for change in delta.unpack(bucket.flat)]
        num_bytes = sum(change.num_bytes for change in changes)
        assert num_bytes <= whole
        if update == "none":
            assert changes == []
        if update == "dense":
            assert num_bytes > 0.3 * whole
            assert any(change.gaps is None for change in changes)
        if update == "sparse":
            assert 0 < num_bytes < 0.2 * whole
        # Each bucket of a delta keeps to the limit, beside its header.
        largest = max(tensor.nbytes for tensor in version.tensors().values())
        for bucket in version.delta:
            changes = list(delta.unpack(bucket.flat))
            size = sum(change.num_bytes for change in changes)
            assert size <= max(BUCKET_BYTES, 2 * largest)
            headers = sum(len(change.name) + ENTRY_BYTES for change in changes)
            assert len(bucket.flat) <= size + headers + 2 * MESSAGE_BYTES  # of two ranks


def test_a_rank_keeps_the_bytes_that_are_planned(
    versions: dict[WeightFormat, list[Version]], model_dirs: Path
) -> None:
    for name, formats in FORMATS_OF.items():
        architecture = Architecture.from_directory(model_dirs / name)
        for weight_format in formats:
            config = Config(learner=LAYOUT)
            if weight_format == "int4-g32":
                config.quantization = QuantizationConfig("int4", 32)
            else:
                config.quantization.format = weight_format
            config.quantization.publish = "delta"
            planned = learner_memory(architecture, config, 0)["converter"]
            # Norms and some scales are whole on each rank, which only so small a model feels.
            kept = versions[weight_format][-1].kept_bytes
            assert kept == pytest.approx(planned, rel=0.05), weight_format


def publish_in_turn(model_dir: Path) -> dict[str, list[tuple[int, str]]]:
    """Publish to servers behind a network that carries nothing; return which was sent what."""
    sent: list[tuple[int, str]] = []
    refusing: set[int] = set()  # servers that refuse their next delta
    wrong: list[int] = []  # servers that do not hold what they are sent, each once

    def send(index: int, names: Sequence[str]) -> None:
        since = changed_version(names)
        sent.append((index, "all" if since is None else f"delta of {since}"))
        if since is not None and index in refusing:
            refusing.remove(index)
            raise UpdateRefused("refused")

    async def update_weights(server: Server, names: list[str], *_: Any, **__: Any) -> None:
        send(int(server.url[-1]), names)

    def send_over_http(server: Server, header: Any, payload: Tensor) -> float:
        is_delta = changed_version(header.names) is not None
        if not is_delta or not header.num_bytes:  # the end of a delta
            send(int(server.url[-1]), header.names)
        return 1.0

    async def verify(server: Server, checksums: dict[str, int]) -> None:
        index = int(server.url[-1])
        if index in wrong:
            wrong.remove(index)
            raise PublishError("other weights")

    made: Any = publishing
    checked: Any = transports
    requests: Any = Server
    channel: Any = needed("elsewhere", "transport", by="this test")

    class NoChannels(Transport):
        meets_senders = True

        async def load(self, delivery: Delivery) -> None:
            await update_weights(self.server, [*delivery.request.names])
            await delivery.sent.wait()

    async def nothing(*_: Any) -> None:
        pass

    made.Broadcast = NoChannels
    checked.verify = verify
    requests.update_weights = update_weights
    channel.post_weights = send_over_http
    requests.pause = requests.resume = nothing

    servers = [make_server(i, model_dir, url=f"http://127.0.0.1:{i}") for i in range(5)]
    learner = Learner(model_dir / "small", LearnerConfig(dtype="float32"), OptimizerConfig())
    fleet = Fleet("rollout", {0: servers[0]})
    settings = QuantizationConfig(publish="delta", bucket_bytes=2**30)
    publisher = Publisher(learner, fleet, settings)
    turns: dict[str, list[tuple[int, str]]] = {}

    def turn(name: str, work: Callable[[], object]) -> None:
        work()
        turns[name] = sorted(sent)
        sent.clear()

    def join(index: int) -> None:
        fleet._members[index] = fleet._member(index, servers[index], "joining")

    turn("first", publisher.publish)
    turn("second", publisher.publish)
    join(1)
    turn("one joins", publisher.publish)
    join(2)
    turn("admit", publisher.admit)
    turn("all hold it", publisher.publish)
    refusing.add(1)
    turn("one refuses", publisher.publish)
    wrong.append(2)
    turn("one is wrong", publisher.publish)
    fleet.members("serving")[0].lose("killed")
    turn("one is lost", publisher.publish)
    wrong.extend([1, 1, 2, 2])
    turn("all are wrong", lambda: pytest.raises(PublishError, publisher.publish))
    join(3)
    turn("after a failure", publisher.publish)
    publisher.close()
    elsewhere = replace(servers[4], is_remote=True)
    resumed = Publisher(learner, Fleet("rollout", {3: servers[3], 4: elsewhere}), settings)
    resumed.version = publisher.version
    turn("resumed, and one is elsewhere", resumed.publish)
    turn("both hold it", resumed.publish)
    refusing.add(4)
    turn("it refuses", resumed.publish)
    turn("it holds it again", resumed.publish)
    resumed.close()
    learner.close()
    return turns


def test_only_servers_verified_to_hold_the_version_before_get_a_delta(model_dirs: Path) -> None:
    (turns,) = run_ranks(publish_in_turn, 1, model_dirs, timeout_s=400)
    assert turns == {
        "first": [(0, "all")],
        "second": [(0, "delta of 1")],
        "one joins": [(0, "delta of 2"), (1, "all")],
        "admit": [(2, "all")],
        "all hold it": [(0, "delta of 3"), (1, "delta of 3"), (2, "delta of 3")],
        "one refuses": [(0, "delta of 4"), (1, "all"), (1, "delta of 4"), (2, "delta of 4")],
        "one is wrong": [(0, "delta of 5"), (1, "delta of 5"), (2, "all"), (2, "delta of 5")],
        "one is lost": [(1, "delta of 6"), (2, "delta of 6")],
        "all are wrong": [(1, "all"), (1, "delta of 7"), (2, "all"), (2, "delta of 7")],
        "after a failure": [(3, "all")],
        "resumed, and one is elsewhere": [(3, "all"), (4, "all")],
        "both hold it": [(3, "delta of 10"), (4, "delta of 10")],
        "it refuses": [(3, "delta of 11"), (4, "all"), (4, "delta of 11")],
        "it holds it again": [(3, "delta of 12"), (4, "delta of 12")],
    }
