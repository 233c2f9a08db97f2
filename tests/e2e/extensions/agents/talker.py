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
