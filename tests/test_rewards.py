"""Rewards: from a verifier's credit to a number on the scale of the run."""

import pytest
import reasoning_gym

from qurl_megatron.algorithm.score import Question, Score, mean_parts
from qurl_megatron.config.schema import VERIFIER_NAMES, Config, ConfigError
from qurl_megatron.config.text import with_overrides
from qurl_megatron.data.rewards import failed, load
from qurl_megatron.data.verifiers import VERIFIERS
from qurl_megatron.recipes import dapo_aime, deepscaler_grpo, gsm8k_ppo


def settings(reward: str, right: float = 1, wrong: float = 0, partial: bool = False) -> Config:
    return Config(reward=reward, reward_right=right, reward_wrong=wrong, reward_partial=partial)


def score(config: Config, text: str, question: Question) -> Score:
    (only,) = load(config).score([text], question)
    return only


YES = Question("Yes or no?", "yes", {})


@pytest.mark.parametrize(("right", "wrong"), [(1, 0), (1, -1), (0.7, 0.2)])
def test_right_and_wrong_responses_get_the_rewards_of_the_run(right: float, wrong: float) -> None:
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


def test_recipes_have_the_scale_and_the_verifier_of_their_source() -> None:
    for recipe, scale in {
        dapo_aime: ("dapo", -1, 1),
        deepscaler_grpo: ("deepscaler", 0, 1),
        gsm8k_ppo: ("gsm8k", 0, 1),
    }.items():
        config = recipe.recipe()
        assert (config.reward, config.reward_wrong, config.reward_right) == scale


def test_every_verifier_that_a_configuration_can_name_exists() -> None:
    assert set(VERIFIERS) == set(VERIFIER_NAMES)


def test_verifiers_and_functions_are_accepted_and_anything_else_is_refused() -> None:
    for reward in (*VERIFIER_NAMES, "judge.py:reward", "pkg.judge:reward"):
        assert with_overrides(Config(), [f"reward={reward}"]).reward == reward
    for reward in ("bleu", "", "judge.py", "judge.py:", "judge.py:1x", ":f"):
        with pytest.raises(ConfigError, match="math, gsm8k.*FILE.py:NAME or MODULE:NAME"):
            with_overrides(Config(), [f"reward={reward}"])


def test_parts_are_averaged_over_the_scores_that_have_them() -> None:
    scores = [Score(1, {"style": 0.5, "length": 3}, ""), Score(0, {"style": 1.0}, "")]
    assert mean_parts([*scores, Score(0, {}, "timed out")]) == {"style": 0.75, "length": 3}
