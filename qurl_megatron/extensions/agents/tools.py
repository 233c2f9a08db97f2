"""Tools that a policy calls: plain Python functions with type hints and a docstring.

    def multiply(a: int, b: int) -> int:
        '''Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        '''

The agents' processes import this file, so it imports no torch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from qurl_megatron.model.chat_template import Message

Tool = Callable[..., Any] | dict[str, Any]
"""A function, or its JSON schema in the form of OpenAI's API."""


def schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool.

    Raises:
        TypeError: the function lacks a type hint, or a part of its docstring.
    """
    if isinstance(tool, dict):
        return tool
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        described: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # of two classes, which transformers does not export
        raise TypeError(f"tool {getattr(tool, '__name__', tool)!r}: {error}") from None
    return described


async def call_tools(message: Message, tools: Sequence[Callable[..., Any]]) -> list[Message]:
    """Make the calls in a message of the policy, and return a message with each answer.

    A tool may be `async`. A result that is not text becomes JSON. An exception, or a call that fits
    no tool, becomes an answer too, so that the policy can read it.
    """
    by_name = {tool.__name__: tool for tool in tools}
    answers = []
    for call in message.get("tool_calls") or []:
        name = call["function"]["name"]
        try:
            if name not in by_name:
                raise LookupError(f"there is no tool {name}; there are {', '.join(by_name)}")
            result = by_name[name](**json.loads(call["function"]["arguments"]))
            result = await result if inspect.isawaitable(result) else result
            text = result if isinstance(result, str) else json.dumps(result)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        answers.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
    return answers
