"""What the learner's side of a channel learns when its server is lost."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qurl_megatron.process import die_with_parent
from qurl_megatron.weight_sync.channel import Channel, Rendezvous
from qurl_megatron.weight_sync.link import Link
from waiting import wait_until

TIMEOUT_S = 100.0


def join_and_hang(rendezvous: Rendezvous) -> None:
    """Be a server that joins a channel and receives nothing."""
    from sglang.srt.utils import init_custom_process_group

    die_with_parent()
    name = rendezvous.channel(0)
    store = dist.PrefixStore(name, rendezvous.join())
    init_custom_process_group("gloo", store=store, world_size=2, rank=1, group_name=name)
    time.sleep(TIMEOUT_S)


def test_a_sender_that_waits_for_a_lost_server_learns_that_and_torch_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt import utils  # noqa: F401, before the fork

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    rendezvous = Rendezvous("weights", "127.0.0.1", 0, "gloo", num_ranks=1, timeout_s=TIMEOUT_S)
    store = rendezvous.host()
    rendezvous = dataclasses.replace(rendezvous, port=store.port)
    context = multiprocessing.get_context("fork")
    server = context.Process(target=join_and_hang, args=(rendezvous,), daemon=True)
    server.start()
    channel = Channel(rendezvous, sender=0)
    flat = torch.zeros(2**24, dtype=torch.uint8)  # more than a connection takes without a reader
    bucket: Any = SimpleNamespace(flat=flat)
    sending = channel.send(bucket, 1, announced=True)
    assert wait_until(lambda: channel._group is not None)
    time.sleep(0.5)
    assert not sending.done()

    link: Any = SimpleNamespace(store=store, url="http://lost")
    del store
    Link._leave(link)  # the link of a server that is lost lets go of its store
    assert link.store is None
    assert wait_until(lambda: channel.failure is not None)
    assert str(channel.failure) == "http://lost"
    server.kill()  # gloo waits for a peer that lives, for as long as its timeout
    sending.result(timeout=TIMEOUT_S)
    channel.close()
    server.join()
    assert "TCPStore" not in capfd.readouterr().err
