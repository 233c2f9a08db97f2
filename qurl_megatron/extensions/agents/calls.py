"""Calls of tools in a policy's text.

    HERMES  <tool_call>{"name": "look", "arguments": {"key": "x"}}</tool_call>
    LLAMA   {"name": "look", "parameters": {"key": "x"}}
    TAGS    <tool_call><function=look><parameter=key>x</parameter></function></tool_call>

Qwen2.5, Qwen3 and Hermes models write the first, Llama 3 the second, where the call is the whole
text, and Qwen3-Coder, Qwen3.5 and Qwen3.6 the third. A model's form is the one in which its chat
template writes a call.

The agents' processes import this file, so it imports no torch.
"""

import ast
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qurl_megatron.model.chat_template import CALLED, Message, TemplateError, render
from qurl_megatron.model.tokenizer import turn_end

Schemas = Sequence[dict[str, Any]]
_ANSWER = "an answer"
_ASKED: Message = {"role": "user", "content": "a question"}
_LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look up a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


class Form(NamedTuple):
    """How calls are written."""

    pattern: re.Pattern[str]
    read: Callable[[re.Match[str], Schemas], tuple[str, Any]]
    """Returns the name and the arguments of a call; raises if it is not a valid one."""


def _of_json(found: re.Match[str], key: str) -> tuple[str, Any]:
    call = json.loads(found[1])
    return str(call["name"]), call.get(key, {})


_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _of_tags(found: re.Match[str], tools: Schemas) -> tuple[str, Any]:
    if _PARAMETER.sub("", found[2]).strip():
        raise ValueError("something is not a parameter")
    functions = [tool.get("function", tool) for tool in tools]
    known = {each.get("name"): each.get("parameters") or {} for each in functions}
    types = known.get(found[1], {}).get("properties") or {}
    return found[1], {
        name: _value(text, types.get(name, {})) for name, text in _PARAMETER.findall(found[2])
    }


def _value(text: str, described: dict[str, Any]) -> Any:
    """Return a parameter's value, of the type that the tool's schema gives it; without one, text.

    What is not text is JSON, or has Python's form: the templates write True and None.
    """
    of = [described, *described.get("anyOf", []), *described.get("oneOf", [])]
    named = [each["type"] for each in of if "type" in each]
    types = {kind for each in named for kind in ([each] if isinstance(each, str) else each)}
    if "null" in types and text in ("null", "None"):
        return None
    if types and "string" not in types:
        for read in (json.loads, ast.literal_eval):
            try:
                return read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return text


HERMES = Form(
    re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL),
    lambda found, _: _of_json(found, "arguments"),
)
LLAMA = Form(
    re.compile(r"\A\s*(?:<\|python_tag\|>)?(\{.*\})\s*\Z", re.DOTALL),
    lambda found, _: _of_json(found, "parameters"),
)
TAGS = Form(
    re.compile(r"<tool_call>\s*<function=([^>\s]+)>(.*?)</function>\s*</tool_call>", re.DOTALL),
    _of_tags,
)


@functools.cache
def form_of(tokenizer: Any) -> Form | None:
    """Return the form in which a chat template writes calls; None: it writes none of these."""
    try:
        answered = [_ASKED, {"role": "assistant", "content": _ANSWER}]
        before, _, _ = render(tokenizer, answered, [_LOOK], opens=False).rpartition(_ANSWER)
        whole = render(tokenizer, [_ASKED, CALLED], [_LOOK], opens=False)
    except TemplateError:
        return None
    said = whole[len(os.path.commonprefix([before, whole])) :]
    said = said[: said.rfind(tokenizer.decode([turn_end(tokenizer)]))]
    (call,) = CALLED["tool_calls"]
    expected = call["function"]["name"], call["function"]["arguments"]
    for form in (HERMES, LLAMA, TAGS):
        calls = [each["function"] for each in parse(said, form, [_LOOK]).get("tool_calls", [])]
        if [(each["name"], json.loads(each["arguments"])) for each in calls] == [expected]:
            return form
    return None


def parse(text: str, form: Form = HERMES, tools: Schemas = (), first: int = 0) -> Message:
    """Return the policy's text as a message, with its tool calls in the form of OpenAI's API.

    Calls get ids from the number `first`. What is not a valid call stays in the text.
    """
    calls: list[dict[str, Any]] = []
    said = text
    for found in form.pattern.finditer(text):
        try:
            name, arguments = form.read(found, tools)
            function = {"name": name, "arguments": json.dumps(arguments)}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # the policy did not write a valid call
        number = first + len(calls)
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
        said = said.replace(found[0], "", 1)
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": said.strip(), "tool_calls": calls}
