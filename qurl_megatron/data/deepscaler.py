r"""DeepScaleR's verifier: the box behind the thought, compared as text and then with sympy.

The text behind the first </think> must have a \boxed{} answer. It is right if it equals the right
answer in the normal form of the MATH data set (Hendrycks et al., 2021), or in a second normal form
whose parts sympy finds equal. A fraction that can be reduced is not right, and neither is a whole
number in another form.

The reference is `rewards/math_reward.py` of DeepScaleR.
"""

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from qurl_megatron.algorithm.score import Question, final_answer

END_OF_THOUGHT = "</think>"
_UNITS = (
    "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"
).split()
_POWERS_OF_TEN = {"million": 6, "billion": 9, "trillion": 12}
_SYMBOLS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}
_BRACKETS = "()[]"


class DeepScaler:
    """DeepScaleR's verifier."""

    def __init__(self) -> None:
        _is_right("\\frac{1}{2}", "x")  # the first use takes a second

    def credit(self, text: str, question: Question) -> float:
        """Return 1 if the box behind the thought is the answer."""
        _, thought_ends, rest = text.partition(END_OF_THOUGHT)
        found = last_boxed(rest.partition(END_OF_THOUGHT)[0]) if thought_ends else None
        answer = _answer(question)
        if found is None or answer is None:
            return 0.0
        return float(
            math_normal_form(found) == math_normal_form(answer) or _is_right(found, answer)
        )

    def unverifiable(self, question: Question) -> str:
        """Return a reason if the answer has a box that does not end."""
        if _answer(question) is None:
            return f"the answer {question.answer[:80]!r} has a box that cannot be read"
        return ""


def _is_right(found: str, answer: str) -> bool:
    """Compare by the second normal form, part by part."""
    found, answer = sympy_normal_form(found), sympy_normal_form(answer)
    if found == answer:
        return True
    if not found:
        return False
    found_parts, parts = _parts(found), _parts(answer)
    if len(found_parts) != len(parts):
        return False
    if len(parts) > 1 and (found[0], found[-1]) != (answer[0], answer[-1]):
        return False
    return all(map(_is_part, found_parts, parts))


def _is_part(found: str, answer: str) -> bool:
    if _is_fraction(found) and _is_fraction(answer):
        return found == answer  # a fraction must be reduced
    return _is_whole(found) == _is_whole(answer) and _are_equal(found, answer)


def _are_equal(found: str, answer: str) -> bool:
    import sympy
    from sympy.parsing import sympy_parser as parser

    difference = f"({answer})-({found})"
    if not _may_evaluate(difference):
        return False
    transformations = (
        *parser.standard_transformations,
        parser.implicit_multiplication_application,
    )
    try:
        expression: Any = parser.parse_expr(difference.replace("^", "**"), None, transformations)
        return bool(sympy.simplify(expression) == 0)
    except Exception:  # what sympy cannot read is not equal
        return False


def _answer(question: Question) -> str | None:
    answer = final_answer(question.answer)
    return last_boxed(answer) if "\\boxed" in answer else answer


def last_boxed(text: str) -> str | None:
    r"""Return what the last \boxed{} holds; None without one, or if its braces do not close."""
    _, box, rest = text.rpartition("\\boxed")
    depth = 0
    for end, char in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth <= 0:
            return rest[1:end] if end else None
    return None


def math_normal_form(answer: str) -> str:
    """Return an answer in the normal form of the MATH data set."""
    text = answer.strip()
    if match := re.search(r"^\\text\{(.+?)\}$", text):
        text = match[1].strip()
    original = text
    for removed in ("\n", "\\!"):
        text = text.replace(removed, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(removed, "")
    if text.count("\\text{ ") > 1:  # it begins a unit, and an answer has only one
        return original
    text = text.partition("\\text{ ")[0].replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, _, right = text.partition("=")
    if text.count("=") == 1 and len(left) <= 2:  # "k = 5"
        text = right
    if "" in text.split("\\sqrt")[1:]:  # a root without an argument
        return original
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    if "" in text.split("\\frac")[1:]:
        return original
    text = _with_braces_in_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    if re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", text):
        return "\\frac{{{}}}{{{}}}".format(*text.split("/"))
    return text


def _with_braces_in_fractions(text: str) -> str:
    r"""Turn \frac12 and \frac1{2} into \frac{1}{2}; return a text that ends too early as it is."""
    if re.search(r"\\frac[^{](\\frac|$)", text):
        return text
    text = re.sub(r"\\frac([^{])(?=\{)", r"\\frac{\1}", text)
    return re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)


def sympy_normal_form(answer: str) -> str:
    """Return an answer without units, signs of currency, LaTeX and spaces, in lower case."""
    text = answer
    if match := re.search(r"^\\text\{(.+?)\}$", text):
        text = match[1]
    text = re.sub(r"\\?[%$]", "", text).replace(" or ", " , ").replace(" and ", " , ")
    for name, power in _POWERS_OF_TEN.items():
        text = text.replace(name, f"*10^{power}")
    for unit in _UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if _is_whole_float(text):
        text = str(round(float(text)))
    if "\\" in text:
        text = text_of_latex(text)
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # a mixed number: 7 3/4 is 7+3/4
    text = re.sub(r"[ {}]", "", text).lower()
    return str(int(float(text.replace(",", "")))) if _is_whole(text) else text


def text_of_latex(latex: str) -> str:
    r"""Return LaTeX as text that sympy can read: \frac{1}{2} as 1/2, \sqrt{2} as sqrt(2)."""
    text = re.sub(r"\\[td]?frac", r" \\frac", latex)  # 7\frac{3}{4} is a mixed number
    try:
        text = _latex_to_text()(text)
    except Exception:  # what pylatexenc cannot read stays as it is, as in DeepScaleR
        return latex
    for symbol, name in _SYMBOLS.items():
        text = text.replace(symbol, name)
    return text.strip()


@functools.cache
def _latex_to_text() -> Callable[[str], str]:
    from pylatexenc.latex2text import LatexNodes2Text

    logging.getLogger("pylatexenc").setLevel(logging.ERROR)  # it warns of each broken \\frac
    return LatexNodes2Text().latex_to_text


def _parts(text: str) -> list[str]:
    """Split a tuple or an interval into its parts."""
    text = _without_digit_commas(text)
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS:
        inner = text[1:-1]
        if not set(inner) & set(_BRACKETS):
            return [part.strip() for part in inner.split(",")]
    return [text] if text else []


def _without_digit_commas(text: str) -> str:
    """Turn 1,234,567 into 1234567; the commas of a tuple stay."""
    shorter = re.sub(r"(\d),(\d{3})($|\D)", r"\1\2\3", text)
    return text if shorter == text else _without_digit_commas(shorter)


def _is_fraction(text: str) -> bool:
    return bool(re.search(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$", text))


def _is_whole(text: str) -> bool:
    return _is_whole_float(_without_digit_commas(text))


def _is_whole_float(text: str) -> bool:
    try:
        number = float(text)
        return abs(number - round(number)) <= 1e-7
    except (ValueError, OverflowError):
        return False


def _may_evaluate(text: str) -> bool:
    """Return False for text with more than two different letters, and for powers that may hang."""
    letters = {char for char in text.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    powers = re.search(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+", text)
    return len(letters) <= 2 and powers is None
