"""A configuration as text: `field=value` overrides and config.yaml. Every value is checked."""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import pydantic

from qurl_megatron.config import yaml_text
from qurl_megatron.config.older import path_now, tree_now
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.files import write_whole

T = TypeVar("T")
_WIDTH = 100
_EMPTY = {"string_type": "''", "list_type": "[]"}
_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = functools.cache(pydantic.TypeAdapter)


def leaf_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of each field of a dataclass, and of those in it, by dotted path."""
    leaves: dict[str, Any] = {}
    for name, value in vars(config).items():
        path = prefix + name
        is_section = dataclasses.is_dataclass(value)
        leaves |= leaf_values(value, f"{path}.") if is_section else {path: value}
    return leaves


class Given(NamedTuple):
    """What is given for a field, and where.

    The path of one key of a dict has a part more: `prompts.options.size`. Empty place: a word of
    the command line. Else messages begin with it: `my.yaml, line 3: `.
    """

    path: str
    value: Any
    place: str = ""


def from_tree(
    kind: type[T],
    tree: Any,
    *,
    extra: Literal["ignore", "forbid"] = "ignore",
    places: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Return a dataclass of type `kind` with every value converted to its field's type.

    `extra` says what happens to fields that `kind` lacks; a newer version may have saved some.
    `places` says where values are given, by dotted path, for the message.

    Raises:
        ConfigError: a field does not accept a value or key; the message names the first.
    """
    try:
        return _adapter(kind).validate_python(tree, extra=extra)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
    if not first["loc"]:
        raise ConfigError("not a mapping of fields to values")
    reason = first["msg"].removeprefix("Value error, ")
    if first["input"] is None and first["type"] in _EMPTY:
        reason += f"; an empty one is {_EMPTY[first['type']]}"
    parts = [str(part) for part in first["loc"] if part != "[key]"]
    paths = [".".join(parts[: len(parts) - cut]) for cut in range(len(parts))]
    value = "null" if first["input"] is None else str(first["input"])[:_WIDTH]
    has_no_value = first["loc"][-1] == "[key]" or first["type"] == "missing"
    word = paths[0] if has_no_value else f"{paths[0]}={value}"
    if not word.isprintable():
        word = ascii(word)
    place = next((places[path] for path in paths if path in places), "")
    raise ConfigError(f"{place}{word}: {reason[0].lower()}{reason[1:]}")


def with_overrides(config: T, overrides: Iterable[str | Given]) -> T:
    """Return `config`, a dataclass, with each override applied: a `field=value` word, or a Given.

    The field of a section has a dotted path: `rollout.temperature=0.6`. So has a single key of a
    dict: `prompts.options.size=9`. The dict's own path replaces all its keys: `prompts.options={}`
    leaves none.

    Raises:
        ConfigError: an override without `=`, an unknown field, or a value of the wrong type.
    """
    tree: dict[str, Any] = dataclasses.asdict(config)  # type: ignore[call-overload]
    places = {}
    for each in overrides:
        path, value, place = of_word(each, config) if isinstance(each, str) else each
        *sections, leaf = path.split(".")
        functools.reduce(operator.getitem, sections, tree)[leaf] = value
        places[path] = place
    return from_tree(type(config), tree, extra="forbid", places=places)


def of_word(word: str, config: Any) -> Given:
    """Return what a `field=value` word gives to a dataclass.

    Raises:
        ConfigError: it has another form, or `config` has no such field.
    """
    path, equals, text = word.partition("=")
    if not equals or not path:
        raise ConfigError(f"{word}: not of the form field=value")
    return _given(path_now(path), text, "", config)


def of_file(content: bytes, file: str, config: Any) -> list[Given]:
    """Return what a YAML file, called `file` in messages, gives to a dataclass.

    Raises:
        ConfigError: it is no mapping, gives a field twice, or `config` has no such field.
    """
    found = yaml_text.leaves(content, file, leaf_values(config))
    # A config.yaml of version 0.2 gives every field.
    return [_given(*each, config) for each in found if each[:2] != ("learner.fp8", None)]


def _given(path: str, value: Any, place: str, config: Any) -> Given:
    """Return what is given; texts become lists, dicts and None."""
    fields = leaf_values(config)
    if not (field := field_of(path, fields)):
        raise ConfigError(f"{place}{no_such_field(path, config)}")
    if isinstance(fields[field], dict):
        word = f"{place}{path}={value}"
        try:
            value = value if place else yaml_text.parse(value)
        except ConfigError as error:
            raise ConfigError(f"{word}: {error}") from None
        if not isinstance(value, dict) and path == field:
            raise ConfigError(f"{word}: not of the form {{key: value}}; {{}} leaves no key")
    elif value in ("null", "none", "None"):
        value = None
    elif isinstance(fields[field], list) and isinstance(value, str):
        value = _items(value)
    return Given(path, value, place)


def field_of(path: str, fields: Mapping[str, Any]) -> str:
    """Return the field of a path, which names it or a key of its dict; empty: there is none."""
    section = path.rpartition(".")[0]
    return path if path in fields else section if isinstance(fields.get(section), dict) else ""


def _items(value: str) -> list[str]:
    """Return the texts of a list, in brackets or not; only a comma needs quotes, unlike in YAML."""
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1]
    found = re.findall(r"""\s*("[^"]*"|'[^']*'|[^,]*)\s*(?:,|$)""", value.strip())
    items = [item.strip().strip("\"'") for item in found]
    return items if items[-1] else items[:-1]  # what follows the last comma may be nothing


def no_such_field(path: str, config: Any) -> str:
    """Return a line about a field that `config` lacks, with what would be right."""
    from qurl_megatron.config import meanings, other_names

    known = meanings.field_meanings(config), meanings.field_meanings(Config())
    return other_names.no_such_field(path, *known)


def save(config: Config, path: Path) -> None:
    """Write `config` to a file that `load` reads."""
    write_whole(path, yaml_text.dump(dataclasses.asdict(config)))


def load(path: Path) -> Config:
    """Return the configuration in a YAML file, also in one that version 0.2 has saved.

    Raises:
        ConfigError: it is not YAML, or has a value that its field does not accept.
    """
    try:
        return from_tree(Config, tree_now(yaml_text.parse(path.read_bytes())))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
