"""Score completions in worker processes, while others are still being sampled.

    Scorer            worker processes that score; `submit` returns a future
    unverifiable      why no completion of a problem could be right, for many problems
    check_reward      whether the configured reward can be loaded

A worker is a program of its own (`data/scoring_worker.py`) and not a fork: it imports the verifier
and nothing else, so it has no CUDA context, no threads of process groups and no torch.

A verifier can hang on what a policy writes ("9^{9^{9^9}}"). Its worker is then killed and replaced,
and only that completion is lost: it scores as wrong, with the reason in `Score.failure`. The limit
of a built-in verifier is CPU time, which a busy machine does not use up, and the kernel keeps it.
The limit of a reward function of one's own is wall-clock time, because it may wait for a service.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.score import TIMED_OUT, Score
from qurl_megatron.config.schema import VERIFIER_NAMES, Config, ConfigError
from qurl_megatron.data.reward_types import Item, Loaded, Question, RewardSettings, Verifiable
from qurl_megatron.data.rewards import VERIFIER_CPU_LIMIT_S
from qurl_megatron.data.verifiers import is_plain

WORKER = "qurl_megatron.data.scoring_worker"
CORES_PER_WORKER = 4
MAX_DEFAULT_WORKERS = 16
START_TIMEOUT_S = 300.0
GRACE_S = 1.0  # beyond a time limit, for a worker to report by itself that it passed
PROBLEMS_PER_REQUEST = 64

StartScoring = Callable[[Prompt, Sequence[Completion]], Future[list[Score]]]
"""`Scorer.submit`."""


class RewardError(RuntimeError):
    """A reward that cannot be loaded; the text says why."""


class Scorer:
    """Worker processes that score completions. Close it to end them; they die with this process.

    Its methods can be called from any thread.
    """

    def __init__(self, config: Config, workers: int = 0) -> None:
        """Start the workers, which load the reward of `config` in the background.

        `workers` of 0 takes a quarter of the cores that this process may use, from 1 to 16.
        """
        self._settings = RewardSettings(
            config.reward,
            config.reward_right,
            config.reward_wrong,
            config.reward_partial,
            config.reward_timeout_s,
        )
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._closed = False
        self._lock = threading.Lock()  # guards the two above
        self._threads = [
            threading.Thread(target=self._serve, name=f"scoring {number}", daemon=True)
            for number in range(workers or _default_workers())
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        """Score the completions of one prompt; the future has one score per completion, in order.

        The future raises RewardError if the reward cannot be loaded.
        """
        question = Question.of(prompt)
        return self._submit([(completion.text, question) for completion in completions])

    def wait_ready(self) -> None:
        """Wait until a worker has loaded the reward.

        Raises:
            RewardError: the reward cannot be loaded.
        """
        self._submit([]).result()

    def unverifiable(self, problems: Sequence[Verifiable]) -> list[str]:
        """Return why no completion of each problem could be right; empty texts where one could.

        Raises:
            RewardError: the reward cannot be loaded.
        """
        items: list[Item] = [(None, Question.of(problem)) for problem in problems]
        futures = [
            self._submit(items[start : start + PROBLEMS_PER_REQUEST])
            for start in range(0, len(items), PROBLEMS_PER_REQUEST)
        ]
        return [score.failure for future in futures for score in future.result()]

    def close(self) -> None:
        """End the workers. Futures that are not done are cancelled."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        while not self._jobs.empty():
            if job := self._jobs.get():
                job.scores.cancel()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, items: list[Item]) -> Future[list[Score]]:
        job = _Job(items)
        self._jobs.put(job)
        return job.scores

    def _serve(self) -> None:
        """Feed one worker at a time until the scorer is closed.

        The kernel ends a worker with the thread that started it, so each thread starts its own.
        """
        with contextlib.suppress(CancelledError):
            worker = self._start()
            while job := self._jobs.get():
                if not job.scores.set_running_or_notify_cancel():
                    continue
                scores: list[Score] = []
                try:
                    worker.wait_ready()
                    while len(scores) < len(job.items):
                        scores += worker.score(job.items[len(scores) :])
                        if worker.is_dead:
                            worker = self._start(instead_of=worker)
                            worker.wait_ready()
                except (RewardError, CancelledError) as error:
                    job.scores.set_exception(CancelledError() if self._closed else error)
                else:
                    job.scores.set_result(scores)
            worker.kill()

    def _start(self, instead_of: _Worker | None = None) -> _Worker:
        with self._lock:
            if self._closed:
                raise CancelledError
            if instead_of:
                self._workers.remove(instead_of)
            worker = _Worker(self._settings)
            self._workers.add(worker)
        return worker


@dataclass(frozen=True)
class _Job:
    items: list[Item]
    scores: Future[list[Score]] = field(default_factory=Future)


class _Worker:
    """One worker process."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", WORKER, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a reward function prints belongs into the log
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection.send(settings)
        self._loaded: Loaded | None = None
        self.is_dead = False

    def wait_ready(self) -> None:
        """Wait until the reward is loaded.

        Raises:
            RewardError: it cannot be.
        """
        if self._loaded is None:
            try:
                if not self._connection.poll(START_TIMEOUT_S):
                    raise RewardError(f"not loaded within {START_TIMEOUT_S:g} s")
                self._loaded = self._connection.recv()
            except (EOFError, OSError):
                raise RewardError(f"{self._end()} while it loaded the reward") from None
        if self._loaded.error:
            raise RewardError(self._loaded.error)

    def score(self, items: list[Item]) -> list[Score]:
        """Return the scores of all items; if the process dies, those up to the one it died of."""
        assert self._loaded is not None
        limit_s = self._settings.timeout_s + GRACE_S if self._settings.is_own_function else None
        scores: list[Score] = []
        try:
            self._connection.send(items)
            while len(scores) < len(items):
                if not self._connection.poll(limit_s):
                    self.kill()
                    return scores + self._lost(self._settings.timed_out(), items[len(scores) :])
                scores.append(self._connection.recv())
        except (EOFError, OSError):
            return scores + self._lost(self._settings.failed(self._end()), items[len(scores) :])
        return scores

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _lost(self, score: Score, items: list[Item]) -> list[Score]:
        """Return the scores of those of the open items that the process has died of."""
        assert self._loaded is not None
        self.is_dead = True
        return [score] * (len(items) if self._loaded.whole_groups else 1)

    def _end(self) -> str:
        """Say why the process ended."""
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"{TIMED_OUT} after {VERIFIER_CPU_LIMIT_S:g} s of CPU time"
        return f"the process that scores ended with code {code}"


def unverifiable(config: Config, problems: Sequence[Verifiable]) -> list[str]:
    """Return why no completion of each problem could be right; empty texts where one could.

    Worker processes find out, because reading 40,000 LaTeX answers takes minutes of CPU time. No
    process is started if all answers are plain numbers.

    Raises:
        RewardError: the reward cannot be loaded.
    """
    reasons = [""] * len(problems)
    doubtful = [row for row, p in enumerate(problems) if not is_plain(config.reward, p.answer)]
    if doubtful:
        requests = -(-len(doubtful) // PROBLEMS_PER_REQUEST)
        cores = min(
            MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0))
        )  # nothing else needs them yet
        with Scorer(config, min(requests, config.scoring_workers or cores)) as scorer:
            found = scorer.unverifiable([problems[row] for row in doubtful])
        for row, reason in zip(doubtful, found, strict=True):
            reasons[row] = reason
    return reasons


def check_reward(config: Config) -> None:
    """Check that the reward can be loaded; a built-in verifier always can.

    Raises:
        ConfigError: it cannot; the text says why.
    """
    if config.reward in VERIFIER_NAMES:
        return
    with Scorer(config, workers=1) as scorer:
        try:
            scorer.wait_ready()
        except RewardError as error:
            raise ConfigError(f"reward={config.reward}: {error}") from None


def _default_workers() -> int:
    return max(1, min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)) // CORES_PER_WORKER))
