"""Verifiers against cases worked by hand from the rules of their sources."""

import functools
import json
import subprocess
import sys
import time
from typing import Any

import pytest
import reasoning_gym

from qurl_megatron.algorithm.score import Question
from qurl_megatron.data.verifiers import VERIFIERS, Verifier, is_plain

RIGHT, WRONG = 1.0, 0.0


@functools.cache
def verifier(name: str) -> Verifier:
    return VERIFIERS[name]()


def question(answer: str, **metadata: Any) -> Question:
    return Question("How many?", answer, metadata)


def credit(name: str, text: str, answer: str) -> float:
    return verifier(name).credit(text, question(answer))


@pytest.mark.parametrize(
    ("answer", "text", "strict", "flexible"),
    [
        # verl's two rules, by the last 300 characters; the flexible one reads "12." as 12.
        ("72", "So it is #### 72", RIGHT, RIGHT),
        ("72", "So it is 72", WRONG, RIGHT),
        ("72", "####72", WRONG, RIGHT),
        ("72", "#### 5, no: #### 72", RIGHT, RIGHT),
        ("72", "#### 72, no: #### 5", WRONG, WRONG),
        ("72", "#### 72\nThat took 3 steps.", RIGHT, WRONG),
        ("72", "#### $72", WRONG, RIGHT),
        ("72", "#### 72.", WRONG, RIGHT),  # in the strict rule the full stop is of the number
        ("72", "7 + 65 = 72, I think.", WRONG, RIGHT),
        ("5", "It is .5", WRONG, WRONG),
        ("72", "#### 72.0", WRONG, WRONG),  # numbers are compared as texts
        ("72", "72 .", WRONG, RIGHT),  # a full stop alone is not a number
        ("1,200", "#### 1,200", RIGHT, RIGHT),
        ("-3", "#### -3", RIGHT, RIGHT),
        ("48/2 = <<48/2=24>>24\n#### 72", "#### 72", RIGHT, RIGHT),
        ("72", "#### 72" + " " * 300, WRONG, WRONG),
        ("72", "no idea", WRONG, WRONG),
        ("72", "", WRONG, WRONG),
    ],
)
def test_gsm8k_follows_verls_strict_and_flexible_rule(
    answer: str, text: str, strict: float, flexible: float
) -> None:
    assert credit("gsm8k", text, answer) == strict
    assert credit("gsm8k_flexible", text, answer) == flexible


CASES = {
    "dapo": [
        ("34", "Answer: 34", RIGHT),
        ("34", "answer :34", RIGHT),
        ("34", "Answer: $34$", RIGHT),
        ("34", "Answer: \\boxed{34}", RIGHT),
        ("34", "\\boxed{34}", WRONG),
        ("34", "The answer is 34", WRONG),
        ("34", "Answer: 34\nI am sure.", RIGHT),
        ("34", "Answer: 34 I am sure.", WRONG),
        ("34", "Answer: 12\nAnswer: 34", RIGHT),
        ("34", "Answer: 34\nAnswer: 12", WRONG),
        ("34", "Answer: x = 34", RIGHT),
        ("34", "Answer: 34 dollars", RIGHT),
        ("34", "Answer: 34^\\circ", RIGHT),
        ("34", "Answer: 34 \\text{ cm}", RIGHT),
        ("34", "Answer: 34.0", WRONG),
        ("1000", "Answer: 1,000", RIGHT),
        ("\\frac{1}{2}", "Answer: \\frac12", RIGHT),
        ("\\frac{1}{2}", "Answer: 0.5", WRONG),
        ("\\sqrt{2}", "Answer: \\sqrt2", RIGHT),
        ("34", "Answer: 34" + "\n" + "x" * 289, RIGHT),  # exactly 300 characters
        ("34", "Answer: 34" + "\n" + "x" * 290, WRONG),
        ("48/2 = <<48/2=24>>24\n#### 1,200", "Answer: 1200", RIGHT),
        ("48/2 = <<48/2=24>>24\n#### 72", "Answer: 24", WRONG),
    ],
    "deepscaler": [
        ("2", "thought </think> \\boxed{2}", RIGHT),
        ("2", "\\boxed{2}", WRONG),  # no end of a thought
        ("2", "\\boxed{2} </think> so 2", WRONG),  # no box behind the thought
        ("2", "</think> 2", WRONG),
        ("2", "</think> \\boxed{1} \\boxed{2}", RIGHT),
        ("2", "</think> \\boxed{2} </think> \\boxed{3}", RIGHT),  # as DeepScaleR cuts it
        ("2", "</think> \\boxed{2", WRONG),
        ("\\boxed{2}", "</think> \\boxed{2}", RIGHT),
        ("\\frac{1}{2}", "</think> \\boxed{\\frac12}", RIGHT),
        ("\\frac{1}{2}", "</think> \\boxed{0.5}", RIGHT),
        ("\\frac{1}{2}", "</think> \\boxed{1/2}", RIGHT),
        ("\\frac{1}{2}", "</think> \\boxed{2/4}", WRONG),  # not reduced
        ("\\frac{3}{4}", "</think> \\boxed{0.75}", RIGHT),  # sympy finds them equal
        ("6", "</think> \\boxed{2*3}", WRONG),  # a whole number must be written as one
        ("5", "</think> \\boxed{x = 5}", RIGHT),
        ("5", "</think> \\boxed{5 \\text{ cm}}", RIGHT),
        ("5", "</think> \\boxed{5 meters}", RIGHT),
        ("1000", "</think> \\boxed{1,000}", RIGHT),
        ("2*10^6", "</think> \\boxed{2 million}", RIGHT),
        ("7/2", "</think> \\boxed{3\\frac{1}{2}}", RIGHT),  # a mixed number
        ("\\sqrt{2}", "</think> \\boxed{\\sqrt2}", RIGHT),
        ("(1,2)", "</think> \\boxed{(1, 2)}", RIGHT),
        ("(1,2)", "</think> \\boxed{[1,2]}", WRONG),
        ("(1,2)", "</think> \\boxed{(2,1)}", WRONG),
        ("x^2+2x+1", "</think> \\boxed{(x+1)^2}", RIGHT),
        ("2\\pi", "</think> \\boxed{\\pi \\cdot 2}", RIGHT),
        ("\\text{Monday}", "</think> \\boxed{monday}", RIGHT),
        ("5 \\sqrt[3]{4}", "</think> \\boxed{5 \\cdot \\sqrt[3]{4}}", RIGHT),
        ("2 \\sqrt{4}", "</think> \\boxed{2 \\sqrt[3]{4}}", RIGHT),  # pylatexenc drops the 3
        ("48/2 = <<48/2=24>>24\n#### 1,200", "</think> \\boxed{1200}", RIGHT),
        ("48/2 = <<48/2=24>>24\n#### 72", "</think> \\boxed{24}", WRONG),
        ("x+y+z", "</think> \\boxed{z+y+x}", WRONG),  # more than two letters are not evaluated
    ],
    "math": [
        ("42", "so it is \\boxed{42}.", RIGHT),
        ("42", "so it is 42.", RIGHT),
        ("42", "so it is \\boxed{24}.", WRONG),
        ("42", "no idea", WRONG),
        ("72", "I had 5. The answer is \\boxed{72}; I used 3 apples.", RIGHT),
        ("1,000", "$1000$", RIGHT),
        ("\\frac{1}{2}", "\\boxed{0.5}", RIGHT),
        ("\\frac{1}{2}", "\\boxed{2}", WRONG),
        ("x^2+1", "$1 + x^2$", RIGHT),
        ("\\$18", "She pays $18$.", RIGHT),
        ("The answer is \\boxed{7}", "\\boxed{7}", RIGHT),
        ("It is $\\frac{3}{4}$ of it", "\\boxed{3/4}", RIGHT),
        ("$\\frac{3}{4}$", "\\boxed{3/4}", RIGHT),
        ("48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72", "\\boxed{72}", RIGHT),
        ("48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72", "\\boxed{24}", WRONG),
        ("He walks 2 km.\n#### 1,200", "#### 1200", RIGHT),
        # A mixed answer keeps all its parts.
        ("15 and $22.5$", "\\boxed{15, 22.5}", RIGHT),
        ("15 and $22.5$", "\\boxed{15 \\text{ and } 22.5}", RIGHT),
        ("15 and $22.5$", "\\boxed{22.5}", WRONG),
        ("$15$ and $22.5$", "$15$ and $22.5$", RIGHT),
        # Reading 12:00 as a division by zero fails; the texts are equal.
        ("12:00", "\\boxed{12:00}", RIGHT),
        ("$12:00$", "$12:00$", RIGHT),
    ],
    "exact": [
        ("yes ", "yes", RIGHT),
        ("yes ", " yes\n", RIGHT),
        ("yes ", "Yes", WRONG),
        ("yes ", "yes!", WRONG),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "text", "expected"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_verifier_scores_as_its_source_does(
    name: str, answer: str, text: str, expected: float
) -> None:
    assert credit(name, text, answer) == expected


def test_broken_latex_of_a_policy_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    assert credit("deepscaler", "</think> \\boxed{\\frac}", "\\frac{1}{2}") == WRONG
    assert not caplog.records


LATEX_CANNOT_READ = r"\hbar \omega(v+1 / 2)-\hbar \omega x_e(v+1 / 2)^2"


def test_a_comparison_that_fails_is_a_failure_and_no_verdict() -> None:
    with pytest.raises(ValueError, match="nan or zoo"):
        credit("math", "\\boxed{7}", "12:00")


def test_no_number_inside_an_unreadable_answer_counts_as_right() -> None:
    for number in ("1", "2", "1/2"):
        assert credit("math", f"\\boxed{{{number}}}", LATEX_CANNOT_READ) == WRONG
    assert credit("math", f"\\boxed{{{LATEX_CANNOT_READ}}}", LATEX_CANNOT_READ) == RIGHT


@pytest.mark.parametrize("name", ["math", "gsm8k", "gsm8k_flexible", "deepscaler", "dapo", "exact"])
def test_a_plain_answer_needs_no_closer_look(name: str) -> None:
    for answer in ("7", "-3.5", "1,000", "0.50", "a\n#### 1,200"):
        assert is_plain(name, answer)
        assert verifier(name).unverifiable(question(answer)) == ""


SIMPLE_LATEX = [
    "\\frac{1}{2}", "-\\frac{2\\sqrt{3}}{x+1}", "x^2+2x+1", "x^{10}-3", "2\\pi", "(1,2)", "x=3",
    "$10-4 n$", "\\left(\\frac{1}{2}, -3\\right)", "3\\sqrt{2}, 5", "2^{n+1}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "needs_look", "reason"),
    [
        (SIMPLE_LATEX, False, ""),
        (["\\hbar", "12:00", "15 and $22.5$"], True, ""),
        ([LATEX_CANNOT_READ, "2x+3y=", "####", "\\frac{1}", ""], True, "cannot be read as LaTeX"),
    ],
)
def test_an_answer_that_math_verify_cannot_read_as_latex_is_unverifiable(
    answers: list[str], needs_look: bool, reason: str
) -> None:
    for answer in answers:
        assert is_plain("math", answer) == (not needs_look)
        found = verifier("math").unverifiable(question(answer))
        assert reason in found and bool(found) == bool(reason)


def test_a_long_answer_is_looked_over_in_no_time() -> None:
    begin = time.monotonic()
    for long in ("1" * 5000 + "!", "(" * 500 + "x", "x" * 5000 + "=", "\\frac{1}{" * 200):
        assert not is_plain("math", long)
    assert time.monotonic() - begin < 1


def test_answers_that_are_not_plain_are_looked_at() -> None:
    assert not is_plain("gsm8k", "seven")
    assert "is no number" in verifier("gsm8k").unverifiable(question("seven"))
    for solution in ("Two and two.\nSo $x = 4$.", "so " * 100 + "4"):
        assert not is_plain("dapo", solution)
        assert "more than the line" in verifier("dapo").unverifiable(question(solution))
    matrix = "\\begin{pmatrix}" + "1 & 2 \\\\ " * 16 + "\\end{pmatrix}"
    assert not is_plain("dapo", matrix) and not verifier("dapo").unverifiable(question(matrix))
    assert not is_plain("deepscaler", "\\boxed{2")
    assert "a box that cannot be read" in verifier("deepscaler").unverifiable(question("\\boxed{2"))
    assert not is_plain("reasoning_gym", "7")


def spell_backward(word: str) -> Question:
    return question(word[::-1], source_dataset="spell_backward", word=word)


def test_reasoning_gym_scores_the_last_answer_tag_or_the_whole_text() -> None:
    for text, is_right in {
        "rats": True,
        " rats\n": True,
        "Let me see.\n<answer> rats </answer>": True,
        "<answer>star</answer> no: <answer>rats</answer>": True,
        "<answer>star</answer> rats": False,
        "the answer is rats": False,
        "": False,
    }.items():
        assert (verifier("reasoning_gym").credit(text, spell_backward("star")) >= 1) == is_right


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "sudoku", "word_ladder"])
def test_reasoning_gym_scores_entries_of_its_tasks_by_metadata(task: str) -> None:
    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    read_back = question(entry["answer"], **json.loads(json.dumps(entry["metadata"])))
    assert verifier("reasoning_gym").credit(entry["answer"], read_back) == 1
    assert verifier("reasoning_gym").credit("no idea", read_back) < 1


def test_problem_that_reasoning_gym_cannot_score_is_recognized() -> None:
    unverifiable = verifier("reasoning_gym").unverifiable
    assert unverifiable(spell_backward("star")) == ""
    assert "no metadata.source_dataset" in unverifiable(question("4"))
    for task, reason in {
        "chess": "'chess' is not a reasoning_gym task",
        "countdown": "countdown does not accept",
    }.items():
        assert reason in unverifiable(question("4", source_dataset=task))


def test_entry_that_json_changed_is_recognized_as_unverifiable() -> None:
    entry = reasoning_gym.create_dataset("rearc", size=1, seed=0)[0]
    fresh = question(entry["answer"], **entry["metadata"])
    assert verifier("reasoning_gym").unverifiable(fresh) == ""
    read_back = question(entry["answer"], **json.loads(json.dumps(entry["metadata"])))
    assert "rearc does not accept" in verifier("reasoning_gym").unverifiable(read_back)


def test_processes_that_score_import_no_torch_and_only_their_own_verifier() -> None:
    script = (
        "import sys\n"
        "import qurl_megatron.data.scoring\n"
        "heavy = {'torch', 'numpy', 'sympy', 'math_verify', 'reasoning_gym', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
