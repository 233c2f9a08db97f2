"""What a chat template leaves out is refused; what it may change is not."""

from typing import Any

import pytest

from conversations import KEEPS_THOUGHTS, chat_tokenizer
from qurl_megatron.model.chat_template import TemplateError, read_message, render

USER = {"role": "user", "content": "Weather in Oslo?"}
CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "look", "arguments": {"city": "Oslo", "days": 3}},
}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "cold"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": CITY},
}
# Knows three roles, as templates of models without tools do, and drops all others.
THREE_ROLES = """\
{%- for m in messages -%}
{%- if m.role in ("system", "user", "assistant") %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endif %}{%- endfor -%}"""
ONE_SYSTEM = THREE_ROLES.replace("{%- if", "{%- if (loop.first or m.role != 'system') and")
NONE_BESIDE_CALLS = THREE_ROLES.replace(
    "{%- if",
    "{%- if m.content is none %}{{ m.tool_calls[0].function | tojson }}"
    '{%- elif m.role == "tool" %}{{ m.content | tojson }}{%- elif',
)
TEXT_OF_ARGUMENTS = NONE_BESIDE_CALLS.replace(
    "m.tool_calls[0].function | tojson",
    "m.tool_calls[0].function.name + m.tool_calls[0].function.arguments",
)


def written(template: str, *messages: dict[str, Any], tools: Any = ()) -> str:
    return render(chat_tokenizer(template), messages, tools)


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        (THREE_ROLES, [{"role": "human", "content": "hi"}], "a message of role 'human', 'hi'"),
        (THREE_ROLES, [USER, CALLS, RESULT], "the call by role 'assistant' of 'look'"),
        (THREE_ROLES, [USER, RESULT], "a message of role 'tool', 'cold'"),
        # A short text may be in another one.
        (THREE_ROLES, [USER, {"role": "tool", "content": "Oslo"}], "a message of role 'tool'"),
        (
            ONE_SYSTEM,
            [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER],
            "a message of role 'system', 'b'",
        ),
        (
            KEEPS_THOUGHTS.replace("call.function.arguments", "{}"),
            [USER, CALLS, RESULT],
            "the call by role 'assistant' of 'look'",
        ),
        ("{{ messages[-1].content }}", [USER, USER], "a message of role 'user'"),
    ],
)
def test_a_message_or_call_that_a_template_leaves_out_is_refused(
    template: str, messages: list[Any], what: str
) -> None:
    with pytest.raises(TemplateError, match=f"leaves out {what}"):
        written(template, *messages)


@pytest.mark.parametrize(
    ("template", "tool", "what"),
    [
        (THREE_ROLES, TOOL, "leaves out the tool 'look'"),
        ("{{ tools[0].function.name }}" + THREE_ROLES, TOOL, "the description of the tool 'look'"),
        (
            "{{ [tools[0].function.name, tools[0].function.description] }}" + THREE_ROLES,
            TOOL,
            "a parameter of the tool 'look'",
        ),
        (KEEPS_THOUGHTS, {"type": "web_search"}, "the tool has no name"),
    ],
)
def test_a_tool_that_a_template_leaves_out_is_refused(template: str, tool: Any, what: str) -> None:
    with pytest.raises(TemplateError, match=what):
        written(template, USER, tools=[tool])
    assert "Looks." in written(KEEPS_THOUGHTS, USER, tools=[TOOL])


def test_a_template_may_trim_quote_and_drop_thoughts() -> None:
    thoughtful = {"role": "assistant", "content": "<think>hm</think> cold \n"}
    drops = THREE_ROLES.replace("m.content", "m.content.split('</think>')[-1]")
    assert "cold<|im_end|>" in written(drops, USER, thoughtful)
    assert '\\"so\\"' in written(
        NONE_BESIDE_CALLS, USER, CALLS, {"role": "tool", "content": 'it is "so"'}
    )
    assert written(THREE_ROLES, {**USER, "name": "Ann"}) == written(THREE_ROLES, USER)


def test_a_developers_message_is_the_systems_where_the_template_knows_only_that() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert "<|im_start|>system\nBe brief." in written(THREE_ROLES, developer, USER)
    assert "<|im_start|>developer\nBe brief." in written(KEEPS_THOUGHTS, developer, USER)


def test_calls_and_their_arguments_are_written_as_the_template_wants_them() -> None:
    for template in (KEEPS_THOUGHTS, NONE_BESIDE_CALLS, TEXT_OF_ARGUMENTS):
        assert "Oslo" in written(template, {**USER, "content": "?"}, CALLS, RESULT)
    with pytest.raises(TemplateError, match="leaves out the call by role 'assistant'"):
        written(NONE_BESIDE_CALLS, USER, {**CALLS, "content": "I look."}, RESULT)


def test_a_message_is_read_as_openais_clients_send_it() -> None:
    parts = [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Oslo?"}]
    assert read_message({"role": "user", "content": parts, "name": None}) == USER
    as_text = {**CALL, "function": {"name": "look", "arguments": '{"city": "Oslo", "days": 3}'}}
    for content in ({}, {"content": None}, {"content": ""}):
        assert read_message({"role": "assistant", "tool_calls": [as_text], **content}) == CALLS
    assert read_message({**USER, "tool_calls": []}) == USER
    flat = read_message({"role": "assistant", "tool_calls": [{"name": "look", "arguments": ""}]})
    assert flat["tool_calls"] == [
        {"type": "function", "function": {"name": "look", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "hi"}, "role is a NoneType"),
        ({**USER, "content": 7}, "content is a int"),
        (
            {**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "content has a part that is not text, of type image_url",
        ),
        ({**USER, "content": ["hi"]}, "a part that is not text, of type str"),
        ({**USER, "function_call": {"name": "look"}}, "has function_call; give tool_calls"),
        ({**USER, "tools": [TOOL]}, "has tools; give tools beside the messages"),
        ({**USER, "content": [{"type": "thinking", "text": "hm"}]}, "of type thinking"),
        ({**USER, "tool_calls": 7}, "tool_calls is a int"),
        ({**USER, "tool_calls": [{}]}, "a call without the name of a function"),
        (
            {**USER, "tool_calls": [{"function": {"name": "look", "arguments": "{city"}}]},
            "the arguments of the call of 'look' are not JSON",
        ),
        (
            {**USER, "tool_calls": [{"name": "look", "parameters": {"city": "Oslo"}}]},
            "the call of 'look' has parameters; give arguments",
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(message: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_message(message)
