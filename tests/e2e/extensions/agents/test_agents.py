"""Random conversations on real servers: what is trained on is what they sampled, id for id."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from conversations import DROPS_THOUGHTS, VOCABULARY, chat_tokenizer
from e2e.extensions.agents import talker
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, pack
from qurl_megatron.algorithm.objective import mismatch_sums, rollout_statistics
from qurl_megatron.config.schema import (
    FormatName,
    LearnerConfig,
    OptimizerConfig,
    QuantizationConfig,
    SamplingConfig,
    ServerConfig,
)
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.extensions.agents.client import AgentClient
from qurl_megatron.extensions.agents.pool import Agents
from qurl_megatron.learner.learner import Learner
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server, wait_ready
from qurl_megatron.rollout.start import start
from qurl_megatron.weight_sync.publish import Publisher
from tiny import EOS_TOKEN_ID, build_tiny_model

torch.set_num_threads(1)
CONTEXT_LENGTH = 3072
EPISODES = 48
SETTINGS: Any = {"completions_per_prompt": 1, "temperature": 1.0, "max_completion_length": 24}


class Recording(AgentClient):
    """A client that keeps what its servers have answered."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.answers: list[tuple[list[int], Completion]] = []

    async def complete(
        self, token_ids: list[int], sampling: dict[str, Any], prefer: Server | None = None
    ) -> tuple[list[Completion], Server]:
        completions, server = await super().complete(token_ids, sampling, prefer)
        self.answers += [(list(token_ids), each) for each in completions]
        return completions, server


@dataclass(frozen=True)
class Deployment:
    learner: Learner
    servers: dict[str, list[Server]]
    publishers: dict[str, Publisher]
    clients: dict[str, Recording]
    tokenizer: Any


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("agents")
    model = build_tiny_model(
        directory / "model", vocab_size=VOCABULARY, max_position_embeddings=4096
    )
    chat_tokenizer(DROPS_THOUGHTS, model)
    config = SamplingConfig(
        agent=f"{talker.__file__}:talk", agent_workers=1, max_episode_tokens=CONTEXT_LENGTH
    )
    formats: dict[str, tuple[FormatName, int]] = {"int8": ("int8", 2), "bf16": ("bf16", 1)}
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("GLOO_SOCKET_IFNAME", "lo")
        agents = stack.enter_context(Agents(config, model, logs=directory))
        servers: dict[str, list[Server]] = {}
        for name, (weight_format, count) in formats.items():
            of_server = ServerConfig(mem_fraction_static=0.2, max_total_tokens=65536)
            spec = ServerSpec(model, of_server, weight_format, CONTEXT_LENGTH)
            servers[name] = [
                start(spec, directory / f"{name}_{index}.log", seed=index) for index in range(count)
            ]
            for server in servers[name]:
                stack.callback(server.stop)
        learner = Learner(model, LearnerConfig(dtype="float32"), OptimizerConfig())
        stack.enter_context(closing(learner))
        tokenizer = AutoTokenizer.from_pretrained(model)
        publishers, clients = {}, {}
        for name, (weight_format, _) in formats.items():
            wait_ready(servers[name], timeout_s=400)
            fleet = stack.enter_context(closing(Fleet(name, dict(enumerate(servers[name])))))
            fleet.watch()
            settings = QuantizationConfig(format=weight_format)
            publishers[name] = Publisher(learner, fleet, settings)
            stack.enter_context(closing(publishers[name]))
            publishers[name].publish()
            clients[name] = Recording(agents, 0.0, fleet, tokenizer, [EOS_TOKEN_ID])
        yield Deployment(learner, servers, publishers, clients, tokenizer)


def random_plan(random: Random) -> list[tuple[Any, ...]]:
    """Return what an episode does: turns, observations, chats, branches, pauses, in any order."""

    def ids() -> list[int]:
        return [random.randrange(2, VOCABULARY) for _ in range(random.randrange(1, 20))]

    plan: list[tuple[Any, ...]] = [("generate", 8)]
    for _ in range(random.randrange(2, 8)):
        plan.append(
            random.choice(
                [
                    ("generate", random.randrange(1, 24)),
                    ("generate", random.randrange(1, 24)),
                    ("observe", ids()),
                    ("chat", random.choice(["this is the thing", "go on", "</think>"]), 20),
                    ("chat", "the end", 20),
                    ("begin", ids()),
                    ("wait", 0.3 * random.random()),
                ]
            )
        )
    return [*plan, ("generate", 8)]


def prompts(random: Random, directory: Path, count: int = EPISODES) -> list[Prompt]:
    return [
        Prompt(
            str(number),
            str(number),
            "",
            [random.randrange(2, VOCABULARY) for _ in range(random.randrange(4, 30))],
            {"plan": random_plan(random), "directory": str(directory)},
        )
        for number in range(count)
    ]


def spans(completion: Completion) -> Iterator[tuple[list[int], list[int], list[float], list[int]]]:
    """Yield context, tokens, log-probs and versions of each sampled span of a sequence."""
    assert completion.episode is not None
    whole, sampled = completion.token_ids, completion.sampled
    prompt = completion.episode.prompt_ids
    start = done = 0
    while start < len(whole):
        end = start
        while end < len(whole) and sampled[end]:
            end += 1
        if end > start:
            place = slice(done, done + end - start)
            yield (
                prompt + whole[:start],
                whole[start:end],
                completion.behaviour_logprobs[place],
                completion.token_versions[place],
            )
            done = place.stop
        start = max(end, start + 1)


def turns_of(answers: list[tuple[list[int], Completion]]) -> list[Any]:
    """Return what `spans` would, joining turns without an observation between them."""
    found: list[list[Any]] = []
    waiting = [
        [
            context,
            list(answer.token_ids),
            list(answer.behaviour_logprobs),
            list(answer.token_versions),
        ]
        for context, answer in answers
    ]
    for context, *sampled in waiting:
        before = next((each for each in found if each[0] + each[1] == context), None)
        if before:
            for kept, new in zip(before[1:], sampled, strict=True):
                kept += new
        else:
            found.append([context, *sampled])
    return sorted(found)


def mismatch(
    deployment: Deployment,
    groups: list[RolloutGroup],
    later: bool = False,
    masks: Sequence[str] = ("mask_sizes", "mask_ids"),
) -> float:
    """Return the k3 of behaviour and proximal log-probs, of all turns or those after the first."""
    batch = pack(groups)
    share = deployment.learner.share(batch.only("behaviour_logprobs", *masks))
    deployment.learner.score(share, ["proximal_logprobs"], temperature=1.0)
    proximal = torch.cat(share.collect("proximal_logprobs"))
    assert batch.behaviour_logprobs is not None
    mask = batch.loss_mask.clone()
    if later:
        for part in mask.split(batch.lengths.tolist()):
            first = int(part.int().argmax())
            ends = (~part[first:]).nonzero()
            part[: first + int(ends[0]) if len(ends) else len(part)] = False
    sums = mismatch_sums(proximal, batch.behaviour_logprobs, mask, 2.0)
    measured = rollout_statistics({name: float(value) for name, value in sums.items()})
    print(f"{int(mask.sum())} tokens: k3 {measured['kl_behaviour_proximal_k3']:.2e}")
    return measured["kl_behaviour_proximal_k3"]


def groups_of(asked: list[Prompt], completions: list[Completion]) -> list[RolloutGroup]:
    return [
        RolloutGroup(prompt, [completion], [0.0])
        for prompt, completion in zip(asked, completions, strict=True)
    ]


def play(
    deployment: Deployment,
    name: str,
    directory: Path,
    seed: int,
    disturb: Any = None,
    without: Sequence[str] = (),
    **sampling: Any,
) -> tuple[list[Completion], list[Prompt]]:
    """Play random conversations, `without` some of their parts; `disturb` runs beside them."""
    asked = prompts(Random(seed), directory)
    for prompt in asked:
        prompt.metadata["plan"] = [
            part for part in prompt.metadata["plan"] if part[0] not in without
        ]
    client = deployment.clients[name]
    client.answers.clear()
    thread = threading.Thread(target=disturb or (lambda: None))
    thread.start()
    groups = client.generate(asked, **SETTINGS, **sampling)
    thread.join()
    return [completion for (completion,) in groups], asked


def assert_exact(client: Recording, completions: list[Completion], directory: Path) -> None:
    """Check every token of every sequence against the answers of the servers and the agent's view.

    No token that a server sampled is missing, and none is there twice.
    """
    sequences = [each for completion in completions for each in completion.sequences()]
    recorded = sorted(list(span) for each in sequences for span in spans(each))
    assert recorded == turns_of(client.answers)
    for number, completion in enumerate(completions):
        assert completion.episode is not None and completion.episode.end == "answered"
        seen = json.loads((directory / f"{number}.json").read_text())
        assert seen == [
            each.prompt_ids(Prompt("", "", "", [])) + each.token_ids
            for each in completion.sequences()
        ]


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_log_probs_of_episodes_are_as_exact_as_those_of_single_answers(
    deployment: Deployment, name: str, tmp_path: Path
) -> None:
    completions, asked = play(deployment, name, tmp_path, seed=1)
    client = deployment.clients[name]
    assert_exact(client, completions, tmp_path)
    assert sum(len(each.sequences()) > 1 for each in completions) > EPISODES / 4
    episodes = groups_of(asked, completions)
    singly = RolloutClient(client.fleet, deployment.tokenizer, [EOS_TOKEN_ID])
    answers = [answer for (answer,) in singly.generate(asked * 2, **SETTINGS)]
    of_answers = mismatch(deployment, groups_of(asked * 2, answers))
    assert mismatch(deployment, episodes) < 1.5 * of_answers
    assert mismatch(deployment, episodes, later=True) < 1.5 * of_answers
    masked, asked = play(deployment, name, tmp_path, 2, top_p=0.9, records_masks=True)
    assert_exact(client, masked, tmp_path)
    of_masked = mismatch(deployment, groups_of(asked, masked))
    assert of_masked < 1.5 * of_answers
    # A learner's log-probs over the whole vocabulary are off by -log(0.9).
    assert mismatch(deployment, groups_of(asked, masked), masks=()) > 3 * of_masked


def test_publishes_between_and_within_turns_change_no_token(
    deployment: Deployment, tmp_path: Path
) -> None:
    publisher = deployment.publishers["int8"]
    first = publisher.version

    def publish_often() -> None:
        for _ in range(4):
            time.sleep(0.5)
            publisher.publish()

    completions, _ = play(deployment, "int8", tmp_path, seed=2, disturb=publish_often)
    assert_exact(deployment.clients["int8"], completions, tmp_path)
    versions = [version for each in completions for version in each.sequences()[0].token_versions]
    versions += [version for each in completions for version in each.token_versions]
    assert min(versions) >= first and len(set(versions)) > 1
    for completion in completions:
        assert completion.oldest_version == min(
            min(each.token_versions) for each in completion.sequences()
        )


def test_turns_of_an_episode_find_its_tokens_in_the_cache(
    deployment: Deployment, tmp_path: Path
) -> None:
    completions, _ = play(deployment, "int8", tmp_path, seed=3, without=["chat", "begin"])
    found = read = 0
    for completion in completions:
        assert completion.episode is not None
        for before, turn in pairwise(completion.episode.turns):
            found += turn.cached_tokens
            read += before.context + before.length - 1  # the last one was read by no pass
    print(f"of {read} tokens of earlier turns {found} were cached")
    assert found > 0.9 * read  # an episode moves to the other server if its own is much busier


def test_episodes_go_on_elsewhere_when_their_server_dies(
    deployment: Deployment, tmp_path: Path
) -> None:
    """The last test: one server is gone afterwards."""

    def kill() -> None:
        time.sleep(1.0)
        deployment.servers["int8"][0].stop()

    completions, _ = play(deployment, "int8", tmp_path, seed=4, disturb=kill)
    assert_exact(deployment.clients["int8"], completions, tmp_path)
    assert len(deployment.clients["int8"].fleet.members("serving")) == 1
