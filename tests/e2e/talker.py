"""An agent that does what a plan says, for tests of episodes on real servers."""

import asyncio
import json
from pathlib import Path
from typing import Any


def look(key: str) -> str:
    """Look something up.

    Args:
        key: What to look up.
    """
    return f"{key} is the thing"


async def talk(policy: Any, problem: Any) -> float:
    """Follow the plan in the problem's metadata; write down every sequence as it was seen here."""
    messages: list[dict[str, Any]] = []
    seen: list[list[int]] = []

    def note(ids: list[int]) -> None:
        if seen and ids[: len(seen[-1])] == seen[-1]:
            seen[-1] = ids
        else:
            seen.append(ids)

    for does, *what in problem.metadata["plan"]:
        if does == "generate":
            await policy.generate(max_tokens=what[0])
        elif does == "observe":
            policy.observe(what[0])
            continue
        elif does == "begin":
            policy.begin(what[0])
            messages = []
            continue
        elif does == "wait":
            await asyncio.sleep(what[0])
            continue
        elif does == "chat":
            messages.append({"role": "user", "content": what[0]})
            messages.append(await policy.chat(list(messages), tools=[look], max_tokens=what[1]))
        note(policy.ids)
    path = Path(problem.metadata["directory"]) / f"{problem.question}.json"
    path.write_text(json.dumps(seen))
    return float(len(problem.question) % 2)


async def openai_chat(policy: Any, problem: Any) -> dict[str, float]:
    """Play three turns with OpenAI's client: plain, streamed, and with a changed history."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=policy.base_url, api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": problem.question}]
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=12
        )
        usage = answer.usage
        assert usage is not None and usage.completion_tokens <= 12
        assert usage.total_tokens == len(policy.ids)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "more"})
        text = ""
        stream = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=12, stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        messages = [messages[0], {"role": "user", "content": text}]
        await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
    return {"reward": 1.0, "turns": policy.num_turns}
