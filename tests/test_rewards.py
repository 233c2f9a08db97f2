"""Rewards: real verifiers, from the text of a completion to 0 or 1."""

import json
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import reasoning_gym

from qurl_megatron.data import rewards
from qurl_megatron.data.rewards import Score, score, unverifiable

RIGHT, WRONG, FAILED = Score(1.0, False), Score(0.0, False), Score(0.0, True)


@dataclass(frozen=True)
class Problem:
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


def spell_backward(word: str) -> Problem:
    return Problem(word[::-1], {"source_dataset": "spell_backward", "word": word})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rats", RIGHT),
        (" rats\n", RIGHT),
        ("Let me see.\n<answer> rats </answer>", RIGHT),
        ("<answer>star</answer> no: <answer>rats</answer>", RIGHT),
        ("<answer>star</answer> rats", WRONG),
        ("the answer is rats", WRONG),
        ("", WRONG),
    ],
)
def test_reasoning_gym_scores_the_last_answer_tag_or_the_whole_text(
    text: str, expected: Score
) -> None:
    assert score("reasoning_gym", text, spell_backward("star")) == expected


@pytest.mark.parametrize(
    ("text", "partial_credit"), [("euqarux", 0.85), ("euqarupx", 0.99)], ids=str
)
def test_partial_credit_of_reasoning_gym_counts_as_0(text: str, partial_credit: float) -> None:
    problem = spell_backward("puraque")
    scorer = reasoning_gym.get_score_answer_fn("spell_backward")
    assert partial_credit < scorer(text, {"answer": problem.answer}) < 1
    assert score("reasoning_gym", text, problem) == WRONG


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "sudoku", "word_ladder"])
def test_reasoning_gym_scores_entries_of_its_tasks_by_metadata(task: str) -> None:
    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    problem = Problem(entry["answer"], json.loads(json.dumps(entry["metadata"])))
    assert score("reasoning_gym", entry["answer"], problem) == RIGHT
    assert score("reasoning_gym", "no idea", problem).value == 0


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("42", "so it is \\boxed{42}.", RIGHT),
        ("42", "so it is 42.", RIGHT),
        ("42", "so it is \\boxed{24}.", WRONG),
        ("42", "no idea", WRONG),
        ("42", "", WRONG),
        ("72", "I had 5. The answer is \\boxed{72}; I used 3 apples.", RIGHT),
        ("1,000", "$1000$", RIGHT),
        ("\\frac{1}{2}", "\\boxed{0.5}", RIGHT),
        ("\\frac{1}{2}", "\\boxed{2}", WRONG),
        ("x^2+1", "$1 + x^2$", RIGHT),
        ("\\$18", "She pays $18$.", RIGHT),
        ("The answer is \\boxed{7}", "\\boxed{7}", RIGHT),
        ("$\\frac{3}{4}$", "\\boxed{3/4}", RIGHT),
        ("48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72", "\\boxed{72}", RIGHT),
        ("48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72", "\\boxed{24}", WRONG),
        ("He walks 2 km.\n#### 1,200", "#### 1200", RIGHT),
        ("####", "\\boxed{1}", FAILED),  # the right answer is empty
    ],
)
def test_math_scores_as_math_verify_does(gold: str, text: str, expected: Score) -> None:
    assert score("math", text, Problem(gold)) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("yes", RIGHT), (" yes\n", RIGHT), ("Yes", WRONG), ("yes!", WRONG)]
)
def test_exact_ignores_surrounding_whitespace_only(text: str, expected: Score) -> None:
    assert score("exact", text, Problem("yes ")) == expected


def test_verifier_that_times_out_scores_0_and_is_marked_as_failed() -> None:
    score("math", "1", Problem("1"))  # imports math-verify
    start = time.monotonic()
    assert score("math", "\\boxed{9^{9^{9^9}}}", Problem("42"), timeout_s=0.3) == FAILED
    assert time.monotonic() - start < 2


def test_time_limit_restores_the_alarm_and_its_handler() -> None:
    before = signal.getsignal(signal.SIGALRM)
    score("math", "\\boxed{1}", Problem("1"))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_verifier_that_raises_scores_0_and_is_marked_as_failed() -> None:
    without_fields = Problem("4", {"source_dataset": "sudoku"})  # its scorer needs the puzzle
    assert score("reasoning_gym", "4", without_fields) == FAILED


def test_scoring_off_the_main_thread_is_refused() -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            score("math", "1", Problem("1"))
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(raised) == 1 and "main thread" in str(raised[0])


def test_unknown_reward_is_named_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'bleu'.*reasoning_gym, math, exact"):
        score("bleu", "1", Problem("1"))


def test_unverifiable_problem_is_recognized() -> None:
    assert unverifiable("reasoning_gym", spell_backward("star")) == ""
    assert unverifiable("exact", Problem("anything")) == ""
    assert "no metadata.source_dataset" in unverifiable("reasoning_gym", Problem("4"))
    unknown = Problem("4", {"source_dataset": "chess"})
    assert "'chess' is not a reasoning_gym task" in unverifiable("reasoning_gym", unknown)
    countdown = Problem("4", {"source_dataset": "countdown"})
    assert "countdown does not accept" in unverifiable("reasoning_gym", countdown)


def test_entry_that_json_changed_is_recognized_as_unverifiable() -> None:
    entry = reasoning_gym.create_dataset("rearc", size=1, seed=0)[0]
    fresh = Problem(entry["answer"], entry["metadata"])
    assert unverifiable("reasoning_gym", fresh) == ""
    read_back = Problem(entry["answer"], json.loads(json.dumps(entry["metadata"])))
    assert "rearc does not accept" in unverifiable("reasoning_gym", read_back)


def test_verifier_libraries_are_not_imported_with_the_module() -> None:
    source = rewards.__file__
    with open(source) as file:
        imports = [line for line in file if line.startswith(("import ", "from "))]
    assert not any("reasoning_gym" in line or "math_verify" in line for line in imports)
