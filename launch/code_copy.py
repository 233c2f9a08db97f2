"""The copy of the code that a job runs, however long it waits or how often it is requeued.

It is a directory `logs/code_HASH` with the package, and beside it in `own/` what the user's
functions are in: the Python files of that directory and of packages below it. The other files there
are links, because a function may read them by its `__file__`.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import qurl_megatron
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import Given

PACKAGE = Path(qurl_megatron.__file__).absolute().parent
LOGS = "logs"  # of jobs, below the directory that they are submitted from


Code = dict[Path, bytes | Path]
"""The content of each file of a copy, by its path there. A path: a link to it."""


def read_code(configs: Iterable[Config] = ()) -> Code:
    """Return the files of the package, and of what the user wrote for these runs.

    The package has the metadata by which SGLang finds the plugin.
    """
    found: dict[Path, Path] = {}
    for directory, _, names in os.walk(PACKAGE, followlinks=True):
        if Path(directory).name != "__pycache__":
            for name in names:
                path = Path(directory, name)
                found[path.relative_to(PACKAGE.parent)] = path
    for each in distribution("qurl-megatron").files or ():
        if each.parts[0].endswith((".dist-info", ".egg-info")):  # the latter in a checkout
            found[Path(each)] = Path(str(each.locate()))
    links: dict[Path, Path] = {}
    for config in configs:
        files = map(_file_of, itertools.chain(*_functions(config).values()))
        for file in filter(None, files):
            for path in _beside(file.parent):
                chosen = found if path.suffix == ".py" and path.is_file() else links
                chosen[_copy_of(file.parent) / path.relative_to(file.parent)] = path
    return {file: found[file].read_bytes() for file in sorted(found)} | {
        file: path for file, path in links.items() if file not in found
    }


def place_of(code: Code) -> Path:
    """Return the directory for a copy of the code, which jobs of the same code share."""
    content = hashlib.sha256()
    for file, data in code.items():
        if isinstance(data, bytes):
            content.update(str(file).encode() + data)
    return Path(LOGS).absolute() / f"code_{content.hexdigest()[:12]}"


def copies(config: Config, place: Path) -> list[Given]:
    """Return what gives a job the copies of the user's functions."""
    functions = _functions(config)
    values: dict[str, Any] = {
        field: ",".join(_in_copy(each, place) for each in names)
        for field, names in functions.items()
    }
    by_name = {
        "scoring.by_source": config.scoring.by_source,
        "evaluation.reward_of": config.evaluation.reward_of,
    }
    for field, rewards in by_name.items():
        values[field] = {name: _in_copy(each, place) for name, each in rewards.items()}
    return [
        Given(field, values[field])
        for field, names in functions.items()
        if any(map(_file_of, names))
    ]


def keep_code(code: Code, place: Path) -> None:
    """Write a copy of the code, or add to the one that is there links to files that are new."""
    if place.exists():
        for file, target in code.items():
            if isinstance(target, Path):
                with contextlib.suppress(FileExistsError):
                    (place / file).symlink_to(target)
        return
    unfinished = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        for file, data in code.items():
            (unfinished / file).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(data, bytes):
                (unfinished / file).write_bytes(data)
            else:
                (unfinished / file).symlink_to(data)
        unfinished.rename(place)
        place.chmod(0o755)  # mkdtemp has made it private
    except OSError as error:
        shutil.rmtree(unfinished)
        if error.errno != errno.ENOTEMPTY:  # another launch was faster
            raise


def _functions(config: Config) -> dict[str, list[str]]:
    """Return the names in each field that may name functions of the user's own."""
    return {
        "reward": config.rewards,
        "scoring.by_source": [*config.scoring.by_source.values()],
        "evaluation.reward_of": [*config.evaluation.reward_of.values()],
        "objective.objective": [config.objective.objective],
        "rollout.agent": [config.rollout.agent],
        "model_builder": [config.model_builder],
    }


def _file_of(function: str) -> Path | None:
    """Return the file that a function is in; None if it is in a module, or not the user's own."""
    file = function.rpartition(":")[0]
    return Path(file).absolute() if file.endswith(".py") else None


def _in_copy(function: str, place: Path) -> str:
    if not (file := _file_of(function)):
        return function
    return f"{place / _copy_of(file.parent) / file.name}:{function.rpartition(':')[2]}"


def _beside(directory: Path) -> Iterator[Path]:
    """Yield what is in a directory, and in place of a package below it what is in that."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name in ("__pycache__", LOGS):
            continue
        if (path / "__init__.py").is_file():
            yield from _beside(path)
        else:
            yield path


def _copy_of(directory: Path) -> Path:
    """Return the place of a directory of the user's in the copy."""
    return Path("own", f"{directory.name}_{hashlib.sha256(bytes(directory)).hexdigest()[:8]}")
