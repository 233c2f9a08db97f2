"""The score of a completion, from a verifier or a reward function.

This file imports nothing heavy, because the processes that score import it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

ACCURACY = "accuracy"
TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Question:
    """What a verifier or a reward function learns of a problem."""

    question: str  # for a chat, the content of all messages
    answer: Any  # a text, the first if there are several; for a user's function see `texts_of`
    metadata: dict[str, Any]
    answers: tuple[str, ...] = ()  # the data's list of right answers, if it has one
    columns: dict[str, Any] = field(default_factory=dict)  # the data's entry, for a user's reward
    given: Any = None  # the answer as the data has it; `answer` and `answers` are texts of it

    @property
    def source(self) -> str:
        """The entry's `data_source`; empty if it has none, or is not kept."""
        return str(self.columns.get("data_source", ""))


def texts_of(answer: Any, answers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the right answers as texts, at least one.

    A function of the user's own may get any JSON value as the answer, and None if the data has
    none.
    """
    return answers or (answer if isinstance(answer, str) else json.dumps(answer, default=str),)


def final_answer(answer: str) -> str:
    """Return an answer without the solution that GSM8K has before it, up to "####"."""
    return answer.rpartition("####")[2]


class Score(NamedTuple):
    """The reward of one completion, before any penalty for its length. Produced by `data/`."""

    value: float
    """The reward, on the scale of the run."""
    parts: dict[str, float]
    """Named numbers beside the reward. The built-in verifiers give `accuracy`: 1 if the answer is
    fully right, else 0."""
    failure: str
    """Why the verifier gave no reward; it starts with `TIMED_OUT` if the verifier took too long.
    Empty: it gave one."""

    @property
    def accuracy(self) -> float:
        """Return the part `accuracy`, or the reward if there is none, as with most functions."""
        return self.parts.get(ACCURACY, self.value)

    @property
    def timed_out(self) -> bool:
        """Return whether the verifier took too long."""
        return self.failure.startswith(TIMED_OUT)


def mean_parts(scores: Iterable[Score]) -> dict[str, float]:
    """Return the mean of each named part over the scores that have it."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(each) for name, each in values.items()}
