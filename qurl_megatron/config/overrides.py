"""Apply `field=value` overrides to a configuration."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import yaml

from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.values import field_meanings
from qurl_megatron.config.yaml_file import from_tree, leaf_values

T = TypeVar("T")


def with_overrides(config: T, overrides: list[str]) -> T:
    """Return `config`, a dataclass, with each `field=value` override applied.

    The field of a section is given by its dotted path: `rollout.temperature=0.6`. A dict gets a
    single key by its path, `data_options.size=9`, and all its keys by its own: `data_options={}`
    leaves none.

    Raises:
        ConfigError: an override without `=`, an unknown field, or a value of the wrong type.
    """
    tree: dict[str, Any] = dataclasses.asdict(config)  # type: ignore[call-overload]
    leaves = leaf_values(config)
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override}: not of the form field=value")
        section, _, leaf = path.rpartition(".")
        is_key = isinstance(leaves.get(section), dict)
        if path not in leaves and not is_key:
            raise ConfigError(f"{path}: no such field{_suggestion(path, config)}")
        node = tree
        for name in section.split(".") if section else []:
            node = node[name]
        if is_key or isinstance(leaves[path], dict):
            try:
                node[leaf] = yaml.safe_load(value)
            except yaml.YAMLError as error:
                reason = " ".join(str(error).split())
                raise ConfigError(f"{override}: not readable as YAML ({reason})") from None
            if not is_key and not isinstance(node[leaf], dict):
                raise ConfigError(f"{override}: not of the form {{key: value}}; {{}} leaves no key")
        elif isinstance(leaves[path], list):
            node[leaf] = _items(value)
        else:
            node[leaf] = None if value in ("null", "none", "None") else value
    return from_tree(type(config), tree)


def overrides_between(config: T, changed: T) -> list[str]:
    """Return the `field=value` overrides that turn `config` into `changed`, of the same type."""
    before = leaf_values(config)
    overrides = []
    for field, value in leaf_values(changed).items():
        if value != before[field]:
            text = "null" if value is None else value
            if isinstance(value, dict | list):
                text = json.dumps(value, default=vars)
            overrides.append(f"{field}={text}")
    return overrides


def _items(value: str) -> list[str]:
    """Return the texts of a list, in brackets or not; they need no quotes, unlike in YAML."""
    if value.startswith("[") and value.endswith("]"):
        value = value[1:-1]
    return [item.strip().strip("\"'") for item in value.split(",") if item.strip()]


def _suggestion(path: str, config: Any) -> str:
    """Return `; did you mean ...?` with the closest fields and their meanings, or nothing."""
    meanings = field_meanings(config)
    close_fields = " or ".join(
        f"{name} ({_first_sentence(meanings[name])})" for name in _closest(path, meanings)
    )
    return f"; did you mean {close_fields}?" if close_fields else ""


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


def _first_sentence(text: str) -> str:
    """Return the first sentence of `text` without its full stop; "Eq. 5" does not end one."""
    return re.split(r"(?<!Eq)\. ", text, maxsplit=1)[0].removesuffix(".")
