"""Rewards: from a verifier's credit to a number on the scale of the run."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reasoning_gym
import torch

from qurl_megatron.algorithm.score import Question, Score, mean_parts
from qurl_megatron.config.schema import VERIFIER_NAMES, Config, ConfigError, ScoringConfig
from qurl_megatron.config.text import with_overrides
from qurl_megatron.data.reward_functions import RewardFunction
from qurl_megatron.data.rewards import failed
from qurl_megatron.data.scoring import load
from qurl_megatron.data.verifiers import VERIFIERS
from qurl_megatron.recipes import dapo_aime, deepscaler_grpo, gsm8k_ppo


def settings(reward: str, right: float = 1, wrong: float = 0, partial: bool = False) -> Config:
    return Config(reward=reward, scoring=ScoringConfig(right, wrong, partial))


def score(config: Config, text: str, question: Question) -> Score:
    (only,) = load(config).score([text], question)
    return only


YES = Question("Yes or no?", "yes", {})


@pytest.mark.parametrize(("right", "wrong"), [(1, 0), (1, -1), (0.7, 0.2)])
def test_right_and_wrong_completions_get_the_rewards_of_the_run(right: float, wrong: float) -> None:
    scale = settings("exact", right, wrong)
    assert score(scale, "yes", YES) == Score(right, {"accuracy": 1}, "")
    assert score(scale, "no", YES) == Score(wrong, {"accuracy": 0}, "")
    assert failed(scale, "it broke") == Score(wrong, {"accuracy": 0}, "it broke")


def test_partial_credit_counts_only_if_the_run_asks_for_it() -> None:
    problem = Question("Spell puraque backward", "euqarup", {"source_dataset": "spell_backward"})
    scorer = reasoning_gym.get_score_answer_fn("spell_backward")
    for text, least_credit in {"euqarux": 0.85, "euqarupx": 0.99, "euqarup": 1}.items():
        credit = scorer(text, {"answer": "euqarup"})
        assert credit >= least_credit
        is_right = float(credit == 1)
        whole = score(settings("reasoning_gym", wrong=-1), text, problem)
        partial = score(settings("reasoning_gym", wrong=-1, partial=True), text, problem)
        assert whole == Score(2 * is_right - 1, {"accuracy": is_right}, "")
        assert partial.value == pytest.approx(2 * credit - 1, abs=1e-12)
        assert partial.parts == {"accuracy": is_right}


def test_verifier_that_raises_scores_as_wrong_and_says_why() -> None:
    without_fields = Question("", "4", {"source_dataset": "sudoku"})  # its scorer needs the grid
    failed = score(settings("reasoning_gym", wrong=-1), "4", without_fields)
    assert failed == Score(-1, {"accuracy": 0}, "KeyError: 'solution'")


@pytest.mark.parametrize(
    ("verifier", "answers", "right", "wrong"),
    [
        ("math", ["\\hbar \\omega(v+1/2)-", "2", "-2"], ["$-2$", "\\boxed{2}"], "$3$"),
        ("gsm8k", ["none", "2", "1,000"], ["#### 1,000", "#### 2"], "#### 3"),
        ("gsm8k_flexible", ["2", "3"], ["it is 3"], "it is 4"),
        ("dapo", ["2", "\\frac{1}{2}"], ["Answer: \\frac{1}{2}"], "Answer: 0.5"),
        ("deepscaler", ["2", "x+1"], ["</think>\\boxed{1+x}", "</think>\\boxed{2}"], "2"),
        ("exact", ["a", "b"], ["b"], "c"),
    ],
)
def test_any_answer_of_a_list_is_right(
    verifier: str, answers: list[str], right: list[str], wrong: str
) -> None:
    """One that the verifier cannot read takes nothing from the others."""
    reward, question = load(settings(verifier)), Question("", answers[0], {}, tuple(answers))
    assert not reward.unverifiable(question)
    scores = list(reward.score([*right, wrong], question))
    assert [score.value for score in scores] == [1] * len(right) + [0]
    assert not any(score.failure for score in scores)


@pytest.mark.parametrize(
    ("verifier", "answer", "right", "wrong"),
    [
        # The JSON of a list of texts, as in Skywork's data.
        ("math", '["\\\\frac{1}{2}", "3"]', ["\\boxed{0.5}", "\\boxed{3}"], "\\boxed{2}"),
        ("gsm8k", '["1"]', ["#### 1"], "#### 2"),
        ("math", "['1', '2']", ["\\boxed{2}"], "\\boxed{3}"),  # as a table has it
        ("exact", "[a, 'b']", ["[a, 'b']"], "b"),
        ("exact", ' ["a", "b"]', ["b"], '["a", "b"]'),
        ("exact", "[1, 2]", ["[1, 2]"], "1"),  # numbers: an answer that is a list
        ("exact", "[]", ["[]"], ""),
        ("exact", '["a", ""]', ['["a", ""]'], "a"),
        ("dapo", '["7", 8]', ["Answer: 7", "Answer: 8"], "Answer: 9"),
        # A number among words.
        ("math", "5 dollars", ["\\boxed{5}", "\\boxed{5 dollars}"], "\\boxed{4}"),
        ("math", "5 km/h", ["\\boxed{5}", "\\boxed{5 km/h}"], "\\boxed{4}"),
        ("deepscaler", "7 cm^2", ["</think> \\boxed{7}"], "</think> \\boxed{49}"),
        ("math", "The answer is 1,200.", ["\\boxed{1200}"], "\\boxed{12}"),
        ("gsm8k", "a\n#### 18 years old", ["#### 18"], "#### 8"),
        ("gsm8k_flexible", "$5", ["it is 5"], "it is 4"),
        ("dapo", "answer: -2.5", ["Answer: -2.5"], "Answer: 2.5"),
        ("deepscaler", "It is 5.", ["</think> \\boxed{5}"], "</think> \\boxed{4}"),
        ("exact", "5 dollars", ["5 dollars"], "5"),
        # Words that may matter stay.
        ("math", "2 and a half", [], "\\boxed{2}"),
        ("math", "5 million dollars", [], "\\boxed{5}"),
        ("math", "5 x^2", [], "\\boxed{5}"),
        ("math", "Sunday, May 5", ["\\boxed{Sunday, May 5}"], "\\boxed{5}"),
    ],
)
def test_an_answer_written_as_a_list_or_among_words_is_read_as_meant(
    verifier: str, answer: str, right: list[str], wrong: str
) -> None:
    reward, question = load(settings(verifier)), Question("", answer, {})
    assert not reward.unverifiable(question)
    scores = list(reward.score([*right, wrong], question))
    assert [score.value for score in scores] == [1] * len(right) + [0]


def test_a_list_of_texts_is_one_answer_in_reasoning_gym() -> None:
    entry = reasoning_gym.create_dataset("jugs", size=1, seed=1)[0]
    jugs = Question("", entry["answer"], entry["metadata"])
    assert entry["answer"].startswith('["')
    for verifier in ("reasoning_gym", "exact"):
        assert score(settings(verifier), entry["answer"], jugs).value == 1


def test_a_list_without_an_answer_that_can_be_compared_is_unverifiable() -> None:
    question = Question("", "none", {}, ("none", "some"))
    assert "'some' is no number" in load(settings("gsm8k")).unverifiable(question)


def verl(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    assert (data_source, extra_info) == ("gsm8k", {"index": 3})
    return {
        "score": float(solution_str == ground_truth),
        "acc": solution_str == ground_truth,
        "s": "",
    }


def verl_with_two(solution_str, ground_truth):  # type: ignore[no-untyped-def]
    return solution_str in ground_truth if isinstance(ground_truth, list) else 0


def trl(completions, solution, **columns):  # type: ignore[no-untyped-def]
    assert columns["extra_info"] == [{"index": 3}] * 2
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if pair[0] == pair[1] else None for pair in zip(texts, solution, strict=True)]


async def trl_with_prompts(prompts, completions, **columns):  # type: ignore[no-untyped-def]
    return torch.tensor([len(prompt[0]["content"]) for prompt in prompts])


def array(completions, problem):  # type: ignore[no-untyped-def]
    return np.array([text == problem.answer for text in completions])


def two_dimensions(completions, problem):  # type: ignore[no-untyped-def]
    return np.zeros((len(completions), 1))


def values_of_a_set(completions, problem):  # type: ignore[no-untyped-def]
    return set(range(len(completions)))


def huge(completion, problem):  # type: ignore[no-untyped-def]
    return 1e39 if completion == "42" else -1e38


def times_out(completion, problem):  # type: ignore[no-untyped-def]
    raise TimeoutError("read timed out")


async def times_out_or_waits(completion, problem):  # type: ignore[no-untyped-def]
    if completion == "7":
        await asyncio.sleep(60)
    raise TimeoutError("read timed out")


READ = "TimeoutError: read timed out"
RETURNED: dict[Callable[..., Any], list[float | str]] = {  # for 42 and 7: a reward or a failure
    verl: [1.0, 0.0],
    verl_with_two: [1.0, 1.0],
    trl: [1.0, "it returned None, which is no score of this completion"],
    trl_with_prompts: [8.0, 8.0],
    array: [1.0, 0.0],
    two_dimensions: ["TypeError: it returned [0.0]; expected a number"] * 2,
    values_of_a_set: ["TypeError: it returned {0, 1}; expected a list of 2 rewards"] * 2,
    huge: ["ValueError: it returned 1e+39, more than float32 holds", -1e38],
    times_out: [READ] * 2,
    times_out_or_waits: [READ, "timed out after 0.5 s"],
}


@pytest.mark.parametrize("function", RETURNED, ids=lambda function: function.__name__)
def test_rewards_of_verl_and_trl_and_arrays_are_scores(function: Callable[..., Any]) -> None:
    columns = {
        "prompt": [{"role": "user", "content": "How many"}],
        "data_source": "gsm8k",
        "extra_info": {"index": 3},
        "solution": "42",
    }
    answers = ("7", "42") if function is verl_with_two else ()
    given = list(answers) or "42"
    question = Question("How many", "42", {}, answers, columns, given)
    scoring = ScoringConfig(wrong=-2, timeout_s=0.5)
    reward = RewardFunction(function, Config(reward="a.py:f", scoring=scoring))
    scores = list(reward.score(["42", "7"], question))
    for score, expected in zip(scores, RETURNED[function], strict=True):
        if isinstance(expected, str):
            assert score.value == -2 and score.failure.startswith(expected)
        else:
            assert (score.value, score.failure) == (expected, "")
        assert score.timed_out == score.failure.startswith("timed out after 0.5 s")
    if function is verl:
        assert [score.parts for score in scores] == [{"accuracy": 1.0}, {"accuracy": 0.0}]


def test_a_function_of_verl_gets_the_answer_of_its_data() -> None:
    def verl(solution_str, ground_truth):  # type: ignore[no-untyped-def]
        return ground_truth == json.loads(solution_str)

    reward = RewardFunction(verl, Config(reward="a.py:f"))
    for given in ({"target": 9}, 9, 0.5, [1, 2], "9", ["9"]):
        question = Question("How many?", "9", {}, given=given)
        (score,) = reward.score([json.dumps(given)], question)
        assert score == Score(1, {}, "")


def test_texts_of_a_plain_question_are_no_messages() -> None:
    def trl(prompts, completions, **columns):  # type: ignore[no-untyped-def]
        assert (prompts, completions, columns["answer"]) == (["How many?"], ["42"], [42])
        return [1]

    entry = {"question": "How many?", "answer": 42}
    reward = RewardFunction(trl, Config(reward="a.py:f"))
    (score,) = reward.score(["42"], Question("How many?", "42", {}, (), entry))
    assert score == Score(1, {}, "")


@pytest.mark.parametrize(
    "parameters",
    [
        "completion, answer",
        "problem, completion",
        "completion, ground_truth",
        "solution_str, ground_truth, method",
        "*arguments, **named",
        "completion, *, problem",
        "completion, problem: str",
    ],
)
def test_a_function_whose_parameters_do_not_say_what_they_are_is_refused(parameters: str) -> None:
    defined: dict[str, Any] = {}
    exec(f"def reward({parameters}): return 1", defined)
    with pytest.raises(TypeError, match=r"its parameters are .*; expected|problem is no str, but"):
        RewardFunction(defined["reward"], Config(reward="a.py:reward"))


def test_recipes_have_the_scale_and_the_verifier_of_their_source() -> None:
    for recipe, scale in {
        dapo_aime: ("dapo", -1, 1),
        deepscaler_grpo: ("deepscaler", 0, 1),
        gsm8k_ppo: ("gsm8k", 0, 1),
    }.items():
        config = recipe.recipe()
        assert (config.reward, config.scoring.wrong, config.scoring.right) == scale


def test_every_verifier_that_a_configuration_can_name_exists() -> None:
    assert set(VERIFIERS) == set(VERIFIER_NAMES)


def test_verifiers_and_functions_are_accepted_and_anything_else_is_refused() -> None:
    for reward in (*VERIFIER_NAMES, "judge.py:reward", "pkg.judge:reward"):
        assert with_overrides(Config(), [f"reward={reward}"]).reward == reward
    with pytest.raises(ConfigError, match="which function.* give judge.py:NAME"):
        with_overrides(Config(), ["reward=judge.py"])
    for reward in ("bleu", "", "judge.py:", "judge.py:1x", ":f"):
        with pytest.raises(ConfigError, match="math, gsm8k.*FILE.py:NAME or MODULE:NAME"):
            with_overrides(Config(), [f"reward={reward}"])


def test_parts_are_averaged_over_the_scores_that_have_them() -> None:
    scores = [Score(1, {"style": 0.5, "length": 3}, ""), Score(0, {"style": 1.0}, "")]
    assert mean_parts([*scores, Score(0, {}, "timed out")]) == {"style": 0.75, "length": 3}
