"""Episodes over HTTP: OpenAI's client at an episode's endpoint, and environments of OpenEnv."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import (
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    BadRequestError,
    NotFoundError,
)

from conversations import KEEPS_THOUGHTS, chat_tokenizer
from qurl_megatron.extensions.agents.chat import say_once
from qurl_megatron.extensions.agents.endpoint import Endpoint
from qurl_megatron.extensions.agents.openenv import Environment
from qurl_megatron.extensions.agents.policy import Limits, Policy, Request, Turn
from tiny import EOS_TOKEN_ID

TOKENIZER = chat_tokenizer(KEEPS_THOUGHTS)
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "x"}}\n</tool_call>'
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


LIMITS = Limits(3, 99, 500, temperature=0.7)


def play(
    agent: Callable[[Policy, AsyncOpenAI], Awaitable[None]],
    *texts: str,
    asked: list[Request] | None = None,
    limits: Limits = LIMITS,
) -> list[list[Any]]:
    """Have an agent talk to a policy that says these texts; return tokens with who wrote them.

    `asked` gets its requests.
    """
    sequences: list[list[Any]] = []
    said = iter(texts)

    async def sample(request: Request) -> Turn:
        if asked is not None:
            asked.append(request)
        if request.begins:
            sequences.append([])
        ids = [*TOKENIZER.encode(next(said), add_special_tokens=False), EOS_TOKEN_ID]
        sequences[-1] += [(token, False) for token in request.ids]
        sequences[-1] += [(token, True) for token in ids]
        return Turn(ids, "", [-1.0] * len(ids), "stop", [1] * len(ids), 0)

    async def run() -> None:
        endpoint = Endpoint()
        policy = Policy([5], limits, sample, TOKENIZER, endpoint.add)
        async with AsyncOpenAI(base_url=policy.base_url, api_key="none", max_retries=0) as client:
            await agent(policy, client)
            endpoint.drop(policy)
            with pytest.raises(APIStatusError, match="it has ended"):
                await client.chat.completions.create(model="policy", messages=[])

    asyncio.run(run())
    return sequences


def test_openais_client_plays_an_episode_with_tools_and_streams() -> None:
    async def agent(policy: Policy, client: AsyncOpenAI) -> None:
        assert [model.id async for model in await client.models.list()] == ["policy"]
        messages: list[Any] = [{"role": "user", "content": "what is x"}]
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[LOOK], max_tokens=30
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        call = choice.message.tool_calls[0]
        assert call.type == "function"
        assert call.function.name == "look" and call.function.arguments == '{"key": "x"}'
        assert answer.usage is not None and answer.usage.total_tokens == len(policy.ids)
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        stream = await client.chat.completions.create(
            model="policy", messages=messages, tools=[LOOK], stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        assert text == "it is 42" and chunks[-1].finish_reason == "stop"

    (sequence,) = play(agent, CALL, "it is 42")
    sampled = [token for token, sampled in sequence if sampled]
    assert TOKENIZER.decode(sampled) == f"{CALL}<|im_end|>it is 42<|im_end|>"


def test_what_an_episode_has_no_room_for_and_what_is_no_chat_are_refused() -> None:
    async def agent(policy: Policy, client: AsyncOpenAI) -> None:
        async def refused(match: str, **body: Any) -> None:
            with pytest.raises(APIStatusError, match=match):
                await client.chat.completions.create(**({"model": "policy"} | body))

        user: Any = {"role": "user", "content": "go on"}
        async with aiohttp.ClientSession() as session:
            url = f"{policy.base_url}/chat/completions"
            for body in ("no JSON", "[" * 10**6, '{"messages": [5]}'):
                async with session.post(url, data=body) as answer:
                    assert answer.status == 400
        for number in range(3):
            await client.chat.completions.create(model="policy", messages=[user] * (number + 1))
        await refused("max_turns is 3", messages=[user])

    assert len(play(agent, "a", "b", "c")) == 3  # each began anew


REFUSED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"top_p": 0.9},
    {"seed": 1},
    {"n": 2},
    {"logprobs": True},
    {"top_logprobs": 3},
    {"response_format": {"type": "json_object"}},
    {"tool_choice": "required"},
    {"tools": [LOOK], "tool_choice": "none"},
    {"parallel_tool_calls": False},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -1},
    {"logit_bias": {"5": -100}},
    {"reasoning_effort": "low"},
    {"extra_body": {"top_k": 20}},
    {"extra_body": {"min_p": 0.1}},
    {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    {"stop": ["two words", ""]},
    {"max_tokens": 0},
    {"max_completion_tokens": -1},
]
MEANS_NOTHING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 1,
    "n": 1,
    "logprobs": False,
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "seed": None,
    "user": "me",
    "extra_body": {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
}


def test_what_would_change_sampling_is_refused_or_honoured() -> None:
    user: Any = {"role": "user", "content": "go on"}
    asked: list[Request] = []

    async def agent(policy: Policy, client: AsyncOpenAI) -> None:
        create = client.chat.completions.create
        for body in REFUSED:
            name = list(body.get("extra_body", body))[-1]
            match = f"{name.replace('max_completion', 'max')}="
            with pytest.raises(BadRequestError, match=match):
                await create(model="policy", messages=[user], **body)
        assert not asked
        await create(model="policy", messages=[user], **MEANS_NOTHING)
        await create(
            model="policy", messages=[user], stop=["a", "two words"], max_completion_tokens=7
        )
        await create(model="policy", messages=[user], stop="a", tools=[LOOK], tool_choice="auto")

    play(agent, "a", "b", "c", asked=asked)
    (a,) = TOKENIZER.encode("a", add_special_tokens=False)
    assert [request.stop_token_ids for request in asked] == [[], [a], [a]]
    assert [request.stop_texts for request in asked] == [[], ["a", "two words"], ["a"]]
    assert [request.max_tokens for request in asked] == [99, 7, 99]


def test_a_tool_choice_is_checked_in_what_was_sampled() -> None:
    user: Any = {"role": "user", "content": "go on"}
    named: Any = {"type": "function", "function": {"name": "look"}}
    other: Any = {"type": "function", "function": {"name": "other"}}

    async def agent(policy: Policy, client: AsyncOpenAI) -> None:
        async def ask(choice: Any) -> Any:
            return await client.chat.completions.create(
                model="policy", messages=[user], tools=[LOOK], tool_choice=choice
            )

        with pytest.raises(BadRequestError, match="tool_choice=.*makes no such call"):
            await ask("required")
        for choice in ("required", named):
            assert (await ask(choice)).choices[0].finish_reason == "tool_calls"
        with pytest.raises(BadRequestError, match="tool_choice=.*makes no such call"):
            await ask(other)

    play(agent, "no", CALL, CALL, CALL, limits=dataclasses.replace(LIMITS, max_turns=0))


def test_content_may_be_a_list_of_texts_and_nothing_else() -> None:
    async def agent(policy: Policy, client: AsyncOpenAI) -> None:
        text: Any = {"type": "text", "text": "what is x"}
        image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        create = client.chat.completions.create
        await create(model="policy", messages=[{"role": "user", "content": [text]}])
        with pytest.raises(BadRequestError, match="a part that is not text, of type image_url"):
            await create(model="policy", messages=[{"role": "user", "content": [text, image]}])

    (sequence,) = play(agent, "a")
    assert "user\nwhat is x<|im_end|>" in TOKENIZER.decode([token for token, _ in sequence])


def test_what_else_openais_api_has_is_answered_with_a_sentence() -> None:
    async def agent(policy: Policy, client: AsyncOpenAI) -> None:
        assert (await client.models.retrieve("policy")).id == "policy"
        asked: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
            ("POST /v1/responses", lambda: client.responses.create(model="policy", input="x")),
            ("POST /v1/completions", lambda: client.completions.create(model="p", prompt="x")),
            ("POST /v1/embeddings", lambda: client.embeddings.create(model="p", input="x")),
            ("GET /v1/models/other", lambda: client.models.retrieve("other")),
            ("POST /v1/models", lambda: client.post("/models", cast_to=object)),
        ]
        for what, ask in asked:
            with pytest.raises(NotFoundError, match=f"{what} is not served; the turns of an epi"):
                await ask()

    play(agent)


def test_each_of_two_turns_at_once_counts_its_own_tokens() -> None:
    async def agent(policy: Policy, client: AsyncOpenAI) -> None:
        async def count(text: str) -> tuple[int, int]:
            messages: Any = [{"role": "user", "content": text}]
            answer = await client.chat.completions.create(model="policy", messages=messages)
            assert answer.usage is not None
            return answer.usage.prompt_tokens, answer.usage.total_tokens

        at_once = await asyncio.gather(*map(count, ("short", "long" * 50)))
        assert at_once == [await count("short"), await count("long" * 50)]

    play(agent, *"abcd", limits=dataclasses.replace(LIMITS, max_turns=0))


def test_what_has_no_effect_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()
    strict: Any = {**LOOK, "function": {**LOOK["function"], "strict": True}}

    async def agent(policy: Policy, client: AsyncOpenAI) -> None:
        user: Any = {"role": "user", "content": "go on"}
        for _ in range(2):
            await client.chat.completions.create(
                model="policy", messages=[user], tools=[strict], store=True, metadata={"a": "b"}
            )

    play(agent, "a", "b")
    out = capfd.readouterr().out
    assert [out.count(f"{name} of a ") for name in ("metadata", "store", "strict")] == [1, 1, 1]


def test_a_client_that_asks_again_after_its_time_out_gets_a_turn() -> None:
    async def run() -> None:
        given_up = asyncio.Event()

        async def sample(request: Request) -> Turn | None:
            if not given_up.is_set():
                await given_up.wait()
                await asyncio.sleep(0.05)
                return None
            return Turn([EOS_TOKEN_ID], "", [-1.0], "stop", [1], 0)

        policy = Policy([5], LIMITS, sample, TOKENIZER, Endpoint().add, given_up.set)
        user: Any = {"role": "user", "content": "go on"}
        options: Any = {"api_key": "none", "max_retries": 2, "timeout": 0.5}
        async with AsyncOpenAI(base_url=policy.base_url, **options) as client:
            await client.chat.completions.create(model="policy", messages=[user])
        assert policy.num_turns == 1

    asyncio.run(run())


def test_a_client_that_hangs_up_has_its_turn_given_up() -> None:
    async def run() -> None:
        turn: asyncio.Future[Turn | None] = asyncio.get_running_loop().create_future()

        async def sample(request: Request) -> Turn | None:
            return await turn

        def abandon() -> None:
            turn.set_result(None)

        policy = Policy([5], LIMITS, sample, TOKENIZER, Endpoint().add, abandon)
        user: Any = {"role": "user", "content": "go on"}
        options: Any = {"api_key": "none", "max_retries": 0, "timeout": 0.5}
        async with AsyncOpenAI(base_url=policy.base_url, **options) as client:
            with pytest.raises(APITimeoutError):
                await client.chat.completions.create(model="policy", messages=[user])
            assert await asyncio.wait_for(turn, 5) is None
        assert policy.num_turns == 0

    asyncio.run(run())


@asynccontextmanager
async def counting() -> AsyncIterator[str]:
    """Serve an environment that speaks OpenEnv's protocol: count to three."""

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        count = 0
        async for message in socket:
            asked = message.json()
            if asked["type"] == "close":
                break
            if asked["type"] == "reset":
                count = asked["data"].get("start", 0)
            elif asked["data"].get("say") == count + 1:
                count += 1
            else:
                error = {"message": f"expected {count + 1}", "code": "EXECUTION_ERROR"}
                await socket.send_json({"type": "error", "data": error})
                continue
            data = {"observation": {"count": count}, "reward": count / 3, "done": count == 3}
            await socket.send_json({"type": "observation", "data": data})
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def test_an_environment_of_openenv_is_reset_and_stepped_through() -> None:
    async def run() -> None:
        async with counting() as url, Environment(url) as one, Environment(f"{url}/") as other:
            step = await one.reset()
            assert step == ({"count": 0}, 0, False)
            assert (await other.reset(start=2)).observation == {"count": 2}
            while not step.done:
                step = await one.step({"say": step.observation["count"] + 1})
            assert step == ({"count": 3}, 1, True)
            with pytest.raises(RuntimeError, match="refused step: expected 3"):
                await other.step({"say": 7})

    asyncio.run(run())
