r"""Rewards: turn the text of a completion and the answer of its problem into a number.

    reward            a completion is right if
    math              math-verify finds its \boxed{}, $...$ or plain number equal to the answer
    gsm8k             the number after its last "####" is the answer, as in verl
    gsm8k_flexible    its last number is the answer, as in verl
    dapo              what follows its last "Answer:" is the answer, as in DAPO (Minerva's rules)
    deepscaler        the box behind its </think> equals the answer, as in DeepScaleR
    reasoning_gym     the scorer of the task named by metadata["source_dataset"] accepts it
    exact             its text is the answer, apart from surrounding whitespace
    FILE.py:NAME, MODULE:NAME     a reward function of one's own; see `data/reward_function.py`

A verifier gives credit from 0 to 1, and `Config.reward_wrong` and `reward_right` are the rewards at
its ends: 0 and 1, or -1 and 1 for DAPO. Credit below 1 counts as 0 unless `Config.reward_partial`
asks for it: the scorers of reasoning_gym give 0.86 for one wrong letter of seven, and
0.9999999999999998 for the right word with a letter too many, which rewards near misses and padding.

These functions run in the processes of `data/scoring.py`, so this file and those it imports import
no torch.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from qurl_megatron.algorithm.score import ACCURACY, Score
from qurl_megatron.data import reward_function
from qurl_megatron.data.reward_types import Question, Reward, RewardSettings
from qurl_megatron.data.verifiers import VERIFIERS, Verifier

VERIFIER_CPU_LIMIT_S = 3.0


def load(settings: RewardSettings) -> Reward:
    """Import what the reward needs, and use it once, because a first use can take seconds.

    Raises:
        ImportError, OSError, SyntaxError, TypeError, or what else the import raises: a reward
            function cannot be used.
    """
    if settings.is_own_function:
        return reward_function.load(settings)
    return _BuiltIn(VERIFIERS[settings.reward](), settings)


class _BuiltIn:
    """A built-in verifier with the scale of a run."""

    whole_groups = False

    def __init__(self, verifier: Verifier, settings: RewardSettings) -> None:
        self._verifier = verifier
        self._settings = settings

    def score(self, texts: Sequence[str], question: Question) -> Iterator[Score]:
        """Yield the score of each text; the kernel ends the process at the limit of CPU time."""
        for text in texts:
            try:
                with _cpu_limit(VERIFIER_CPU_LIMIT_S):
                    credit = self._verifier.credit(text, question)
            except Exception as error:
                yield self._settings.failed(f"{type(error).__name__}: {error}")
            else:
                yield self._scaled(credit)

    def unverifiable(self, question: Question) -> str:
        """Return the verifier's reason; the kernel ends the process at the limit of CPU time."""
        with _cpu_limit(VERIFIER_CPU_LIMIT_S):
            return self._verifier.unverifiable(question)

    def _scaled(self, credit: float) -> Score:
        accuracy = float(credit >= 1)
        wrong, right = self._settings.wrong, self._settings.right
        share = min(max(credit, 0.0), 1.0) if self._settings.partial else accuracy
        return Score(wrong + share * (right - wrong), {ACCURACY: accuracy}, "")


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Have the kernel end this process if the body takes more CPU time.

    An exception could not end a long computation inside a C function.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
