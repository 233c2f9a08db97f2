"""Conversations as a model's chat template writes them, for training data and agents alike.

Invariant: every message's text, every call and every tool is in the text, or `render` refuses it.

A template leaves out what it does not know, without a word: another role, tools, parts of a
content. So a conversation is first rendered with a mark in place of each of its parts, once for
each shape of conversations, and every mark must be there. What a template may do to a part does not
matter then: strip it, quote it, or drop the thoughts in it, as in earlier turns. Other fields of a
message, such as `name` or `reasoning_content`, may be left out.

Agents' processes import this file, so it imports no torch.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]
_TEXTS = ("text", "input_text", "output_text")  # types of parts
_MARK = "Zq{}qZ"  # letters and digits, which no template changes
_ASKED: Message = {"role": "user", "content": "a question"}
_ORDERED: Message = {"role": "developer", "content": "an order"}
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "look", "arguments": {"key": "a value"}},
        }
    ],
}


class TemplateError(ValueError):
    """A conversation that a chat template does not write as it was given."""


def read_message(message: Message) -> Message:
    """Return a message in the form that templates take.

    Its content is one text, which is empty if there is none, as beside calls. The arguments of
    calls are objects: in OpenAI's API they are JSON. Fields that are None are left out.

    Raises:
        ValueError: a part of the content is not text, or a call cannot be read.
    """
    read = {name: value for name, value in message.items() if value is not None}
    content = read.get("content", "")
    read["content"] = "".join(map(_text, content)) if isinstance(content, list) else content
    for field in ("role", "content"):
        if not isinstance(read.get(field), str):
            raise ValueError(f"{field} is a {type(read.get(field)).__name__}; expected a text")
    for old, instead in (("function_call", "tool_calls"), ("tools", "tools beside the messages")):
        if read.get(old):
            raise ValueError(f"a message has {old}; give {instead}")
    calls = read.pop("tool_calls", None)
    if calls and not isinstance(calls, list):
        raise ValueError(f"tool_calls is a {type(calls).__name__}; expected a list of calls")
    if calls:
        read["tool_calls"] = [_read_call(call) for call in calls]
    return read


def _text(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXTS or not isinstance(part.get("text"), str):
        raise ValueError(f"content has a part that is not text, of type {kind}")
    return str(part["text"])


def _read_call(call: Any) -> dict[str, Any]:
    function = _function(call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("tool_calls has a call without the name of a function")
    arguments = function.get("arguments") or {}
    other = next((each for each in ("parameters", "input", "args") if function.get(each)), "")
    if other and not arguments:
        raise ValueError(f"the call of {function['name']!r} has {other}; give arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise ValueError(
            f"the arguments of the call of {function['name']!r} are not JSON"
        ) from None
    wrapped = call if "function" in call else {"type": "function"}
    return {**wrapped, "function": {**function, "arguments": arguments}}


def _function(described: dict[str, Any]) -> Any:
    """Return the function of a tool or a call; in some data they are not wrapped."""
    return described.get("function", described)


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    opens: bool = True,
) -> str:
    """Return a conversation as its template writes it; `opens` begins the policy's next turn.

    A `developer`'s messages are written as the system's where the template knows only that.

    Args:
        messages: in the form of `read_message`.

    Raises:
        TemplateError: one line: the template refuses the conversation, or leaves out a part of it.
    """
    form = _form(tokenizer)
    if left_out := _left_out(tokenizer, messages, tools, form):
        raise TemplateError(
            f"the chat template leaves out {left_out}; it must know all roles and tools"
        )
    return _written(tokenizer, messages, tools, form, opens)


class _Form(NamedTuple):
    """How a template wants what is written in several ways."""

    orders: str = "developer"  # the role of a developer's messages
    beside_calls: str | None = ""  # the content of a message that has only calls
    arguments_as_text: bool = False

    def of(self, message: Message) -> Message:
        """Return a message in this form."""
        if message["role"] == "developer":
            message = {**message, "role": self.orders}
        if "tool_calls" not in message:
            return message
        calls = [
            {**call, "function": {**(named := call["function"]), "arguments": self._text(named)}}
            for call in message["tool_calls"]
        ]
        return {**message, "content": message["content"] or self.beside_calls, "tool_calls": calls}

    def _text(self, function: dict[str, Any]) -> Any:
        arguments = function["arguments"]
        return json.dumps(arguments) if self.arguments_as_text else arguments


@functools.cache
def _form(tokenizer: Any) -> _Form:
    """Return the first form in which a template writes everything, or else the usual form."""
    orders = "developer" if knows_developer(tokenizer) else "system"
    forms = [_Form(orders, content, text) for text in (False, True) for content in ("", None)]
    called = [_ASKED, CALLED]
    return next((form for form in forms if _writes(tokenizer, called, form)), forms[0])


@functools.cache
def knows_developer(tokenizer: Any) -> bool:
    """Return whether a template writes the messages of a `developer`."""
    return _writes(tokenizer, [_ORDERED, _ASKED], _Form())


def _writes(tokenizer: Any, messages: list[Message], form: _Form) -> bool:
    try:
        return not _left_out(tokenizer, messages, (), form)
    except TemplateError:
        return False


def _left_out(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]], form: _Form
) -> str:
    """Return a part of a conversation that a template leaves out; empty: it writes all."""
    marked, parts = _marked(messages, tools)
    shape = json.dumps(marked, default=str)
    return next((parts[number] for number in _missing(tokenizer, shape, len(parts), form)), "")


def _marked(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[Any, list[str]]:
    """Return a conversation with marks in place of its parts, and what each mark stands for."""
    parts: list[str] = []

    def mark(part: str) -> str:
        parts.append(part)
        return _MARK.format(len(parts) - 1)

    def marked(described: dict[str, Any], kind: str) -> dict[str, Any]:
        """Return a tool or a call with marks for its name and the texts in it."""
        function = _function(described)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise TemplateError(f"{kind} has no name, as a function has in OpenAI's API")
        part = f"{kind} {function['name']!r}"
        function = {**function, "name": mark(part)}
        if function.get("description"):
            function["description"] = mark(f"the description of {part}")
        if isinstance(arguments := function.get("arguments"), dict):
            function["arguments"] = {mark(part): mark(part) for _ in arguments}
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
            named = {mark(f"a parameter of {part}"): v for v in parameters["properties"].values()}
            function["parameters"] = {**parameters, "properties": named}
        return {**described, "function": function} if "function" in described else function

    shape = []
    for message in messages:
        role, content = message["role"], message["content"]
        if content and not content.isspace():
            text = mark(f"a message of role {role!r}, {content[:40]!r}")
            message = {**message, "content": text}
        if "tool_calls" in message:
            calls = [
                marked(call, f"the call by role {role!r} of") for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        shape.append(message)
    return (shape, [marked(tool, "the tool") for tool in tools]), parts


@functools.lru_cache(maxsize=1024)
def _missing(tokenizer: Any, shape: str, num_marks: int, form: _Form) -> list[int]:
    """Return the numbers of the marks that a template does not write."""
    messages, tools = json.loads(shape)
    text = _written(tokenizer, messages, tools, form)
    return [number for number in range(num_marks) if _MARK.format(number) not in text]


def _written(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    form: _Form,
    opens: bool = True,
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                [form.of(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=opens,
            )
        )
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TemplateError(f"the chat template refuses it ({reason})") from error
