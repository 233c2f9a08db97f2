r"""DAPO's verifier: what follows the last "Answer:", in the normal form of Minerva.

Only the last 300 characters of a text count. Minerva's normal form (Lewkowycz et al., 2022,
Appendix D.1) takes what follows the last "=", and removes words, units and LaTeX around the answer
and the commas of whole numbers. The answer is then compared as text: 0.5 is not \frac{1}{2}.

The reference is `verl/utils/reward_score/math_dapo.py`, which DAPO was trained with. It rewards 1
and -1; `Config.reward_wrong` has the second.
"""

from __future__ import annotations

import re

from qurl_megatron.data.reward_types import Question

TAIL_LENGTH = 300
_REPLACED = (  # in this order
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (  # in this order; spaces are gone by then
    *"square ways integers dollars mph inches hours km units \\ldots sue points feet".split(),
    *"minutes digits cents degrees cm gm pounds meters meals edges students".split(),
    *"childrentickets multiples \\text{s} \\text{.}".split(),
    "\\text{\ns}",
    *"\\text{}^2 \\text{}^3".split(),
    "\\text{\n}",
    *'\\text{} \\mathrm{th} ^\\circ ^{\\circ} \\; ,\\! {,} " \\dots'.split(),
)


class Dapo:
    """DAPO's verifier."""

    def credit(self, text: str, question: Question) -> float:
        """Return 1 if the text ends with the answer behind "Answer:"."""
        found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text[-TAIL_LENGTH:])
        # Without an answer the reference compares the text "[INVALID]".
        candidate = found[-1] if found else "[INVALID]"
        return float(normal_form(candidate) == normal_form(question.answer))

    def unverifiable(self, question: Question) -> str:
        """Return an empty text: answers are compared as texts."""
        return ""


def normal_form(answer: str) -> str:
    """Return an answer in Minerva's normal form."""
    text = answer.split("=")[-1]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = re.sub(r"(.*?)\$(.*?)\$(.*)", r"$\2$", text)
    for command in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()
