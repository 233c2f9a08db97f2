"""Two real servers that die, hang and are started again, while a learner samples and publishes.

Lost servers are started again when a test says so.
"""

import math
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from benchmarks.deployment import (
    HEALTH_TIMEOUT_S,
    PEER_TIMEOUT_S,
    PER_STEP,
    Deployment,
    held_by,
    send_signal,
    tree,
    wait_until,
)
from benchmarks.soak import FAULTS, Soak
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.rollout.fleet import AdmissionNeeded, FleetTooSmall
from qurl_megatron.rollout.roster import incarnation, reported_lost
from qurl_megatron.rollout.server import Server
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.transport import Channel, PublishError
from tiny import build_tiny_model

PROMPTS = [
    Prompt(id=str(row), question="", answer="", token_ids=[3 + row, 4, 5, 6]) for row in range(48)
]


class Watched(Deployment):
    """A deployment whose lost servers are started again when a test says so."""

    def serving(self) -> list[int]:
        return [member.index for member in self.fleet.members("serving")]

    def restart_lost(self) -> None:
        """Have the lost servers started again, and wait until they ask for the weights."""

        def is_whole() -> bool:
            self.starter.check()
            return len(self.fleet.members("serving", "joining")) == 2

        wait_until(is_whole)

    def sample(self, prompts: list[Prompt], length: int = 200) -> list[list[Completion]]:
        """Sample two completions of each prompt."""
        return self.client.generate(
            prompts, completions_per_prompt=2, temperature=1.0, max_completion_length=length
        )

    def change_weights(self) -> None:
        with torch.no_grad():
            for *_, shard in self.learner.shards():
                shard.mul_(1.01)

    def checksums(self, index: int) -> dict[str, int]:
        return held_by(self.roster[index])


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as monkeypatch, ExitStack() as stack:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        directory = tmp_path_factory.mktemp("fleet")
        yield Watched(directory, build_tiny_model(directory / "model"), stack)


@pytest.fixture
def both(deployment: Watched) -> Watched:
    """Return the deployment with both servers serving, started again where a test has ended one."""
    if deployment.serving() != [0, 1]:
        deployment.restart_lost()
        deployment.publisher.admit()
    assert deployment.serving() == [0, 1]
    return deployment


def assert_all_answered(groups: list[list[Completion]], version: int) -> None:
    assert [len(group) for group in groups] == [2] * len(PROMPTS)
    for completion in (completion for group in groups for completion in group):
        assert completion.token_ids
        assert len(completion.behaviour_logprobs) == len(completion.token_ids)
        assert completion.token_versions[-1] == version


def requests_at(deployment: Watched) -> dict[int, int]:
    return {member.index: len(member.requests) for member in deployment.fleet.members("serving")}


def test_one_publish_gives_both_servers_the_same_weights(both: Watched) -> None:
    both.change_weights()
    published = both.publisher.publish()
    assert published.num_servers == 2
    assert both.checksums(0) == both.checksums(1) == published.conversion.checksums


def test_publishes_between_faults_of_each_kind_lose_no_prompt_and_serve_no_wrong_weights(
    both: Watched,
) -> None:
    # The last third of the publishes has no faults that end a server: then both are read back.
    publishes, quiet = 8, 1 / 3
    seen = Soak(both, publishes=publishes, seed=0, fault_every=1, quiet=quiet, until=math.inf).run()
    assert seen.problems == []
    assert seen.publishes == publishes and seen.trained == publishes * PER_STEP
    assert seen.faults.keys() == set(FAULTS)
    assert seen.lost >= 3 and seen.refusals > 0 and seen.checksums_read >= 2 * quiet * publishes


def test_a_server_killed_while_sampling_costs_no_answer(both: Watched) -> None:
    both.said.clear()
    with ThreadPoolExecutor() as threads:
        sampling = threads.submit(both.sample, PROMPTS)
        wait_until(lambda: list(requests_at(both).values()) == [24, 24])
        time.sleep(0.5)
        send_signal(tree(both.roster[1]), signal.SIGKILL)
        wait_until(lambda: both.serving() == [0])
        assert_all_answered(sampling.result(timeout=200), both.publisher.version)
    # Its end is seen, by its process or by its connections. Nobody waits for a time limit.
    (lost,) = [line for line in both.said if "server rollout_1 is lost" in line]
    assert re.search("died|closed the connection", lost)
    assert both.fleet.members("serving")[0].outstanding == 0


def test_a_server_that_hangs_while_sampling_costs_no_answer(both: Watched) -> None:
    hung = both.roster[0]
    with ThreadPoolExecutor() as threads:
        sampling = threads.submit(both.sample, PROMPTS)
        wait_until(lambda: list(requests_at(both).values()) == [24, 24])
        time.sleep(0.5)
        send_signal(tree(hung), signal.SIGSTOP)
        noticed_s = wait_until(lambda: both.serving() == [1])
        assert_all_answered(sampling.result(timeout=200), both.publisher.version)
    assert noticed_s < HEALTH_TIMEOUT_S + 15
    assert incarnation("rollout", 0, hung) in reported_lost(both.logs)


def test_a_server_started_again_gets_the_present_version_and_takes_prompts(
    both: Watched,
) -> None:
    published = both.publisher.publish()
    both.roster[1].stop()
    wait_until(lambda: both.serving() == [0])
    both.restart_lost()
    assert not both.fleet.needs_admission()  # the other one serves
    assert_all_answered(both.sample(PROMPTS, 4), published.version)
    assert both.serving() == [0]
    both.publisher.admit()
    assert both.serving() == [0, 1]
    assert both.publisher.version == published.version
    assert both.checksums(1) == published.conversion.checksums
    with ThreadPoolExecutor() as threads:
        sampling = threads.submit(both.sample, PROMPTS)
        wait_until(lambda: list(requests_at(both).values()) == [24, 24])
        assert_all_answered(sampling.result(timeout=200), published.version)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_lost_in_a_publish_neither_hangs_nor_spoils_the_other(
    both: Watched, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = both.roster[0]
    both.publisher.publish()  # there are channels to both
    destination = next(
        transport.destination
        for transport in both.publisher._transports.values()
        if transport.server.pid == lost.pid
    )
    assert destination is not None
    its_channel = both.publisher._senders.channels[destination.token]
    sent: list[Channel] = []

    def send(channel: Channel, bucket: Bucket, version: int) -> Future[int]:
        sent.append(channel)
        if channel is its_channel and sent.count(channel) == 2:
            send_signal(tree(lost), number)
        return original(channel, bucket, version)

    original = Channel.send
    monkeypatch.setattr(Channel, "send", send)
    both.change_weights()
    begin = time.monotonic()
    published = both.publisher.publish()
    assert time.monotonic() - begin < PEER_TIMEOUT_S + 15
    assert sent.count(its_channel) > 2 and its_channel.failure is not None
    assert published.num_servers == 1 and both.serving() == [1]
    assert both.checksums(1) == published.conversion.checksums
    if number == signal.SIGSTOP:
        assert incarnation("rollout", 0, lost) in reported_lost(both.logs)
    assert_all_answered(both.sample(PROMPTS, 4), published.version)


def test_a_server_that_hangs_while_it_joins_holds_nobody_up_for_long(both: Watched) -> None:
    both.roster[1].stop()
    wait_until(lambda: both.serving() == [0])
    both.restart_lost()
    send_signal(tree(both.roster[1]), signal.SIGSTOP)
    begin = time.monotonic()
    both.publisher.admit()
    assert time.monotonic() - begin < PEER_TIMEOUT_S + 15
    assert both.serving() == [0]
    assert_all_answered(both.sample(PROMPTS, 4), both.publisher.version)


def test_a_server_with_other_weights_is_lost_and_if_all_have_them_it_is_an_error(
    both: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [both.roster[0].pid]
    original = Server.checksums

    async def checksums(server: Server) -> list[dict[str, int]]:
        ranks = await original(server)
        if server.pid in wrong:
            ranks[0][min(ranks[0])] += 1
        return ranks

    monkeypatch.setattr(Server, "checksums", checksums)
    assert both.publisher.publish().num_servers == 1
    assert both.serving() == [1]
    wrong.append(both.roster[1].pid)
    with pytest.raises(PublishError, match=r"does not hold .* 1 of \d+ checksums differ"):
        both.publisher.publish()


def test_without_any_server_sampling_waits_for_one_and_begins_again(both: Watched) -> None:
    def sample_and_kill() -> list[list[Completion]]:
        if both.roster == before:
            with ThreadPoolExecutor() as threads:
                sampling = threads.submit(both.sample, 4 * PROMPTS)  # for seconds
                wait_until(lambda: list(requests_at(both).values()) == [96, 96])
                for server in before.values():
                    send_signal(tree(server), signal.SIGKILL)
                wait_until(lambda: both.serving() == [])
                both.restart_lost()
                with pytest.raises(AdmissionNeeded):
                    sampling.result(timeout=200)
                raise AdmissionNeeded
        return both.sample(PROMPTS)

    before, version = both.roster, both.publisher.version
    groups = both.publisher.while_serving(sample_and_kill)
    assert_all_answered(groups, version)
    assert both.serving() == [0, 1]


def test_sampling_ends_when_too_few_servers_are_left_for_too_long(both: Watched) -> None:
    for server in both.roster.values():
        server.stop()
    both.fleet._patience_s = 1.0
    with pytest.raises(FleetTooSmall, match=r"(?s)0 of at least 1 rollout servers.*was lost"):
        both.sample(PROMPTS, 4)
    # A publish to nobody is a publish; a server that joins later gets its version.
    assert both.publisher.publish().num_servers == 0
