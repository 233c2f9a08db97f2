"""Documentation of dataclass fields, read from the docstring below each field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from qurl_megatron.config.values import LARGEST


@dataclasses.dataclass(frozen=True)
class FieldDescription:
    """The description of one leaf field of a configuration."""

    path: str
    """Dotted path, as in `field=value`."""

    type: str
    """Accepted values, such as `int >= 1`, `"naive" | "tis"` or `int >= 1 or null`."""

    default: str
    """Default value, in YAML."""

    meaning: str
    """The field's docstring, on one line."""

    section: str
    """First line of the docstring of the dataclass that has the field."""


def describe(kind: type, prefix: str = "") -> Iterator[FieldDescription]:
    """Yield every leaf field of a dataclass and of the dataclasses in it, in order.

    Each path starts with `prefix`. A field that is a dataclass yields its own fields, with the
    defaults that `kind` gives them.

    Raises:
        LookupError: a field has no docstring.
    """
    required = {
        field.name: None
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    yield from _describe(kind, kind(**required), prefix)


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass on one line, in the order of its fields.

    Raises:
        LookupError: a field has no docstring.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                docs[field.target.id] = " ".join(str(below.value.value).split())
    names = [field.name for field in dataclasses.fields(kind)]
    missing = [name for name in names if name not in docs]
    if missing:
        raise LookupError(f"{kind.__name__}.{missing[0]} has no docstring below it")
    return {name: docs[name] for name in names}


def _describe(kind: type, defaults: Any, prefix: str) -> Iterator[FieldDescription]:
    meanings = field_docs(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    section = (inspect.getdoc(kind) or "").partition("\n")[0]
    for name, meaning in meanings.items():
        default = getattr(defaults, name)
        if dataclasses.is_dataclass(hints[name]):
            yield from _describe(hints[name], default, f"{prefix}{name}.")
        else:
            yield FieldDescription(
                f"{prefix}{name}", type_name(hints[name]), json.dumps(default), meaning, section
            )


def type_name(hint: Any) -> str:
    """Return the values that a type hint accepts, as a person would write them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return f"{type_name(arguments[0])} {' and '.join(_bounds(hint.__metadata__))}".rstrip()
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in arguments)
    if origin is list:
        return f"[{type_name(arguments[0])}, ...]"
    if origin is dict:
        return f"{{{type_name(arguments[0])}: {type_name(arguments[1])}, ...}}"
    if dataclasses.is_dataclass(hint):
        parts = typing.get_type_hints(hint, include_extras=True).items()
        return f"{{{', '.join(f'{name}: {type_name(part)}' for name, part in parts)}}}"
    return {types.NoneType: "null", Any: "any value"}.get(hint, getattr(hint, "__name__", ""))


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    """Yield the bounds in words, without upper bounds that nobody meets."""
    for bound in metadata:
        if isinstance(bound, Gt):
            yield f"> {bound.gt}"
        elif isinstance(bound, Ge):
            yield f">= {bound.ge}"
        elif isinstance(bound, Le) and bound.le < LARGEST:  # type: ignore[operator]
            yield f"<= {bound.le}"
        elif isinstance(bound, Lt):
            yield f"< {bound.lt}"
