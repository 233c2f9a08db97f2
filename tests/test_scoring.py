"""The processes that score: each verifier's verdicts, and what happens when one hangs or dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from problem_files import submit
from qurl_megatron.algorithm.score import Question, Score
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.data import scoring
from qurl_megatron.data.entries import DataError
from qurl_megatron.data.problems import Problem, Source, keep_verifiable
from qurl_megatron.data.rewards import VERIFIER_CPU_LIMIT_S
from qurl_megatron.data.scoring import Scorer, check_reward, unverifiable
from qurl_megatron.machine.processes import start_ticks
from waiting import wait_until

TOO_SLOW = "\\boxed{9^{9^{9^9}}}"


def unreadable(answers: Sequence[str]) -> list[str]:
    questions = [Question("How many?", answer, {}) for answer in answers]
    return unverifiable(Config(reward="math"), questions)


def accuracies(scores: Sequence[Score]) -> list[float]:
    return [score.accuracy for score in scores]


def test_a_hung_verifier_costs_its_own_completion_only() -> None:
    texts = ["\\boxed{42}", "\\boxed{41}", TOO_SLOW, "9" * 100_000, "\\boxed{42}", "42"]
    begin = time.monotonic()
    with Scorer(Config(reward="math"), workers=2) as scorer:
        future, other = submit(scorer, *texts), submit(scorer, *texts[:2], *texts[4:])
        scores = future.result(timeout=120)
        assert accuracies(scores) == [1, 0, 0, 0, 1, 1]
        assert [row for row, score in enumerate(scores) if score.timed_out] == [2]
        assert scores[2].failure == "timed out after 3 s of CPU time"
        assert scores[3].failure.startswith("SympifyError") and len(scores[3].failure) <= 300
        assert not any(scores[row].failure for row in (0, 1, 4, 5))
        assert accuracies(other.result(timeout=120)) == [1, 0, 1, 1]
    assert time.monotonic() - begin < 100


def test_the_limit_of_a_verifier_is_cpu_time() -> None:
    """A worker that is stopped for longer than the limit uses no CPU time meanwhile."""
    with Scorer(Config(reward="math"), workers=1) as scorer:
        scorer.wait_ready()
        (pid,) = children(os.getpid())
        worker = psutil.Process(pid)
        loading_s = sum(worker.cpu_times()[:2])
        future = submit(scorer, TOO_SLOW)
        deadline = time.monotonic() + 60
        while sum(worker.cpu_times()[:2]) < loading_s + 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker.suspend()
        time.sleep(VERIFIER_CPU_LIMIT_S + 1)
        assert not future.done()
        worker.resume()
        resumed = time.monotonic()
        assert future.result(timeout=60)[0].failure == "timed out after 3 s of CPU time"
        assert time.monotonic() - resumed > 1  # most of the CPU time was still to be used


def test_groups_are_scored_while_the_caller_does_other_work() -> None:
    with Scorer(Config(reward="exact"), workers=2) as scorer:
        futures = [submit(scorer, f"{n}", "no", answer=f"{n}") for n in range(200)]
        assert [accuracies(future.result(timeout=60)) for future in futures] == [[1, 0]] * 200


def test_a_worker_that_dies_costs_one_completion_and_is_replaced() -> None:
    with Scorer(Config(reward="exact"), workers=1) as scorer:
        scorer.wait_ready()
        (worker,) = children(os.getpid())
        os.kill(worker, signal.SIGKILL)
        scores = submit(scorer, "42", "42", "41").result(timeout=60)
        assert accuracies(scores) == [0, 1, 0]
        assert scores[0].failure == "the process that scores ended with code -9"
        assert not scores[0].timed_out and not scores[1].failure


def children(pid: int) -> list[int]:
    """Return the scoring processes that a process has started."""
    found = psutil.Process(pid).children()
    return [process.pid for process in found if scoring.WORKER in process.cmdline()]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(start_ticks(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_closing_ends_the_workers_and_cancels_what_is_not_done() -> None:
    scorer = Scorer(Config(reward="math"), workers=2)
    scorer.wait_ready()
    workers = children(os.getpid())
    assert len(workers) == 2
    futures = [submit(scorer, TOO_SLOW) for _ in range(4)]
    scorer.close()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=0)
    wait_until_gone(workers)


def test_workers_die_with_a_process_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import time\ndef reward(completion, problem): time.sleep(60)\n"
    )
    script = (
        "from qurl_megatron.config.schema import Config\n"
        "from qurl_megatron.data.scoring import Scorer\n"
        "from tests.problem_files import submit\n"
        f"scorer = Scorer(Config(reward='{tmp_path}/mine.py:reward'), workers=2)\n"
        "scorer.wait_ready()\n"
        "submit(scorer, '42')\n"
        "print('started', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        workers = children(owner.pid)
        assert len(workers) == 2
        owner.kill()
        owner.wait()
        wait_until_gone(workers)


def test_workers_outlive_the_signals_that_stop_a_run_from_their_first_instruction() -> None:
    with Scorer(Config(reward="exact"), workers=1) as scorer:
        assert wait_until(lambda: bool(children(os.getpid())))
        (worker,) = children(os.getpid())
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(worker, number)
        scorer.wait_ready()
        assert children(os.getpid()) == [worker]
        scores = submit(scorer, "42").result(timeout=60)
        assert scores == [Score(1, {"accuracy": 1}, "")]


def test_unreadable_answers_are_found_among_many() -> None:
    answers = [f"{n}:{n + 1}" for n in range(1, 200)]  # a ratio
    answers[20], answers[150] = "2x+3y=", "\\int"
    answers[90] = "9^{9^{9^9}}-9^{9^{9^8}}+\\sqrt{2^{9^9}}"  # it is read, or costs only itself
    reasons = unreadable(answers)
    slow, reasons[90] = reasons[90], ""
    assert slow == "" or slow.startswith("timed out")
    assert [row for row, reason in enumerate(reasons) if reason] == [20, 150]
    assert reasons[20] == "the answer '2x+3y=' cannot be read as LaTeX"


def test_plain_answers_and_built_in_rewards_are_checked_without_starting_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(scoring, "Scorer", start)
    begin = time.monotonic()
    assert not any(unreadable([f"{n}" for n in range(40_000)]))
    check_reward(Config(reward="math"))
    assert time.monotonic() - begin < 5
    with pytest.raises(AssertionError, match="a process was started"):
        unreadable(["12:00"])
    with pytest.raises(AssertionError, match="a process was started"):
        check_reward(Config(reward="rewards.py:reward"))


def test_processes_start_once_for_the_answers_of_all_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Scorer] = []

    def start(config: Config, workers: int) -> Scorer:
        started.append(Scorer(config, workers))
        return started[-1]

    monkeypatch.setattr(scoring, "Scorer", start)
    answers = {"data": ["12:00", "2x+3y=", "7"], "evaluation.data.a": ["1:2"], "b": ["\\int"]}
    sources = {
        name: Source(
            name, [Problem("How many?", [], each, {}, f"{name} {each}") for each in values]
        )
        for name, values in answers.items()
    }
    with pytest.raises(DataError, match=r"^b \\int: the answer .* cannot be read as LaTeX"):
        keep_verifiable(sources, Config(reward="math"))
    assert sources["data"].notes == [
        "1 answers cannot be compared by reward math, and only their exact text is right; the "
        "first is data 2x+3y=: the answer '2x+3y=' cannot be read as LaTeX"
    ]
    assert [len(source.problems) for source in sources.values()] == [3, 1, 1]
    assert not sources["evaluation.data.a"].notes
    assert len(started) == 1


def test_reward_that_cannot_be_loaded_fails_every_future(tmp_path: Path) -> None:
    config = Config(reward=f"{tmp_path / 'none.py'}:reward")
    with Scorer(config, workers=2) as scorer:
        message = "reward=.*none.py:reward: .*none.py: no such file"
        for future in [submit(scorer, "42") for _ in range(4)]:
            with pytest.raises(ConfigError, match=message):
                future.result(timeout=60)
