"""The verifier that asks math-verify."""

import functools
import logging
import re
from itertools import product
from typing import Any

from qurl_megatron.algorithm.score import Question, final_answer
from qurl_megatron.data.verifiers import Verifier, shown


class Math(Verifier):
    r"""math-verify as verl calls it: answers are read as LaTeX, texts as LaTeX or as expressions.

    The right answer is put into \boxed{}, unless it is a sentence with its own \boxed{} or $...$.
    """

    def __init__(self) -> None:
        import math_verify

        # math-verify warns that its own time limits are off; the kernel limits the time instead.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._math_verify = math_verify
        self._parse_answer = functools.lru_cache(maxsize=4096)(self._parse_latex)
        self.credit("$x^2+1$ or 2", Question("", "\\frac{1}{2}", {}))  # a first use takes a second

    def credit(self, text: str, question: Question) -> float:
        """Return 1 if any reading of the text equals any reading of the answer."""
        answers = self._parse_answer(question.answer)
        if not answers:
            raise ValueError(f"LaTeX finds no mathematics in the answer {question.answer!r}")
        found = self._math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
        # Texts first: their comparison is short and never fails.
        pairs = sorted(product(answers, found), key=lambda pair: not isinstance(pair[0], str))
        error: Exception | None = None
        for answer, candidate in pairs:
            try:
                if self._math_verify.verify(
                    answer, candidate, timeout_seconds=None, raise_on_error=True
                ):
                    return 1.0
            except Exception as failure:
                error = failure
        if error is not None:
            raise error
        return 0.0

    def unverifiable(self, question: Question) -> str:
        """Return a reason if LaTeX cannot read the answer: a number in it would count as right."""
        try:
            readings = self._parse_answer(question.answer)
        except Exception:
            readings = []
        if any(not isinstance(reading, str) for reading in readings):
            return ""
        return f"the answer {shown(question.answer)} cannot be read as LaTeX"

    def _parse_latex(self, answer: str) -> list[Any]:
        return self._math_verify.parse(
            _boxed(answer),
            extraction_config=[self._math_verify.LatexExtractionConfig()],
            parsing_timeout=None,
            raise_on_error=True,
        )


def _boxed(answer: str) -> str:
    r"""Put an answer into \boxed{}, unless it is a sentence around its own \boxed{} or $...$."""
    answer = final_answer(answer).strip().replace("\\$", "")  # \$ is a currency
    outside = re.sub(r"\$[^$]*\$", " ", answer)
    is_sentence = outside != answer and re.search(r"(?!(?:and|or)\b)\b[A-Za-z]{2,}", outside)
    if "\\boxed" in answer or is_sentence:
        return answer
    return f"\\boxed{{{answer.strip('$') if answer.count('$') < 3 else answer}}}"
