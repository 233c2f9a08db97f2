"""A conversation in which sampled text is never tokenized again.

The chat template renders a whole conversation once, at its beginning. Later it renders only new
messages, after a stand-in for the policy's last message. What follows the stand-in is appended to
the tokens of the episode.

If the result would differ from the template's own history, the conversation is rendered anew, as a
branch (see `Policy.begin`). This happens if messages were changed or left out, if the tools were
changed, if the template drops the thoughts of earlier turns, as Qwen3's does after a user's
message, or if a turn ended within a thought that the template had begun.

The agents' processes import this file, so it imports no torch.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from typing import Any

from qurl_megatron.extensions.agents.calls import HERMES, form_of, parse
from qurl_megatron.extensions.agents.tools import Tool, schema
from qurl_megatron.model.chat_template import (
    CALLED,
    Message,
    TemplateError,
    knows_developer,
    read_message,
    render,
)
from qurl_megatron.model.tokenizer import turn_end

_THOUGHT_BEGIN, _THOUGHT_END = "<think>", "</think>"
_THOUGHT = "a thought"
_STAND_IN: list[Message] = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "an answer"},
]
_THOUGHTFUL: list[Message] = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nan answer"},
]


class Chat:
    """The messages of an episode, and the tokens that each new message adds."""

    def __init__(self, policy: Any) -> None:
        """Begin a conversation for a `Policy`."""
        self._policy = policy
        self._tokenizer = policy.tokenizer
        self._known: list[tuple[Any, ...]] = []  # messages that are in the tokens so far
        self._tools: list[dict[str, Any]] = []
        self._has_thought = False  # in any turn of this sequence so far
        self._num_calls = 0  # of tools, in all turns of the episode
        self._one_at_a_time = asyncio.Lock()

    async def reply(
        self,
        messages: list[Message],
        tools: list[Tool],
        max_tokens: int | None,
        stop: str | Sequence[int | str],
    ) -> Message:
        """Return the policy's next message; `messages` are the whole conversation so far.

        Raises:
            TemplateError: the chat template cannot append messages, or leaves out a part of them.
            EpisodeOver, ValueError, TypeError: as in `Policy.generate`, or of a wrong message.
        """
        if self._one_at_a_time.locked():
            say_once("a turn of an episode waits until the one before it has ended")
        async with self._one_at_a_time:
            return await self._reply(messages, tools, max_tokens, stop)

    async def _reply(
        self,
        messages: list[Message],
        tools: list[Tool],
        max_tokens: int | None,
        stop: str | Sequence[int | str],
    ) -> Message:
        check_template(self._tokenizer)
        schemas = [schema(tool) for tool in tools]
        form = form_of(self._tokenizer)
        if schemas and not form:
            raise TemplateError(
                "the chat template writes no tools, or their calls in a form that is not read; "
                "give no tools, or use policy.generate"
            )
        messages = [read_message(each) for each in messages]
        if any(each["role"] == "developer" for each in messages):
            if not knows_developer(self._tokenizer):
                say_once("messages of role developer are written as system")
        plain = [_plain(each) for each in messages]
        # Empty until the turn is done, so that a turn that fails leads to a new rendering.
        known, self._known = self._known, []
        new = messages[len(known) :]
        goes_on = (
            len(known) > 0
            and plain[: len(known)] == known
            and schemas == self._tools
            and not (self._has_thought and drops_thoughts(self._tokenizer, new))
        )
        if goes_on:
            end = turn_end(self._tokenizer)
            is_open = self._policy.ids[-1] != end  # it was cut off, or ended by another token
            written = _added(self._tokenizer, new, schemas)
            self._policy.observe([*([end] if is_open else []), *self._policy.encode(written)])
        else:
            written = render(self._tokenizer, messages, schemas)
            self._policy.begin(self._policy.encode(written))
            self._has_thought = False
        turn = await self._policy.generate(max_tokens=max_tokens, stop=stop)
        text = self._said(turn, stop)
        message = parse(text, form or HERMES, schemas, self._num_calls)
        self._num_calls += len(message.get("tool_calls", []))
        # A template may open the turn behind an empty thought, as Qwen3's without enable_thinking.
        self._has_thought |= _THOUGHT_END in text or written.rstrip().endswith(_THOUGHT_END)
        # Where the template begins a thought, the message lacks its beginning.
        in_thought = written.rstrip().endswith(_THOUGHT_BEGIN) and _THOUGHT_END not in text
        if not in_thought:
            self._known = [*plain, _plain(read_message(message))]
        self._tools = schemas
        return message

    def _said(self, turn: Any, stop: str | Sequence[int | str]) -> str:
        """Return the text of a turn without what ended it."""
        text: str = self._policy.decode(turn.ids)
        given = [stop] if isinstance(stop, str) else stop
        places = [text.find(each) for each in given if isinstance(each, str) and each in text]
        if places:
            return text[: min(places)]
        return self._policy.decode(turn.ids[:-1]) if turn.finish == "stop" else text


@functools.cache
def say_once(what: str) -> None:
    """Write a line to the agents' log, once in a process."""
    print(f"qurl: {what}", flush=True)


def _added(
    tokenizer: Any,
    new: list[Message],
    tools: list[dict[str, Any]],
    before: list[Message] = _STAND_IN,
) -> str:
    """Return what a template writes for `new`, after the stand-in `before`.

    A template may write `before` differently once messages follow it. Only the number of end
    tokens stays the same, so the text is cut after that number of them.
    """
    if new and new[0]["role"] == "tool":
        before = [*before[:-1], CALLED]
    base = render(tokenizer, before, tools, opens=False)
    whole = render(tokenizer, [*before, *new], tools)
    end, cut = tokenizer.decode([turn_end(tokenizer)]), 0
    for _ in range(base.count(end)):
        place = whole.find(end, cut)
        if place < 0:
            raise TemplateError(f"the template writes fewer {end} once messages follow")
        cut = place + len(end)
    return whole[cut:]


def drops_thoughts(tokenizer: Any, new: list[Message]) -> bool:
    """Return whether a template leaves out earlier thoughts when the `new` messages follow."""
    return _THOUGHT not in render(tokenizer, [*_THOUGHTFUL, *new], [])


@functools.cache
def check_template(tokenizer: Any) -> None:
    """Check, once for each tokenizer, that its chat template can append messages.

    Raises:
        TemplateError: it cannot; the text says for which messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError("the tokenizer has no chat template; use policy.generate")
    if turn_end(tokenizer) is None:
        raise TemplateError(
            "the chat template does not end an assistant's message with a special token; use "
            "policy.generate"
        )
    cases: dict[str, list[Message]] = {
        "a user's message": [{"role": "user", "content": "more"}],
        "two users' messages": [
            {"role": "user", "content": "more"},
            {"role": "user", "content": "and more"},
        ],
    }
    if _writes_calls(tokenizer):  # else `render` refuses them when they come
        answer = {"role": "tool", "tool_call_id": "call_0", "name": "look", "content": "found"}
        cases["a tool's answer"] = [answer]
        cases["two tools' answers"] = [answer, {**answer, "content": "and more"}]
    for name, new in cases.items():
        try:
            added = _added(tokenizer, new, [])
            if added != _added(tokenizer, new, [], [*_STAND_IN, *_STAND_IN]):
                raise TemplateError("what it writes depends on the number of messages before")
            missing = [each["content"] for each in new if each["content"] not in added]
            if missing:
                raise TemplateError(f"it leaves out {missing[0]!r}")
            whole = render(tokenizer, [*_STAND_IN, *new], [])
            if name.endswith("answer") or name.endswith("answers"):
                continue  # `whole` lacks the call that `_added` gives its stand-in
            ids = tokenizer.encode(added, add_special_tokens=False)
            if tokenizer.encode(whole, add_special_tokens=False)[-len(ids) :] != ids:
                raise TemplateError("its tokens depend on those before")
        except Exception as error:  # a template may raise anything
            raise TemplateError(
                f"the chat template does not append {name}: {error}; use policy.generate"
            ) from None


def _writes_calls(tokenizer: Any) -> bool:
    try:
        render(tokenizer, [*_STAND_IN[:-1], CALLED], opens=False)
    except TemplateError:
        return False
    return True


def _plain(message: Message) -> tuple[Any, ...]:
    """Return what two messages must share to be the same, however a framework rewrote them."""
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", [])
    ]
    return message["role"], message["content"], calls
