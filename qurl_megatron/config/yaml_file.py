"""Write a configuration as YAML: a run's config.yaml, and the commented page of `qurl config`."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from qurl_megatron.config.fields import field_docs
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.tree import from_tree

_WIDTH = 100


def save(config: Config, path: Path) -> None:
    """Write `config` to a file that `load` reads."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def load(path: Path) -> Config:
    """Return the configuration in a YAML file.

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
    """Return `tree` with the fields that an older version saved under their present names."""
    learner = tree.get("learner") if isinstance(tree, dict) else None
    if isinstance(learner, dict) and learner.pop("recompute_activations", False):
        learner["recompute"] = "full"
    return tree


def commented_yaml(config: Config) -> str:
    """Return `config` as YAML with each field's meaning as a comment above it."""
    return "\n".join(_commented(config, indent="")) + "\n"


def _commented(section: Any, indent: str) -> Iterator[str]:
    for name, meaning in field_docs(type(section)).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            summary = (inspect.getdoc(value) or "").partition("\n")[0]
            yield ""
            yield from _comment(summary, indent)
            yield f"{indent}{name}:"
            yield from _commented(value, f"{indent}  ")
        else:
            yield from _comment(meaning, indent)
            tree = dataclasses.asdict(section)[name]
            text = yaml.safe_dump({name: tree}, sort_keys=False, width=_WIDTH)
            yield textwrap.indent(text.rstrip(), indent)


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )
