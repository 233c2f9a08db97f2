"""Entries: what data consists of before it is read as problems.

Those of a reasoning-gym task are generated here. `files.py` reads those of files, directories and
the Hub, which a run of generated data does not import.
"""

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qurl_megatron.data.verifiers import reasoning_gym_tasks

REASONING_GYM = "reasoning_gym:"
DEFAULT_TASK_SIZE = 5000
# Tasks that draw from the state of their process, so that their seed decides less than all.
OF_PROCESS = (
    *("codeio", "composite", "intermediate_integration", "isomorphic_strings", "knight_swap"),
    *("list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"),
)
MAX_DEPTH = 100  # of lists and objects in JSON; pickling metadata ends at a few hundred

Entries = Iterator[tuple[str, Any]]
"""The location of each entry, for messages, and the entry, which should be an object."""


class DataError(ValueError):
    """Data that cannot be used; the text says where, what is wrong and what would be right."""


def parts_of(data: str) -> list[str]:
    """Return the sources that a text names: itself, or several between commas."""
    if place(data):  # its name may have a comma
        return [data]
    return [part.strip() for part in data.split(",") if part.strip()]


def place(data: str) -> tuple[Path, list[str]] | None:
    """Return the path that a source names, and the names after it; None if it does not exist."""
    if Path(data).is_file():
        return Path(data), []
    words = data.split(":")
    for length in range(len(words), max(len(words) - 3, 0), -1):
        directory, names = ":".join(words[:length]), words[length:]
        # DIR, DIR:SPLIT or DIR:CONFIG, DIR:CONFIG:SPLIT; a comma is between two sources.
        if directory and "," not in "".join(names) and Path(directory).is_dir():
            return Path(directory), names
    return None


def generate(task: str, options: Mapping[str, Any], seed: int) -> Entries:
    """Yield the entries of a reasoning-gym task.

    Raises:
        DataError: there is no such task, or it has no such options.
    """
    import reasoning_gym

    tasks = reasoning_gym_tasks()
    if task not in tasks:
        raise DataError(f"{REASONING_GYM}{task}: no such task;{_suggestion(task, tasks)}")
    _, config_class = tasks[task]
    known = [field.name for field in dataclasses.fields(config_class)]
    for option in options:
        if option not in known:
            raise DataError(
                f"prompts.options.{option}: reasoning_gym's {task} has no such option;"
                f"{_suggestion(option, known)}"
            )
    options = {"size": DEFAULT_TASK_SIZE, "seed": seed, **options}
    wholes = {"size": "a whole number from 1, such as 10000", "seed": "a whole number, such as 7"}
    for option, right in wholes.items():
        value = options[option]  # a seed of None would be another one in each process
        if type(value) is not int or (option == "size" and value < 1):
            raise DataError(f"prompts.options.{option}={value}: must be {right}")
    try:
        make = reasoning_gym.create_dataset
        if task in OF_PROCESS:
            from qurl_megatron.data.alike import entries_of as make
        entries = make(task, **options)
        for index in range(len(entries)):  # a task may look at its options only here
            yield f"{REASONING_GYM}{task} entry {index}", entries[index]
    except Exception as error:  # the library's own checks: AssertionError, TypeError, ValueError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{REASONING_GYM}{task} with {options}: {reason}") from error


def _suggestion(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    matches = difflib.get_close_matches(name, known, n=3)
    return f" did you mean {', '.join(matches)}?" if matches else f" known are {', '.join(known)}"


def from_json(text: str | bytes, location: str, expected: str) -> Any:
    """Return the value of JSON text.

    Raises:
        DataError: it is not JSON, gives a field twice, or is nested too deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
        is_deep = _depth(value) > MAX_DEPTH
    except RecursionError:
        is_deep = True
    except ValueError as error:  # also raised for bytes that are not UTF-8
        raise DataError(f"{location}: not JSON ({error}); expected {expected}") from error
    if is_deep:
        raise DataError(f"{location}: nested more than {MAX_DEPTH} deep; expected {expected}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if a field is given twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise ValueError(f"the field {twice} is given twice")
    return fields


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested; raise RecursionError beyond some hundreds."""
    parts = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, parts), default=0) if isinstance(value, list | dict) else 0
