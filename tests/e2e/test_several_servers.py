"""Two servers that are not on the loopback address, behind one client and one publisher.

Some of their layers stay in BF16.
"""

import asyncio
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from batches import score
from e2e.reference import Reference
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import (
    LearnerConfig,
    OptimizerConfig,
    QuantizationConfig,
    ServerConfig,
)
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.learner.learner import Learner
from qurl_megatron.quantization.checksum import checksum, combine
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.roster import read_roster, save_roster
from qurl_megatron.rollout.server import PEER_TIMEOUT_S, Server, wait_ready
from qurl_megatron.rollout.start import start
from qurl_megatron.weight_sync.publish import Published, Publisher
from tiny import EOS_TOKEN_ID, build_tiny_model, quantized

ADDRESS = "127.0.0.2"  # servers are unauthenticated on 127.0.0.1 only
BUCKET_BYTES = 64 * 1024  # a publish sends several
KEEP = ["model.layers.0.self_attn", "*.1.mlp.down_proj"]
KEPT = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
KEPT += ["model.layers.1.mlp.down_proj"]
PROMPTS = [
    Prompt(id=str(row), question="", answer="", token_ids=[3 + row, 4, 5, 6]) for row in range(16)
]


@dataclass(frozen=True)
class Deployment:
    model: Path
    servers: list[Server]
    learner: Learner
    publisher: Publisher
    client: RolloutClient


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("two")
    model = build_tiny_model(directory / "model")
    config = ServerConfig(mem_fraction_static=0.6, max_total_tokens=8192)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        servers = []
        for index in range(2):
            log = directory / f"server_{index}.log"
            spec = ServerSpec(model, config, "int8", 64, KEEP)
            server = start(spec, log, seed=index, host=ADDRESS, api_key="a key of the run")
            stack.callback(server.stop)
            servers.append(server)
        learner = Learner(model, LearnerConfig(dtype="float32"), OptimizerConfig())
        stack.enter_context(closing(learner))
        wait_ready(servers, timeout_s=400)
        fleet = Fleet("rollout", dict(enumerate(servers)))
        publisher = publisher_to(fleet, learner)
        stack.enter_context(closing(publisher))
        tokenizer = AutoTokenizer.from_pretrained(model)
        client = RolloutClient(fleet, tokenizer, [EOS_TOKEN_ID])
        yield Deployment(model, servers, learner, publisher, client)


def publisher_to(fleet: Fleet, learner: Learner, **options: Any) -> Publisher:
    settings = QuantizationConfig(bucket_bytes=BUCKET_BYTES, keep=KEEP, **options)
    return Publisher(learner, fleet, settings)


def sequences_of(server: Server) -> int:
    """Return the number of sequences that the server has started, by its log."""
    log = Path(server.log_file).read_text()
    return sum(int(count) for count in re.findall(r"Prefill batch, #new-seq: (\d+)", log))


def change_weights(learner: Learner, fraction: float) -> None:
    """Multiply about this fraction of the weights by 1.1, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for *_, shard in learner.shards():
            chosen = torch.rand(shard.shape, generator=generator) < fraction
            shard.mul_(1 + 0.1 * chosen)


def publish_to_both(publisher: Publisher) -> Published:
    """Publish, and check that both servers hold it, apart from the publisher's own check."""
    published = publisher.publish()
    assert published.num_servers == 2
    for member in publisher._fleet.members("serving"):
        held = asyncio.run(member.server.checksums())
        assert combine(held) == published.conversion.checksums
    return published


def test_both_servers_compute_with_kept_layers_in_bf16_and_codes_elsewhere(
    deployment: Deployment,
) -> None:
    """Sampled log-probs are those of the mixture, far from those of codes everywhere."""
    published = publish_to_both(deployment.publisher)
    mixed = quantized(deployment.model, "int8", kept=KEPT)
    assert published.conversion.checksums == {name: checksum(t) for name, t in mixed.items()}
    groups = deployment.client.generate(
        PROMPTS, completions_per_prompt=1, temperature=1.0, max_completion_length=16
    )
    completions = [completion for group in groups for completion in group]
    behaviour = torch.cat([torch.tensor(c.behaviour_logprobs) for c in completions])
    distances = []
    for weights in (mixed, quantized(deployment.model, "int8")):
        reference = Reference(deployment.model, weights)
        expected = [
            reference.logprobs(prompt.token_ids, list(completion.token_ids))
            for prompt, completion in zip(PROMPTS, completions, strict=True)
        ]
        distances.append(float((behaviour - torch.cat(expected)).abs().mean()))
    assert 3 * distances[0] < distances[1]


def test_both_servers_have_weights_written_into_their_parameters(deployment: Deployment) -> None:
    fleet = Fleet("rollout", dict(enumerate(deployment.servers)))
    with closing(publisher_to(fleet, deployment.learner, transport="direct")) as publisher:
        for _ in range(2):
            change_weights(deployment.learner, 0.5)
            assert publish_to_both(publisher).sent_bytes == 0


def test_a_server_without_the_version_before_gets_all_tensors_and_the_other_a_delta(
    deployment: Deployment,
) -> None:
    learner, said = deployment.learner, list[str]()
    fleet = Fleet("rollout", dict(enumerate(deployment.servers)), say=said.append)

    def disturb(version: int) -> None:
        """Have another learner publish to the second server, with one other weight."""
        only = Fleet("rollout", {1: deployment.servers[1]})
        with closing(publisher_to(only, learner)) as stranger:
            stranger.version = version - 1
            shard = next(iter(learner.shards()))[-1]
            value = shard[0, 0].item()
            shard[0, 0] = value + 1
            stranger.publish()
            shard[0, 0] = value

    with closing(publisher_to(fleet, learner, publish="delta")) as publisher:
        full = publish_to_both(publisher)
        full_bytes = full.conversion.num_bytes
        assert full.sent_bytes == full_bytes
        change_weights(learner, 0.001)
        delta_bytes = publish_to_both(publisher).sent_bytes
        assert 100 < delta_bytes < full_bytes / 10
        assert publish_to_both(publisher).sent_bytes < 100  # nothing changed

        for ahead, reason in (
            (99, "it holds version 102, and was sent a delta of 3"),
            (0, "does not hold the weights it was sent: 1 of"),
        ):
            said.clear()
            disturb(publisher.version + ahead)
            change_weights(learner, 0.001)
            begin = time.monotonic()
            sent_bytes = publish_to_both(publisher).sent_bytes
            assert time.monotonic() - begin < PEER_TIMEOUT_S / 2  # nobody waits for a time limit
            assert full_bytes < sent_bytes < 1.1 * full_bytes
            (line,) = said
            assert line.startswith("server rollout_1 gets all tensors, not a delta: ")
            assert reason in line
            change_weights(learner, 0.001)
            assert publish_to_both(publisher).sent_bytes < full_bytes / 10
            assert len(said) == 1


def test_deltas_that_do_not_pay_are_given_up(deployment: Deployment) -> None:
    fleet = Fleet("rollout", dict(enumerate(deployment.servers)))
    with closing(publisher_to(fleet, deployment.learner, publish="auto")) as publisher:
        sent = []
        for fraction in (0, 0.001, 0.5, 0.001):
            change_weights(deployment.learner, fraction)
            sent.append(publish_to_both(publisher))
    full_bytes = sent[0].sent_bytes
    assert sent[1].sent_bytes < full_bytes / 10
    assert full_bytes / 2 < sent[2].sent_bytes < 1.1 * full_bytes
    assert sent[3].sent_bytes == full_bytes


def test_every_group_is_answered_and_both_servers_take_part(deployment: Deployment) -> None:
    deployment.publisher.publish()
    before = [sequences_of(server) for server in deployment.servers]
    groups = deployment.client.generate(
        PROMPTS, completions_per_prompt=2, temperature=1.0, max_completion_length=8
    )
    assert len(groups) == len(PROMPTS) and {len(group) for group in groups} == {2}
    versions = {v for group in groups for completion in group for v in completion.token_versions}
    assert versions == {deployment.publisher.version}
    after = [sequences_of(server) for server in deployment.servers]
    for begun, done in zip(before, after, strict=True):
        assert done - begun >= 2 * len(PROMPTS) / 2
    # Both servers give log-probs of the published weights.
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            tokens = torch.tensor([prompt.token_ids + completion.token_ids])
            logprobs, _ = score(deployment.learner, tokens)
            behaviour = torch.tensor(completion.behaviour_logprobs)
            assert len(behaviour) == len(completion.token_ids)
            assert (logprobs[0, len(prompt.token_ids) :] - behaviour).abs().max() < 0.5


def test_requests_need_the_key_and_the_key_is_not_visible(
    deployment: Deployment, tmp_path: Path
) -> None:
    body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1}}
    for server in deployment.servers:
        assert server.api_key
        for path in ("/generate", "/pause_generation"):
            assert httpx.post(f"{server.url}{path}", json=body).status_code == 401
        command = Path(f"/proc/{server.pid}/cmdline").read_text()
        assert server.api_key not in command
    roster = {"rollout": dict(enumerate(deployment.servers))}
    save_roster(tmp_path / "servers.json", roster)
    assert stat.S_IMODE((tmp_path / "servers.json").stat().st_mode) == 0o600
    assert read_roster(tmp_path / "servers.json") == roster
