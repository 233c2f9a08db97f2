"""A configuration as nested dicts, and back with every value checked."""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic

from qurl_megatron.config.schema import ConfigError

T = TypeVar("T")

# Fields that are dicts with keys of the user's choice.
FREE_FORM_FIELDS = {
    "data_options",
    "evaluation.data",
    "evaluation.server.options",
    "quantization.uaq.layer_scales",
    "rollout.server.options",
    "rollout.stages",
    "server.options",  # of `qurl eval` and `qurl serve`
}


def leaf_values(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the value of every leaf field by its dotted path; a free-form dict is one leaf."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        path = prefix + name
        is_section = isinstance(value, dict) and path not in FREE_FORM_FIELDS
        leaves |= leaf_values(value, f"{path}.") if is_section else {path: value}
    return leaves


def from_tree(kind: type[T], tree: dict[str, Any]) -> T:
    """Return a dataclass of type `kind` with every value converted to its field's type.

    Raises:
        ConfigError: the first value or key that its field does not accept.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_python(tree)
    except pydantic.ValidationError as error:
        raise ConfigError(_message(error)) from None


def _message(error: pydantic.ValidationError) -> str:
    """Return what is wrong with the first wrong value, on one line."""
    first = error.errors()[0]
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    value = str(first["input"])
    if not first["loc"]:
        return "not a mapping of fields to values"
    is_key = first["loc"][-1] == "[key]"
    path = ".".join(str(part) for part in (first["loc"][:-1] if is_key else first["loc"]))
    word = path if is_key else f"{path}={value}"
    return f"{word if word.isprintable() else ascii(word)}: {reason}"
