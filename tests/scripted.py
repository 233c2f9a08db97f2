"""A rollout client whose answers are given: no server is asked."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.rollout.server import ServerFailed


class ScriptedClient:
    """A rollout client with right greedy answers, and the given texts as sampled answers."""

    def __init__(self, *texts: str, logprob: float = 0.0) -> None:
        self.texts = texts
        self.logprob = logprob
        self.settings: list[dict[str, Any]] = []
        self.loses = "lost"  # the answer of the problem at which the server dies

    def sampling(self, **settings: Any) -> dict[str, Any]:
        self.settings.append(settings)
        return settings

    async def group(self, prompt: Prompt, sampling: dict[str, Any]) -> list[Completion]:
        if prompt.answer == self.loses:
            raise ServerFailed("the server died")
        texts = [prompt.answer] if sampling["temperature"] == 0 else self.texts
        return [Completion([1], [self.logprob], text, False, [1]) for text in texts]

    def gather(self, answers: Iterable[Awaitable[Any]]) -> list[Any]:
        async def in_order() -> list[Any]:
            return [await answer for answer in answers]

        return asyncio.run(in_order())
