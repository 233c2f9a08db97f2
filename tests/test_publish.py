"""Several senders publish to servers of several ranks, by every transport.

The learner is real, on up to eight ranks. The servers are SGLang's models and its receiver
of weights, in processes of their own (`served.py`).
"""

from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sglang_loader
from distributed import run_ranks
from fleets import make_server
from learner_reference import DP2, EP2, PP2, TP2, VPP2
from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.rollout.fleet import Member
from qurl_megatron.weight_sync.publish import Publisher
from qurl_megatron.weight_sync.transport import PublishError
from served import connect, serving
from tiny import UNEVEN, Family, build_tiny_model

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the models of forked processes are on the CPU"
)

BUCKET_BYTES = 10_000
# SGLang is imported where a sender joins its first channel, which takes long on a busy machine.
TIMEOUT_S = 200.0
ONE, TWO = "http://127.0.0.1:1", "http://127.0.0.1:2"  # nobody listens there
SIZES = {ONE: 1, TWO: 2}  # ranks of each server


def test_servers_that_are_all_lost_in_the_first_publish_would_be_lost_again() -> None:
    def commit(holds: bool) -> int:
        member = Member(nothing, 0, nothing, "serving" if holds else "lost", version=1)
        used = SimpleNamespace(delivered=lambda: None, failure=None, member=member)
        publisher._transports = {member: used}
        return publisher._commit([used], delivery, SimpleNamespace(non_finite="", checksums={}))

    nothing: Any = None
    publisher: Any = Publisher.__new__(Publisher)
    publisher.version, publisher._sent, publisher._has_served = 1, {}, False
    publisher._wait = list
    publisher._fleet = SimpleNamespace(last_loss="server rollout_0 was lost: no room")
    delivery = SimpleNamespace(end=lambda sent: None)
    with pytest.raises(PublishError, match="no server took the first weights: .*no room"):
        commit(False)
    assert [commit(True), commit(False)] == [1, 0]


def publish_all(model_dir: Path, pipes: dict[str, list[Connection]]) -> dict[str, Any]:
    """Publish in all ways; return what rank 0 was told, and which ranks sent how many bytes."""
    from qurl_megatron.config.schema import OptimizerConfig, QuantizationConfig
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.rollout.fleet import Fleet
    from qurl_megatron.weight_sync.publish import Publisher
    from qurl_megatron.weight_sync.transport import Channel

    layout = LearnerConfig(tensor_parallel_size=2, pipeline_parallel_size=2, dtype="float32")
    learner = Learner(model_dir, layout, OptimizerConfig())
    rank = dist.get_rank()
    servers = {
        index: make_server(
            index, model_dir, url=url, tensor_parallel_size=SIZES[url], timeout_s=TIMEOUT_S
        )
        for index, url in enumerate(pipes)
    }
    said: list[str] = []
    fleet = Fleet("rollout", servers if rank == 0 else {}, say=said.append)
    connect(pipes if rank == 0 else {})
    sent = 0
    original = Channel.send

    def send(each: Any, bucket: Any, version: int) -> Any:
        nonlocal sent
        sent += bucket.flat.numel()
        return original(each, bucket, version)

    setattr(Channel, "send", send)  # noqa: B010
    results: dict[str, Any] = {"sent": {}}
    generator = torch.Generator().manual_seed(rank)

    def publish(name: str, publisher: Publisher) -> None:
        nonlocal sent
        for *_, shard in learner.shards():
            shard.mul_(1 + 0.1 * (torch.rand(shard.shape, generator=generator) < 0.001))
        sent = 0
        published = publisher.publish()
        results["sent"][name] = sent
        results[name] = (published.num_servers, published.sent_bytes, published.conversion)

    def publisher(**options: Any) -> Publisher:
        settings = QuantizationConfig(bucket_bytes=BUCKET_BYTES, **options)
        return Publisher(learner, fleet, settings)

    broadcast = publisher(publish="delta")
    publish("key frame", broadcast)
    publish("delta", broadcast)
    broadcast.close()
    direct = publisher(transport="direct")
    publish("direct", direct)
    publish("direct again", direct)
    direct.close()
    last = publisher()
    publish("before a death", last)
    if rank == 0:
        pipes[ONE][0].send(("/die_in_the_next_update", {}))
        pipes[ONE][0].recv()
    publish("after a death", last)
    last.close()
    results["said"] = said
    learner.close()
    return results


@pytest.mark.usefixtures("engine")
def test_every_stage_sends_its_own_and_a_lost_server_costs_nothing(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "qwen2", tied=True, **UNEVEN)
    models = {url: sglang_loader.build_ranks(tmp_path, "int8", size) for url, size in SIZES.items()}
    with serving(models[ONE]) as one, serving(models[TWO]) as two:
        pipes = {ONE: one, TWO: two}
        leader, *others = run_ranks(publish_all, 4, tmp_path, pipes, timeout_s=500)
    for name in ("key frame", "delta", "direct", "direct again", "before a death"):
        assert leader[name][0] == len(SIZES), (name, leader["said"])
    num_servers, _, conversion = leader["after a death"]
    assert num_servers == 1
    assert any("server rollout_0 is lost" in line for line in leader["said"])

    # Each stage's first rank sends, to both servers, and no other.
    for rank, results in enumerate([leader, *others]):
        assert bool(results["sent"]["key frame"]) == (rank in (0, 2)), rank
        assert results["sent"]["direct"] == 0
    for name in ("key frame", "delta"):
        total = sum(results["sent"][name] for results in [leader, *others])
        assert total == len(SIZES) * leader[name][1]
    whole = conversion.num_bytes
    assert leader["key frame"][1] == whole
    assert 0 < leader["delta"][1] < whole / 5, leader["said"]
    assert leader["direct"][1] == 0


# With experts, the ranks that send them have parts of what other senders gather.
LAYOUTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "PP2 in 2 parts": ("qwen2", VPP2),
    "TP2, EP2": ("qwen3_moe", {**TP2, **EP2}),
    "TP2xPP2, EP2": ("qwen3_moe", {**TP2, **PP2, **EP2}),
    "TP2xDP2, EP2, ETP2": ("qwen3_moe", {**TP2, **DP2, **EP2, "expert_tensor_parallel_size": 2}),
}
# All tensors in one bucket; some, and one in each; deltas of some buckets; nothing gathered.
WAYS: list[dict[str, Any]] = [
    {"bucket_bytes": 2**30},
    {"bucket_bytes": 4000},
    {"bucket_bytes": 1},
    {"bucket_bytes": 500, "publish": "delta"},
    {"bucket_bytes": 1, "transport": "direct"},
]


def publish_each_way(
    model_dir: Path, layout: dict[str, Any], pipes: dict[str, list[Connection]]
) -> list[int]:
    """Publish twice in each of the `WAYS`; return how many servers held it each time."""
    from sglang.srt.utils import init_custom_process_group  # noqa: F401  # before the time counts

    from qurl_megatron.config.schema import OptimizerConfig, QuantizationConfig
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.rollout.fleet import Fleet
    from qurl_megatron.weight_sync.publish import Publisher

    learner = Learner(model_dir, LearnerConfig(dtype="float32", **layout), OptimizerConfig())
    is_first = dist.get_rank() == 0
    connect(pipes if is_first else {})
    held = []
    for way in WAYS:
        (url,) = pipes
        of_server = {"tensor_parallel_size": SIZES[url], "timeout_s": TIMEOUT_S / 10}
        server = make_server(0, model_dir, url=url, **of_server)
        fleet = Fleet("rollout", {0: server} if is_first else {})
        publisher = Publisher(learner, fleet, QuantizationConfig(**way))
        for _ in range(2):
            for *_, shard in learner.shards():
                shard.neg_()
            held.append(publisher.publish().num_servers)
        publisher.close()
    learner.close()
    return held


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_sender_waits_for_what_the_server_takes_later(name: str, tmp_path: Path) -> None:
    """Whatever the number of buckets; else transfers would end after their time, and be lost."""
    family, layout = LAYOUTS[name]
    build_tiny_model(tmp_path, family, num_hidden_layers=4)
    num_ranks = LearnerConfig(**layout).world_size
    with serving(sglang_loader.build_ranks(tmp_path, "int8", SIZES[TWO])) as pipes:
        leader, *_ = run_ranks(publish_each_way, num_ranks, tmp_path, layout, {TWO: pipes})
    assert leader == [1] * 2 * len(WAYS)
