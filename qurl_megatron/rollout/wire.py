"""What both ends of a request to a server share: limits, names, and how to show foreign text.

A run names itself in the header `Qurl-Run` of each of its requests. A server has the weights of one
run at a time, and serves only that run. Requests of other runs get status 409
(`sglang_plugin/access.py`).
"""

from collections.abc import Iterable
from typing import Any

import pydantic

DESCRIPTION_PATH = "/qurl"  # the three paths: see `extensions/elsewhere/wire.py`
WEIGHTS_PATH = "/qurl/weights"
RUN_PATH = "/qurl/run"
RUN_HEADER = "Qurl-Run"
LARGEST_HEADER_BYTES = 2**28  # for names and shapes of a bucket; more is refused
SHOWN_CHARACTERS = 500  # of an answer of another machine
_ANYTHING = pydantic.TypeAdapter(Any)


def read_json(content: bytes) -> Any:
    """Parse JSON of another machine.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return _ANYTHING.validate_json(content)
    except pydantic.ValidationError as error:
        raise ValueError(error.errors(include_input=False)[0]["msg"]) from None


def escaped(text: str) -> str:
    """Return the beginning of a foreign text, on one line, with control characters escaped.

    So the text cannot control a terminal.
    """
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown
    )


def dtype_names(dtypes: Iterable[object]) -> list[str]:
    """Return the names of torch dtypes as in SGLang's requests, such as "int8"."""
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]
