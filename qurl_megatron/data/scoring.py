"""Score completions in worker processes, while others are still being sampled.

A worker is a program of its own and not a fork: it imports this file, the verifier and nothing
else, so it has no CUDA context, no threads of process groups and no torch.

A verifier can hang on what a policy writes ("9^{9^{9^9}}"). Its worker is then killed and replaced,
and only that completion is lost: it scores as wrong, with the reason in `Score.failure`. The kernel
limits the CPU time of a built-in verifier, which a busy machine does not use up. A reward function
of the user's own is limited in wall-clock time, because it may wait for a service. Processes that
it starts end with its worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from qurl_megatron.algorithm.score import TIMED_OUT, Question, Score
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.data import rewards
from qurl_megatron.data.verifiers import is_plain, no_mathematics, right_answers
from qurl_megatron.machine.processes import END_CONTAINED, contain, die_with_parent, start_worker

if TYPE_CHECKING:  # it imports torch, which a worker does not need
    from qurl_megatron.algorithm.batch import Completion, Prompt

WORKER = "import sys; from qurl_megatron.data.scoring import work; work(int(sys.argv[1]))"
CORES_PER_WORKER = 4
MAX_DEFAULT_WORKERS = 16
START_TIMEOUT_S = 300.0  # of the process, and of the import of a built-in verifier
GRACE_S = 1.0  # beyond a time limit, for a worker to report the timeout itself
PROBLEMS_PER_WORKER = 64  # for fewer answers another process does not pay

StartScoring = Callable[["Prompt", Sequence["Completion"]], Future[list[Score]]]
"""`Scorer.submit`."""


class Scorer(contextlib.AbstractContextManager["Scorer"]):
    """Worker processes that score completions. Close it to end them; they die with this process.

    Its methods can be called from any thread.
    """

    def __init__(self, config: Config, workers: int = 0) -> None:
        """Start the workers, which load the rewards of `config` in the background.

        Each reward has `workers` processes; 0 takes a quarter of the cores that this process may
        use, from 1 to 16.
        """
        cores = len(os.sched_getaffinity(0))
        workers = workers or max(1, min(MAX_DEFAULT_WORKERS, cores // CORES_PER_WORKER))
        self._config = config
        self._of_rewards = rewards.each_of(config)
        self._workers: set[_Worker] = set()
        self._closed = False
        self._lock = threading.Lock()  # guards the two above
        self._threads = ThreadPoolExecutor(workers, "scoring")
        # The kernel ends a worker with the thread that started it, so each thread has its own.
        self._of_thread = threading.local()
        for _ in range(workers):
            self._threads.submit(self._ready_workers)

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        """Score the completions of one prompt; the future has one score per completion, in order.

        A completion that comes with a score keeps it. The future raises ConfigError if the reward
        cannot be loaded.
        """
        return self._threads.submit(self._score, prompt.asked, completions)

    def ask(self, question: Question, texts: list[str] | list[None]) -> Future[list[Score]]:
        """Score the texts, or with `[None]` find out whether any text could be right.

        The `failure` of the only score then says why none could.
        """
        return self._threads.submit(self._answer, question, texts)

    def wait_ready(self) -> list[str]:
        """Wait until each reward is loaded; return the fields that they need of an entry.

        Raises:
            ConfigError: a reward cannot be loaded; the text says why.
        """
        workers = self._threads.submit(self._ready_workers).result()
        return [column for worker in workers for column in worker.columns]

    def close(self) -> None:
        """End the workers. Futures that are not done are cancelled."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score(self, question: Question, completions: Sequence[Completion]) -> list[Score]:
        texts = [each.text for each in completions if each.score is None]
        scores = iter(self._answer(question, texts) if texts else [])
        return [each.score or next(scores) for each in completions]

    def _answer(self, question: Question, texts: list[str] | list[None]) -> list[Score]:
        config = rewards.of_question(self._config, question)
        by_reward = [self._answer_of(each, question, texts) for each in rewards.each_of(config)]
        return [rewards.weighted_sum(config, each) for each in zip(*by_reward, strict=True)]

    def _answer_of(
        self, config: Config, question: Question, texts: list[str] | list[None]
    ) -> list[Score]:
        """Return a reward's scores of texts from this thread's worker, and from its successors."""
        scores: list[Score] = []
        worker = self._ready_worker(config)
        while len(scores) < len(texts):
            scores += worker.score(question, texts[len(scores) :])  # fewer if the worker died
            worker = self._ready_worker(config)
        return scores

    def _ready_workers(self) -> list[_Worker]:
        return [self._ready_worker(each) for each in self._of_rewards]

    def _ready_worker(self, config: Config) -> _Worker:
        """Return this thread's worker for the only reward of `config`, with that loaded.

        If it has died it is a new one.

        Raises:
            CancelledError: the scorer is closed, and has killed the worker.
            ConfigError: the reward cannot be loaded.
        """
        of_thread: dict[str, _Worker] = vars(self._of_thread)
        worker = of_thread.get(config.reward)
        if worker is None or worker.is_dead:
            with self._lock:
                if self._closed:
                    raise CancelledError
                self._workers -= {worker}
                worker = of_thread[config.reward] = _Worker(config)
                self._workers.add(worker)
        try:
            worker.wait_ready()
        except ConfigError:
            if self._closed:  # which killed the worker while it loaded the reward
                raise CancelledError from None
            raise
        return worker


class _Worker:
    """One worker process, for one reward."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._is_user_function = rewards.is_user_function(config)
        self._limit_s = config.scoring.timeout_s + GRACE_S if self._is_user_function else None
        self._process, self._connection = start_worker(WORKER)
        self._connection.send(config)
        self._error: str | None = None  # why the reward cannot be loaded; None: not known yet
        self._whole_groups = False  # a group's scores come all at once, not one after the other
        self.columns: list[str] = []  # fields that the reward needs of each entry
        self.is_dead = False

    def wait_ready(self) -> None:
        """Wait until the reward is loaded.

        Raises:
            ConfigError: it cannot be loaded.
        """
        if self._error is None:
            try:
                if self._connection.poll(START_TIMEOUT_S + self._config.scoring.import_timeout_s):
                    self._error, self._whole_groups, self.columns = self._connection.recv()
                else:
                    self._error = f"not loaded within {START_TIMEOUT_S:g} s"
            except (EOFError, OSError):
                self._error = f"{self._end()} while it loaded the reward"
        if self._error:
            raise ConfigError(f"reward={self._config.reward}: {self._error}")

    def score(self, question: Question, texts: list[str] | list[None]) -> list[Score]:
        """Return the scores of all texts; if the process dies, those up to the text it died of."""
        scores: list[Score] = []
        try:
            self._connection.send((question, texts))
            while len(scores) < len(texts) and self._connection.poll(self._limit_s):
                scores.append(self._connection.recv())
            lost = rewards.timed_out(self._config)
        except (EOFError, OSError):
            lost = rewards.failed(self._config, self._end())
        num_open = len(texts) - len(scores)
        if num_open:
            self.kill()
            self.is_dead = True
            scores += [lost] * (num_open if self._whole_groups else 1)
        return scores

    def kill(self) -> None:
        """End the process, and what a reward function has started."""
        if self._is_user_function:
            self._process.send_signal(END_CONTAINED)
        else:
            self._process.kill()
        self._process.wait()

    def _end(self) -> str:
        """Say why the process ended."""
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"{TIMED_OUT} after {rewards.VERIFIER_CPU_LIMIT_S:g} s of CPU time"
        if code == -signal.SIGALRM:
            limit_s = self._config.scoring.import_timeout_s
            return f"{TIMED_OUT} after scoring.import_timeout_s={limit_s:g}"
        return f"the process that scores ended with code {code}"


@contextlib.contextmanager
def scoring(config: Config) -> Iterator[Callable[[str], StartScoring]]:
    """Yield what scores completions to the problems of an evaluation set, or of training: `""`.

    Each reward has processes of its own; sets without one of their own share those of training.
    """
    reward_of = config.evaluation.reward_of
    sets = {reward: name for name, reward in {"": "", **reward_of}.items()}
    with contextlib.ExitStack() as stack:
        scorers = {
            reward: stack.enter_context(
                Scorer(rewards.of_set(config, name), config.scoring.workers)
            )
            for reward, name in sets.items()
        }
        yield lambda name: scorers[reward_of.get(name, "")].submit


def unverifiable(config: Config, questions: Sequence[Question]) -> list[str]:
    """Return why no completion of each problem could be right; empty texts where one may.

    `config` has one reward.

    Worker processes find out, because reading 40,000 LaTeX answers takes minutes of CPU time. No
    process is started if all answers are plain numbers.

    Raises:
        ConfigError: the reward cannot be loaded.
    """
    if rewards.is_user_function(config):
        return [""] * len(questions)
    reasons = [no_mathematics(config.reward, question) for question in questions]
    doubtful = [
        row
        for row, question in enumerate(questions)
        if not reasons[row]
        and not any(
            is_plain(config.reward, answer) for answer in right_answers(config.reward, question)
        )
    ]
    if not doubtful:
        return reasons
    cores = min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))  # nothing else needs them yet
    workers = min(-(-len(doubtful) // PROBLEMS_PER_WORKER), config.scoring.workers or cores)
    with Scorer(config, workers) as scorer:
        futures = {row: scorer.ask(questions[row], [None]) for row in doubtful}
        for row, future in futures.items():
            (score,) = future.result()
            reasons[row] = score.failure
    return reasons


def check_rewards(config: Config) -> dict[str, list[str]]:
    """Check that all rewards can be loaded; a built-in verifier always can.

    Return the fields that they need of each entry, by the name of the evaluation set that has a
    reward of its own, and as `""` of all other data.

    Raises:
        ConfigError: one cannot; the text says why.
    """
    names = ("", *config.evaluation.reward_of)
    return {name: check_reward(rewards.of_set(config, name)) for name in names}


def check_reward(config: Config) -> list[str]:
    """Check that each reward of training can be loaded.

    Return the fields that they need of each entry of the data, whatever its source.

    Raises:
        ConfigError: one cannot; the text says why.
    """
    columns: list[str] = []
    of_every_entry = config.rewards[bool(config.scoring.by_source) :]
    for each in filter(rewards.is_user_function, rewards.each_of(config)):
        with Scorer(each, workers=1) as scorer:
            needed = scorer.wait_ready()
            columns += needed if each.reward in of_every_entry else []
    return columns


def load(config: Config) -> rewards.Reward:
    """Import the reward, and use a verifier once, because its first use can take seconds.

    Raises:
        ImportError, OSError, SyntaxError, TypeError, or what else the import raises: a reward
            function cannot be used.
    """
    if not rewards.is_user_function(config):
        return rewards.BuiltIn(config)
    from qurl_megatron.data.reward_functions import RewardFunction, load_function

    return RewardFunction(load_function(config.reward), config)


def work(descriptor: int) -> None:
    """Be a worker: load a reward, then answer requests until the connection is closed.

    The process ends with the one that started it, whatever happens to it.
    """
    die_with_parent()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):  # the other side is gone
        config = connection.recv()
        if rewards.is_user_function(config):
            contain()
            limit_s = config.scoring.import_timeout_s
            signal.setitimer(signal.ITIMER_REAL, limit_s)  # then SIGALRM ends the process
        try:
            reward = load(config)
        except (Exception, SystemExit) as error:
            connection.send((rewards.why(error), False, []))
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(("", reward.whole_groups, reward.columns))
        while True:
            question, texts = connection.recv()
            if texts == [None]:
                connection.send(Score(0.0, {}, reward.unverifiable(question)))
                continue
            for score in reward.score(texts, question):
                connection.send(score)  # each as soon as it is known
