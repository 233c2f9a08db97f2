"""Environments that OpenEnv serves: `reset` and `step` over a WebSocket.

    async def agent(policy, problem):
        async with Environment("http://127.0.0.1:8000") as environment:
            step = await environment.reset(seed=problem.metadata["seed"])
            while not step.done:
                ...
                step = await environment.step({"message": reply["content"]})
        return step.reward

OpenEnv itself needs a Python of its own, because its dependencies conflict with those of `qurl`.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import aiohttp

LARGEST_MESSAGE_BYTES = 100 * 2**20


class Step(NamedTuple):
    """What an environment answers."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Environment(contextlib.AbstractAsyncContextManager["Environment"]):
    """A session with an OpenEnv server, which gives each session its own environment."""

    def __init__(self, url: str) -> None:
        """Name the server by its base URL, such as http://127.0.0.1:8000."""
        self._url = f"{url.rstrip('/')}/ws"
        self._stack = contextlib.AsyncExitStack()
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def __aenter__(self) -> Environment:
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            self._socket = await stack.enter_async_context(
                session.ws_connect(self._url, max_msg_size=LARGEST_MESSAGE_BYTES)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._socket and not self._socket.closed:
            with contextlib.suppress(ConnectionError):
                await self._socket.send_json({"type": "close"})
        await self._stack.aclose()

    async def reset(self, **options: Any) -> Step:
        """Begin an episode; `options` are the environment's own, such as `seed`."""
        return await self._ask("reset", options)

    async def step(self, action: dict[str, Any]) -> Step:
        """Take an action, and return the environment's answer."""
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: dict[str, Any]) -> Step:
        """Send a message, and return the answer.

        Raises:
            RuntimeError: the environment refuses it, or the session is closed.
        """
        assert self._socket is not None, "use it as `async with Environment(url) as environment`"
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type != aiohttp.WSMsgType.TEXT:
            raise RuntimeError(f"{self._url} closed the session at {kind}")
        answer = message.json()
        content = answer.get("data", {})
        if answer.get("type") != "observation":
            raise RuntimeError(f"{self._url} refused {kind}: {content.get('message', answer)}")
        return Step(
            content.get("observation", {}), content.get("reward"), bool(content.get("done"))
        )
