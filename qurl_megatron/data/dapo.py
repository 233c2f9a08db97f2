"""DAPO's verifier, and Minerva's normal form."""

import re

from qurl_megatron.algorithm.score import Question, final_answer
from qurl_megatron.data.verifiers import TAIL_LENGTH, Verifier, shown


class Dapo(Verifier):
    r"""DAPO's verifier: what follows the last "Answer:", in the normal form of Minerva.

    Only the last 300 characters of a text count. Minerva's normal form (Lewkowycz et al., 2022,
    Appendix D.1) takes what follows the last "=", and removes words, units and LaTeX around the
    answer and the commas of whole numbers. The answer is then compared as text: 0.5 is not
    \frac{1}{2}.

    The reference is `verl/utils/reward_score/math_dapo.py`, which DAPO was trained with. It rewards
    1 and -1; `scoring.wrong` sets the latter.
    """

    def credit(self, text: str, question: Question) -> float:
        """Return 1 if the text ends with the answer behind "Answer:"."""
        found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", text[-TAIL_LENGTH:])
        # Without an answer the reference compares the text "[INVALID]".
        candidate = found[-1] if found else "[INVALID]"
        right = minerva_normal_form(final_answer(question.answer))
        return float(minerva_normal_form(candidate) == right)

    def unverifiable(self, question: Question) -> str:
        """Return a reason if the answer is several lines, or longer than what is read."""
        if self.credit(f"Answer: {final_answer(question.answer).strip()}", question):
            return ""
        return f"the answer {shown(question.answer)} is more than the line that reward dapo reads"


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


def minerva_normal_form(answer: str) -> str:
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
