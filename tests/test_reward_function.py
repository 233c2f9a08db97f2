"""Reward functions of a user's own, called by the processes that score."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from problem_files import submit
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import Config, ConfigError, ScoringConfig
from qurl_megatron.config.text import load
from qurl_megatron.data.rewards import absolute
from qurl_megatron.data.scoring import Scorer, check_reward, scoring
from qurl_megatron.launch.prepare import prepare_new

UNTAUGHT = "model_builder=qurl_megatron.recipes.quickstart:build_model"
DOCS = Path(__file__).parents[1] / "docs"

FUNCTIONS = """
import asyncio, time

def number(completion, problem):
    return len(completion)

def parts(completion, problem):
    is_right = completion == problem.answer
    return {"reward": 0.5, "accuracy": is_right, "level": problem.metadata["level"]}

def accuracy(completion, problem):
    return {"reward": 3, "accuracy": 0.25}

def batch(completions, problem):
    best = max(completions)
    return [float(text == best) for text in completions]

async def waits(completion, problem):
    await asyncio.sleep(1)
    return {"reward": float(completion), "words": 1}

async def batch_waits(completions, problem):
    await asyncio.sleep(0.01)
    return list(range(len(completions)))

class Judge:
    async def __call__(self, completion, problem):
        return 7

judge = Judge()

def moody(completion, problem):
    if completion == "raise":
        raise KeyError("mood")
    if completion == "exit":
        raise SystemExit("bye")
    if completion == "hang":
        while True:
            time.sleep(0.01)
    bad = {"text": "one", "nan": float("nan"), "none": None, "dict": {"score": 1}}
    return bad.get(completion, 1.5)

async def moody_async(completion, problem):
    if completion == "hang":
        await asyncio.sleep(60)
    return moody(completion, problem)

def short_batch(completions, problem):
    return [1.0]

def hung_batch(completions, problem):
    print("called")
    time.sleep(60)

def prints(completion, problem):
    print("a line of the user's")
    return 0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def config(functions: Path, name: str, timeout_s: float = 10) -> Config:
    scale = ScoringConfig(wrong=-1, timeout_s=timeout_s)
    return Config(reward=f"{functions}:{name}", scoring=scale)


def scores(config: Config, *texts: str) -> list[Score]:
    with Scorer(config, workers=1) as scorer:
        return submit(scorer, *texts).result(timeout=60)


def test_a_function_returns_a_number_or_named_numbers(functions: Path) -> None:
    assert scores(config(functions, "number"), "ab", "") == [Score(2, {}, ""), Score(0, {}, "")]
    right, wrong = scores(config(functions, "parts"), "42", "41")
    assert right == Score(0.5, {"accuracy": 1, "level": 3}, "")
    assert (right.accuracy, wrong.accuracy) == (1, 0)
    assert scores(config(functions, "number"), "ab")[0].accuracy == 2  # no part of that name


def test_a_batch_function_gets_all_completions_to_a_problem(functions: Path) -> None:
    assert [s.value for s in scores(config(functions, "batch"), "a", "c", "b")] == [0, 1, 0]
    assert [s.value for s in scores(config(functions, "batch_waits"), "a", "b")] == [0, 1]


def test_completions_to_a_problem_wait_at_the_same_time(functions: Path) -> None:
    texts = [f"{n}" for n in range(20)]
    begin = time.monotonic()
    found = scores(config(functions, "waits"), *texts)
    assert time.monotonic() - begin < 10  # one after the other they take 20 s
    assert found == [Score(n, {"words": 1}, "") for n in range(20)]
    assert scores(config(functions, "judge"), "a") == [Score(7, {}, "")]


def test_several_rewards_are_weighed_and_summed_and_the_first_says_what_is_right(
    functions: Path,
) -> None:
    """The group's function still gets the whole group, after a verifier's process has died."""
    several = config(functions, "batch")
    several.reward, several.scoring.weights = f"exact, {several.reward}", [2, -0.5]
    assert scores(several, "42", "7") == [
        Score(2, {"accuracy": 1, "exact": 1, "exact.accuracy": 1, "batch": 0}, ""),
        Score(-2.5, {"accuracy": 0, "exact": -1, "exact.accuracy": 0, "batch": 1}, ""),
    ]
    several.reward, several.scoring.weights = f"{functions}:parts, {functions}:moody", []
    parts = {"accuracy": 1, "parts": 0.5, "parts.accuracy": 1, "parts.level": 3}
    failed = Score(0.5 - 1, parts | {"moody": -1, "accuracy": 0, "parts.accuracy": 0}, "")
    assert scores(several, "42", "raise") == [
        Score(0.5 + 1.5, parts | {"moody": 1.5}, ""),
        failed._replace(failure="KeyError: 'mood'"),
    ]
    several.reward, several.scoring.weights = f"{functions}:number", [0.5]
    assert scores(several, "42") == [Score(1, {"accuracy": 2, "number": 2}, "")]
    several.reward, several.scoring.weights = f"{functions}:accuracy,exact", []
    assert scores(several, "7")[0].accuracy == 0.25  # its part of that name, not its reward
    several.reward, several.scoring.weights = f"math,{functions}:batch", [1, 1]
    hangs = "\\boxed{9^{9^{9^9}}}"
    found = scores(several, "42", hangs, "a")
    assert [score.parts["batch"] for score in found] == [0, 0, 1]
    assert [score.parts["accuracy"] for score in found] == [1, 0, 0]
    assert [score.timed_out for score in found] == [False, True, False]


def test_an_entry_has_the_reward_of_its_data_source_in_place_of_the_first(functions: Path) -> None:
    by_source = config(functions, "number")
    by_source.reward = f"exact,{by_source.reward}"
    by_source.scoring.by_source = {"letters": f"{functions}:parts", "numbers": "gsm8k_flexible"}
    with Scorer(by_source, workers=1) as scorer:
        accuracies = [
            submit(scorer, "it is 42", source=source).result(timeout=60)[0].accuracy
            for source in ("letters", "numbers", "others")
        ]
        (score,) = submit(scorer, "it is 42", source="numbers").result(timeout=60)
    assert accuracies == [0, 1, 0]
    assert score.value == 9 and score.parts.keys() == {
        *("accuracy", "gsm8k_flexible", "gsm8k_flexible.accuracy", "number")
    }


def test_an_evaluation_set_has_a_reward_of_its_own_in_place_of_all_others(functions: Path) -> None:
    weighted = config(functions, "number")
    weighted.reward, weighted.scoring.weights = f"exact,{weighted.reward}", [2, 3]
    weighted.scoring.by_source = {"sums": "gsm8k_flexible"}
    weighted.evaluation.reward_of = {"letters": f"{functions}:parts", "other": "exact"}
    question = Prompt("0", "How many?", "42", [1], {"level": 3}, (), {"data_source": "sums"})
    answers = [Completion([1], [0.0], "it is 42", truncated=False, token_versions=[1])]

    with scoring(weighted) as score_of:
        names = ("", "unnamed", "letters", "other")
        found = [score_of(name)(question, answers).result(timeout=60)[0] for name in names]
    assert [score.value for score in found] == [2 * 1 + 3 * 8, 2 * 1 + 3 * 8, 0.5, -1]
    assert [*found[2].parts] == ["accuracy", "level"] and [*found[3].parts] == ["accuracy"]


@pytest.mark.parametrize("name", ["moody", "moody_async"])
def test_a_call_that_fails_costs_its_own_completion_and_says_why(
    functions: Path, name: str
) -> None:
    texts = ["good", "raise", "exit", "text", "nan", "none", "dict", "hang", "good"]
    found = scores(config(functions, name, timeout_s=1), *texts)
    assert [score.value for score in found] == [1.5, -1, -1, -1, -1, -1, -1, -1, 1.5]
    assert [score.failure for score in found] == [
        "",
        "KeyError: 'mood'",
        "SystemExit: bye",
        "TypeError: it returned 'one'; expected a number",
        "ValueError: it returned nan; expected a finite number",
        "TypeError: it returned None; expected a number",
        "TypeError: it returned {'score': 1}, which has no \"reward\"",
        "timed out after 1 s",
        "",
    ]
    assert [score.timed_out for score in found] == [text == "hang" for text in texts]
    assert all(score.parts == {} for score in found)


def test_a_batch_that_fails_costs_its_group(
    functions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = scores(config(functions, "short_batch"), "a", "b")
    assert (
        short == [Score(-1, {}, "TypeError: it returned [1.0]; expected a list of 2 rewards")] * 2
    )
    hung = scores(config(functions, "hung_batch", timeout_s=0.5), "a", "b")
    assert hung == [Score(-1, {}, "timed out after 0.5 s")] * 2
    assert capfd.readouterr().err == "called\n"  # and not once more for the second completion


def test_what_a_function_prints_goes_to_the_error_output(
    functions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scores(config(functions, "prints"), "a")
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "a line of the user's\n")


TAKES_ONE = "def reward(completion): pass"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reward = 3", "TypeError: a int, which cannot be called"),
        (TAKES_ONE, r"its parameters are \(completion\); expected \(completion, problem\)"),
        ("other = 3", "mine.py has no function reward"),
        ("def reward(:", "SyntaxError"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("import os; os._exit(3)", "the process that scores ended with code 3 while it loaded"),
        ("import sys; sys.exit('no')", "SystemExit: no"),
        ("def reward(completion, problem): yield 1", "TypeError: it yields, and so returns no rew"),
        ("async def reward(completion, problem): yield 1", "TypeError: it yields"),
        ("def reward(completions, prompt): pass", "its parameter prompt must be prompts"),
    ],
)
def test_what_is_no_reward_function_or_cannot_be_imported_is_refused_in_one_line(
    source: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(source)
    reward = f"{tmp_path / 'mine.py'}:reward"
    with pytest.raises(ConfigError, match=f"reward={reward}: .*{message}") as refusal:
        check_reward(Config(reward=reward))
    assert "\n" not in str(refusal.value)


STARTS_OTHERS = """
import os, subprocess, sys, time
def daemon(name):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:  # its parent ends, and init would adopt it
            subprocess.Popen(["sleep", name], start_new_session=True)
            time.sleep(600)
        os._exit(0)
for _ in range(5):
    daemon(SECONDS)
subprocess.Popen(["sleep", SECONDS], start_new_session=True)
{ending}
def reward(completion, problem):
    daemon(SECONDS)
    if completion == "hang":
        time.sleep(600)
    return 1
"""


def sleepers(seconds: str) -> list[psutil.Process]:
    """Return the processes that sleep for so long, which nobody else does."""
    words = ["sleep", seconds]
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == words]


@pytest.mark.parametrize("ending", ["while True: pass", "import time; time.sleep(600)"])
def test_a_reward_file_that_does_not_end_is_refused_and_what_it_started_ends(
    ending: str, tmp_path: Path
) -> None:
    seconds = f"6{os.getpid()}.1"
    source = STARTS_OTHERS.replace("SECONDS", repr(seconds)).replace("{ending}", ending)
    (tmp_path / "mine.py").write_text(source)
    reward = Config(reward=f"{tmp_path / 'mine.py'}:reward")
    reward.scoring.import_timeout_s = 2
    with pytest.raises(ConfigError, match="after scoring.import_timeout_s=2 while it load"):
        check_reward(reward)
    assert sleepers(seconds) == []


def test_what_a_reward_function_has_started_ends_with_its_worker(tmp_path: Path) -> None:
    """It has sessions of its own, and parents that have ended."""
    seconds = f"6{os.getpid()}.2"
    source = STARTS_OTHERS.replace("SECONDS", repr(seconds)).replace("{ending}", "")
    (tmp_path / "mine.py").write_text(source)
    reward = Config(reward=f"{tmp_path / 'mine.py'}:reward", scoring=ScoringConfig(timeout_s=1))
    with Scorer(reward, workers=1) as scorer:
        good, hung = submit(scorer, "a", "hang").result(timeout=60)
        assert (good.value, hung.failure) == (1, "timed out after 1 s")
        scorer.wait_ready()  # another worker, in the place of the one that hung
        assert 0 < len(sleepers(seconds)) <= 6
    assert sleepers(seconds) == []


def test_what_a_reward_function_has_started_ends_when_its_run_is_killed(tmp_path: Path) -> None:
    seconds = f"6{os.getpid()}.3"
    source = STARTS_OTHERS.replace("SECONDS", repr(seconds)).replace("{ending}", "")
    (tmp_path / "mine.py").write_text(source)
    script = (
        "from qurl_megatron.config.schema import Config\n"
        "from qurl_megatron.data.scoring import Scorer\n"
        f"scorer = Scorer(Config(reward='{tmp_path}/mine.py:reward'), workers=1)\n"
        "scorer.wait_ready()\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert run.stdout and run.stdout.readline() == "ready\n"
        assert sleepers(seconds)
        os.killpg(run.pid, signal.SIGKILL)  # as a launcher ends a rank
        run.wait()
    deadline = time.monotonic() + 30
    while sleepers(seconds):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_with_a_broken_reward_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    words = ["name=run", f"output_dir={tmp_path}", "reward=none.py:reward"]
    with pytest.raises(ConfigError, match=r"reward=none.py:reward: .*none.py: no such file"):
        prepare_new("quickstart", words)
    assert list(tmp_path.iterdir()) == []


def test_the_path_of_the_file_is_stored_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import neighbour\nreward = neighbour.reward\n")
    (tmp_path / "neighbour.py").write_text("def reward(completion, problem):\n    return 3\n")
    words = ["name=run", f"output_dir={tmp_path}", "prompts.options.size=100", UNTAUGHT]
    created, _ = prepare_new("quickstart", [*words, "reward=[exact, mine.py:reward]"])
    saved = load(created.run_dir / "config.yaml")
    assert saved.reward == f"exact,{tmp_path / 'mine.py'}:reward"
    assert absolute("/a/judge.py:reward") == "/a/judge.py:reward"
    assert absolute("math") == "math"
    assert absolute("package.judge:reward") == "package.judge:reward"
    monkeypatch.chdir("/")
    (score,) = scores(saved, "a")
    assert score.value == score.parts["reward"] == 3


def test_a_module_is_found_in_the_directory_where_the_run_starts(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "judge.py").write_text("def reward(completion, problem): return 3\n")
    script = (
        "from qurl_megatron.config.schema import Config\n"
        "from qurl_megatron.data.scoring import check_reward\n"
        "check_reward(Config(reward='mine.judge:reward'))\n"
        "print('loaded')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "loaded\n", done.stderr


class Judge(BaseHTTPRequestHandler):
    """Answers as OpenAI's interface does: YES if the completion it is shown has a 42."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = body["messages"][0]["content"]
        assert self.path == "/v1/chat/completions"
        assert "Question: How many?\nRight answer: 42\n" in shown
        verdict = "YES" if "Completion: 42" in shown else "NO"
        answer = json.dumps({"choices": [{"message": {"content": verdict}}]}).encode()
        self.send_response(500 if "Completion: broken" in shown else 200)
        self.send_header("Content-Length", f"{len(answer)}")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def judge_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / "reward.md").read_text(), flags=re.DOTALL)


def test_the_documented_judge_runs_against_a_server(judge_url: str, tmp_path: Path) -> None:
    (source,) = [example for example in examples() if "# judge.py" in example]
    assert "http://127.0.0.1:8001" in source
    (tmp_path / "judge.py").write_text(source.replace("http://127.0.0.1:8001", judge_url))
    right, wrong, broken = scores(
        Config(reward=f"{tmp_path / 'judge.py'}:reward"), "42 of them", "41", "broken"
    )
    assert right == Score(1, {"accuracy": 1, "words": 3}, "")
    assert wrong == Score(0, {"accuracy": 0, "words": 1}, "")
    assert broken.value == 0 and "500 Internal Server Error" in broken.failure


def test_the_documented_function_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(examples()[0])
    (score,) = scores(Config(reward=f"{tmp_path / 'mine.py'}:reward"), "It is 42")
    assert score == Score(1 - 0.003, {"accuracy": 1, "words": 3}, "")
