"""What the learner learns when a server is lost, and which servers hold what was sent."""

import asyncio
import dataclasses
import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fleets import make_server
from qurl_megatron.machine.processes import die_with_parent
from qurl_megatron.quantization.checksum import part_key
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server, UpdateRefused
from qurl_megatron.weight_sync import transport as transports
from qurl_megatron.weight_sync.broadcast import Broadcast, GroupChannel, GroupDestination
from qurl_megatron.weight_sync.transport import PublishError, Transport, verify
from sent import packed
from waiting import wait_until

TIMEOUT_S = 100.0


def join_and_hang(destination: GroupDestination) -> None:
    """Be a server that joins a channel and receives nothing."""
    from sglang.srt.utils import init_custom_process_group

    die_with_parent()
    name = destination.token
    store = dist.PrefixStore(name, destination.store())
    init_custom_process_group("gloo", store=store, world_size=2, rank=1, group_name=name)
    time.sleep(TIMEOUT_S)


def test_a_sender_that_waits_for_a_lost_server_learns_that_and_torch_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt import utils  # noqa: F401, before the fork

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    destination = GroupDestination(
        "weights", "127.0.0.1", 0, "gloo", num_ranks=1, timeout_s=TIMEOUT_S
    )
    store = destination.store(is_host=True)
    destination = dataclasses.replace(destination, port=store.port)
    context = multiprocessing.get_context("fork")
    server = context.Process(target=join_and_hang, args=(destination,), daemon=True)
    server.start()
    channel = GroupChannel(destination, sender=0)
    bucket = packed({"w": torch.zeros(2**24)})  # more than a connection takes without a reader
    sending = channel.send(bucket, 1)
    assert wait_until(lambda: channel._group is not None)
    time.sleep(0.5)
    assert not sending.done()

    of_lost = make_server(0, tmp_path, url="http://127.0.0.1:1")
    (member,) = Fleet("rollout", {0: of_lost}).members("joining")
    broadcast = Broadcast(member)
    broadcast.store = store
    del store
    asyncio.run(broadcast.leave())  # the end of a server that is lost lets go of its store
    assert broadcast.store is None and broadcast.destination is None
    assert wait_until(lambda: channel.failure is not None)
    assert str(channel.failure) == of_lost.url
    server.kill()  # gloo waits for a peer that lives, for as long as its timeout
    sending.result(timeout=TIMEOUT_S)
    channel.close()
    server.join()
    assert "TCPStore" not in capfd.readouterr().err


@pytest.mark.parametrize(("sent", "first"), [({"a": 1, "b": 2}, "b"), ({}, "a"), ({"a": 2}, "a")])
def test_a_server_with_fewer_more_or_other_tensors_does_not_hold_what_was_sent(
    sent: dict[str, int], first: str
) -> None:
    async def checksums() -> list[dict[str, int]]:
        return [{part_key("a", 0, 0): 1}]

    server: Any = SimpleNamespace(url="http://a", checksums=checksums)
    asyncio.run(verify(server, {"a": 1}))
    with pytest.raises(PublishError, match=f"1 of {len(sent)} checksums differ, first {first}$"):
        asyncio.run(verify(server, sent))


@pytest.mark.parametrize(("refused", "state"), [("load", "serving"), ("pause", "lost")])
def test_a_server_is_paused_once_and_may_refuse_a_delta_but_not_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, state: str
) -> None:
    asked: list[str] = []

    def answering(request: str) -> Any:
        async def ask(*_: Any) -> None:
            asked.append(request)
            if request == refused:
                raise UpdateRefused(f"refused to {request}")

        return ask

    async def verified(*_: Any) -> None:
        pass

    monkeypatch.setattr(transports, "verify", verified)
    for request in ("pause", "resume"):
        monkeypatch.setattr(Server, request, answering(request))
    for request in ("load", "leave"):
        monkeypatch.setattr(Transport, request, answering(request))
    fleet = Fleet("rollout", {0: make_server(0, tmp_path)}, loaded=True)
    (member,) = fleet.members("serving")
    transport = Transport(member)

    async def deliver(since: int | None) -> None:
        delivery: Any = SimpleNamespace(since=since, version=2, num_senders=1, checksums={})
        await transport.begin(delivery)
        await transport.delivered()

    with asyncio.Runner() as runner:
        runner.run(deliver(since=1))
        assert member.state == state and member.is_paused and not member.holds(2)
        if state == "lost":
            return
        refused = ""
        runner.run(deliver(since=None))
    assert member.holds(2) and not member.is_paused
    assert asked == ["pause", "load", "leave", "load", "resume"]


class NcclGroup:
    """Stands for a process group over NCCL, which takes a GPU to create."""

    aborted = False

    def _get_backend(self, place: torch.device) -> "NcclGroup":
        return self

    def abort(self) -> None:
        self.aborted = True


def test_a_server_that_hangs_or_dies_in_a_transfer_over_nccl_leaves_the_learner_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's watchdog is off for the channel's group only, and the channel limits the time."""
    settings = ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"]
    monkeypatch.setenv(settings[0], "1")
    monkeypatch.delenv(settings[1], raising=False)
    group, created = NcclGroup(), []

    def create(*_: Any, timeout: timedelta, **__: Any) -> tuple[NcclGroup, None]:
        created.append(([os.environ[name] for name in settings], timeout.total_seconds()))
        return group, None

    hanging = SimpleNamespace(is_completed=lambda: False)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_new_process_group_helper", create)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: hanging)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    destination = GroupDestination("weights", "127.0.0.1", 0, "nccl", num_ranks=2, timeout_s=0.2)
    store = destination.store(is_host=True)
    channel = GroupChannel(dataclasses.replace(destination, port=store.port), sender=0)
    bucket = packed({"w": torch.zeros(4)})
    assert channel.send(bucket, 1).result(timeout=TIMEOUT_S) == 0
    assert str(channel.failure) == "a transfer took over 0.2 s"
    assert group.aborted
    assert created == [(["0", "0"], 0.2)]
    assert [os.environ.get(name) for name in settings] == ["1", None]
