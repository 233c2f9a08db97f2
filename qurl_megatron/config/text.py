"""A configuration as text: `field=value` overrides, config.yaml, and the docstrings of fields.

Every value that is read is checked. `qurl config` prints YAML with the docstrings as comments.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from qurl_megatron.config import yaml_text
from qurl_megatron.config.other_names import our_name
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.files import write_whole

T = TypeVar("T")
_WIDTH = 100
_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = functools.cache(pydantic.TypeAdapter)


def leaf_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of each field of a dataclass, and of those in it, by dotted path."""
    leaves: dict[str, Any] = {}
    for name, value in vars(config).items():
        path = prefix + name
        is_section = dataclasses.is_dataclass(value)
        leaves |= leaf_values(value, f"{path}.") if is_section else {path: value}
    return leaves


def from_tree(kind: type[T], tree: Any, *, extra: Literal["ignore", "forbid"] = "ignore") -> T:
    """Return a dataclass of type `kind` with every value converted to its field's type.

    `extra` says what happens to fields that `kind` lacks; a newer version may have saved some.

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
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")
    value = "null" if first["input"] is None else str(first["input"])[:_WIDTH]
    word = path if first["loc"][-1] == "[key]" else f"{path}={value}"
    if not word.isprintable():
        word = ascii(word)
    raise ConfigError(f"{word}: {reason[0].lower()}{reason[1:]}")


def with_overrides(config: T, overrides: list[str]) -> T:
    """Return `config`, a dataclass, with each `field=value` override applied.

    The field of a section has a dotted path: `rollout.temperature=0.6`. So has a single key of a
    dict: `data_options.size=9`. The dict's own path replaces all its keys: `data_options={}` leaves
    none.

    Raises:
        ConfigError: an override without `=`, an unknown field, or a value of the wrong type.
    """
    tree: dict[str, Any] = dataclasses.asdict(config)  # type: ignore[call-overload]
    leaves = leaf_values(config)
    for override in overrides:
        path, equals, value = override.partition("=")
        if (renamed := _renamed(path)) != path:
            reason = f"{path} is called {renamed} now; version 0.3 will not know the old name"
            warnings.warn(reason, FutureWarning, stacklevel=2)
            path = renamed
        if not equals or not path:
            raise ConfigError(f"{override}: not of the form field=value")
        section, _, leaf = path.rpartition(".")
        is_key = isinstance(leaves.get(section), dict)
        if path not in leaves and not is_key:
            raise ConfigError(no_such_field(path, config))
        node = tree
        for name in section.split(".") if section else []:
            node = node[name]
        if is_key or isinstance(leaves[path], dict):
            try:
                node[leaf] = _renamed(yaml_text.parse(value))
            except ConfigError as error:
                raise ConfigError(f"{override}: {error}") from None
            if not is_key and not isinstance(node[leaf], dict):
                raise ConfigError(f"{override}: not of the form {{key: value}}; {{}} leaves no key")
        elif value in ("null", "none", "None"):
            node[leaf] = None
        else:
            node[leaf] = _items(value) if isinstance(leaves[path], list) else value
    return from_tree(type(config), tree, extra="forbid")


def overrides_between(config: T, changed: T) -> list[str]:
    """Return the `field=value` overrides that turn `config` into `changed`, of the same type."""
    before = leaf_values(config)
    overrides = []
    for field, value in leaf_values(changed).items():
        if value != before[field]:
            text = "null" if value is None else value
            if isinstance(value, list):
                text = f"[{', '.join(map(str, value))}]"
            elif isinstance(value, dict):
                text = json.dumps(value, default=vars)
            overrides.append(f"{field}={text}")
    return overrides


def _items(value: str) -> list[str]:
    """Return the texts of a list, in brackets or not; they need no quotes, unlike in YAML."""
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1]
    return [item.strip().strip("\"'") for item in value.split(",") if item.strip()]


def no_such_field(path: str, config: Any) -> str:
    """Return a line about a field that `config` lacks, with the closest fields and meanings."""
    meanings = field_meanings(config)
    if inside := [name for name in meanings if name.startswith(f"{path}.")]:
        return f"{path}: has no value of its own; give its fields, such as {inside[0]}"
    if isinstance(config, Config) and (ours := our_name(path)):
        return f"{path}: no such field; that is {ours} here"
    close_fields = []
    for name in _closest(path, meanings):
        # "Eq. 5" does not end a sentence.
        sentence = re.split(r"(?<!Eq)\. ", meanings[name], maxsplit=1)[0].removesuffix(".")
        close_fields.append(f"{name} ({sentence})")
    suggestion = f"; did you mean {' or '.join(close_fields)}?" if close_fields else ""
    return f"{path}: no such field{suggestion}"


def _closest(path: str, fields: Iterable[str]) -> list[str]:
    """Return the fields of the same name, else of the most similar name, else of a similar path.

    If `path` names a section, only its fields are searched for similar names.
    """
    section, _, leaf = path.rpartition(".")
    leaves = {field: field.rpartition(".")[2] for field in fields}
    same = [field for field in leaves if leaves[field] == leaf]
    if same:
        return same
    siblings = [field for field in leaves if field.rpartition(".")[0] == section] if section else []
    names = {leaves[field] for field in siblings or leaves}
    similar = difflib.get_close_matches(leaf, names, n=2, cutoff=0.7)
    return [field for field in siblings or leaves if leaves[field] in similar] or (
        difflib.get_close_matches(path, leaves, n=3, cutoff=0.6)
    )


def save(config: Config, path: Path) -> None:
    """Write `config` to a file that `load` reads."""
    write_whole(path, yaml_text.dump(dataclasses.asdict(config)))


def load(path: Path) -> Config:
    """Return the configuration in a YAML file, also in one of an older version.

    Raises:
        ConfigError: it is not YAML, or has a value that its field does not accept.
    """
    try:
        return from_tree(Config, _in_todays_fields(yaml_text.parse(path.read_bytes())))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _in_todays_fields(tree: Any) -> Any:
    """Return a `tree` that an older version saved, with the present names of its fields.

    Raises:
        ConfigError: a field that is gone has a value that is no longer supported.
    """
    tree = _renamed(tree)
    sections = tree if isinstance(tree, dict) else {}
    learner, rollout = (sections.get(name) for name in ("learner", "rollout"))
    if isinstance(learner, dict) and learner.pop("recompute_activations", False):
        learner["recompute"] = "full"
    if isinstance(learner, dict) and (fp8 := learner.pop("fp8", None)):
        raise ConfigError(f"learner.fp8={fp8}: not supported any more; leave it out")
    if isinstance(rollout, dict) and (top_k := rollout.get("top_k", -1)) != -1:
        raise ConfigError(f"rollout.top_k={top_k}: not supported; set rollout.top_p instead")
    return tree


def _renamed(given: Any) -> Any:
    """Return a field's path, or a tree of fields, with the names of this version."""
    if isinstance(given, dict):
        values = {name: _renamed(x) if isinstance(x, dict) else x for name, x in given.items()}
        return {_renamed(name): value for name, value in values.items()}
    if isinstance(given, str):
        return re.sub(r"(^|\.)max_response_length$", r"\1max_completion_length", given)
    return given


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
