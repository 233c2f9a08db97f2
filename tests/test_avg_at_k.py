"""Avg@1 and Avg@k against hand-computed numbers."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import time
from collections.abc import Awaitable, Iterable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from logs import run_log
from qurl_megatron import device
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.proof import WrongRollouts
from qurl_megatron.config.schema import Config, ConfigError, RolloutConfig
from qurl_megatron.config.text import with_overrides
from qurl_megatron.data.problems import read_problems
from qurl_megatron.data.scoring import Scorer
from qurl_megatron.evaluation import avg_at_k
from qurl_megatron.evaluation.avg_at_k import (
    Answer,
    Average,
    EvalConfig,
    ProblemResult,
    averages,
    check_output,
    measure,
    read_answers,
    run,
    unfinished,
    write_answers,
)
from qurl_megatron.files import append_lines
from qurl_megatron.rollout.server import ServerFailed
from tiny import build_tiny_model


def test_a_format_that_needs_a_gpu_is_refused_where_it_would_run(tmp_path: Path) -> None:
    if device.accelerator() == "cuda":
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="SGLang's own fp8 layers need a GPU; use format=fp8"):
        run(EvalConfig(format="fp8-block", output=str(tmp_path / "eval")))


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


class ScriptedClient:
    """A rollout client with right greedy answers, and the given texts as sampled answers."""

    def __init__(self, *texts: str, logprob: float = 0.0) -> None:
        self.texts = texts
        self.logprob = logprob
        self.settings: list[dict[str, Any]] = []
        self.loses = "lost"  # the answer of the problem at which the server dies

    def sampling(self, **settings: Any) -> dict[str, Any]:
        self.settings.append(settings)
        return settings

    async def group(self, prompt: Prompt, sampling: dict[str, Any]) -> list[Completion]:
        if prompt.answer == self.loses:
            raise ServerFailed("the server died")
        texts = [prompt.answer] if sampling["temperature"] == 0 else self.texts
        return [Completion([1], [self.logprob], text, False, [1]) for text in texts]

    def gather(self, answers: Iterable[Awaitable[Any]]) -> list[Any]:
        async def in_order() -> list[Any]:
            return [await answer for answer in answers]

        return asyncio.run(in_order())


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
    again = read_problems(str(tmp_path / "answers.jsonl"), {}).problems
    assert [each.question for each in again] == [result.question for result in results]
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


def test_an_evaluation_that_loses_its_server_keeps_its_answers_and_asks_only_for_the_others(
    tmp_path: Path,
) -> None:
    client: Any = ScriptedClient("8", "7")
    path = tmp_path / "answers_0.jsonl"
    prompts = [Prompt(str(n), f"question {n}", str(n), [1]) for n in range(4)]

    def keep(result: ProblemResult) -> None:
        append_lines(path, [dataclasses.asdict(result)])

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


def test_only_the_same_evaluation_of_the_same_files_continues_another(tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text("{}\n")
    model = build_tiny_model(tmp_path / "model")
    files = {"b": str(data), "a": str(data)}
    config = EvalConfig(model=str(model), data=files, k=4, output=str(tmp_path / "eval"))
    output, console = Path(config.output), Console(file=(tmp_path / "said").open("w"))

    def refusal(**fields: Any) -> str:
        try:
            check_output(dataclasses.replace(config, **fields))
        except ConfigError as error:
            return str(error)
        return ""

    def interrupt(config: EvalConfig) -> None:
        with pytest.raises(ServerFailed), unfinished(config, "2026-01-31", console):
            raise ServerFailed("died")

    assert refusal() == ""
    interrupt(dataclasses.replace(config, k=8))
    assert refusal() == ""  # it has no answers
    interrupt(config)
    (output / "answers_0.jsonl").touch()
    assert refusal() == refusal(scoring_workers=3, output=f"{tmp_path}/eval/.") == ""
    assert "k=8: " in refusal(k=8) and "with k=4; give that" in refusal(k=8)
    assert "data=['a=" in refusal(data=dict(sorted(files.items())))  # whose answers are whose?
    interrupt(config)
    assert refusal() == ""
    with unfinished(config, "2026-01-31", console):
        with pytest.raises(ConfigError, match="another qurl eval works on it"):
            interrupt(config)
        time.sleep(0.01)
        os.utime(model / "config.json")
        assert "model/config.json: was changed since" in refusal()
    assert "exists; choose another directory" in refusal()  # it is complete
    other = dataclasses.replace(config, output=str(tmp_path / "wrong"))
    with pytest.raises(WrongRollouts), unfinished(other, "2026-01-31", console):
        (tmp_path / "wrong" / "answers_0.jsonl").touch()
        raise WrongRollouts("equal")
    assert not (tmp_path / "wrong" / "answers_0.jsonl").exists()


def test_the_command_continues_where_its_server_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(3)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = build_tiny_model(tmp_path / "model")
    output = tmp_path / "eval"
    client: Any = ScriptedClient("1", "7")
    monkeypatch.setattr(avg_at_k, "serving", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("qurl_megatron.rollout.client.RolloutClient", lambda *_: client)

    def evaluate() -> None:
        config = EvalConfig(model=str(model), k=2, output=str(output))
        config.data = {str(data): str(data), "more": str(data)}
        config.reward, config.reward_weights = "exact, dapo", [1, 3]
        config.k_of, config.reward_of = {"more": 0}, {"more": "gsm8k_flexible"}
        config.max_prompt_length = config.max_completion_length = 64
        check_output(config)
        run(config)

    client.loses = "2"
    with pytest.raises(ServerFailed):
        evaluate()
    said = capsys.readouterr().err
    assert f"{output} keeps the answers so far; the same command continues" in said
    kept = read_answers(output / "answers_0.jsonl")
    assert sorted(kept) == [0, 1] and not (output / "summary.json").exists()
    client.loses = ""
    evaluate()
    out, err = capsys.readouterr()
    assert "answers_0.jsonl: 2 of 3 problems have their answers" in err
    assert out.endswith("and its answer, of reward 1:\n  | What is 0?\n  | 0\n")
    whole = read_answers(output / "answers_0.jsonl")
    assert list(whole) == [0, 1, 2] and kept.items() <= whole.items()
    greedy = whole[0].greedy
    assert (greedy.accuracy, greedy.parts["exact"], greedy.parts["dapo"]) == (1, 1, 0)
    results = json.loads((output / "summary.json").read_text())["results"]
    assert {name: [*averages] for name, averages in results.items()} == {
        str(data): ["Avg@1", "Avg@2 sampled"],
        "more": ["Avg@1"],
    }
    assert results[str(data)]["Avg@1"]["mean"] == results["more"]["Avg@1"]["mean"] == 1
    assert results[str(data)]["Avg@2 sampled"]["mean"] == pytest.approx(1 / 6)
    answers = ["answers_0.jsonl", "answers_1.jsonl"]
    assert sorted(path.name for path in output.iterdir()) == [*answers, "summary.json"]
    assert [*read_answers(output / answers[1])[0].greedy.parts] == ["accuracy"]
    with pytest.raises(ConfigError, match="exists; choose another directory"):
        evaluate()


def test_a_run_ends_with_a_command_that_reads_its_data_as_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"enable_thinking": False}
    rollout = RolloutConfig(agent="a.py:play", max_turns=3, max_prompt_length=7)
    rollout.max_completion_length = 9
    fields: dict[str, Any] = {"question_key": "text", "chat_template_options": options}
    fields["data_options"] = {"min_digits": 1, "operators": ["+", "-"]}
    fields |= {"reward": "exact,b.py:f", "reward_weights": [1, 0.5]}
    run_log(tmp_path / "run", data="a.jsonl", rollout=rollout, **fields).say_results()
    command = capsys.readouterr().out.replace("\n", " ").rpartition("its answers: ")[2]
    _, *words = shlex.split(command)
    assert words[:3] == ["eval", str(tmp_path / "run" / "final_model"), "a.jsonl"]
    config = with_overrides(EvalConfig(), words[3:])
    assert config.output == str(tmp_path / "run" / "answers")
    for name, value in (fields | {"agent": "a.py:play", "max_turns": 3}).items():
        assert getattr(config, name) == value
    assert (config.max_prompt_length, config.max_completion_length) == (7, 9)
