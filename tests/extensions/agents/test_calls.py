"""Calls of tools in a policy's text, in the forms of several models."""

import asyncio
import json
from typing import Any

import pytest

from conversations import BEGINS_THOUGHT, KEEPS_THOUGHTS, chat_tokenizer
from qurl_megatron.extensions.agents.calls import HERMES, LLAMA, TAGS, form_of, parse
from qurl_megatron.extensions.agents.tools import call_tools

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def test_a_call_that_fits_no_tool_or_fails_is_answered_with_why() -> None:
    texts = [
        '<tool_call>{"name": "divide", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "multiply", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "multiply", "arguments": "x"}</tool_call>',
    ]
    assert "tool_calls" not in parse(f'<tool_call>{{"name": {"[" * 10**5}}}</tool_call>')
    for text, why in zip(
        texts, ["no tool divide; there are", "missing 1", "TypeError"], strict=True
    ):
        (answer,) = asyncio.run(call_tools(parse(text), [multiply]))
        assert why in answer["content"] and answer["role"] == "tool"
    assert asyncio.run(call_tools(parse("plain"), [multiply])) == []


def test_what_is_not_a_valid_call_stays_in_the_text_beside_one() -> None:
    broken = "<tool_call>\n{broken\n</tool_call>"
    message = parse(f"first {CALL} then {broken}")
    assert len(message["tool_calls"]) == 1
    assert message["content"] == f"first  then {broken}"


@pytest.mark.parametrize("mark", ["", "<|python_tag|>"])
def test_a_call_may_have_the_form_of_llama(mark: str) -> None:
    text = mark + '{"name": "multiply", "parameters": {"a": 6, "b": 7}}'
    message = parse(text, LLAMA)
    (answer,) = asyncio.run(call_tools(message, [multiply]))
    assert (message["content"], answer["content"]) == ("", "42")
    for said, form in [(text, HERMES), ("So: " + text, LLAMA), (text[:-3], LLAMA)]:
        assert parse(said, form) == {"role": "assistant", "content": said}


PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "whole": {"type": "integer"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "size": {"type": ["number", "null"]},
}
TOOL = {"type": "function", "function": {"name": "set", "parameters": {"properties": PROPERTIES}}}


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "6", "6"),
        ("text", "null", "null"),
        ("text", " two\n\nlines ", " two\n\nlines "),
        ("whole", "6", 6),
        ("whole", "six", "six"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("list", '[1, {"a": "b"}]', [1, {"a": "b"}]),
        ("list", "['a', None]", ["a", None]),
        ("maybe", "null", None),
        ("maybe", "6", "6"),
        ("size", "None", None),
        ("size", "0.5", 0.5),
        ("unknown", "6", "6"),
    ],
)
def test_a_parameter_in_tags_has_the_type_that_the_tool_gives_it(
    name: str, written: str, value: Any
) -> None:
    body = f"<function=set>\n<parameter={name}>\n{written}\n</parameter>\n</function>"
    (call,) = parse(f"<tool_call>\n{body}\n</tool_call>", TAGS, [TOOL])["tool_calls"]
    assert call["function"]["name"] == "set"
    assert json.loads(call["function"]["arguments"]) == {name: value}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=set>\n<parameter=text>\n6\n</function>\n</tool_call>",
        "<tool_call>\n<function=set>\nsix\n</function>\n</tool_call>",
        "<tool_call>\n<function=set>\n</tool_call>",
    ],
)
def test_a_call_in_tags_that_is_not_complete_stays_in_the_text(text: str) -> None:
    assert parse(text, TAGS, [TOOL]) == {"role": "assistant", "content": text}


def test_a_model_has_the_form_in_which_its_template_writes_a_call() -> None:
    llama = KEEPS_THOUGHTS.replace("\n<tool_call>\n", "").replace("\n</tool_call>", "")
    as_llama = llama.replace('"arguments": ', '"parameters": ')
    other = KEEPS_THOUGHTS.replace('"arguments": ', '"parameters": ')
    for template, form in (
        (KEEPS_THOUGHTS, HERMES),
        (BEGINS_THOUGHT, TAGS),
        (as_llama, LLAMA),
        (other, None),
        (KEEPS_THOUGHTS.replace("m.tool_calls", "[]"), None),
    ):
        assert form_of(chat_tokenizer(template)) == form
