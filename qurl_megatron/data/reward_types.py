"""What a reward is asked with, and what it depends on.

The processes of `data/scoring.py` import this file, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from qurl_megatron.algorithm.score import ACCURACY, TIMED_OUT, Score
from qurl_megatron.config.schema import VERIFIER_NAMES

MAX_FAILURE_LENGTH = 300


class Verifiable(Protocol):
    """The fields of a problem that a verifier needs; both `Problem` and `Prompt` have them."""

    @property
    def question(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Question:
    """What a verifier or a reward function learns of a problem."""

    question: str  # for a chat, the content of all messages
    answer: str
    metadata: dict[str, Any]

    @staticmethod
    def of(problem: Verifiable) -> Question:
        """Return the part of a problem that is sent to the processes that score."""
        return Question(problem.question, problem.answer, dict(problem.metadata))


class RewardSettings(NamedTuple):
    """The fields of a configuration that a reward depends on."""

    reward: str
    right: float
    wrong: float
    partial: bool
    timeout_s: float

    @property
    def is_own_function(self) -> bool:
        """Return whether the reward is a function of the user's own."""
        return self.reward not in VERIFIER_NAMES

    def failed(self, reason: str) -> Score:
        """Return the score of a completion whose verifier failed: that of a wrong one."""
        parts = {} if self.is_own_function else {ACCURACY: 0.0}
        return Score(self.wrong, parts, one_line(reason))

    def timed_out(self) -> Score:
        """Return the score of a completion whose reward function took too long."""
        return self.failed(f"{TIMED_OUT} after {self.timeout_s:g} s")


def one_line(text: str) -> str:
    """Return a text in one line of bounded length."""
    return " ".join(text.split())[:MAX_FAILURE_LENGTH]


class Reward(Protocol):
    """A loaded reward."""

    @property
    def whole_groups(self) -> bool:
        """Whether a group's scores come all at once, and not one after the other."""
        ...

    def score(self, texts: Sequence[str], question: Question) -> Iterator[Score]:
        """Yield the score of each text."""
        ...

    def unverifiable(self, question: Question) -> str:
        """Return why no text could be right; an empty text if one could."""
        ...


class Loaded(NamedTuple):
    """What a process that scores answers first."""

    error: str  # why the reward cannot be loaded; empty if it was
    whole_groups: bool


Item = tuple[str | None, Question]
"""A text to score; without a text, whether any could be right."""
