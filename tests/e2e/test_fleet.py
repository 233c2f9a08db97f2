"""Two real servers that die, hang and are started again, while a learner samples and publishes.

The tests start the servers, in the place of a run's starter.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, ServerConfig
from qurl_megatron.learner.learner import Learner
from qurl_megatron.preload import Preload
from qurl_megatron.quantization.checksum import combine
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.control import ServerControl
from qurl_megatron.rollout.fleet import AdmissionNeeded, Fleet, FleetTooSmall
from qurl_megatron.rollout.roster import incarnation, reported_lost
from qurl_megatron.rollout.server import Server, start_server, wait_ready
from qurl_megatron.weight_sync.publish import Publisher, PublishError
from tiny import EOS_TOKEN_ID, build_tiny_model

BUCKET_BYTES = 64 * 1024  # a publish sends several
PEER_TIMEOUT_S = 8.0
HEALTH_TIMEOUT_S = 8.0
PROMPTS = [
    Prompt(id=str(row), question="", answer="", token_ids=[3 + row, 4, 5, 6]) for row in range(48)
]


@dataclass
class Deployment:
    """A learner and its fleet, whose roster the tests write."""

    directory: Path
    model: Path
    preload: Preload | None
    stack: ExitStack
    roster: dict[int, Server] = field(default_factory=dict)
    num_starts: int = 0

    def start(self, *indices: int) -> None:
        """Start servers, or start them again, and enter them in the roster."""
        for index in indices:
            self.num_starts += 1
            server = start_server(
                self.model,
                ServerConfig(mem_fraction_static=0.6, max_total_tokens=16384),
                "int8",
                context_length=256,
                log_file=self.directory / f"server_{self.num_starts}.log",
                seed=self.num_starts,
                preload=self.preload,
            )
            self.stack.callback(server.stop)
            self.roster = self.roster | {index: server}

    def begin(self) -> None:
        """Make learner, fleet, publisher and client, and publish once."""
        learner = Learner(self.model, LearnerConfig(dtype="float32"), OptimizerConfig())
        self.learner = learner
        self.stack.enter_context(closing(learner))
        wait_ready(list(self.roster.values()), timeout_s=400)
        self.said: list[str] = []
        self.fleet = Fleet(
            "rollout",
            self.roster,
            patience_s=300,
            health_timeout_s=HEALTH_TIMEOUT_S,
            say=self.said.append,
        )
        self.stack.enter_context(closing(self.fleet))
        self.fleet.watch(lambda: self.roster)
        self.publisher = Publisher(
            learner, self.fleet, "int8", BUCKET_BYTES, timeout_s=PEER_TIMEOUT_S
        )
        self.stack.enter_context(closing(self.publisher))
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.client = RolloutClient(self.fleet, tokenizer, [EOS_TOKEN_ID])
        self.publisher.publish()

    def sample(self, length: int = 200) -> list[list[Completion]]:
        """Sample two completions of each prompt."""
        return self.client.generate(
            PROMPTS, completions_per_prompt=2, temperature=1.0, max_response_length=length
        )

    def change_weights(self) -> None:
        with torch.no_grad():
            for *_, shard in self.learner.shards():
                shard.mul_(1.01)

    def serving(self) -> list[int]:
        return [member.index for member in self.fleet.members("serving")]

    def checksums(self, index: int) -> dict[str, int]:
        with closing(ServerControl(self.roster[index])) as control:
            return combine(control.checksums())


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, preload: Preload | None
) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        made = Deployment(directory, build_tiny_model(directory / "model"), preload, stack)
        made.start(0, 1)
        made.begin()
        yield made


@pytest.fixture
def both(deployment: Deployment) -> Deployment:
    """Return the deployment with both servers serving, started again where a test has ended one."""
    lost = {0, 1} - set(deployment.serving())
    for index in lost:
        deployment.roster[index].stop()
    if lost:
        deployment.start(*lost)
        wait_until(lambda: len(deployment.fleet.members("serving", "joining")) == 2)
        deployment.publisher.admit()
    assert deployment.serving() == [0, 1]
    return deployment


def wait_until(condition: Callable[[], bool], timeout_s: float = 200.0) -> float:
    """Wait until `condition()`, and return how long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + timeout_s, "timed out"
        time.sleep(0.02)
    return time.monotonic() - begin


def tree(server: Server) -> list[psutil.Process]:
    main = psutil.Process(server.pid)
    return [main, *main.children(recursive=True)]


def send_signal(server: Server, number: signal.Signals) -> None:
    for process in tree(server):
        os.kill(process.pid, number)


def assert_all_answered(groups: list[list[Completion]], version: int) -> None:
    assert [len(group) for group in groups] == [2] * len(PROMPTS)
    for completion in (completion for group in groups for completion in group):
        assert completion.token_ids
        assert len(completion.behaviour_logprobs) == len(completion.token_ids)
        assert completion.weight_version == version


def requests_at(deployment: Deployment) -> dict[int, int]:
    return {member.index: len(member.requests) for member in deployment.fleet.members("serving")}


def test_one_publish_gives_both_servers_the_same_weights(both: Deployment) -> None:
    both.change_weights()
    published = both.publisher.publish()
    assert published.num_servers == 2
    assert both.checksums(0) == both.checksums(1) == published.conversion.checksums


def test_a_server_killed_while_sampling_costs_no_answer(both: Deployment) -> None:
    with ThreadPoolExecutor() as threads:
        sampling = threads.submit(both.sample)
        wait_until(lambda: list(requests_at(both).values()) == [24, 24])
        time.sleep(0.5)
        send_signal(both.roster[1], signal.SIGKILL)
        noticed_s = wait_until(lambda: both.serving() == [0])
        assert_all_answered(sampling.result(timeout=200), both.publisher.version)
    assert noticed_s < 3
    assert any("server rollout_1 is lost" in line for line in both.said)
    assert both.fleet.members("serving")[0].outstanding == 0


def test_a_server_that_hangs_while_sampling_costs_no_answer(both: Deployment) -> None:
    hung = both.roster[0]
    with ThreadPoolExecutor() as threads:
        sampling = threads.submit(both.sample)
        wait_until(lambda: list(requests_at(both).values()) == [24, 24])
        time.sleep(0.5)
        send_signal(hung, signal.SIGSTOP)
        noticed_s = wait_until(lambda: both.serving() == [1])
        assert_all_answered(sampling.result(timeout=200), both.publisher.version)
    assert noticed_s < HEALTH_TIMEOUT_S + 6
    assert incarnation("rollout", 0, hung) in reported_lost(both.directory)


def test_a_server_started_again_gets_the_present_version_and_takes_prompts(
    both: Deployment,
) -> None:
    published = both.publisher.publish()
    both.roster[1].stop()
    wait_until(lambda: both.serving() == [0])
    both.start(1)
    wait_until(both.fleet.has_joining)
    assert not both.fleet.needs_admission()  # the other one serves
    assert_all_answered(both.sample(4), published.version)
    assert both.serving() == [0]
    both.publisher.admit()
    assert both.serving() == [0, 1]
    assert both.publisher.version == published.version
    assert both.checksums(1) == published.conversion.checksums
    with ThreadPoolExecutor() as threads:
        sampling = threads.submit(both.sample)
        wait_until(lambda: list(requests_at(both).values()) == [24, 24])
        assert_all_answered(sampling.result(timeout=200), published.version)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_lost_in_a_publish_neither_hangs_nor_spoils_the_other(
    both: Deployment, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = both.roster[0]
    sent: list[int] = []

    def update_weights(control: ServerControl, *args: object, **options: object) -> None:
        if control.server == lost and sent.count(lost.pid) == 1:
            send_signal(lost, number)
        sent.append(control.server.pid)
        original(control, *args, **options)  # type: ignore[arg-type]

    original = ServerControl.update_weights
    monkeypatch.setattr(ServerControl, "update_weights", update_weights)
    both.change_weights()
    begin = time.monotonic()
    published = both.publisher.publish()
    assert time.monotonic() - begin < PEER_TIMEOUT_S + 6
    assert sent.count(lost.pid) < sent.count(both.roster[1].pid)  # it drops out of the rest
    assert published.num_servers == 1 and both.serving() == [1]
    assert both.checksums(1) == published.conversion.checksums
    if number == signal.SIGSTOP:
        assert incarnation("rollout", 0, lost) in reported_lost(both.directory)
    assert_all_answered(both.sample(4), published.version)


def test_a_server_that_hangs_while_it_joins_holds_nobody_up_for_long(both: Deployment) -> None:
    both.roster[1].stop()
    wait_until(lambda: both.serving() == [0])
    both.start(1)
    wait_until(both.fleet.has_joining)
    send_signal(both.roster[1], signal.SIGSTOP)
    begin = time.monotonic()
    both.publisher.admit()
    assert time.monotonic() - begin < PEER_TIMEOUT_S + 6
    assert both.serving() == [0]
    assert_all_answered(both.sample(4), both.publisher.version)


def test_a_server_with_other_weights_is_lost_and_if_all_have_them_it_is_an_error(
    both: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [both.roster[0].pid]
    original = ServerControl.checksums

    def checksums(control: ServerControl) -> list[dict[str, int]]:
        ranks = original(control)
        if control.server.pid in wrong:
            ranks[0][min(ranks[0])] += 1
        return ranks

    monkeypatch.setattr(ServerControl, "checksums", checksums)
    assert both.publisher.publish().num_servers == 1
    assert both.serving() == [1]
    wrong.append(both.roster[1].pid)
    with pytest.raises(PublishError, match=r"does not hold .* 1 of \d+ checksums differ"):
        both.publisher.publish()


def test_without_any_server_sampling_waits_for_one_and_begins_again(both: Deployment) -> None:
    def sample_and_kill() -> list[list[Completion]]:
        if both.num_starts == starts:
            with ThreadPoolExecutor() as threads:
                sampling = threads.submit(both.sample)
                wait_until(lambda: list(requests_at(both).values()) == [24, 24])
                for server in both.roster.values():
                    send_signal(server, signal.SIGKILL)
                wait_until(lambda: both.serving() == [])
                both.start(0)
                with pytest.raises(AdmissionNeeded):
                    sampling.result(timeout=200)
                raise AdmissionNeeded
        return both.sample()

    starts, version = both.num_starts, both.publisher.version
    groups = both.publisher.while_serving(sample_and_kill)
    assert_all_answered(groups, version)
    assert both.serving() == [0]


def test_sampling_ends_when_too_few_servers_are_left_for_too_long(both: Deployment) -> None:
    for server in both.roster.values():
        server.stop()
    both.fleet._patience_s = 1.0
    with pytest.raises(FleetTooSmall, match=r"(?s)0 of at least 1 rollout servers.*was lost"):
        both.sample(4)
    # A publish to nobody is a publish; a server that joins later gets its version.
    assert both.publisher.publish().num_servers == 0
