"""`qurl eval` keeps its answers, and continues where it ended."""

import contextlib
import dataclasses
import json
import os
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from logs import run_log
from qurl_megatron import device
from qurl_megatron.algorithm.proof import WrongRollouts
from qurl_megatron.config.schema import (
    ConfigError,
    EvaluationConfig,
    LearnerConfig,
    PromptsConfig,
    QuantizationConfig,
    RolloutConfig,
    ScoringConfig,
)
from qurl_megatron.config.text import with_overrides
from qurl_megatron.evaluation.avg_at_k import read_answers
from qurl_megatron.evaluation.evaluate import EvalConfig, check_output, run, unfinished
from qurl_megatron.rollout.server import ServerFailed
from scripted import ScriptedClient
from tiny import build_tiny_model


def test_a_format_that_needs_a_gpu_is_refused_where_it_would_run(tmp_path: Path) -> None:
    if device.accelerator() == "cuda":
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="SGLang's own fp8 layers need a GPU; use format=fp8"):
        run(EvalConfig(format="fp8-block", output=str(tmp_path / "eval")))


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
        with pytest.raises(ServerFailed), unfinished(config, "2026-01-31", {}, console):
            raise ServerFailed("died")

    assert refusal() == ""
    interrupt(dataclasses.replace(config, k=8))
    assert refusal() == ""  # it has no answers
    interrupt(config)
    (output / "answers_0.jsonl").touch()
    assert refusal() == refusal(scoring=ScoringConfig(workers=3), output=f"{tmp_path}/eval/.") == ""
    assert "k=8: " in refusal(k=8) and "with k=4; give that" in refusal(k=8)
    assert "data=['a=" in refusal(data=dict(sorted(files.items())))  # whose answers are whose?
    interrupt(config)
    assert refusal() == ""
    with unfinished(config, "2026-01-31", {}, console):
        with pytest.raises(ConfigError, match="another qurl eval works on it"):
            interrupt(config)
        time.sleep(0.01)
        os.utime(model / "config.json")
        assert "model/config.json: was changed since" in refusal()
    assert "exists; choose another directory" in refusal()  # it is complete
    other = dataclasses.replace(config, output=str(tmp_path / "wrong"))
    with pytest.raises(WrongRollouts), unfinished(other, "2026-01-31", {}, console):
        (tmp_path / "wrong" / "answers_0.jsonl").touch()
        raise WrongRollouts("equal")
    assert not (tmp_path / "wrong" / "answers_0.jsonl").exists()


def answer_with(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `client` answer evaluations, in place of servers."""
    monkeypatch.setattr(
        "qurl_megatron.evaluation.evaluate.serving", lambda *_: contextlib.nullcontext()
    )
    monkeypatch.setattr("qurl_megatron.rollout.client.RolloutClient", lambda *_: client)


def test_the_command_continues_where_its_server_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(3)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    model = build_tiny_model(tmp_path / "model")
    output = tmp_path / "eval"
    client: Any = ScriptedClient("1", "7")
    answer_with(client, monkeypatch)

    def evaluate() -> None:
        config = EvalConfig(model=str(model), k=2, output=str(output))
        config.data = {str(data): str(data), "more": str(data)}
        config.reward, config.scoring.weights = "exact, dapo", [1, 3]
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


def test_answers_that_a_reward_function_cannot_score_are_counted_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text(
        "def score(completion, problem):\n    raise OSError('gone')\n"
    )
    model, client = build_tiny_model(tmp_path / "model"), ScriptedClient("1", "7")
    answer_with(client, monkeypatch)
    config = EvalConfig(model=str(model), reward=f"{tmp_path}/mine.py:score", k=2)
    config.data, config.output = {"sums": f"{tmp_path}/data.jsonl"}, str(tmp_path / "eval")
    config.max_prompt_length = config.max_completion_length = 64
    run(config)
    said = "sums: scores that failed: 3 of 3 answers, which count as wrong: OSError: gone"
    assert said in capsys.readouterr().err


def test_answers_to_problems_that_are_no_longer_those_of_the_data_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, number in (("a", 5), ("b", 0), ("c", 1), ("d", 2)):
        row = {"question": f"What is {number}?", "answer": str(number)}
        (tmp_path / f"{file}.jsonl").write_text(f"{json.dumps(row)}\n")
    model, client = build_tiny_model(tmp_path / "model"), ScriptedClient("1", "7")
    answer_with(client, monkeypatch)

    def evaluate() -> None:
        config = EvalConfig(model=str(model), reward="exact", output=str(tmp_path / "eval"))
        config.data = {"sums": f"{tmp_path}/*.jsonl"}
        config.max_prompt_length = config.max_completion_length = 64
        check_output(config)
        run(config)

    client.loses = "2"
    with pytest.raises(ServerFailed):
        evaluate()
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match="jsonl: has other problems than .* has answers to"):
        evaluate()


def test_a_run_ends_with_commands_for_its_curves_and_for_its_data_as_it_read_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"enable_thinking": False}
    rollout = RolloutConfig(agent="a.py:play", max_turns=3, max_prompt_length=7)
    rollout.max_completion_length = 9
    rollout.stop_token_ids = [5, 6]
    prompts = PromptsConfig(question_key="text", chat_template_options=options)
    prompts.options = {"min_digits": 1, "operators": ["+", "-"]}
    fields: dict[str, Any] = {"reward": "exact,b.py:f", "scoring": ScoringConfig(weights=[1, 0.5])}
    fields["scoring"].timeout_s, rollout.agent_timeout_s = 300.0, 900.0
    settings = {"data": "a.jsonl", "rollout": rollout, "prompts": prompts}
    run_log(tmp_path / "run", **settings, **fields).say_results()
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"curves: tensorboard --logdir {tmp_path / 'run' / 'tensorboard'}" in said
    _, *words = shlex.split(said.rpartition("its answers: ")[2])
    assert words[:3] == ["eval", str(tmp_path / "run" / "final_model"), "a.jsonl"]
    config = with_overrides(EvalConfig(), words[3:])
    assert config.output == str(tmp_path / "run" / "answers")
    for name, value in (fields | {"agent": "a.py:play", "max_turns": 3}).items():
        assert getattr(config, name) == value
    assert vars(config.prompts).items() <= vars(prompts).items()
    assert (config.max_prompt_length, config.max_completion_length) == (7, 9)
    assert config.agent_timeout_s == 900
    assert (config.stop_token_ids, config.format) == ([5, 6], "bf16")


def test_a_run_that_measured_files_ends_with_a_command_for_their_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = EvaluationConfig(data={"a": "a.jsonl", "b": "b c.csv"}, reward_of={"b": "math"})
    prompts = PromptsConfig(question_key="text", options={"min_digits": 1})
    settings: dict[str, Any] = {"data": "reasoning_gym:a", "reward": "exact", "prompts": prompts}
    run_log(tmp_path / "run", **settings, evaluation=evaluation).say_results()
    said = capsys.readouterr().out.replace("\n", " ")
    _, *words = shlex.split(said.rpartition("its answers: ")[2])
    config = with_overrides(EvalConfig(), words[2:])
    assert (config.data, config.reward) == (evaluation.data, "exact")
    assert config.reward_of == {"b": "math"}
    assert (config.prompts.question_key, config.prompts.options) == ("text", {})


def test_a_policy_that_was_trained_as_served_is_to_be_evaluated_as_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantization = QuantizationConfig(format="int4", group_size=32, keep=["*.o_proj"])
    learner = LearnerConfig(quantized_forward="all")
    settings: dict[str, Any] = {"data": "a.jsonl", "learner": learner}
    run_log(tmp_path / "run", **settings, quantization=quantization).say_results()
    said = capsys.readouterr().out.replace("\n", " ")
    _, *words = shlex.split(said.rpartition("its answers: ")[2])
    config = with_overrides(EvalConfig(), words[3:])
    assert (config.format, config.group_size, config.keep) == ("int4", 32, ["*.o_proj"])
