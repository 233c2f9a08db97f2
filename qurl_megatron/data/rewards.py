r"""A completion's text and a problem's answer -> a reward of 0 or 1.

    reward          verifier
    reasoning_gym   the library's own scorer of the task in metadata["source_dataset"]
    math            math-verify: \boxed{}, $...$ or a plain number; GSM8K's "#### 42" as gold
    exact           the text is the answer, surrounding whitespace aside

Rewards are binary. reasoning_gym's scorers give partial credit (spell_backward 0.86 for one wrong
letter of seven, and 0.9999999999999998 for the right word with a letter too many), which rewards
near misses and padding: only its full score of 1 counts.

A verifier may hang on what a policy writes ("9^{9^{9^9}}"), so each call is limited in time by
SIGALRM, which only a process's main thread can use. One that runs out of time or raises gives 0
and says so.
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


class Problem(Protocol):
    """What a verifier needs to know; a `Prompt` has it."""

    @property
    def answer(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


class Score(NamedTuple):
    """`value` 0.0 or 1.0; `failed` if the verifier raised or ran out of time, which counts as 0."""

    value: float
    failed: bool


class _VerifierTimeout(BaseException):
    """Not an Exception: verifiers catch those of their own accord."""


def score(
    reward: str, completion_text: str, problem: Problem, timeout_s: float = VERIFIER_TIMEOUT_S
) -> Score:
    """The reward of one completion. Main thread only, except for `exact`.

    Raises ValueError for an unknown reward, RuntimeError off the main thread.
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


def unverifiable(reward: str, problem: Problem) -> str:
    """Why no completion of this problem could ever score 1; empty if one could.

    It asks reasoning_gym's scorer about the problem's own answer, which finds a field it lacks or
    that JSON changed (arc_agi's grids are tuples: read back as lists, its own answers score 0.05).
    A gold answer that math-verify cannot read shows only when scored, as failed: reading 40,000
    takes a minute.
    """
    if reward == "reasoning_gym":
        task = problem.metadata.get("source_dataset")
        if not task:
            return (
                "no metadata.source_dataset, which reward reasoning_gym scores by; "
                "add it or choose reward=math or reward=exact"
            )
        if task not in reasoning_gym_tasks():
            return f"metadata.source_dataset {task!r} is no reasoning_gym task"
        if score(reward, problem.answer, problem).value < 1:
            return f"reasoning_gym's scorer of {task} does not accept the problem's own answer"
    return ""


def reasoning_gym_tasks() -> Mapping[str, tuple[type, type]]:
    """Names of the library's tasks with their dataset and configuration classes."""
    import reasoning_gym.factory  # 3 s: only those who use it pay for it

    return reasoning_gym.factory.DATASETS


# A verifier is made outside the time limit, as importing its library takes seconds.


def _reasoning_gym_verifier(problem: Problem) -> Callable[[str], bool]:
    from reasoning_gym.utils import extract_answer

    scorer = _reasoning_gym_scorer(problem.metadata["source_dataset"])
    entry = {"answer": problem.answer, "metadata": dict(problem.metadata)}

    def verify(text: str) -> bool:
        answer = extract_answer(text)
        return scorer(text.strip() if answer is None else answer, entry) >= 1

    return verify


@functools.cache
def _reasoning_gym_scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """Cached, as the library makes a whole dataset to get at its scorer."""
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _math_verifier(problem: Problem) -> Callable[[str], bool]:
    import math_verify

    def verify(text: str) -> bool:
        gold, answer = _parse_gold(problem.answer), _parse_math(text)
        return math_verify.verify(gold, answer, timeout_seconds=None, raise_on_error=True)

    return verify


@functools.lru_cache(maxsize=4096)
def _parse_gold(answer: str) -> list[Any]:
    r"""Gold answers are often bare LaTeX, which math-verify only reads in \boxed{} or $...$."""
    answer = answer.rsplit("####", 1)[-1].strip().replace("\\$", "")  # \$ is a currency
    if "\\boxed" not in answer and answer.count("$") < 2:
        answer = f"\\boxed{{{answer.strip('$')}}}"
    gold = _parse_math(answer)
    if not gold:
        raise ValueError(f"math-verify reads no mathematics in the answer {answer!r}")
    return gold


def _parse_math(text: str) -> list[Any]:
    import math_verify

    # It warns that its own time limits are off; `score` has one for parsing and comparing together.
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
