"""Problems: read questions and answers from files, dataset directories and reasoning-gym tasks.

Sources:

    FILE.jsonl             one JSON object per line
    FILE.json              a list of objects, or one object per line
    FILE.parquet           one row per problem
    DIR                    a Hugging Face dataset: written by `save_to_disk`, or files such as
                           these in the layout of the Hub (train-*.parquet, data/, the configs of
                           a README.md); the split `train`, or the only split there is
    DIR:SPLIT              another split of it
    reasoning_gym:TASK     problems that reasoning-gym generates

Recognized fields of an entry (others are ignored):

    source                         question                            answer
    plain, reasoning-gym           question (or prompt, or problem)    answer
    GSM8K                          question                            answer, "#### 42" at its end
    DeepScaleR, MATH-500, AIME     problem                             answer
    verl, DAPO-17k                 prompt: chat messages               reward_model.ground_truth

The question is a string or a list of chat messages, which are objects with `role` and `content`.
`metadata` holds fields for the verifier; reward reasoning_gym needs its `source_dataset`.

Invariants:
- A question appears once; later copies are dropped.
- Nothing is downloaded, and nothing is written outside a temporary directory.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qurl_megatron.config.schema import Config
from qurl_megatron.data.scoring import unverifiable
from qurl_megatron.data.verifiers import reasoning_gym_tasks

REASONING_GYM = "reasoning_gym:"
QUESTION_FIELDS = ("question", "prompt", "problem")
MESSAGE_FIELDS = ("role", "content")
DEFAULT_TASK_SIZE = 5000

Entries = Iterator[tuple[str, Any]]
"""Location of each entry, for messages, and the entry: an object if the data is right."""


class DataError(ValueError):
    """Data that cannot be used; the text says where, what is wrong and what would be right."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and its answer, before tokenization."""

    question: str  # for a chat, the content of all messages
    messages: list[dict[str, str]]  # role and content; a plain question is one user message
    answer: str
    metadata: dict[str, Any]  # fields for the verifier
    location: str  # file and line, for messages


def read_problems(data: str, data_options: Mapping[str, Any], *, seed: int = 0) -> list[Problem]:
    """Read a file, a dataset directory or `reasoning_gym:TASK`; keep order, drop repetitions.

    Args:
        data: a source, see the top of this module.
        data_options: options of the reasoning-gym task; empty for any other source. `size` defaults
            to 5000 and `seed` to `seed`.

    Raises:
        DataError: a problem cannot be read, or there is none.
    """
    if data.startswith(REASONING_GYM):
        entries = _generate(data.removeprefix(REASONING_GYM), data_options, seed)
    elif data_options:
        raise DataError(
            f"data_options.{next(iter(data_options))}: {data} takes no options; only "
            f"{REASONING_GYM}TASK does"
        )
    else:
        entries = _read(data)
    unique: dict[str, Problem] = {}
    for location, entry in entries:
        problem = _problem(entry, location)
        unique.setdefault(problem.question, problem)
    if not unique:
        raise DataError(f"{data}: contains no problems")
    return list(unique.values())


def find_unverifiable(problems: list[Problem], config: Config) -> dict[str, str]:
    """Return why no response to a problem could be right, by its location, where that is so.

    Raises:
        DataError: that is so for every problem, or for one of reasoning_gym, whose entry then lacks
            what its scorer needs.
    """
    reasons = {
        problem.location: reason
        for problem, reason in zip(problems, unverifiable(config, problems), strict=True)
        if reason
    }
    if reasons and (config.reward == "reasoning_gym" or len(reasons) == len(problems)):
        location, reason = next(iter(reasons.items()))
        raise DataError(f"{location}: {reason}")
    return reasons


# Sources: each yields entries.


def _generate(task: str, options: Mapping[str, Any], seed: int) -> Entries:
    import reasoning_gym

    tasks = reasoning_gym_tasks()
    if task not in tasks:
        raise DataError(f"{REASONING_GYM}{task}: no such task;{_suggestion(task, tasks)}")
    _, config_class = tasks[task]
    known = [field.name for field in dataclasses.fields(config_class)]
    for option in options:
        if option not in known:
            raise DataError(
                f"data_options.{option}: reasoning_gym's {task} has no such option;"
                f"{_suggestion(option, known)}"
            )
    try:
        entries = reasoning_gym.create_dataset(
            task, **{"size": DEFAULT_TASK_SIZE, "seed": seed, **options}
        )
    except Exception as error:  # the library's own checks: AssertionError, TypeError, ValueError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{REASONING_GYM}{task} with {dict(options)}: {reason}") from error
    for index in range(len(entries)):
        yield f"{REASONING_GYM}{task} entry {index}", entries[index]


def _suggestion(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    matches = difflib.get_close_matches(name, known, n=3)
    return f" did you mean {', '.join(matches)}?" if matches else f" known are {', '.join(known)}"


def _read(data: str) -> Entries:
    path = Path(data)
    directory, _, split = data.rpartition(":")
    if path.is_dir():
        return _read_directory(path, None)
    if directory and Path(directory).is_dir():
        return _read_directory(Path(directory), split)
    if not path.is_file():
        raise DataError(f"{data}: no such file or directory")
    return _read_file(path)


def _read_file(path: Path) -> Entries:
    if path.suffix not in _READERS:
        raise DataError(
            f"{path}: unsupported; expected a {', '.join(_READERS)} file, a dataset directory or "
            f"{REASONING_GYM}TASK"
        )
    return _READERS[path.suffix](path)


def _read_jsonl(path: Path) -> Entries:
    # Binary: text mode would also split at the other line separators, inside a JSON string.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            location = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                yield location, json.loads(line)
            except ValueError as error:  # also raised for bytes that are not UTF-8
                raise DataError(
                    f"{location}: not JSON ({error}); expected one object per line"
                ) from error


def _read_json(path: Path) -> Entries:
    with path.open("rb") as file:
        if file.read(64).lstrip()[:1] != b"[":
            yield from _read_jsonl(path)
            return
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); expected a list of objects") from error
    for number, entry in enumerate(entries, start=1):
        yield f"{path} entry {number}", entry


def _read_parquet(path: Path) -> Entries:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for rows in file.iter_batches():
                for entry in rows.to_pylist():
                    number += 1
                    yield f"{path} row {number}", entry
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as parquet after row {number} ({error})") from error


_READERS: dict[str, Callable[[Path], Entries]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_directory(directory: Path, split: str | None) -> Entries:
    """Read one split of a Hugging Face dataset; the library decides what its splits are."""
    import datasets  # takes seconds: imported only where it is used

    # The library's log messages repeat its exceptions.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        if any((directory / name).is_file() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(directory)
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            name = _choose_split(splits, split, directory)
            for number, entry in enumerate(splits[name], start=1):
                yield f"{directory} split {name} row {number}", entry
            return
        with tempfile.TemporaryDirectory(prefix="qurl-data-") as cache:
            shards = datasets.load_dataset_builder(str(directory), cache_dir=cache)
        files = shards.config.data_files or {}
    except DataError:
        raise
    except Exception as error:  # the library raises many kinds
        reason = " ".join(str(error).split())
        raise DataError(
            f"{directory}: not the directory of one dataset ({reason}); give the directory of one"
        ) from error
    for shard in files[_choose_split(files, split, directory)]:
        yield from _read_file(Path(shard))


def _choose_split(splits: Mapping[Any, Any], name: str | None, directory: Path) -> Any:
    """Return the key of the split called `name`, or of the default split; may raise DataError."""
    names = [str(split) for split in splits]
    if name is None:
        name = names[0] if len(names) == 1 else "train"
    if name not in names:
        raise DataError(
            f"{directory}: has no split {name!r}; name one of {', '.join(names)} as "
            f"{directory}:{names[0]}"
        )
    return list(splits)[names.index(name)]


# From an entry to a problem.


def _problem(entry: Any, location: str) -> Problem:
    if not isinstance(entry, dict):
        raise DataError(f"{location}: a JSON {type(entry).__name__}; expected an object")
    # A parquet row has every column; None marks those without a value.
    names = [name for name in QUESTION_FIELDS if entry.get(name) is not None]
    name = names[0] if names else QUESTION_FIELDS[0]
    messages = _messages(entry.get(name), name, location)
    question = "\n\n".join(message["content"] for message in messages)
    verl = entry.get("reward_model")
    if isinstance(verl, dict):
        answer = _text(verl.get("ground_truth"), "reward_model.ground_truth", location)
    else:
        answer = _text(entry.get("answer"), "answer", location)
    metadata = entry.get("metadata")
    if not isinstance(metadata, dict | None):
        raise DataError(f"{location}: metadata is a {type(metadata).__name__}; expected an object")
    return Problem(question, messages, answer, metadata or {}, location)


def _messages(value: Any, field: str, location: str) -> list[dict[str, str]]:
    if not isinstance(value, list):
        return [{"role": "user", "content": _text(value, field, location)}]
    if not value or not all(isinstance(message, dict) for message in value):
        raise DataError(
            f"{location}: {field} is a list, but not of chat messages, each with role and content"
        )
    return [
        {
            key: _text(message.get(key), f"{field}[{number}].{key}", location)
            for key in MESSAGE_FIELDS
        }
        for number, message in enumerate(value)
    ]


def _text(value: Any, field: str, location: str) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{location}: {field} is missing or empty; expected a non-empty string")
    if not isinstance(value, str):
        raise DataError(f"{location}: {field} is a {type(value).__name__}; expected a string")
    return value
