r"""Rewards: turn the text of a completion and the answer of its problem into 0 or 1.

    reward          verifier
    reasoning_gym   the library's scorer of the task named by metadata["source_dataset"]
    math            math-verify: \boxed{}, $...$ or a plain number; the right answer may be GSM8K's
                    "#### 42"
    exact           the text is the answer, apart from surrounding whitespace

Rewards are binary. The scorers of reasoning_gym give partial credit (spell_backward gives 0.86 for
one wrong letter of seven, and 0.9999999999999998 for the right word with a letter too many), which
would reward near misses and padding: only the full score of 1 counts.

A verifier can hang on what a policy writes ("9^{9^{9^9}}"), so SIGALRM limits the time of each
call; only the main thread of a process can use it. A verifier that times out or raises gives 0, and
the score is marked as failed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, get_args

from qurl_megatron.config.schema import Reward

REWARDS: tuple[str, ...] = get_args(Reward)
VERIFIER_TIMEOUT_S = 3.0


class Verifiable(Protocol):
    """The fields of a problem that a verifier needs; both `Problem` and `Prompt` have them."""

    @property
    def answer(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


class Score(NamedTuple):
    """The reward `value`, 0.0 or 1.0; `failed` if the verifier raised or timed out (`value` 0)."""

    value: float
    failed: bool


class _VerifierTimeout(BaseException):
    """The time limit of a verifier passed. No Exception, because verifiers catch those."""


def score(
    reward: str, completion_text: str, problem: Verifiable, timeout_s: float = VERIFIER_TIMEOUT_S
) -> Score:
    """Return the reward of one completion; call it in the main thread, except for `exact`.

    Raises:
        ValueError: the reward is unknown.
        RuntimeError: the caller is not the main thread.
    """
    if reward not in REWARDS:
        raise ValueError(f"unknown reward {reward!r}; valid are {', '.join(REWARDS)}")
    if reward == "exact":
        return Score(float(completion_text.strip() == problem.answer.strip()), failed=False)
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"reward {reward} is scored in the main thread only: it needs SIGALRM")
    if reward == "reasoning_gym":
        verify = _reasoning_gym_verifier(problem)
    else:
        verify = _math_verifier(problem)
    try:
        with _time_limit(timeout_s):
            return Score(float(verify(completion_text)), failed=False)
    except (Exception, _VerifierTimeout):
        return Score(0.0, failed=True)


def unverifiable(reward: str, problem: Verifiable) -> str:
    """Return why no completion of this problem could score 1; an empty string if one could.

    For reasoning_gym, the scorer is given the problem's own answer. This finds a missing field, and
    a field that JSON changed: the grids of arc_agi are tuples; read back as lists, its own answers
    score 0.05. An answer that math-verify cannot read is not found here: reading 40,000 answers in
    advance would take a minute. Its completions are scored as failed.
    """
    if reward == "reasoning_gym":
        task = problem.metadata.get("source_dataset")
        if not task:
            return (
                "no metadata.source_dataset, which reward reasoning_gym scores by; "
                "add it or choose reward=math or reward=exact"
            )
        if task not in reasoning_gym_tasks():
            return f"metadata.source_dataset {task!r} is not a reasoning_gym task"
        if score(reward, problem.answer, problem).value < 1:
            return f"reasoning_gym's scorer of {task} does not accept the problem's own answer"
    return ""


def reasoning_gym_tasks() -> Mapping[str, tuple[type, type]]:
    """Return the dataset class and the configuration class of each task, by name."""
    import reasoning_gym.factory  # takes 3 s: imported only where it is used

    return reasoning_gym.factory.DATASETS


# A verifier is built outside the time limit, because importing its library takes seconds.


def _reasoning_gym_verifier(problem: Verifiable) -> Callable[[str], bool]:
    from reasoning_gym.utils import extract_answer

    scorer = _reasoning_gym_scorer(problem.metadata["source_dataset"])
    entry = {"answer": problem.answer, "metadata": dict(problem.metadata)}

    def verify(text: str) -> bool:
        answer = extract_answer(text)
        return scorer(text.strip() if answer is None else answer, entry) >= 1

    return verify


@functools.cache
def _reasoning_gym_scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """Return a task's scorer; cached, because the library builds a whole dataset for it."""
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _math_verifier(problem: Verifiable) -> Callable[[str], bool]:
    import math_verify

    def verify(text: str) -> bool:
        gold, answer = _parse_gold(problem.answer), _parse_math(text)
        return math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True)

    return verify


@functools.lru_cache(maxsize=4096)
def _parse_gold(answer: str) -> list[Any]:
    r"""Parse a right answer; bare LaTeX needs \boxed{} or $...$ around it for math-verify."""
    answer = answer.rsplit("####", 1)[-1].strip().replace("\\$", "")  # \$ is a currency
    if "\\boxed" not in answer and answer.count("$") < 2:
        answer = f"\\boxed{{{answer.strip('$')}}}"
    gold = _parse_math(answer)
    if not gold:
        raise ValueError(f"math-verify finds no mathematics in the answer {answer!r}")
    return gold


def _parse_math(text: str) -> list[Any]:
    import math_verify

    # math-verify warns that its own time limits are off; `score` limits the time instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def expire(signum: int, frame: object) -> None:
        raise _VerifierTimeout

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
