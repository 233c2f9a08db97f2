"""A configuration as a tree of dicts, back from one with every value checked, and as YAML.

The YAML is a run's config.yaml, or the commented page of `qurl config`.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.values import field_docs, first_line

T = TypeVar("T")
_WIDTH = 100
_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = functools.cache(pydantic.TypeAdapter)


def leaf_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of every field of a dataclass and of those in it, by its dotted path."""
    leaves: dict[str, Any] = {}
    for name, value in vars(config).items():
        path = prefix + name
        is_section = dataclasses.is_dataclass(value)
        leaves |= leaf_values(value, f"{path}.") if is_section else {path: value}
    return leaves


def from_tree(kind: type[T], tree: Any) -> T:
    """Return a dataclass of type `kind` with every value converted to its field's type.

    Raises:
        ConfigError: the first value or key that its field does not accept.
    """
    try:
        return _adapter(kind).validate_python(tree)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
    if not first["loc"]:
        raise ConfigError("not a mapping of fields to values")
    reason = first["msg"].removeprefix("Value error, ")
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")
    word = path if first["loc"][-1] == "[key]" else f"{path}={first['input']}"
    if not word.isprintable():
        word = ascii(word)
    raise ConfigError(f"{word}: {reason[0].lower()}{reason[1:]}")


def save(config: Config, path: Path) -> None:
    """Write `config` to a file that `load` reads."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def load(path: Path) -> Config:
    """Return the configuration in a YAML file, also in one of an older version.

    Raises:
        ConfigError: it is not YAML, or has a value that its field does not accept.
    """
    try:
        return from_tree(Config, _in_todays_fields(yaml.safe_load(path.read_text())))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: not readable as YAML ({reason})") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _in_todays_fields(tree: Any) -> Any:
    """Return `tree` with the fields that an older version saved under their present names.

    Raises:
        ConfigError: a field that is gone has another value than the only one it could have.
    """
    sections = tree if isinstance(tree, dict) else {}
    learner, rollout = (sections.get(name) for name in ("learner", "rollout"))
    if isinstance(learner, dict) and learner.pop("recompute_activations", False):
        learner["recompute"] = "full"
    for name, value in {"top_p": 1, "top_k": -1}.items():
        if isinstance(rollout, dict) and rollout.get(name, value) != value:
            raise ConfigError(
                f"rollout.{name}={rollout[name]}: training samples from the full vocabulary, "
                "because SGLang's log-probs are not those of a truncated one; remove the field"
            )
    return tree


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
            text = yaml.safe_dump({name: tree[name]}, sort_keys=False, width=_WIDTH)
            yield textwrap.indent(text.rstrip(), indent)
