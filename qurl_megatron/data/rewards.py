"""Rewards: built-in verifiers on the scale of a run, and which rewards a completion gets.

Functions of the user's own are in `reward_functions.py`.

The processes of `data/scoring.py` import this file, so it imports no torch.
"""

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from qurl_megatron.algorithm.score import ACCURACY, TIMED_OUT, Question, Score
from qurl_megatron.config.schema import OF_SCORES, VERIFIER_NAMES, Config, reward_title
from qurl_megatron.config.text import leaf_values
from qurl_megatron.data.verifiers import VERIFIERS, right_answers

VERIFIER_CPU_LIMIT_S = 3.0
MAX_FAILURE_LENGTH = 300


def each_of(config: Config) -> list[Config]:
    """Return a configuration with each of its rewards alone, for entries of whatever source."""
    names = dict.fromkeys([*config.rewards, *config.scoring.by_source.values()])
    return [_with_only(config, name) for name in names]


def _with_only(config: Config, reward: str) -> Config:
    return replace(config, reward=reward, scoring=replace(config.scoring, weights=[], by_source={}))


def of_set(config: Config, name: str) -> Config:
    """Return a configuration with the rewards of an evaluation set; an empty name: of training."""
    own = config.evaluation.reward_of.get(name)
    return _with_only(config, own) if own else config


def names_for(config: Config, question: Question) -> list[str]:
    """Return the rewards of a question, by the `data_source` of its entry."""
    first = config.scoring.by_source.get(question.source)
    return [first or config.rewards[0], *config.rewards[1:]]


def of_question(config: Config, question: Question) -> Config:
    """Return a configuration with the rewards of a question only."""
    scoring = replace(config.scoring, by_source={})
    return replace(config, reward=",".join(names_for(config, question)), scoring=scoring)


def weighted_sum(config: Config, scores: Sequence[Score]) -> Score:
    """Return the score of a completion from that by each reward of a run.

    A reward is a part, and its own parts are behind its name. The first reward says whether the
    completion is right.
    """
    if len(scores) == 1 and not config.scoring.weights:
        return scores[0]
    weights = config.scoring.weights or [1.0] * len(scores)
    parts: dict[str, float] = {}
    for name, score in zip(map(reward_title, config.rewards), scores, strict=True):
        parts |= {name: score.value} | {f"{name}.{part}": x for part, x in score.parts.items()}
    parts[ACCURACY] = scores[0].accuracy  # also where a function has this name
    total = sum(weight * score.value for weight, score in zip(weights, scores, strict=True))
    return Score(total, parts, next((each.failure for each in scores if each.failure), ""))


def first_value(config: Config, question: Question, score: Score) -> float:
    """Return what a question's first reward gave, of a score that `weighted_sum` or an agent made.

    With one reward that is the score's value.
    """
    if len(config.rewards) == 1:
        return score.value
    return score.parts.get(reward_title(names_for(config, question)[0]), score.value)


def what_decides_scores(config: Config) -> dict[str, Any]:
    """Return the values of `OF_SCORES`, as JSON."""
    values = leaf_values(config)
    return {field: values[field] for field in OF_SCORES}


def absolute(function: str) -> str:
    """Return FILE.py:NAME with the file's absolute path, so that a resumed run finds it."""
    place, colon, name = function.rpartition(":")
    return f"{Path(place).absolute()}{colon}{name}" if place.endswith(".py") else function


def is_user_function(config: Config) -> bool:
    """Return whether every reward is a function of the user's own."""
    return not any(each.reward in VERIFIER_NAMES for each in each_of(config))


def reads_entries(config: Config) -> bool:
    """Return whether a reward, or the choice of one, depends on other fields of an entry."""
    return bool(config.scoring.by_source) or any(map(is_user_function, each_of(config)))


def failed(config: Config, reason: str) -> Score:
    """Return the score of a completion whose verifier failed: that of a wrong one."""
    parts = {} if is_user_function(config) else {ACCURACY: 0.0}
    return Score(config.scoring.wrong, parts, one_line(reason))


def timed_out(config: Config) -> Score:
    """Return the score of a completion whose reward function took too long."""
    return failed(config, f"{TIMED_OUT} after {config.scoring.timeout_s:g} s")


def one_line(text: str) -> str:
    """Return a text in one line of bounded length."""
    return " ".join(text.split())[:MAX_FAILURE_LENGTH]


def why(error: BaseException) -> str:
    """Return in one line why code of the user's own cannot be used."""
    missing = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
    moved = missing.startswith("qurl_megatron.agents")  # what 0.2 called it
    now = "; it is qurl_megatron.extensions.agents now" if moved else ""
    return one_line(f"{type(error).__name__}: {error}{now}")


class Reward(Protocol):
    """What scores texts: a built-in verifier, or a function of the user's own."""

    whole_groups: bool  # all scores of a group come at once
    columns: list[str]  # fields that each entry of the data must have

    def score(self, texts: Sequence[str], question: Question) -> Iterator[Score]:
        """Yield the score of each text; an exception becomes a failure."""
        ...

    def unverifiable(self, question: Question) -> str:
        """Return why no text could be right; an empty text if one could, or if that is unknown."""
        ...


class BuiltIn:
    """A built-in verifier on the scale of a run.

    A verifier gives credit from 0 to 1, and `scoring.wrong` and `scoring.right` are the rewards at
    its ends: 0 and 1, or -1 and 1 for DAPO. Credit below 1 counts as 0 unless `scoring.partial`
    asks for it, because it rewards near misses and padding: the scorers of reasoning_gym give 0.86
    for one wrong letter of seven, and 0.9999999999999998 for the right word with a letter too many.

    The kernel ends the process if a text or an answer takes `VERIFIER_CPU_LIMIT_S` of CPU time.
    """

    whole_groups = False

    def __init__(self, config: Config) -> None:
        self._config = config
        self._verifier = VERIFIERS[config.reward]()
        self.columns: list[str] = []

    def score(self, texts: Sequence[str], question: Question) -> Iterator[Score]:
        """Yield the score of each text as soon as it is known."""
        for text in texts:
            try:
                score = self._score(text, question)
            except (Exception, SystemExit) as error:
                score = failed(self._config, f"{type(error).__name__}: {error}")
            yield score

    def unverifiable(self, question: Question) -> str:
        """Return the verifier's reason."""
        reason = ""
        for each in self._one_by_one(question):
            with _cpu_limit(VERIFIER_CPU_LIMIT_S):
                reason = self._verifier.unverifiable(each)
            if not reason:
                return ""
        return reason

    def _score(self, text: str, question: Question) -> Score:
        credit = self._credit(text, question)
        accuracy = float(credit >= 1)
        scale = self._config.scoring
        share = min(max(0.0, credit), 1.0) if scale.partial else accuracy
        return Score(scale.wrong + share * (scale.right - scale.wrong), {ACCURACY: accuracy}, "")

    def _credit(self, text: str, question: Question) -> float:
        """Return the largest credit for any answer; raise what the verifier raised for them all."""
        credits: list[float] = []
        failures: list[Exception] = []
        for each in self._one_by_one(question):
            try:
                with _cpu_limit(VERIFIER_CPU_LIMIT_S):
                    credits.append(self._verifier.credit(text, each))
            except Exception as error:
                failures.append(error)
        if not credits:
            raise failures[0]
        return max(credits)

    def _one_by_one(self, question: Question) -> list[Question]:
        """Return a question with each of its right answers alone."""
        answers = right_answers(self._config.reward, question)
        return [replace(question, answer=answer, answers=()) for answer in answers]


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Let the kernel end this process if the body takes more CPU time than that.

    An exception could not end a long computation inside a C function.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
