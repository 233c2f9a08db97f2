"""Downloads from the Hugging Face Hub into its cache; `repository.py` has what names mean."""

import contextlib
import errno
import functools
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from qurl_megatron.model.repository import HubError, Repository

Kind = Literal["model", "dataset"]
_COMMIT = re.compile(r"[0-9a-f]{40}")


def download(
    repository: Repository,
    kind: Kind,
    allowed: Sequence[str],
    ignored: Sequence[str] = (),
) -> Path:
    """Download the files that match `allowed` patterns and no `ignored` one; return the snapshot.

    A commit that has been downloaded is not asked for again. If the Hub does not give it, what the
    cache has is used; only its list of a commit's files, which older versions of the library did
    not keep, can say that something is missing.

    Raises:
        HubError: not all of it can be downloaded.
    """
    import huggingface_hub  # takes part of a second: imported only where it is used
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    huggingface_hub.utils.logging.set_verbosity_error()  # its warnings repeat its exceptions
    given: dict[str, Any] = {
        "repo_type": kind,
        "revision": repository.revision or None,
        "cache_dir": _cache(repository),
    }
    patterns: dict[str, Any] = {
        "allow_patterns": list(allowed),
        "ignore_patterns": list(ignored),
    }
    if _COMMIT.fullmatch(repository.revision):
        # Without its list of files the cache cannot say whether it has all.
        with contextlib.suppress(CachedRepoTreeNotFoundError):
            tree = huggingface_hub.get_cached_repo_tree(repository.name, **given)
            with contextlib.suppress(LocalEntryNotFoundError):
                return Path(
                    huggingface_hub.snapshot_download(
                        repository.name, **given, **patterns, local_files_only=True
                    )
                )
            chosen = filter_repo_objects(tree, **patterns, key=lambda file: file.path)
            if (megabytes := sum(file.size for file in chosen) / 1e6) >= 1:
                print(f"qurl: downloading {megabytes:,.0f} MB: {repository}", file=sys.stderr)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a disk that is too small: an error says so
            return Path(huggingface_hub.snapshot_download(repository.name, **given, **patterns))
    except Exception as error:  # of the Hub, the network and the disk
        with contextlib.suppress(LocalEntryNotFoundError, ValueError):
            snapshot = huggingface_hub.snapshot_download(
                repository.name, **given, **patterns, local_files_only=True
            )
            _warn_of_no_list(repository.name)
            return Path(snapshot)
        raise HubError(f"{repository}: {_reason(error, repository, kind)}") from error


@functools.cache  # said once
def _warn_of_no_list(name: str) -> None:
    print(
        f"qurl: {name}: the cache has no list of its files, and the Hub does not answer; what is "
        "there is taken for all of it",
        file=sys.stderr,
    )


def is_listed(commit: Repository, kind: Kind) -> bool:
    """Return whether the cache has the list of a commit's files, and so knows what it lacks."""
    return _tree(commit, kind) is not None


def listed(commit: Repository, kind: Kind = "model") -> list[str]:
    """Return the files of a commit, according to the cache, which has something of the commit."""
    names = _tree(commit, kind)
    if names is None:  # older versions keep no list
        snapshot = download(commit, kind, ())
        names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
    return [name for name in names if not {"", "..", "."} & set(name.split("/"))]  # inside it


def _tree(commit: Repository, kind: Kind) -> list[str] | None:
    """Return the files of a commit as the cache lists them; None: it has no list."""
    import huggingface_hub
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = huggingface_hub.get_cached_repo_tree(
            commit.name, repo_type=kind, revision=commit.revision, cache_dir=_cache(commit)
        )
    except CachedRepoTreeNotFoundError:
        return None
    return [file.path for file in tree]


def _cache(repository: Repository) -> str | None:
    """Return the cache that a snapshot is in, if it is there; None is the usual one."""
    return repository.cache if repository.cache and Path(repository.cache).is_dir() else None


def _reason(error: Exception, repository: Repository, kind: str) -> str:
    """Return what is wrong, and what to do."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository.name}"
    if isinstance(error, errors.GatedRepoError):
        return f"is gated; ask for access at {page}, then log in: hf auth login (or set HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no such directory here, and no such {kind} on the Hub ({page}); if it is "
            "private, log in: hf auth login (or set HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hub has no such branch, tag or commit of it; see {page}/tree/main"
    if isinstance(error, errors.HFValidationError):
        return f"there is no such directory here, and it is no {kind}'s name on the Hub"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk of {constants.HF_HUB_CACHE} is full; make room, or set HF_HOME to a "
            "directory of a larger one, and run this again: it continues"
        )
    if isinstance(error, PermissionError) or (
        isinstance(error, OSError) and error.errno == errno.EROFS
    ):
        return (
            f"{error.filename or constants.HF_HUB_CACHE} cannot be written; set HF_HOME to a "
            "directory that can"
        )
    cause = error.__cause__ or error
    why = " ".join(f"{type(cause).__name__}: {cause}".split())
    if constants.is_offline_mode():
        why = "HF_HUB_OFFLINE is set"
    command = f"hf download {repository.name}"
    command += " --repo-type dataset" if kind == "dataset" else ""
    command += f" --revision {repository.revision}" if repository.revision else ""
    if _COMMIT.fullmatch(repository.revision):
        has = "is not downloaded whole"
    else:
        has = "there is no such directory here, it is not downloaded"
    return (
        f"{has}, and the Hub does not give it ({why:.300}); run this again where there is a "
        f"network, which continues it, or there: {command}"
    )
