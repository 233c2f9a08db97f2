"""Prompts: where they are read, how they become tokens, in what order they are served.

    read_problems   file or reasoning-gym task -> [Problem]; needs no model: run it first
    tokenise        [Problem] -> [Prompt]
    split           [Prompt] -> PromptSet(train, held_out), by a hash of the question
    PromptStream    [Prompt] -> the prompts of each step, resumable

What holds:
- A question appears once; later copies are dropped.
- The side of the split a question is on depends on its text alone: not on the machine, the seed,
  its line or the other questions. Questions that differ in case or spacing only are on the same
  side.
- Every problem kept can be scored: see `rewards.unverifiable`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qurl_megatron import rewards
from qurl_megatron.batch import Prompt
from qurl_megatron.config import Config

REASONING_GYM = "reasoning_gym:"
QUESTION_FIELDS = ("question", "prompt", "problem")
DEFAULT_TASK_SIZE = 5000


class DataError(ValueError):
    """Prompts that cannot be used; the text says where, what is wrong and what would be right."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question with its answer, not yet tokens."""

    question: str
    answer: str
    metadata: dict[str, Any]  # a verifier's own fields
    where: str  # file and line, for messages


class PromptSet(NamedTuple):
    """No question is on both sides."""

    train: list[Prompt]
    held_out: list[Prompt]


def load_prompts(config: Config, tokenizer: Any) -> PromptSet:
    """Read, tokenise and split what a run trains on. Raises DataError."""
    problems = read_problems(config.data, config.data_options, config.reward, seed=config.seed)
    prompts = tokenise(problems, tokenizer, config.rollout.max_prompt_length)
    return split(prompts, config.evaluation.held_out_fraction)


def read_problems(
    data: str, data_options: Mapping[str, Any], reward: str, *, seed: int = 0
) -> list[Problem]:
    """The problems of a `.jsonl` file or of `reasoning_gym:TASK`, each question once, in order.

    A file has one object a line: `question` (or `prompt` or `problem`), `answer`, and optionally
    `metadata`, whose `source_dataset` reward reasoning_gym needs; reasoning-gym's own entries are
    such lines. Of a task, `data_options` are the library's options for it; `size` is 5000 and
    `seed` is `seed` unless they say otherwise. Raises DataError.
    """
    if data.startswith(REASONING_GYM):
        problems = _generate(data.removeprefix(REASONING_GYM), data_options, seed)
    else:
        problems = _read_jsonl(Path(data), data_options)
    unique: dict[str, Problem] = {}
    for problem in problems:
        if problem.question in unique:
            continue
        if reason := rewards.unverifiable(reward, problem):
            raise DataError(f"{problem.where}: {reason}")
        unique[problem.question] = problem
    if not unique:
        raise DataError(f"{data}: no problems; one JSON object a line is wanted")
    return list(unique.values())


def tokenise(problems: Iterable[Problem], tokenizer: Any, max_prompt_length: int) -> list[Prompt]:
    """Prompts as the policy sees them, in order.

    With a chat template the question is the user's turn and the assistant's is opened; without one
    it is the text as it stands. Raises DataError if a prompt is longer than `max_prompt_length`
    tokens.
    """
    return [_tokenise(problem, tokenizer, max_prompt_length) for problem in problems]


def split(prompts: list[Prompt], held_out_fraction: float) -> PromptSet:
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
    return PromptSet(train, held_out)


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


def _generate(task: str, options: Mapping[str, Any], seed: int) -> Iterator[Problem]:
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
        yield _problem(entries[index], f"{REASONING_GYM}{task} entry {index}")


def _read_jsonl(path: Path, options: Mapping[str, Any]) -> Iterator[Problem]:
    if path.suffix != ".jsonl":
        raise DataError(
            f"data {str(path)!r}: unsupported; a .jsonl file or {REASONING_GYM}TASK is wanted"
        )
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if options:
        raise DataError(
            f"data_options.{next(iter(options))}: {path} takes none; only {REASONING_GYM}TASK does"
        )
    with path.open("rb") as lines:  # bytes: other line separators may stand inside a JSON string
        for number, line in enumerate(lines, start=1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:  # also what is not UTF-8
                raise DataError(
                    f"{where}: not JSON ({error}); one object a line is wanted"
                ) from error
            if not isinstance(entry, dict):
                raise DataError(f"{where}: a JSON {type(entry).__name__}; an object is wanted")
            yield _problem(entry, where)


def _problem(entry: dict[str, Any], where: str) -> Problem:
    name = next((field for field in QUESTION_FIELDS if field in entry), QUESTION_FIELDS[0])
    question = _text(entry.get(name), name, where)
    answer = _text(entry.get("answer"), "answer", where)
    metadata = entry.get("metadata", {})
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: metadata is a {type(metadata).__name__}; an object is wanted")
    return Problem(question, answer, metadata, where)


def _text(value: Any, field: str, where: str) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"{where}: {field} is missing or empty; a non-empty string is wanted")
    if not isinstance(value, str):
        raise DataError(f"{where}: {field} is a {type(value).__name__}; a string is wanted")
    return value


def _tokenise(problem: Problem, tokenizer: Any, max_prompt_length: int) -> Prompt:
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        token_ids = tokenizer(problem.question)["input_ids"]
    if len(token_ids) > max_prompt_length:
        raise DataError(
            f"{problem.where}: the prompt has {len(token_ids)} tokens, more than max_prompt_length "
            f"{max_prompt_length}; raise it or drop the problem"
        )
    identity = hashlib.sha256(problem.question.encode()).hexdigest()[:16]
    return Prompt(identity, problem.question, problem.answer, list(token_ids), problem.metadata)


def _position(question: str) -> float:
    """A number in [0, 1) that is the question's own, whatever its case and spacing."""
    plain = " ".join(question.casefold().split())
    return int.from_bytes(hashlib.sha256(plain.encode()).digest()[:6], "big") / 2**48


def _close(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    matches = difflib.get_close_matches(name, known, n=3)
    return f" did you mean {', '.join(matches)}?" if matches else f" known are {', '.join(known)}"
