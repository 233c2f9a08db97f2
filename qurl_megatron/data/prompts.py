"""Prompts: where they are read, how they become tokens, in what order they are served.

    read_problems   file, directory or reasoning-gym task -> [Problem]; needs no model: run it first
    tokenize        [Problem] -> [Prompt]
    split           [Prompt] -> Split(train, held_out), by a hash of the question
    PromptStream    [Prompt] -> the prompts of each step, resumable

What can be read:

    FILE.jsonl             an object a line
    FILE.json              a list of objects, or an object a line
    FILE.parquet           a row a problem
    DIR                    a Hugging Face dataset: saved by `save_to_disk`, or such files as shards
                           in the Hub's usual layout (train-*.parquet, data/, a README.md's configs)
    DIR:SPLIT              its split of that name; without one `train`, or the only one there is
    reasoning_gym:TASK     generated

Which fields of a problem are recognized (others are ignored):

    whose                          question                            answer
    plain, reasoning-gym           question (or prompt, or problem)    answer
    GSM8K                          question                            answer, "#### 42" at its end
    DeepScaleR, MATH-500, AIME     problem                             answer
    verl, DAPO-17k                 prompt: chat messages               reward_model.ground_truth

Chat messages are a list of objects with `role` and `content`, under any name of the question.
`metadata` holds a verifier's own fields; reward reasoning_gym needs its `source_dataset`.

What holds:
- A question appears once; later copies are dropped.
- The side of the split a question is on depends on its text alone: not on the machine, the seed,
  its line or the other questions. Questions that differ in case or spacing only are on the same
  side.
- No question that a run is evaluated on is trained on, whatever its case and spacing.
- Every problem kept can be scored: see `rewards.unverifiable`.
- Nothing is downloaded, and nothing is written but in a temporary directory.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import Config
from qurl_megatron.data import rewards

REASONING_GYM = "reasoning_gym:"
QUESTION_FIELDS = ("question", "prompt", "problem")
DEFAULT_TASK_SIZE = 5000


class DataError(ValueError):
    """Prompts that cannot be used; the text says where, what is wrong and what would be right."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question with its answer, not yet tokens."""

    question: str  # of a chat, what all its messages say
    messages: list[dict[str, str]]  # role and content; of a question the user's turn alone
    answer: str
    metadata: dict[str, Any]  # a verifier's own fields
    where: str  # file and line, for messages


class Split(NamedTuple):
    """No question is on both sides."""

    train: list[Prompt]
    held_out: list[Prompt]


class PromptSet(NamedTuple):
    """What a run is trained on and what it is evaluated on; no question is in both."""

    train: list[Prompt]
    held_out: list[Prompt]
    files: dict[str, list[Prompt]]  # of evaluation.data, by name


def load_prompts(config: Config, tokenizer: Any) -> PromptSet:
    """Read, tokenize and split what a run works with. Raises DataError."""

    def prompts(data: str, options: Mapping[str, Any]) -> list[Prompt]:
        problems = read_problems(data, options, config.reward, seed=config.seed)
        return tokenize(problems, tokenizer, config.rollout.max_prompt_length)

    train, held_out = split(
        prompts(config.data, config.data_options), config.evaluation.held_out_fraction
    )
    files = {name: prompts(data, {}) for name, data in config.evaluation.data.items()}
    evaluated = {_plain(prompt.question) for some in files.values() for prompt in some}
    kept = [prompt for prompt in train if _plain(prompt.question) not in evaluated]
    if not kept:
        raise DataError(f"{config.data}: every problem to train on is in evaluation.data too")
    return PromptSet(kept, held_out, files)


def read_problems(
    data: str, data_options: Mapping[str, Any], reward: str, *, seed: int = 0
) -> list[Problem]:
    """The problems of a file, a directory or `reasoning_gym:TASK`, each question once, in order.

    What can be read is said at the top of this module. Of a task, `data_options` are the library's
    options for it; `size` is 5000 and `seed` is `seed` unless they say otherwise. Raises DataError.
    """
    if data.startswith(REASONING_GYM):
        entries = _generate(data.removeprefix(REASONING_GYM), data_options, seed)
    elif data_options:
        raise DataError(
            f"data_options.{next(iter(data_options))}: {data} takes none; only "
            f"{REASONING_GYM}TASK does"
        )
    else:
        entries = _read(data)
    unique: dict[str, Problem] = {}
    for where, entry in entries:
        problem = _problem(entry, where)
        if problem.question in unique:
            continue
        if reason := rewards.unverifiable(reward, problem):
            raise DataError(f"{problem.where}: {reason}")
        unique[problem.question] = problem
    if not unique:
        raise DataError(f"{data}: no problems in it")
    return list(unique.values())


def tokenize(problems: Iterable[Problem], tokenizer: Any, max_prompt_length: int) -> list[Prompt]:
    """Prompts as the policy sees them, in order.

    With a chat template a question is the user's turn, a chat is what it is, and the assistant's
    turn is opened; without one a question is the text as it stands. Raises DataError if a prompt is
    longer than `max_prompt_length` tokens, or a chat does not go without a template or with it.
    """
    return [_tokenize(problem, tokenizer, max_prompt_length) for problem in problems]


def split(prompts: list[Prompt], held_out_fraction: float) -> Split:
    """Hold out about `held_out_fraction` of the prompts, by a hash of each question.

    Raises DataError if that leaves a side empty that should not be.
    """
    held_out = [prompt for prompt in prompts if _position(prompt.question) < held_out_fraction]
    train = [prompt for prompt in prompts if _position(prompt.question) >= held_out_fraction]
    if not train or (held_out_fraction > 0 and not held_out):
        side = "train on" if not train else "hold out"
        raise DataError(
            f"held_out_fraction {held_out_fraction} of {len(prompts)} problems leaves none to "
            f"{side}; add problems or change the fraction"
        )
    return Split(train, held_out)


class PromptStream:
    """Endless prompts: every epoch a new order of all of them, none twice within an epoch.

    The order of epoch n depends on `seed` and n alone, so a small dictionary resumes it.
    """

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("a prompt stream needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts, running on into the next epoch where this one ends."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._shuffled()
            end = min(self._position + count - len(taken), len(self._order))
            taken += [self._prompts[index] for index in self._order[self._position : end]]
            self._position = end
        return taken

    def state(self) -> dict[str, Any]:
        """Where the stream is, for a checkpoint: plain numbers and a string."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "prompts": self._fingerprint(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises DataError if it is of other prompts, or in another order."""
        if state["prompts"] != self._fingerprint():
            raise DataError(
                f"the data cursor was saved over other prompts than these {len(self._prompts)}; "
                "resume with the same data and data_options"
            )
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def _fingerprint(self) -> str:
        ids = "".join(prompt.id for prompt in self._prompts)
        return hashlib.sha256(ids.encode()).hexdigest()[:16]


Entries = Iterator[tuple[str, Any]]
"""Where each entry stands, for messages, and what it is: an object if all is well."""


def _generate(task: str, options: Mapping[str, Any], seed: int) -> Entries:
    import reasoning_gym

    tasks = rewards.reasoning_gym_tasks()
    if task not in tasks:
        raise DataError(f"{REASONING_GYM}{task}: no such task;{_close(task, tasks)}")
    _, config_class = tasks[task]
    known = [field.name for field in dataclasses.fields(config_class)]
    for option in options:
        if option not in known:
            raise DataError(
                f"data_options.{option}: reasoning_gym's {task} has no such option;"
                f"{_close(option, known)}"
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


def _read(data: str) -> Entries:
    path = Path(data)
    directory, _, split_name = data.rpartition(":")
    if path.is_dir():
        return _read_directory(path, None)
    if directory and Path(directory).is_dir():
        return _read_directory(Path(directory), split_name)
    if not path.is_file():
        raise DataError(f"{data}: no such file or directory")
    return _read_file(path)


def _read_file(path: Path) -> Entries:
    if path.suffix not in _READERS:
        raise DataError(
            f"{path}: unsupported; a {', '.join(_READERS)} file, a dataset directory or "
            f"{REASONING_GYM}TASK is wanted"
        )
    return _READERS[path.suffix](path)


def _read_jsonl(path: Path) -> Entries:
    with path.open("rb") as lines:  # bytes: other line separators may stand inside a JSON string
        for number, line in enumerate(lines, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line)
            except ValueError as error:  # also what is not UTF-8
                raise DataError(
                    f"{where}: not JSON ({error}); one object a line is wanted"
                ) from error


def _read_json(path: Path) -> Entries:
    with path.open("rb") as file:
        if file.read(64).lstrip()[:1] != b"[":
            yield from _read_jsonl(path)
            return
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); a list of objects is wanted") from error
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


def _read_directory(directory: Path, split_name: str | None) -> Entries:
    """A split of a Hugging Face dataset, by that library's own rules of what its splits are."""
    import datasets  # seconds: only those who use it pay for it

    # What it has to say comes as an exception too.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        if any((directory / name).is_file() for name in ("dataset_dict.json", "state.json")):
            saved = datasets.load_from_disk(directory)
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            name = _split_of(splits, split_name, directory)
            for number, entry in enumerate(splits[name], start=1):
                yield f"{directory} split {name} row {number}", entry
            return
        with tempfile.TemporaryDirectory(prefix="qurl-data-") as cache:
            shards = datasets.load_dataset_builder(str(directory), cache_dir=cache)
        files = shards.config.data_files or {}
    except DataError:
        raise
    except Exception as error:  # the library's own, of many kinds
        reason = " ".join(str(error).split())
        raise DataError(
            f"{directory}: not the directory of one dataset ({reason}); give one that is"
        ) from error
    for shard in files[_split_of(files, split_name, directory)]:
        yield from _read_file(Path(shard))


def _split_of(splits: Mapping[Any, Any], name: str | None, directory: Path) -> Any:
    """The name of the split to be read. Raises DataError."""
    names = [str(split) for split in splits]
    if name is None:
        name = names[0] if len(names) == 1 else "train"
    if name not in names:
        raise DataError(
            f"{directory}: has no split {name!r}; name one of {', '.join(names)} as "
            f"{directory}:{names[0]}"
        )
    return list(splits)[names.index(name)]


def _problem(entry: Any, where: str) -> Problem:
    if not isinstance(entry, dict):
        raise DataError(f"{where}: a JSON {type(entry).__name__}; an object is wanted")
    # A parquet row has every column, None where there is nothing.
    named = [name for name in QUESTION_FIELDS if entry.get(name) is not None]
    name = named[0] if named else QUESTION_FIELDS[0]
    messages = _messages(entry.get(name), name, where)
    question = "\n\n".join(message["content"] for message in messages)
    verl = entry.get("reward_model")
    if isinstance(verl, dict):
        answer = _text(verl.get("ground_truth"), "reward_model.ground_truth", where)
    else:
        answer = _text(entry.get("answer"), "answer", where)
    metadata = entry.get("metadata")
    if not isinstance(metadata, dict | None):
        raise DataError(f"{where}: metadata is a {type(metadata).__name__}; an object is wanted")
    return Problem(question, messages, answer, metadata or {}, where)


def _messages(value: Any, field: str, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list):
        return [{"role": "user", "content": _text(value, field, where)}]
    if not value or not all(isinstance(message, dict) for message in value):
        raise DataError(
            f"{where}: {field} is a list, but not one of chat messages, each with role and content"
        )
    return [
        {part: _text(message.get(part), f"{field}[{n}].{part}", where) for part in _MESSAGE}
        for n, message in enumerate(value)
    ]


_MESSAGE = ("role", "content")


def _text(value: Any, field: str, where: str) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{where}: {field} is missing or empty; a non-empty string is wanted")
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} is a {type(value).__name__}; a string is wanted")
    return value


def _tokenize(problem: Problem, tokenizer: Any, max_prompt_length: int) -> Prompt:
    if getattr(tokenizer, "chat_template", None):
        try:
            text = tokenizer.apply_chat_template(
                problem.messages, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise DataError(f"{problem.where}: the chat template refuses it ({error})") from error
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif [message["role"] for message in problem.messages] == ["user"]:
        token_ids = tokenizer(problem.question)["input_ids"]
    else:
        raise DataError(
            f"{problem.where}: a chat of {len(problem.messages)} messages, and the tokenizer has "
            "no chat template; only a single message of the user's goes without"
        )
    if len(token_ids) > max_prompt_length:
        raise DataError(
            f"{problem.where}: the prompt has {len(token_ids)} tokens, more than max_prompt_length "
            f"{max_prompt_length}; raise it or drop the problem"
        )
    identity = hashlib.sha256(problem.question.encode()).hexdigest()[:16]
    return Prompt(identity, problem.question, problem.answer, list(token_ids), problem.metadata)


def _position(question: str) -> float:
    """A number in [0, 1) that is the question's own, whatever its case and spacing."""
    return int.from_bytes(hashlib.sha256(_plain(question).encode()).digest()[:6], "big") / 2**48


def _plain(question: str) -> str:
    return " ".join(question.casefold().split())


def _close(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    matches = difflib.get_close_matches(name, known, n=3)
    return f" did you mean {', '.join(matches)}?" if matches else f" known are {', '.join(known)}"
