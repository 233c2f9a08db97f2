"""Adapters over a quantized base, on real servers and in real runs."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from batches import score
from e2e.running import QUICK, Start, metrics_of
from extensions.adapters.adapters_reference import ALPHA, RANK, write_b
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import (
    AdaptersConfig,
    LearnerConfig,
    OptimizerConfig,
    QuantizationConfig,
    ServerConfig,
)
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.extensions.adapters.layers import Adapters
from qurl_megatron.extensions.adapters.learner import AdaptedLearner
from qurl_megatron.report.record import list_checkpoints
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server, wait_ready
from qurl_megatron.rollout.start import start
from qurl_megatron.weight_sync.publish import Publisher
from tiny import EOS_TOKEN_ID, build_tiny_model

ADAPTERS = "adapters={run}/final_adapters"
SETTINGS = QuantizationConfig(bucket_bytes=64 * 1024)
PROMPTS = [
    Prompt(id=str(row), question="", answer="", token_ids=[3 + row, 4, 5, 6]) for row in range(8)
]


@dataclass(frozen=True)
class Deployment:
    servers: list[Server]
    learner: AdaptedLearner
    fleet: Fleet
    client: RolloutClient


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a server of one rank and one of two, and a learner with adapters that are not 0."""
    directory = tmp_path_factory.mktemp("adapters")
    model = build_tiny_model(directory / "model")
    with ExitStack() as stack:
        servers = []
        for ranks in (1, 2):
            config = ServerConfig(max_total_tokens=4096, tensor_parallel_size=ranks)
            spec = ServerSpec(model, config, "int8", 64, adapters=AdaptersConfig(RANK, ALPHA))
            server = start(spec, directory / f"server_{ranks}.log", seed=ranks)
            stack.callback(server.stop)
            servers.append(server)
        adapters = Adapters(RANK, ALPHA, "int8")
        learner = AdaptedLearner(
            model, LearnerConfig(dtype="float32"), OptimizerConfig(), adapters=adapters
        )
        stack.enter_context(closing(learner))
        wait_ready(servers, timeout_s=400)
        fleet = Fleet("rollout", dict(enumerate(servers)))
        client = RolloutClient(fleet, AutoTokenizer.from_pretrained(model), [EOS_TOKEN_ID])
        yield Deployment(servers, learner, fleet, client)


def publish(deployment: Deployment, publisher: Publisher) -> int:
    """Publish to both servers; return the bytes that each was sent."""
    published = publisher.publish()
    assert published.num_servers == 2
    return published.sent_bytes


def distance(deployment: Deployment) -> float:
    """Return the mean difference between the servers' log-probs and the learner's, in nats."""
    groups = deployment.client.generate(
        PROMPTS, completions_per_prompt=2, temperature=1.0, max_completion_length=16
    )
    differences = []
    for prompt, completions in zip(PROMPTS, groups, strict=True):
        for completion in completions:
            tokens = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
            (own,) = score(deployment.learner, tokens, temperature=1.0)[0]
            of_completion = own[len(prompt.token_ids) :]
            differences.append((of_completion - torch.tensor(completion.behaviour_logprobs)).abs())
    return float(torch.cat(differences).mean())


def test_both_servers_add_the_adapters_that_they_were_sent_and_hold_the_base(
    deployment: Deployment,
) -> None:
    learner = deployment.learner
    with closing(Publisher(learner, deployment.fleet, SETTINGS)) as publisher:
        whole = publish(deployment, publisher)
        with learner.as_reference():
            of_base = distance(deployment)
        write_b(learner)
        adapters = publish(deployment, publisher)
        assert adapters < whole / 4
        with_adapters = distance(deployment)
        with learner.as_reference():
            assert 5 * with_adapters < distance(deployment)  # they change a lot
        assert with_adapters < 3 * of_base + 0.01


def test_adapters_are_written_in_place_too(deployment: Deployment) -> None:
    settings = replace(SETTINGS, transport="direct")
    with closing(Publisher(deployment.learner, deployment.fleet, settings)) as publisher:
        for factor in (0.5, 2.0):
            for rule, _, shard in deployment.learner.shards():
                if rule.is_adapter:
                    shard.mul_(factor)
            assert publish(deployment, publisher) == 0
            assert distance(deployment) < 0.02


def test_a_run_goes_on_after_a_kill_and_resumes_on_another_layout_over_the_same_base(
    start: Start, tmp_path: Path
) -> None:
    words = ["adapters.rank=4", "steps=6", "rollout.servers=2", "checkpoint.every_steps=2"]
    run = start("train", *QUICK, *words)
    run.wait_for("step 1/")
    os.kill(run.server_pid("rollout", 0), signal.SIGKILL)
    assert run.exit_code() == 0, run.text()
    steps = metrics_of(run)
    assert all(0 < step["kl_behaviour_proximal_k3"] < 5e-3 for step in steps)
    assert min(step["publish_bytes"] for step in steps) < steps[0]["publish_full_bytes"] / 4
    final = run.run_dir / "final_model"
    newest = max(list_checkpoints(run.run_dir))

    assert start("export", newest, "exported").exit_code() == 0
    assert_equal_files(tmp_path / "exported", final)
    assert_equal_files(tmp_path / "exported_adapters", run.run_dir / "final_adapters")

    found = answers(start, tmp_path / "over_base", run.run_dir / "model", ADAPTERS, "format=int8")
    assert found == answers(start, tmp_path / "merged", final)
    assert "merged over int8" in " ".join((tmp_path / "over_base.txt").read_text().split())

    resumed = start("resume", run.run_dir, "steps=7", "learner.tensor_parallel_size=1")
    assert resumed.exit_code() == 0, resumed.text()
    assert len(metrics_of(run)) == 7

    weights = run.run_dir / "model" / "model.safetensors"
    other = {name: tensor + 0.01 for name, tensor in load_file(weights).items()}
    save_file(other, weights, {"format": "pt"})
    for words in (["steps=8"], ["steps=8", "--dry-run"]):
        refused = start("resume", run.run_dir, *words)
        assert refused.exit_code() == 2
        assert "trained over another base" in refused.text().splitlines()[-1]


def answers(start: Start, output: Path, model: Path, *words: str) -> list[str]:
    """Return the answers that `qurl eval` gets for some words."""
    problems = output.with_suffix(".jsonl")
    rows = [{"question": f"Spell {word}", "answer": word} for word in ("cat", "dog", "house")]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = ["max_prompt_length=32", "max_completion_length=8", "server.max_total_tokens=4096"]
    words = tuple(word.format(run=model.parent) for word in words)
    command = start("eval", model, problems, "reward=exact", f"output={output}", *limits, *words)
    assert command.exit_code() == 0, command.text()
    output.with_suffix(".txt").write_text(command.text())
    found = [json.loads(line) for line in (output / "answers_0.jsonl").open()]
    return [str(answer["greedy"]["text"]) for answer in found]


def assert_equal_files(directory: Path, other: Path) -> None:
    for file in other.glob("*.safetensors"):
        found, expected = (load_file(each / file.name) for each in (directory, other))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
