"""The docstrings of fields: what each means, as `qurl config`, the docs and messages say it."""

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pydantic

from qurl_megatron.config import yaml_text
from qurl_megatron.config.schema import Config

_WIDTH = 100


def commented_yaml(config: Config) -> str:
    """Return `config` as YAML with each field's meaning as a comment above it."""
    return "\n".join(_commented(config, indent="")) + "\n"


def _commented(section: Any, indent: str) -> Iterator[str]:
    tree = dataclasses.asdict(section)
    for name, meaning in field_docs(type(section)).items():  # type: ignore[arg-type]
        value = getattr(section, name)
        is_section = dataclasses.is_dataclass(value)
        if is_section:
            yield ""
        margin = f"{indent}# "
        text = first_line(value) if is_section else meaning
        yield from textwrap.wrap(text, _WIDTH, initial_indent=margin, subsequent_indent=margin)
        if is_section:
            yield f"{indent}{name}:"
            yield from _commented(value, f"{indent}  ")
        else:
            text = yaml_text.dump({name: tree[name]}, width=_WIDTH)
            yield textwrap.indent(text.rstrip(), indent)


def field_meanings(config: Any, prefix: str = "") -> dict[str, str]:
    """Return the docstring of each field of a dataclass, and of those in it, by dotted path.

    Each path starts with `prefix`.
    """
    meanings: dict[str, str] = {}
    for name, meaning in field_docs(type(config)).items():  # type: ignore[arg-type]
        value, path = getattr(config, name), prefix + name
        is_section = dataclasses.is_dataclass(value)
        meanings |= field_meanings(value, f"{path}.") if is_section else {path: meaning}
    return meanings


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass on one line, in the order of its fields."""
    # pydantic gives a dataclass the settings of the type around it; here that is a list.
    settings = pydantic.ConfigDict(use_attribute_docstrings=True)
    schema = pydantic.TypeAdapter(list[kind], config=settings).json_schema()  # type: ignore[valid-type]
    fields = schema["$defs"][kind.__name__]["properties"]
    docs = {name: " ".join(field.get("description", "").split()) for name, field in fields.items()}
    for base in filter(dataclasses.is_dataclass, kind.__bases__):  # pydantic reads no bases
        docs |= field_docs(base)
    return docs


def first_line(documented: Any) -> str:
    """Return the first line of the docstring of an object or of its class."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]
