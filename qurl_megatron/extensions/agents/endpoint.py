"""An OpenAI-compatible endpoint for each episode, on loopback, in the process of its agent.

Each episode has its own path, which nobody can guess. A chat completion is a call of `Policy.chat`.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import secrets
import socket
import time
from typing import Any

from aiohttp import web

from qurl_megatron.extensions.agents.chat import say_once
from qurl_megatron.extensions.agents.policy import EpisodeOver, Limits, Policy, Turn
from qurl_megatron.extensions.agents.tools import Message

LARGEST_REQUEST_BYTES = 2**26
TAKEN = {"messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream"}
WITHOUT_EFFECT = {  # fields that change nothing about what is sampled
    *("model", "user", "stream_options", "service_tier", "safety_identifier", "prompt_cache_key"),
}
NOT_KEPT = {"metadata", "store"}  # what OpenAI would keep with an answer
MEANS_NOTHING: dict[str, list[Any]] = {  # the values at which other fields change nothing
    **dict.fromkeys(("n", "best_of", "repetition_penalty"), [1]),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens"), [0]),
    **dict.fromkeys(("logprobs", "ignore_eos"), [False]),
    **{"top_k": [-1], "top_logprobs": [0], "logit_bias": [{}], "parallel_tool_calls": [True]},
    **{"response_format": [{"type": "text"}], "modalities": [["text"]]},
}
MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "qurl"}


class Endpoint:
    """One HTTP server for all episodes of a process."""

    def __init__(self) -> None:
        """Bind a port at once; the server answers as soon as the event loop runs."""
        self._policies: dict[str, tuple[Policy, contextvars.Context]] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._port = self._socket.getsockname()[1]
        # In an empty context: else the log would name the first episode before the server's output.
        self._starting = asyncio.get_running_loop().create_task(
            self._start(), context=contextvars.Context()
        )

    def add(self, policy: Policy) -> str:
        """Return the base URL of an episode."""
        for key, (known, _) in self._policies.items():
            if known is policy:
                return self._url(key)
        key = secrets.token_urlsafe(16)
        self._policies[key] = policy, contextvars.copy_context()
        return self._url(key)

    def drop(self, policy: Policy) -> None:
        """Forget an episode that has ended."""
        self._policies = {
            key: known for key, known in self._policies.items() if known[0] is not policy
        }

    def _url(self, key: str) -> str:
        return f"http://127.0.0.1:{self._port}/{key}/v1"

    async def _start(self) -> None:
        app = web.Application(client_max_size=LARGEST_REQUEST_BYTES)
        app.router.add_post("/{key}/v1/chat/completions", self._complete)
        app.router.add_get("/{key}/v1/models", self._models)
        app.router.add_get("/{key}/v1/models/policy", self._model)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # A client that hangs up cancels its handler, which abandons the turn.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.SockSite(runner, self._socket).start()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [MODEL]})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(MODEL)

    async def _unknown(self, request: web.Request) -> web.Response:
        asked = f"{request.method} /{request.path.split('/', 2)[-1]}"
        return _refusal(
            404,
            f"{asked[:80]} is not served; the turns of an episode are chat completions, POST "
            "/v1/chat/completions, of the model policy",
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if (known := self._policies.get(request.match_info["key"])) is None:
            return _refusal(404, "there is no such episode; it has ended")
        policy, context = known
        try:
            body = await request.json()
            messages = list(body["messages"])
        except (ValueError, LookupError, TypeError, RecursionError):
            return _refusal(400, "the body must be a JSON object with messages")
        if unmet := _unmet(body, policy.limits):
            return _refusal(400, unmet)
        given = {name: value for name, value in body.items() if value is not None}
        most = given.get("max_completion_tokens", given.get("max_tokens"))

        async def take() -> tuple[Message, Turn | None, int]:
            message = await policy.chat(
                messages, tools=given.get("tools", []), max_tokens=most, stop=given.get("stop", [])
            )
            return message, policy.last_turn, len(policy.ids)  # before a waiting turn begins

        try:
            # In the episode's context: if the code blocks or ends the process, this episode fails.
            message, turn, total = await asyncio.get_running_loop().create_task(
                take(), context=context
            )
        except EpisodeOver as error:
            return _refusal(400, str(error), code="context_length_exceeded")
        except Exception as error:  # a template refuses the messages, or a turn is running already
            return _refusal(400, f"{type(error).__name__}: {error}")
        if unmet := _not_chosen(given.get("tool_choice"), message):
            return _refusal(400, unmet)
        assert turn is not None
        reason = "tool_calls" if message.get("tool_calls") else turn.finish
        answer: dict[str, Any] = {
            "id": f"chatcmpl-{policy.num_turns}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model", "policy"),
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": total - len(turn.ids),
                "completion_tokens": len(turn.ids),
                "total_tokens": total,
            },
        }
        if not body.get("stream"):
            return web.json_response(answer)
        # A stream has one chunk, with the complete turn.
        calls = [
            {"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])
        ]
        delta = message | ({"tool_calls": calls} if calls else {})
        answer["object"] = "chat.completion.chunk"
        answer["choices"] = [{"index": 0, "delta": delta, "finish_reason": reason}]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())
        await response.write_eof()
        return response


def _unmet(body: dict[str, Any], limits: Limits) -> str:
    """Return why a parameter of a request cannot be honored; an empty text if all can."""
    tools = body.get("tools") or []
    means_nothing = {
        **MEANS_NOTHING,
        "temperature": [limits.temperature],
        "top_p": [limits.top_p],
        "tool_choice": ["auto"] if tools else ["auto", "none"],
    }
    taken = TAKEN | WITHOUT_EFFECT | NOT_KEPT
    if tools and (body.get("tool_choice") == "required" or _chosen(body.get("tool_choice"))):
        taken.add("tool_choice")  # is checked in the sampled turn
    for name, value in body.items():
        allowed = means_nothing.get(name, [])
        if not (value is None or value in allowed or name in taken):
            known = f", or give {json.dumps(allowed[0])}" if allowed else ""
            return (
                f"{name}={json.dumps(value)[:80]}: turns are sampled as the run's settings say; "
                f"leave it out{known}"
            )
    for name in sorted(name for name in NOT_KEPT if body.get(name)):
        say_once(f"{name} of a request has no effect; turns are kept in the run's samples")
    if any(isinstance(each, dict) and _function(each).get("strict") for each in tools):
        say_once("strict of a tool has no effect: a call is sampled freely, and may not fit")
    return ""


def _function(described: dict[str, Any]) -> dict[str, Any]:
    function = described.get("function")
    return function if isinstance(function, dict) else {}


def _chosen(choice: Any) -> str:
    """Return the name of the function that `tool_choice` names; empty: it names none."""
    return str(_function(choice).get("name", "")) if isinstance(choice, dict) else ""


def _not_chosen(choice: Any, message: dict[str, Any]) -> str:
    """Return why a turn is not what `tool_choice` asked for; an empty text if it is."""
    names = {call["function"]["name"] for call in message.get("tool_calls", [])}
    named = _chosen(choice)
    if choice in (None, "auto", "none") or (names == {named} if named else names):
        return ""
    return (
        f"tool_choice={json.dumps(choice)[:80]}: the turn makes no such call; it is kept, and "
        "another may be asked for"
    )


def _refusal(status: int, message: str, code: str = "") -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=status)
