"""Configurations as `field=value` words, as nested dicts and as YAML files."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from qurl_megatron.config.schema import Config, ConfigError

T = TypeVar("T")
# Dicts of any keys; a stage is given as {max_response_length: 8, completions_per_prompt: 8}.
_FREE_FORM = {
    "data_options",
    "evaluation.data",
    "quantization.uaq.layer_scales",
    "rollout.stages",
}
_ABSENT = object()


def with_overrides(config: T, words: list[str]) -> T:
    """`config`, a dataclass, with each `field=value` word applied; of a part `rollout.top_k=-1`.

    Raises:
        ConfigError: a word without `=`, an unknown field, or a value of the wrong type.
    """
    tree = dataclasses.asdict(config)  # type: ignore[call-overload]
    for word in words:
        path, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word}: not of the form field=value")
        *parents, leaf = path.split(".")
        node, known = tree, True
        for parent in parents:
            known = known and isinstance(node.get(parent), dict)
            node = node[parent] if known else node
        free_form = ".".join(parents) in _FREE_FORM
        if not known or (leaf not in node and not free_form) or isinstance(node.get(leaf), dict):
            raise ConfigError(f"{path}: no such field{_suggestion(path, tree)}")
        try:
            node[leaf] = yaml.safe_load(value) if free_form else _plain(value)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{word}: not readable as YAML ({reason})") from None
    return from_tree(type(config), tree)


def overrides_between(config: T, changed: T) -> list[str]:
    """The `field=value` words that make `changed` of `config`, of the same dataclass.

    A key that `changed` has taken out of a dict stays.
    """
    before, now = (_leaves(dataclasses.asdict(one)) for one in (config, changed))  # type: ignore[call-overload]
    words = []
    for field, value in now.items():
        if field in _FREE_FORM:
            words += [
                f"{field}.{key}={json.dumps(part)}"
                for key, part in value.items()
                if before[field].get(key, _ABSENT) != part
            ]
        elif value != before[field]:
            words.append(f"{field}={'null' if value is None else value}")
    return words


def from_tree(kind: type[T], tree: dict[str, Any]) -> T:
    """A configuration from nested dicts, every value converted to its field's type."""
    try:
        return pydantic.TypeAdapter(kind).validate_python(tree)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigError(f"{path}={first['input']}: {message}") from None


def save(config: Config, path: Path) -> None:
    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def load(path: Path) -> Config:
    return from_tree(Config, yaml.safe_load(path.read_text()))


def _plain(value: str) -> str | None:
    return None if value in ("null", "none", "None") else value


def _suggestion(path: str, tree: dict[str, Any]) -> str:
    """`; did you mean ...?` with the closest field names, or nothing."""
    fields = list(_leaves(tree))
    leaf = path.rpartition(".")[2]
    close = [name for name in fields if name.rpartition(".")[2] == leaf]
    close = close or difflib.get_close_matches(path, fields, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every field of a configuration's nested dicts, as it is named in `field=value`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and f"{prefix}{name}" not in _FREE_FORM
        found |= _leaves(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return found
