"""Avg@1 and Avg@k against hand-computed numbers."""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.proof import WrongRollouts
from qurl_megatron.config.schema import Config, EvaluationConfig, ScoringConfig
from qurl_megatron.data.problems import read_problems
from qurl_megatron.data.scoring import Scorer
from qurl_megatron.evaluation.avg_at_k import (
    Answer,
    Average,
    ProblemResult,
    append_answer,
    averages,
    failures,
    measure,
    read_answers,
    write_answers,
)
from qurl_megatron.loop.measurements import Evaluator
from qurl_megatron.rollout.server import ServerFailed
from scripted import ScriptedClient


def make_result(greedy: float, *sampled: float) -> ProblemResult:
    answers = [Answer("", reward, False, False, reward, "") for reward in (greedy, *sampled)]
    return ProblemResult(0, "question", "answer", answers[0], answers[1:])


def test_averages_and_standard_errors_are_over_problems() -> None:
    by_name = averages(
        [make_result(1, 1, 1), make_result(0, 0, 1), make_result(1, 0, 0), make_result(1, 1, 0)]
    )
    assert by_name["Avg@1"].mean == 0.75
    assert by_name["Avg@1"].standard_error == pytest.approx(0.5 / sqrt(4))
    # Shares of 1, 1/2, 0 and 1/2: sample standard deviation sqrt((1/4 + 1/4) / 3).
    assert by_name["Avg@2 sampled"].mean == 0.5
    assert by_name["Avg@2 sampled"].standard_error == pytest.approx(sqrt(1 / 6) / sqrt(4))


PROMPT = Prompt("0", "question", "42", [1])


def test_answers_are_generated_as_configured_and_verifier_failures_are_recorded(
    tmp_path: Path,
) -> None:
    client: Any = ScriptedClient("\\boxed{42}", "\\boxed{41}", "9" * 100_000, "")
    with Scorer(Config(reward="math", scoring=ScoringConfig(wrong=-1)), workers=1) as scorer:
        results = measure(client, scorer.submit, [PROMPT], 64, k=4, temperature=0.6, top_p=0.95)
    greedy, sampled = client.settings
    assert (greedy["completions_per_prompt"], greedy["temperature"]) == (1, 0.0)
    assert (sampled["completions_per_prompt"], sampled["temperature"]) == (4, 0.6)
    assert sampled["top_p"] == 0.95
    by_name = averages(results)
    assert failures(results).startswith("1 of 5 answers, which count as wrong: SympifyError")
    assert (by_name["Avg@1"].mean, by_name["Avg@4 sampled"].mean) == (1.0, 0.25)
    write_answers(results, tmp_path / "answers.jsonl")
    again = read_problems(str(tmp_path / "answers.jsonl"), {}).problems
    assert [each.question for each in again] == [result.question for result in results]
    (line,) = (json.loads(line) for line in (tmp_path / "answers.jsonl").open())
    assert [a["reward"] for a in line["sampled"]] == [1, -1, -1, -1]
    assert [a["accuracy"] for a in line["sampled"]] == [1, 0, 0, 0]
    assert [a["verifier_failed"] for a in line["sampled"]] == [False, False, True, False]
    assert [a["failure"][:12] for a in line["sampled"]] == ["", "", "SympifyError", ""]


@pytest.mark.parametrize("num_held_out", [0, 1])
def test_an_evaluation_of_a_run_counts_scores_that_failed(
    num_held_out: int, tmp_path: Path
) -> None:
    client: Any = ScriptedClient("\\boxed{42}", "9" * 100_000)
    config = Config(output_dir=str(tmp_path), name="run", evaluation=EvaluationConfig(k=2))
    publisher: Any = SimpleNamespace(publish=int, while_serving=lambda work: work())
    with Scorer(config, workers=1) as scorer:
        held_out, files = [PROMPT] * num_held_out, {"sums": [PROMPT]}
        parts = publisher, client, lambda name: scorer.submit, held_out, files
        evaluation = Evaluator(config, *parts).evaluate(1)
    assert (evaluation.held_out_accuracy is not None) == bool(num_held_out)
    failed = f"1 of {3 + num_held_out} answers, which count as wrong: SympifyError"
    assert evaluation.failures.startswith(failed)


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


def test_an_evaluation_that_loses_its_server_keeps_its_answers_and_asks_only_for_the_others(
    tmp_path: Path,
) -> None:
    client: Any = ScriptedClient("8", "7")
    path = tmp_path / "answers_0.jsonl"
    prompts = [Prompt(str(n), f"question {n}", str(n), [1]) for n in range(4)]
    keep = partial(append_answer, path=path)

    with Scorer(Config(reward="exact"), workers=1) as scorer:
        lost = [*prompts[:2], dataclasses.replace(prompts[2], answer="lost"), prompts[3]]
        with pytest.raises(ServerFailed):
            measure(client, scorer.submit, lost, 64, k=2, keep=keep)
        known = read_answers(path)
        assert sorted(known) == [0, 1]
        asked: list[str] = []
        submit = scorer.submit

        def score(prompt: Prompt, completions: Sequence[Completion]) -> Any:
            asked.append(prompt.answer)
            return submit(prompt, completions)

        results = measure(client, score, prompts, 64, k=2, known=known, keep=keep)
        assert asked == ["2", "2", "3", "3"]  # greedy and sampled answers
        assert results == measure(client, submit, prompts, 64, k=2)
    assert read_answers(path) == dict(enumerate(results))
