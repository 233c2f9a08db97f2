"""Atomic writes: a file or directory is complete or absent, even if the process dies."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


def partial_of(directory: Path) -> Path:
    """Return the path of a directory while it is filled, before `rename_whole` renames it."""
    return directory.with_name(directory.name + PARTIAL)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the run's complete checkpoints, oldest first."""
    return sorted(
        path for path in (run_dir / "checkpoints").glob("step_*") if path.suffix != PARTIAL
    )


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file; an empty list if the file does not exist.

    A last line without a line break is dropped: its writer was interrupted.
    """
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if there is no such file or it is not whole.

    `write_whole` leaves no such file, but a full disk that loses what was written, or a copy that
    was interrupted, may.
    """
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_whole(
    path: Path, content: str | Callable[[Path], None], *, private: bool = False
) -> None:
    """Write a file atomically.

    Args:
        content: the text, or a function that writes the file at a given path.
        private: only this user may read the file.
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
    """Sync a finished file or directory to disk, then rename it to `path`.

    The caller syncs the files within a directory.
    """
    sync(unfinished)
    os.replace(unfinished, path)
    sync(path.parent)


def free_bytes(path: Path) -> int:
    """Return the free space of the file system that a path is on, or will be on when it is made.

    A quota may leave less to this user.
    """
    path = path.absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(existing).free


def gigabytes(num_bytes: float) -> str:
    """Return a size for a message, such as `1.5 GB` or `1.44 TB`."""
    return f"{num_bytes / 1e12:.3g} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g} GB"


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
