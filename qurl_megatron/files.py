"""Files and directories that are whole or not there, whatever happens to the process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


def partial_of(directory: Path) -> Path:
    """Where a directory is made until it is whole; `rename_whole` then gives it its name."""
    return directory.with_name(directory.name + PARTIAL)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl, without a last line that was cut short; none if it is not there."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write_whole(
    path: Path, content: str | Callable[[Path], None], *, private: bool = False
) -> None:
    """Write a file that is either whole or not there, whatever happens to this process.

    A `private` one is for nobody but this user to read.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    if private:
        unfinished.touch(mode=0o600)
    if isinstance(content, str):
        unfinished.write_text(content)
    else:
        content(unfinished)
    rename_whole(unfinished, path)


def rename_whole(unfinished: Path, path: Path) -> None:
    """Give a finished file or directory its name, on the disk before it is seen.

    Files within a directory are for the caller to sync.
    """
    sync(unfinished)
    os.replace(unfinished, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file's content, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
