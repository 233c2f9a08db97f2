"""The fields of a model's config.json and other files in JSON, each checked when it is read."""

import json
from pathlib import Path
from typing import Any


class ArchitectureError(ValueError):
    """A model directory or layout that cannot be used. The message is one line for the user."""


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ArchitectureError: the file cannot be read as JSON, or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        reason = " ".join(str(error).split())
        raise ArchitectureError(f"{file} is not JSON: {reason}") from None
    if not isinstance(content, dict):
        raise ArchitectureError(f"{file} holds no JSON object, but {type(content).__name__}")
    return content


def read_size(config: dict[str, Any], name: str, file: Path, default: int | None = None) -> int:
    """Return a field that is a size; `default` replaces a missing one, if it is not None."""
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise ArchitectureError(f"{file} has no '{name}'")
    if type(value) is not int or not 0 < value < 2**31:
        raise ArchitectureError(f"{file}: '{name}' must be a positive integer, not {value!r:.80}")
    return value


def read_positive(
    fields: dict[str, Any], name: str, file: Path, default: float | None = None
) -> float:
    """Return a field that is a positive number; `default` replaces a missing one."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ArchitectureError(f"{file}: '{name}' must be a positive number, not {value!r:.80}")
    return float(value)


def read_flag(config: dict[str, Any], name: str, file: Path) -> bool:
    """Return a field that is true or false; a missing one is false."""
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ArchitectureError(f"{file}: '{name}' must be true or false, not {value!r:.80}")
    return value
