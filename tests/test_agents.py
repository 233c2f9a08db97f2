"""Agents in processes of their own: what they are given, and what each way to fail costs."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conversations import chat_tokenizer
from qurl_megatron.agents.client import AgentClient, with_own_scores
from qurl_megatron.agents.pool import Agents, check_agent
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import Config, ConfigError
from samplers import scores_of
from tiny import EOS_TOKEN_ID

AGENT = """
import asyncio, os, time

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
    turn = await policy.generate(max_tokens=2)
    if how == "raises":
        raise LookupError("no such table")
    elif how == "sleeps":
        await asyncio.sleep(60)
    elif how == "blocks":
        time.sleep(60)
    elif how == "blocks in a task":
        async def block():
            time.sleep(60)
        await asyncio.create_task(block())
    elif how == "dies":
        os._exit(3)
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

async def chats(policy, problem):
    message = await policy.chat([{"role": "user", "content": "hello"}])
    return {"reward": 1.0, "sampled": policy.ids[-1]}

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


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Play an episode of each of some answers at once; return the completions and the client."""
    chat_tokenizer(directory=tmp_path / "model")
    (tmp_path / "agent.py").write_text(AGENT)
    opened: list[Agents] = []

    def play(
        name: str, *answers: str, delay_s: float = 0.0, **settings: Any
    ) -> tuple[list[Completion], Scripted]:
        config = Config(model=str(tmp_path / "model"), reward_wrong=-1.0)
        rollout = config.rollout
        rollout.agent, rollout.max_episode_tokens = f"{tmp_path}/agent.py:{name}", 40
        rollout.agent_workers, rollout.agent_turn_timeout_s = 1, 1.5
        for field, value in settings.items():
            setattr(rollout, field, value)
        agents = Agents(rollout, config.model, tmp_path)
        opened.append(agents)
        client = Scripted(agents, config, None, chat_tokenizer(), [EOS_TOKEN_ID])  # type: ignore
        client.delay_s, client.contexts = delay_s, []
        prompts = [Prompt("0", "7", answer, PROMPT) for answer in answers or ("",)]
        settings = {"n": 1, "max_new_tokens": 9, "stop_token_ids": [EOS_TOKEN_ID], "top_k": -1}

        async def all_at_once() -> list[list[Completion]]:
            return await asyncio.gather(*(client.group(prompt, settings) for prompt in prompts))

        return [completion for (completion,) in asyncio.run(all_at_once())], client

    yield play
    for agents in opened:
        agents.close()


def test_an_episode_has_what_was_sampled_and_what_was_observed_in_between(play: Any) -> None:
    (episode,), client = play("three")
    assert episode.token_ids == [202, 203, 100, 101, 206, 207, 208, 101, 102, 211, 212, 213, 214]
    assert episode.sampled == [True] * 2 + [False] * 2 + [True] * 3 + [False] * 2 + [True] * 4
    assert episode.behaviour_logprobs == [-0.5] * 9 and episode.token_versions == [4] * 9
    assert episode.episode is not None and episode.episode.prompt_ids == PROMPT
    assert [tuple(turn) for turn in episode.episode.turns] == [(2, 2, 0), (3, 6, 0), (4, 11, 0)]
    assert client.contexts == [
        PROMPT + episode.token_ids[:length] for length in (0, 4, 9)
    ]  # each a beginning of the next
    assert episode.episode.score == Score(0.5, {"turns": 3.0, "asked": 7.0}, "")
    assert episode.episode.end == "answered" and not episode.truncated and episode.text == "of 4"


def test_a_new_beginning_opens_a_branch(play: Any) -> None:
    (episode,), client = play("branched")
    first, last = episode.sequences()
    assert (first.token_ids, first.prompt_ids(PROMPT)) == ([202], PROMPT)
    assert first.sampled == [True] and last is episode
    assert client.contexts == [PROMPT, [7, 8, 9], [7, 8, 9, *last.token_ids[:3]]]
    assert last.sampled == [True, True, False, True, True, True]
    assert episode.num_sampled == 6 and len(episode.episode.turns) == 3


ENDS = {  # what an episode does -> how it ends, the reward, and what went wrong
    "well": ("answered", 1.0, ""),
    "raises": ("error", -1.0, "LookupError: no such table"),
    "sleeps": ("deadline", -1.0, "took longer than agent_turn_timeout_s 1.5 between two turns"),
    "no number": ("error", -1.0, "TypeError: it returned 'much'; expected a number"),
    "unplayed": ("error", -1.0, "the agent returned without a turn of the policy"),
    "long prompt": ("error", -1.0, "the sequence has 50 tokens; max_episode_tokens is 40"),
    "talks": ("turns", -1.0, ""),
    "fills": ("tokens", -1.0, ""),
}


def test_each_way_to_end_costs_that_episode_only(play: Any, tmp_path: Path) -> None:
    episodes, _ = play("each", *ENDS, "unsure", max_turns=6)
    for episode, (end, reward, failure) in zip(episodes, ENDS.values(), strict=False):
        assert episode.episode is not None and episode.episode.score is not None
        assert (episode.episode.end, episode.episode.score.failure) == (end, failure)
        assert episode.episode.score.value == reward
        assert episode.has_failed == (end in ("deadline", "error"))
        assert episode.truncated == (end in ("turns", "tokens"))
    assert len(episodes[6].episode.turns) == 6
    assert len(PROMPT + episodes[7].token_ids) == 40
    unsure = episodes[-1]
    assert unsure.episode is not None and unsure.episode.score is None
    log = (tmp_path / "agents_0.log").read_text()
    assert "episode 1: plays raises\n" in log
    assert "episode 1: LookupError: no such table\n" in log  # with its traceback


@pytest.mark.parametrize(
    ("how", "end", "failure"),
    [
        ("blocks", "deadline", "blocked its process for longer than agent_turn_timeout_s 1.5"),
        ("blocks in a task", "deadline", "blocked its process"),
        ("dies", "error", "its process ended with code 3"),
    ],
)
def test_a_process_that_hangs_or_dies_costs_the_episode_that_did_it_only(
    play: Any, how: str, end: str, failure: str
) -> None:
    bad, *others = play("each", how, *["well"] * 5)[0]
    assert bad.episode.end == end and bad.episode.score.failure.startswith(failure)
    for episode in others:  # begun again, without what they had sampled
        assert episode.episode.end == "answered" and len(episode.episode.turns) == 2
        assert episode.token_ids == [202, 203, 204, 205]


def test_the_time_of_an_episode_includes_that_of_the_servers(play: Any) -> None:
    began = time.monotonic()
    (episode,), _ = play("each", "well", delay_s=30.0, agent_timeout_s=1.0)
    assert (episode.episode.end, episode.episode.score.failure) == (
        "deadline",
        "took longer than agent_timeout_s 1",
    )
    assert time.monotonic() - began < 25


def test_the_time_between_turns_does_not(play: Any) -> None:
    (episode,), _ = play("each", "well", delay_s=2.0)
    assert episode.episode.end == "answered"


def test_only_as_many_episodes_are_played_at_once_as_there_may_be(play: Any) -> None:
    began = time.monotonic()
    episodes, _ = play("each", *["well"] * 5, agent_episodes=1)
    assert all(each.episode.end == "answered" for each in episodes)
    assert time.monotonic() - began > 5 * 0.2


def test_what_an_agent_leaves_open_the_runs_reward_scores(play: Any) -> None:
    episodes, _ = play("each", "well", "unsure")
    seen = []

    def verify(prompt: Prompt, completions: Any) -> Any:
        seen.extend(each.text for each in completions)
        return scores_of([0.25] * len(completions))

    scores = with_own_scores(verify)(Prompt("", "", "", []), episodes).result()
    assert [score.value for score in scores] == [1.0, 0.25] and seen == ["of 2"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("plain", r"TypeError: it is not async; expected `async def NAME\(policy, problem\)`"),
        ("odd", r"TypeError: its parameters are \(policy\); expected \(policy, problem\)"),
        ("absent", "ImportError: .*agent.py has no function absent"),
    ],
)
def test_an_agent_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    chat_tokenizer(directory=tmp_path / "model")
    config = Config(model=str(tmp_path / "model"))
    config.rollout.agent = f"{tmp_path}/agent.py:{name}"
    config.rollout.agent_workers = 1
    with pytest.raises(ConfigError, match=f"^rollout.agent=.*{name}: {why}$"):
        check_agent(config)


def test_what_sampling_raises_ends_the_run_and_not_the_episode(play: Any) -> None:
    async def refuse(*_: Any) -> Awaitable[Any]:
        raise ConnectionError("no server")

    original, Scripted.complete = Scripted.complete, refuse  # type: ignore
    try:
        with pytest.raises(ConnectionError):
            play("three")
    finally:
        Scripted.complete = original  # type: ignore[method-assign]
