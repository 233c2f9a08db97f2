"""Names of the Hugging Face Hub: models and datasets in the cache that all its tools share.

    ORG/NAME             what its branch main holds now
    ORG/NAME@REVISION    a branch, a tag or a commit

A file or directory of that name on this machine wins. A name stands for the path of a snapshot,
which ends with the commit: `.../models--ORG--NAME/snapshots/COMMIT`. A run keeps that path. If the
snapshot is gone or not whole, the same commit is downloaded again (`downloads.py`).
"""

import re
from pathlib import Path
from typing import NamedTuple

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_SNAPSHOT = re.compile(r"(.*)/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")


class HubError(ValueError):
    """What the Hub or its cache cannot give. The message is one line for the user."""


class Repository(NamedTuple):
    """A repository of the Hub at a revision."""

    name: str  # ORG/NAME
    revision: str = ""  # empty: branch main
    cache: str = ""  # where it has been downloaded to; empty: the usual cache

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def snapshot_of(path: str) -> Repository | None:
    """Return the repository of a snapshot's path, even if it does not exist; None for others."""
    match = _SNAPSHOT.fullmatch(path.rstrip("/"))
    return Repository(f"{match[2]}/{match[3]}", match[4], match[1]) if match else None


def repository_of(text: str, kept: str = "") -> Repository | None:
    """Return the repository that a name of the Hub, or the path of a snapshot, means.

    `kept` is the path that a run has: a name without a revision then means its commit. Return None
    for another text, and for the name of a file or directory.
    """
    if snapshot := snapshot_of(text):
        return snapshot
    match = _NAME.fullmatch(text)
    if not match or Path(text).exists():
        return None
    known = snapshot_of(kept)
    return known if known and text == known.name else Repository(match[1], match[2] or "")


def refuse_address(text: str) -> None:
    """Refuse a URL, which is neither a path nor a name.

    Raises:
        HubError: it is one; the line says what to give instead.
    """
    if re.match(r"[a-z0-9]+://", text):
        found = re.match(r"(?:https?://huggingface\.co|hf:/)/(?:datasets/)?([\w.-]+/[\w.-]+)", text)
        name = (
            f"the name {found[1]}" if found else "the path of what you have downloaded (curl -LO)"
        )
        raise HubError(f"{text}: an address is not downloaded; give {name}")
