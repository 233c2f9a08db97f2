"""The built-in verifiers: how much credit a text gets for the answer of its problem, from 0 to 1.

Each follows the rules of its source, whose quirks are part of the task: a policy that is compared
with published results must have been rewarded for the same.

This file imports no verifier's library at its top; a verifier imports its own when it is built. A
verifier with a file of its own is imported by runs that it rewards.
"""

import ast
import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from qurl_megatron.algorithm.score import Question, final_answer, texts_of
from qurl_megatron.machine.imports import late

TAIL_LENGTH = 300  # the last characters of a text, all that GSM8K's and DAPO's rules read
PLAIN_LENGTH = 1000  # of an answer's LaTeX; the time to check it grows with its square


class Verifier(Protocol):
    """A built-in verifier."""

    def credit(self, text: str, question: Question) -> float:
        """Return the credit of a text; it may raise anything, which counts as a failure."""
        ...

    def unverifiable(self, question: Question) -> str:
        """Return why no text could get credit of 1; an empty text if one could."""
        return ""


class Exact(Verifier):
    """The text is the answer, apart from surrounding whitespace."""

    def credit(self, text: str, question: Question) -> float:
        """Return 1 for the answer itself."""
        return float(text.strip() == question.answer.strip())


_NUMBER = "-?[0-9.]+"


class Gsm8k(Verifier):
    """GSM8K as verl scores it, by the last 300 characters of a text.

    Strict: the number after the last "#### ", without its commas. Flexible: the last number, as it
    is read: verl's has a full stop behind it and its commas, so "12." and "1,200" are wrong there.
    The answer is what follows "####" in it, without commas.
    """

    def __init__(self, *, flexible: bool) -> None:
        self._flexible = flexible

    def credit(self, text: str, question: Question) -> float:
        """Return 1 if the number is the answer, digit for digit."""
        return float(self._number(text[-TAIL_LENGTH:]) == _gsm8k_answer(question.answer))

    def unverifiable(self, question: Question) -> str:
        """Return a reason if the answer is not a number."""
        if re.fullmatch(_NUMBER, _gsm8k_answer(question.answer)):
            return ""
        return f"the answer {shown(question.answer)} is no number, which reward gsm8k compares"

    def _number(self, text: str) -> str | None:
        if self._flexible:
            numbers = re.findall(r"-?[0-9.,]*[0-9]", text)
        else:
            numbers = re.findall(r"#### (-?[0-9.,]+)", text)
        return numbers[-1].replace(",", "") if numbers else None


def _gsm8k_answer(answer: str) -> str:
    return final_answer(answer).strip().replace(",", "")


class ReasoningGym(Verifier):
    """The library's scorer of a problem's task, for the last <answer> of a text or all of it."""

    def __init__(self) -> None:
        import reasoning_gym

        self._scorer_of: Callable[[str], Callable[[str, dict[str, Any]], float]] = functools.cache(
            reasoning_gym.get_score_answer_fn  # it builds a whole dataset
        )

    def credit(self, text: str, question: Question) -> float:
        """Return what the scorer gives."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text)
        scorer = self._scorer_of(question.metadata["source_dataset"])
        entry = {"answer": question.answer, "metadata": question.metadata}
        return float(scorer(text.strip() if answer is None else answer, entry))

    def unverifiable(self, question: Question) -> str:
        """Return a reason if the scorer does not accept the problem's own answer.

        This finds a missing field, and a field that JSON changed: the grids of arc_agi are tuples;
        read back as lists, its own answers score 0.05.
        """
        task = question.metadata.get("source_dataset")
        if not task:
            return (
                "no metadata.source_dataset, which reward reasoning_gym scores by; "
                "add it or choose reward=math or reward=exact"
            )
        if task not in reasoning_gym_tasks():
            return f"metadata.source_dataset {task!r} is not a reasoning_gym task"
        try:
            accepted = self.credit(question.answer, question) >= 1
        except Exception:
            accepted = False
        if not accepted:
            return f"reasoning_gym's scorer of {task} does not accept the problem's own answer"
        return ""


def reasoning_gym_tasks() -> Mapping[str, tuple[type, type]]:
    """Return the dataset class and the configuration class of each task, by name."""
    import reasoning_gym.factory  # takes 3 s: imported only where it is used

    return reasoning_gym.factory.DATASETS


def shown(answer: str) -> str:
    """Return an answer in quotes for a message, cut if it is long."""
    return repr(answer if len(answer) <= 80 else answer[:77] + "...")


VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "math": late("qurl_megatron.data.mathematics:Math"),
    "gsm8k": functools.partial(Gsm8k, flexible=False),
    "gsm8k_flexible": functools.partial(Gsm8k, flexible=True),
    "dapo": late("qurl_megatron.data.dapo:Dapo"),
    "deepscaler": late("qurl_megatron.data.deepscaler:DeepScaler"),
    "reasoning_gym": ReasoningGym,
    "exact": Exact,
}


def right_answers(reward: str, question: Question) -> list[str]:
    """Return the texts that a built-in verifier compares with, each of them right.

    A text that is a list of texts, as JSON or Python writes it, is that list. Of a number with a
    unit behind it or "The answer is" before it, the number alone is right too, but not for `exact`.
    The answers of reasoning-gym stay as they are: a list of texts can be one answer there.
    """
    given = texts_of(question.answer, question.answers)
    if "source_dataset" in question.metadata:
        return list(given)
    right = [each for answer in given for each in _listed(answer)]
    return right if reward == "exact" else [*right, *filter(None, map(_number_alone, right))]


def _listed(answer: str) -> list[str]:
    """Return the texts and numbers of a list of them, or the answer alone."""
    listed = _data_in(answer)
    if isinstance(listed, list) and all(type(each) in (str, int, float) for each in listed):
        texts = [str(each).strip() for each in listed]
        return texts if all(texts) else [answer]
    return [answer]


def _data_in(answer: str) -> Any:
    """Return the value that a text is as JSON or Python writes it, if any text or object is in it.

    Else None: [0, 1] is an interval, and {1, 2} a set.
    """
    for read in (json.loads, ast.literal_eval) if answer.lstrip()[:1] in ("[", "{") else ():
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = read(answer.strip())
            return value if _has_words(value) else None
    return None


def _has_words(value: Any) -> bool:
    parts = value if isinstance(value, list | tuple | set) else ()
    return isinstance(value, str | dict) and value != {} or any(map(_has_words, parts))


def no_mathematics(reward: str, question: Question) -> str:
    """Return why an answer is no mathematics; empty if it may be.

    An object as text, or a list of lists with texts in it, belongs to a function of the user's own.
    NuminaMath-1.5 has "proof" and "notfound" where there is no answer.
    """
    if reward == "exact" or "source_dataset" in question.metadata:
        return ""
    given = texts_of(question.answer, question.answers)
    if {each.strip().lower() for each in given} <= {"proof", "notfound"}:
        return f"the answer {shown(given[0])} says that there is none to compare"
    data = [each for each in given if _listed(each) == [each] and _data_in(each) is not None]
    if len(data) < len(given):
        return ""
    return f"the answer {shown(data[0])} is an object or a nested list, not one answer"


_AMONG_WORDS = re.compile(
    r"(?P<before>[a-z][a-z ,']*(?::\s*|\s))?\$?(?P<number>-?[0-9][0-9,]*(?:\.[0-9]+)?)"
    r"(?P<after>(?:\s+[a-z(][a-z0-9()/^]*)*)\.?",
    re.IGNORECASE,
)
_OPENING = re.compile(r"(?:(?:the )?(?:final )?answer(?: is)?:?|it is)\s*", re.IGNORECASE)
_UNITS = set(
    """square cubic unit units point points dollar dollars euro euros pound pounds cent cents
    degree degrees mm cm dm m km centimeter centimeters meter meters metre metres kilometer
    kilometers inch inches foot feet yard yards mile miles mph acre acres second seconds minute
    minutes hour hours day days week weeks month months year years old mg g kg gram grams kilogram
    kilograms ounce ounces ml l liter liters litre litres gallon gallons h s""".split()
)


def _among_words(answer: str) -> re.Match[str] | None:
    """Return the match of a number with nothing but words around it."""
    answer = final_answer(answer).strip()
    return _AMONG_WORDS.fullmatch(answer) if len(answer) <= 80 else None


def _number_alone(answer: str) -> str:
    """Return the number in "The answer is 5." or "5 dollars"; empty: other words may matter."""
    found = _among_words(answer)
    if found is None or not _OPENING.fullmatch(found["before"] or "it is"):
        return ""
    is_known = set(re.findall("[a-z]+", found["after"].lower())) <= _UNITS
    return found["number"] if is_known and found["number"] != found[0] else ""


def has_other_words(reward: str, answer: str) -> bool:
    """Return whether a number has words around it that a completion may have to repeat."""
    if reward not in ("math", "dapo", "deepscaler"):
        return False  # the others do not look for a number, or refuse such an answer
    found = _among_words(answer)
    words = found and re.search(r"[A-Za-z]{2}", f"{found['before'] or ''} {found['after']}")
    return bool(words) and not _number_alone(answer)


def is_plain(reward: str, answer: str) -> bool:
    """Return whether some completion could surely be right, so that no verifier need check it.

    math-verify takes milliseconds to read LaTeX, so its most common forms are recognized here. Some
    verifiers can compare any text.
    """
    if reward == "math":
        latex = final_answer(answer).strip()
        return len(latex) <= PLAIN_LENGTH and _is_simple_latex(latex)
    if reward in ("gsm8k", "gsm8k_flexible"):
        return re.fullmatch(_NUMBER, _gsm8k_answer(answer)) is not None
    if reward == "dapo":
        line = final_answer(answer).strip()
        return "\n" not in line and len(line) < TAIL_LENGTH // 2
    return reward != "reasoning_gym" and (reward != "deepscaler" or "\\boxed" not in answer)


# Possessive quantifiers (++): a long number is read once, and not in every way it can be divided.
_FACTOR = r"(?:[0-9]++(?:\.[0-9]++)?|[a-zA-Z]|\\pi(?![a-zA-Z]))"
_SUM = rf"-?{_FACTOR}++(?:[-+]{_FACTOR}++)*+"
_SUMS = rf"{_SUM}(?:,{_SUM})*+"
_INNERMOST = re.compile(
    rf"\\[dt]?frac\{{{_SUM}\}}\{{{_SUM}\}}|\\sqrt\{{{_SUM}\}}|\({_SUMS}\)|"
    rf"{_FACTOR}\^(?:[0-9a-z]|\{{{_SUM}\}})"
)


def _is_simple_latex(answer: str) -> bool:
    """Return whether an answer is made of sums of numbers, letters, fractions, roots, powers."""
    text = re.sub(r"\s|\\left(?![a-z])|\\right(?![a-z])", "", answer.strip("$"))
    shorter = _INNERMOST.sub("x", text)
    while shorter != text:
        text, shorter = shorter, _INNERMOST.sub("x", shorter)
    return re.fullmatch(rf"(?:[a-zA-Z]=)?{_SUMS}", text) is not None
