"""Avg@1 and Avg@k against hand-computed numbers."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.proof import WrongRollouts
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.data.scoring import Scorer
from qurl_megatron.evaluation.avg_at_k import (
    Answer,
    Average,
    EvalConfig,
    ProblemResult,
    averages,
    measure,
    run,
    write_answers,
)


def test_a_format_that_needs_a_gpu_is_refused_where_it_would_run(tmp_path: Path) -> None:
    if device.accelerator() == "cuda":
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="SGLang's own fp8 layers need a GPU; use format=fp8"):
        run(EvalConfig(format="fp8-block", output=str(tmp_path / "eval")))


def make_result(greedy: float, *sampled: float) -> ProblemResult:
    answers = [Answer("", reward, False, False, reward, "") for reward in (greedy, *sampled)]
    return ProblemResult("question", "answer", answers[0], answers[1:])


def test_averages_and_standard_errors_are_over_problems() -> None:
    by_name = averages(
        [make_result(1, 1, 1), make_result(0, 0, 1), make_result(1, 0, 0), make_result(1, 1, 0)]
    )
    assert by_name["Avg@1"].mean == 0.75
    assert by_name["Avg@1"].standard_error == pytest.approx(0.5 / sqrt(4))
    # Shares of 1, 1/2, 0 and 1/2: sample standard deviation sqrt((1/4 + 1/4) / 3).
    assert by_name["Avg@2 sampled"].mean == 0.5
    assert by_name["Avg@2 sampled"].standard_error == pytest.approx(sqrt(1 / 6) / sqrt(4))


class ScriptedClient:
    """A rollout client with right greedy answers, and the given texts as sampled answers."""

    def __init__(self, *texts: str, logprob: float = 0.0) -> None:
        self.texts = texts
        self.logprob = logprob
        self.settings: list[dict[str, Any]] = []

    def generate(self, prompts: list[Prompt], **settings: Any) -> list[list[Completion]]:
        self.settings.append(settings)
        greedy = settings["temperature"] == 0
        return [
            [
                Completion([1], [self.logprob], text, False, [1])
                for text in ([p.answer] if greedy else self.texts)
            ]
            for p in prompts
        ]


PROMPT = Prompt("0", "question", "42", [1])


def test_answers_are_generated_as_configured_and_verifier_failures_are_recorded(
    tmp_path: Path,
) -> None:
    client: Any = ScriptedClient("\\boxed{42}", "\\boxed{41}", "9" * 100_000, "")
    with Scorer(Config(reward="math", reward_wrong=-1), workers=1) as scorer:
        results = measure(client, scorer.submit, [PROMPT], 64, k=4, temperature=0.6, top_p=0.95)
    greedy, sampled = client.settings
    assert (greedy["completions_per_prompt"], greedy["temperature"]) == (1, 0.0)
    assert (sampled["completions_per_prompt"], sampled["temperature"]) == (4, 0.6)
    assert sampled["top_p"] == 0.95
    by_name = averages(results)
    assert (by_name["Avg@1"].mean, by_name["Avg@4 sampled"].mean) == (1.0, 0.25)
    write_answers(results, tmp_path / "answers.jsonl")
    (line,) = (json.loads(line) for line in (tmp_path / "answers.jsonl").open())
    assert [a["reward"] for a in line["sampled"]] == [1, -1, -1, -1]
    assert [a["accuracy"] for a in line["sampled"]] == [1, 0, 0, 0]
    assert [a["verifier_failed"] for a in line["sampled"]] == [False, False, True, False]
    assert [a["failure"][:12] for a in line["sampled"]] == ["", "", "SympifyError", ""]


def test_k_of_0_generates_only_a_greedy_answer() -> None:
    client: Any = ScriptedClient()
    with Scorer(Config(reward="exact"), workers=1) as scorer:
        (result,) = measure(client, scorer.submit, [PROMPT], 64)
    assert len(client.settings) == 1 and result.sampled == [] and result.greedy.reward == 1
    assert averages([result]) == {"Avg@1": Average(1.0, 0.0)}


def test_equal_answers_are_right_where_one_token_makes_up_top_p() -> None:
    client: Any = ScriptedClient("42", "42", "42", logprob=-10.0)
    with Scorer(Config(reward="exact"), workers=1) as scorer:
        (result,) = measure(client, scorer.submit, [PROMPT], 64, k=3, top_p=0.5)
        assert len(result.sampled) == 3
        with pytest.raises(WrongRollouts):
            measure(client, scorer.submit, [PROMPT], 64, k=3)
