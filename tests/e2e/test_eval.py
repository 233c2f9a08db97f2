"""`qurl eval` on a real server: quantize a directory, serve it, and score its answers."""

import json
import signal
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from e2e.reference import Reference
from e2e.running import Start
from qurl_megatron.cli import app
from qurl_megatron.evaluation.avg_at_k import read_answers
from tiny import EOS_TOKEN_ID, build_tiny_model
from waiting import wait_until

LENGTH = 6
REWARD = """
def reward(completion, problem):
    if problem.question == "What is 7 + 7?":
        raise ValueError("seven is not scored")
    is_right = completion.strip() == problem.answer.strip()
    return {"reward": is_right - 0.5, "accuracy": is_right}
"""


def test_greedy_and_sampled_answers_are_those_of_the_quantized_model_scored_by_a_users_function(
    start: Start, tmp_path: Path
) -> None:
    model_dir = build_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    questions = [f"What is {n} + {n}?" for n in range(8)]
    data = tmp_path / "problems.jsonl"

    def write_problems(answers: list[str]) -> None:
        rows = [{"question": q, "answer": a} for q, a in zip(questions, answers, strict=True)]
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    write_problems(["unknown"] * 8)
    words = ["--smoothing", "0.5", "--data", str(data)]
    result = CliRunner().invoke(app, ["quantize", str(model_dir), str(tmp_path / "int8"), *words])
    assert result.exit_code == 0, result.output
    reference = Reference(model_dir, load_file(tmp_path / "int8" / "model.safetensors"))

    def greedy(question: str) -> str:
        tokens = tokenizer(question)["input_ids"]
        answer: list[int] = []
        while len(answer) < LENGTH and EOS_TOKEN_ID not in answer:
            answer.append(int(reference.logits(torch.tensor(tokens + answer))[-1].argmax()))
        return str(tokenizer.decode(answer, skip_special_tokens=True))

    write_problems([*map(greedy, questions[:6]), "something", "else"])
    (tmp_path / "mine.py").write_text(REWARD)
    words = ["reward=mine.py:reward", "format=int8", "smoothing=0.5", "k=4"]
    words += [f"output={tmp_path / 'eval'}"]
    words += ["max_prompt_length=32", f"max_completion_length={LENGTH}", "top_p=0.9"]
    words += ["server.max_total_tokens=4096", "server.mem_fraction_static=0.3"]
    run = start("eval", model_dir, data, *words)
    assert run.exit_code() == 0, run.text()
    assert run.survivors() == []
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    (named,) = summary["results"].values()
    assert named["Avg@1"]["mean"] == 0.75
    assert "the server is up after" in run.text()
    assert f"{data}: 16 of 16 requests, 0 s left" in run.text()
    assert "75.0%" in run.text() and "Avg@4 sampled" in run.text()
    answers = [json.loads(line) for line in (tmp_path / "eval" / "answers_0.jsonl").open()]
    assert [answer["question"] for answer in answers] == questions
    *scored, failed = (answer["greedy"] for answer in answers)
    assert all(greedy["reward"] == greedy["accuracy"] - 0.5 for greedy in scored)
    assert (failed["reward"], failed["failure"]) == (0, "ValueError: seven is not scored")
    sampled = [completion["text"] for answer in answers for completion in answer["sampled"]]
    assert len(sampled) == 32 and len(set(sampled)) > 8
    assert list(tmp_path.glob("eval*")) == [tmp_path / "eval"]


def test_a_server_that_does_not_start_is_reported_with_its_log_and_no_traceback(
    start: Start, tmp_path: Path
) -> None:
    model_dir = build_tiny_model(tmp_path / "model")
    problem = {"question": "What is 1 + 1?", "answer": "2"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    words = ["server.start_timeout_s=1", f"output={tmp_path / 'eval'}", "max_prompt_length=32"]
    words += [f"max_completion_length={LENGTH}"]
    run = start("eval", model_dir, tmp_path / "problems.jsonl", *words)
    assert run.exit_code() == 1
    assert run.survivors() == []
    log = tmp_path / "eval" / "server.log"
    assert f"did not come up in 1 s; {log} ends:" in run.text()
    assert "qurl: server http://127.0.0.1:" in run.text() and "Traceback" not in run.text()


def test_a_signal_while_it_samples_ends_it_with_one_line_and_the_same_command_continues(
    start: Start, tmp_path: Path
) -> None:
    """`tests/signals.py` sends every signal in every phase."""
    model_dir = build_tiny_model(tmp_path / "model")
    problems = [{"question": f"What is {n} + 1?", "answer": "2"} for n in range(16)]
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)) + "\n")
    words = ["reward=exact", "k=8", f"output={tmp_path / 'eval'}", "max_prompt_length=32"]
    words += ["max_completion_length=200", "server.max_running_requests=8"]
    words += ["server.max_total_tokens=20000", "server.mem_fraction_static=0.3"]
    run = start("eval", model_dir, tmp_path / "problems.jsonl", *words)
    answers = tmp_path / "eval" / "answers_0.jsonl"
    assert wait_until(answers.exists, 300)
    run.process.send_signal(signal.SIGTERM)
    sent_at = time.monotonic()
    assert run.exit_code() == 143, run.text()
    assert time.monotonic() - sent_at < 2 + 5  # the machine may be busy
    last = run.text().splitlines()[-1]
    assert last == "qurl: interrupted by SIGTERM" and "Traceback" not in run.text()
    _, alive = psutil.wait_procs(run.survivors(), timeout=30)
    assert alive == []
    kept = read_answers(answers)
    assert 0 < len(kept) < len(problems)
    run = start("eval", model_dir, tmp_path / "problems.jsonl", *words)
    run.wait_for(f"{answers}: {len(kept)} of 16 problems have their answers")
    assert wait_until(lambda: len(read_answers(answers)) > len(kept), 300)
    run.find("sglang::scheduler").kill()
    assert run.exit_code() == 1, run.text()
    assert f"{tmp_path / 'eval'} keeps the answers so far; the same command continues" in run.text()
    assert "server http://127.0.0.1:" in run.text() and "Traceback" not in run.text()
    kept = read_answers(answers)
    run = start("eval", model_dir, tmp_path / "problems.jsonl", *words)
    assert run.exit_code() == 0, run.text()
    results = read_answers(answers)
    assert list(results) == list(range(16)) and kept.items() <= results.items()
