"""What a completion is worth, as a verifier or a reward function says it.

This file imports nothing heavy, because the processes that score import it.
"""

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
    answer: str  # the first, if there are several
    metadata: dict[str, Any]
    answers: tuple[str, ...] = ()  # if the data has a list of them: each is right
    columns: dict[str, Any] = field(default_factory=dict)  # the entry, for a reward of one's own

    @property
    def right_answers(self) -> tuple[str, ...]:
        """The answers, one or more, of which any is right."""
        return self.answers or (self.answer,)


class Score(NamedTuple):
    """The reward of one completion, before any penalty for its length. Produced by `data/`."""

    value: float
    """The reward, on the scale of the run."""
    parts: dict[str, float]
    """Named numbers beside the reward. The built-in verifiers give `accuracy`: 1 if the answer is
    fully right, else 0."""
    failure: str
    """Why the verifier gave no reward, which starts with `TIMED_OUT` if it took too long. Empty: it
    did."""

    @property
    def accuracy(self) -> float:
        """Return the part `accuracy`; without it, as of most reward functions, the reward."""
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
