"""Agents in processes of their own: what they are given, and what each way to fail costs."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from conversations import VOCABULARY, chat_tokenizer
from qurl_megatron.algorithm.batch import Completion, Episode, Prompt
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    RolloutConfig,
    SamplingConfig,
    ScoringConfig,
    StageConfig,
)
from qurl_megatron.data.scoring import Scorer
from qurl_megatron.evaluation.evaluate import EvalConfig
from qurl_megatron.extensions.agents import episodes
from qurl_megatron.extensions.agents.checks import load
from qurl_megatron.extensions.agents.client import AgentClient, _Sequence
from qurl_megatron.extensions.agents.policy import Request
from qurl_megatron.extensions.agents.pool import Agents, _Playing
from qurl_megatron.loop.sampling import NothingToTrainOn
from samplers import sampler_of
from tiny import EOS_TOKEN_ID, build_tiny_model

AGENT = """
import asyncio, contextlib, itertools, os, subprocess, sys, time
from pathlib import Path
import anyio
import numpy as np

class Unsayable(Exception):
    def __str__(self):
        raise KeyError

NUMBERS = itertools.count()

async def play(policy, problem):
    agents = {"three": three, "branched": branched, "mixed": mixed}
    return await agents.get(problem.answer, each)(policy, problem)

async def mixed(policy, problem):
    number = next(NUMBERS) % 4
    await policy.generate(max_tokens=2)
    policy.observe([9])
    await policy.generate(max_tokens=1)
    return [1.0, 0.5, 0.0, None][number] if number < 3 else int("nothing")

async def three(policy, problem):
    for number in range(3):
        turn = await policy.generate(max_tokens=2 + number)
        policy.observe([100 + number, 101 + number])
    return {"reward": 0.5, "turns": policy.num_turns, "asked": float(problem.question)}

async def branched(policy, problem):
    await policy.generate(max_tokens=1)
    policy.begin([7, 8, 9])
    await policy.generate(max_tokens=2)
    policy.observe([5])
    await policy.generate(max_tokens=3)
    return 1

async def each(policy, problem):
    how = problem.answer
    if how == "unplayed":
        return 1.0
    print("plays", how)
    if how == "long prompt":
        policy.begin([3] * 50)
    elif how == "no prompt":
        policy.begin([])
    elif how == "no token":
        policy.observe([3, -1])
    elif how == "beyond the tokenizer":
        policy.begin([10**6])
    elif how == "half a token":
        policy.observe([0.5])
    elif how == "no room":
        await policy.generate(max_tokens=0)
    elif how == "no stop":
        await policy.generate(stop=[10**6])
    elif how == "gives up":
        policy.observe([41])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(policy.generate(), 0.2)
        assert not policy.num_turns
        policy.observe([42])
    turn = await policy.generate(max_tokens=2)
    if how == "raises":
        raise LookupError("no such table")
    elif how == "sleeps":
        await asyncio.sleep(60)
    elif how == "blocks in a task":
        async def block():
            time.sleep(60)
        await asyncio.create_task(block())
    elif how == "leaves a program behind":
        program = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(__file__).with_name("left").write_text(str(program.pid))
        os._exit(3)
    elif how == "swallows":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
    elif how == "cancels":
        cancelled = asyncio.create_task(asyncio.sleep(60))
        cancelled.cancel()
        await cancelled
    elif how == "cancels a group":
        async with anyio.create_task_group() as group:  # as httpx and openai's client do
            group.start_soon(anyio.sleep, 60)
            await anyio.sleep(0.1)
            group.cancel_scope.cancel()
    elif how == "leaves":
        async def leave():
            sys.exit(3)
        await asyncio.create_task(leave())
    elif how == "cannot say why":
        raise Unsayable()
    elif how == "says odd things":
        print("\\ud800")
        raise ValueError("\\ud800")
    elif how == "asks elsewhere":
        await asyncio.to_thread(lambda: asyncio.run(policy.generate()))
    elif how == "reads much":
        policy.encode("x" * 10**6)
    elif how == "forks" and os.fork() == 0:
        return 0.0
    elif how == "has numbers of numpy":
        await policy.generate(max_tokens=np.int64(1))
        return np.float32(1.0)
    elif how == "no number":
        return "much"
    elif how == "talks":
        while True:
            policy.observe([40])
            await policy.generate(max_tokens=1)
    elif how == "fills":
        while True:
            await policy.generate()
    elif how == "unsure":
        return None
    await asyncio.sleep(0.2)
    await policy.generate(max_tokens=2)
    return 1.0

def plain(policy, problem):
    return 1.0

async def odd(policy):
    return 1.0
"""
PROMPT = [50, 51]


class Scripted(AgentClient):
    """A client whose fleet samples 200, 201, ...: the next number at each token."""

    delay_s = 0.0

    async def complete(
        self, token_ids: list[int], sampling: dict[str, Any], prefer: Any = None
    ) -> Any:
        await asyncio.sleep(self.delay_s)
        length = sampling["max_new_tokens"]
        self.contexts.append(list(token_ids))
        ids = [200 + (len(token_ids) + place) % 50 for place in range(length)]
        turn = Completion(ids, [-0.5] * length, f"of {length}", True, [4] * length)
        return [turn], None

    contexts: list[list[int]] = []


Play = Callable[..., tuple[list[Completion], Scripted]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("agents")
    model = build_tiny_model(directory / "model", vocab_size=VOCABULARY)
    chat_tokenizer(directory=model)
    (directory / "agent.py").write_text(AGENT)
    return directory


@pytest.fixture(scope="module")
def play(directory: Path) -> Iterator[Play]:
    """Play an episode of each of some answers at once; return the completions and the client.

    Runs with the same settings share a process, whose start takes seconds.
    """
    opened: dict[str, Agents] = {}

    def play(
        *answers: str,
        delay_s: float = 0.0,
        max_turns: int = 0,
        max_episode_tokens: int = 40,
        **settings: Any,
    ) -> tuple[list[Completion], Scripted]:
        config = RolloutConfig(
            agent=f"{directory}/agent.py:play",
            agent_workers=1,
            max_turns=max_turns,
            max_episode_tokens=max_episode_tokens,
            max_prompt_length=20,
            stages={2: StageConfig(99, 1)},
            **{"agent_turn_timeout_s": 1.5, **settings},
        )
        if str(settings) not in opened:
            opened[str(settings)] = Agents(config, directory / "model", logs=directory)
        agents = opened[str(settings)]
        agents.wait_ready()
        agents._config = config
        client = Scripted(agents, -1.0, None, chat_tokenizer(), [EOS_TOKEN_ID])
        client.delay_s, client.contexts = delay_s, []
        prompts = [Prompt("0", "7", answer, PROMPT) for answer in answers]
        sampling = {"n": 1, "max_new_tokens": 9, "stop_token_ids": [EOS_TOKEN_ID], "top_k": -1}

        async def all_at_once() -> list[list[Completion]]:
            return await asyncio.gather(*(client.group(prompt, sampling) for prompt in prompts))

        return [completion for (completion,) in asyncio.run(all_at_once())], client

    yield play
    for agents in opened.values():
        agents.close()


def episode_of(completion: Completion) -> Episode:
    assert completion.episode is not None
    return completion.episode


def score_of(completion: Completion) -> Score:
    assert completion.score is not None
    return completion.score


def test_an_episode_has_what_was_sampled_and_what_was_observed_in_between(play: Play) -> None:
    (episode,), client = play("three")
    assert episode.token_ids == [202, 203, 100, 101, 206, 207, 208, 101, 102, 211, 212, 213, 214]
    assert episode.sampled == [True] * 2 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 4
    assert episode.behaviour_logprobs == [-0.5] * 9 and episode.token_versions == [4] * 9
    assert episode_of(episode).prompt_ids == PROMPT
    assert [tuple(turn) for turn in episode_of(episode).turns] == [(2, 2, 0), (3, 6, 0), (4, 11, 0)]
    assert client.contexts == [
        PROMPT + episode.token_ids[:length] for length in (0, 4, 9)
    ]  # each a beginning of the next
    assert score_of(episode) == Score(0.5, {"turns": 3.0, "asked": 7.0}, "")
    assert (
        episode_of(episode).end == "answered" and not episode.truncated and episode.text == "of 4"
    )


def test_a_token_keeps_the_experts_of_the_pass_that_sampled_the_next() -> None:
    """Later turns read it again, with the experts of another pass, perhaps of other weights."""

    def turn(ids: list[int], read: int, expert: int) -> Completion:
        experts = torch.full((read, 2, 1), expert, dtype=torch.int16)
        return Completion(ids, [-1.0] * len(ids), "", False, [1] * len(ids), experts)

    sequence = _Sequence([1, 2])
    sequence.sample(turn([3, 4], 3, 7))
    sequence.observe([5])
    sequence.sample(turn([6], 5, 8))
    sequence.observe([9])  # nothing is sampled after it
    episode = sequence.completion()
    assert episode.token_ids == [3, 4, 5, 6] and episode.routed_experts is not None
    assert episode.routed_experts[:, 0, 0].tolist() == [7, 7, 7, 8, 8]


def test_an_episode_without_a_limit_has_the_lengths_of_its_stage(play: Play) -> None:
    """A prompt and a turn: 20 tokens and 9, and not the 99 of a later stage."""
    (episode,), _ = play("fills", max_episode_tokens=0)
    assert len(PROMPT + episode.token_ids) == 20 + 9 and episode_of(episode).end == "tokens"


def test_a_turn_that_nobody_waits_for_is_given_up(play: Play) -> None:
    (episode,), client = play("gives up", delay_s=0.6)
    assert episode_of(episode).prompt_ids == [*PROMPT, 41]
    assert episode.token_ids == [42, 204, 205, 206, 207]
    assert episode.sampled == [False] + [True] * 4 and episode_of(episode).end == "answered"
    assert client.contexts == [PROMPT + [41, 42], PROMPT + [41, 42, 204, 205]]


def test_what_a_turn_reads_is_kept_however_soon_it_is_given_up() -> None:
    """Both messages may have come before the loop goes on."""
    read: list[list[int]] = []
    answers: list[Any] = []

    async def sample(request: Request) -> None:
        read.append(request.ids)
        await asyncio.sleep(60)

    async def run() -> None:
        playing = _Playing(answers.append, sample)
        playing.deliver("sample", Request(True, [5], 1, []))
        playing.deliver("abandon", None)
        async with asyncio.timeout(5):
            while not answers:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert (read, answers) == ([[5]], [None])


def test_a_new_beginning_opens_a_branch(play: Play) -> None:
    (episode,), client = play("branched")
    first, last = episode.sequences()
    assert (first.token_ids, episode_of(first).prompt_ids) == ([202], PROMPT)
    assert first.sampled == [True] and last is episode
    assert client.contexts == [PROMPT, [7, 8, 9], [7, 8, 9, *last.token_ids[:3]]]
    assert last.sampled == [True, True, False, True, True, True]
    assert episode.num_sampled == 6 and len(episode_of(episode).turns) == 3


ENDS = {  # what an episode does -> how it ends, the reward, and what went wrong
    "well": ("answered", 1.0, ""),
    "raises": ("error", -1.0, "LookupError: no such table"),
    "sleeps": ("deadline", -1.0, "took longer than agent_turn_timeout_s 1.5 between two turns"),
    "no number": ("error", -1.0, "TypeError: it returned 'much'; expected a number"),
    "unplayed": ("error", -1.0, "the agent returned without a turn of the policy"),
    "long prompt": ("error", -1.0, "the sequence has 50 tokens; max_episode_tokens is 40"),
    "no prompt": ("error", -1.0, "ValueError: the sequence is empty; the policy must read a token"),
    "no token": ("error", -1.0, "ValueError: token -1: the tokenizer has"),
    "beyond the tokenizer": ("error", -1.0, "ValueError: token 1000000: the tokenizer has"),
    "half a token": ("error", -1.0, "TypeError: 'float' object cannot be interpreted"),
    "no room": ("error", -1.0, "ValueError: max_tokens=0: expected at least 1"),
    "swallows": ("deadline", -1.0, "took longer than agent_turn_timeout_s 1.5 between two turns"),
    "cancels": ("error", -1.0, "asyncio.exceptions.CancelledError"),
    "cancels a group": ("answered", 1.0, ""),
    "leaves": ("error", -1.0, "RuntimeError: SystemExit: 3"),
    "cannot say why": ("error", -1.0, "agent.Unsayable: <exception str() failed>"),
    "says odd things": ("error", -1.0, "ValueError: \ud800"),
    "asks elsewhere": ("error", -1.0, "RuntimeError: a policy belongs to the event loop"),
    "reads much": ("tokens", -1.0, ""),
    "forks": ("answered", 1.0, ""),
    "has numbers of numpy": ("answered", 1.0, ""),
    "no stop": ("error", -1.0, "ValueError: token 1000000: the tokenizer has"),
    "talks": ("turns", -1.0, ""),
    "fills": ("tokens", -1.0, ""),
}


def test_each_way_to_end_costs_that_episode_only(play: Play, directory: Path) -> None:
    episodes, _ = play(*ENDS, "unsure", max_turns=6)
    for episode, (end, reward, failure) in zip(episodes, ENDS.values(), strict=False):
        score = score_of(episode)
        assert (episode_of(episode).end, score.value) == (end, reward)
        assert score.failure.startswith(failure) and bool(score.failure) == bool(failure)
        assert bool(episode.failure) == (end in ("deadline", "error"))
        assert episode.truncated == (end in ("turns", "tokens"))
    talked, filled = (episodes[[*ENDS].index(name)] for name in ("talks", "fills"))
    assert len(episode_of(talked).turns) == 6
    assert len(PROMPT + filled.token_ids) == 40
    assert episodes[-1].score is None
    log = (directory / "agents_0.log").read_text()
    assert re.search(r"episode (\d+): plays raises\n(.*\n)*episode \1: LookupError: no such", log)


@pytest.mark.parametrize(
    ("how", "end", "failure"),
    [
        (
            "blocks in a task",
            "deadline",
            "blocked its process for longer than agent_turn_timeout_s 1.5",
        ),
        ("leaves a program behind", "error", "its process ended with code 3"),
    ],
)
def test_a_process_that_hangs_or_dies_costs_the_episode_that_did_it_only(
    play: Play, directory: Path, how: str, end: str, failure: str
) -> None:
    bad, *others = play(how, *["well"] * 5)[0]
    assert episode_of(bad).end == end and score_of(bad).failure.startswith(failure)
    for episode in others:  # begun again, without what they had sampled
        assert episode_of(episode).end == "answered" and len(episode_of(episode).turns) == 2
        assert episode.token_ids == [202, 203, 204, 205]
    if (left := directory / "left").exists():
        assert not psutil.pid_exists(int(left.read_text()))


def test_the_time_of_an_episode_includes_that_of_the_servers(play: Play) -> None:
    (episode,), _ = play("well", delay_s=3600.0, agent_timeout_s=1.0)
    assert episode_of(episode).end == "deadline"
    assert score_of(episode).failure == "took longer than agent_timeout_s 1"


def test_the_time_between_turns_does_not(play: Play) -> None:
    (episode,), _ = play("well", delay_s=2.0)
    assert episode_of(episode).end == "answered"


def test_only_as_many_episodes_are_played_at_once_as_there_may_be(play: Play) -> None:
    began = time.monotonic()
    episodes, _ = play(*["well"] * 5, agent_episodes=1)
    assert all(episode_of(each).end == "answered" for each in episodes)
    assert time.monotonic() - began > 5 * 0.2


def test_what_an_agent_leaves_open_the_runs_reward_scores(play: Play) -> None:
    episodes, _ = play("well", "unsure")
    assert [each.text for each in episodes] == ["of 2", "of 2"]
    with Scorer(Config(reward="exact", scoring=ScoringConfig(right=0.25))) as scorer:
        scores = scorer.submit(Prompt("", "", "of 2", []), episodes).result()
    assert [score.value for score in scores] == [1.0, 0.25]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "agent.py:plain",
            r"TypeError: it is not async; expected `async def NAME\(policy, problem\)`",
        ),
        ("agent.py:odd", r"TypeError: its parameters are \(policy\); expected \(policy, problem\)"),
        ("agent.py:absent", "ImportError: .*agent.py has no function absent"),
        ("old.py:play", "ModuleNotFoundError: .*; it is qurl_megatron.extensions.agents now"),
    ],
)
def test_an_agent_that_cannot_be_used_is_refused_in_one_line(
    directory: Path, name: str, why: str
) -> None:
    (directory / "old.py").write_text("from qurl_megatron.agents.tools import call_tools")
    config = SamplingConfig(agent=f"{directory}/{name}")
    with pytest.raises(ConfigError, match=f"^rollout.agent=.*{name}: {why}$"):
        load(config, directory / "model", chat_tokenizer(), "rollout.")


def test_a_command_that_plays_episodes_serves_the_weights_in_the_format(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Served(Exception):
        pass

    def serving(config: EvalConfig, served: Path, console: Any) -> Any:
        raise Served(json.loads((served / "config.json").read_text())["quantization_config"])

    monkeypatch.setattr(episodes, "serving", serving)
    (tmp_path / "problems.jsonl").write_text('{"question": "1", "answer": "2"}\n')
    config = EvalConfig(
        model=str(directory / "model"),
        data={"problems": str(tmp_path / "problems.jsonl")},
        agent=f"{directory}/agent.py:three",
        format="int8",
        max_prompt_length=50,
        max_completion_length=50,
    )
    with pytest.raises(Served, match="int8"):
        episodes.run(config, 1)


def test_what_sampling_raises_ends_the_run_and_not_the_episode(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> Any:
        raise ConnectionError("no server")

    monkeypatch.setattr(Scripted, "complete", refuse)
    with pytest.raises(ConnectionError):
        play("three")


@pytest.mark.parametrize("answer", ["mixed", "raises"])
def test_a_step_trains_on_episodes_with_a_reward_and_counts_the_others(
    play: Play, answer: str
) -> None:
    _, client = play("three")
    config = Config()
    config.rollout.prompts_per_step, config.rollout.completions_per_prompt = 1, 4
    prompts = [Prompt("0", "7", answer, PROMPT)]
    own = Scorer(Config(reward="no_such_module:own"))  # an agent gives its own rewards
    with own, sampler_of(config, client, own.submit, prompts, chat_tokenizer()) as sampler:
        if answer == "raises":
            with pytest.raises(
                NothingToTrainOn, match="of step 1 .* try 3 of 3; LookupError: no such"
            ):
                sampler.sample(step=1, version=4)
            return
        batch, summary = sampler.sample(step=1, version=4)
    assert len(batch) == 3 and batch.loss_mask.sum() == 3 * 3
    assert batch.advantages is not None and batch.token_staleness is not None
    by_sequence = batch.advantages.split(batch.lengths.tolist())
    assert sorted(round(float(each[-1]), 3) for each in by_sequence) == [-1, 0, 1]  # of three
    assert not batch.token_staleness.any()
    assert summary["reward_mean"] == 0.5 and summary["episodes_failed"] == 1
    assert summary["episode_failure"].startswith("ValueError: invalid literal for int()")
    assert summary["episode_ends"]["answered"] == 3 and summary["episode_ends"]["error"] == 1
    assert summary["turns_mean"] == 2 and summary["observed_length_mean"] == 1
