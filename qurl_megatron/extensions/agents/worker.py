"""A process that plays episodes, all in one asyncio loop. Rank 0 samples for it.

    rank 0 -> worker    Settings, then ("play", key, Question, prompt_ids, Limits),
                        ("turn", key, Turn or None) or ("cancel", key)
    worker -> rank 0    "" or why the agent cannot be loaded, then ("sample", key, Request),
                        ("abandon", key, None) or ("end", key, Ended)

An abandoned turn is answered with None, unless it had been sampled before. The process imports no
torch, and ends with rank 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import mmap
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from qurl_megatron.algorithm.score import Question, Score
from qurl_megatron.data.reward_functions import load_function, score_of
from qurl_megatron.data.rewards import one_line, why
from qurl_megatron.extensions.agents.policy import EpisodeOver, Limits, Policy, Request, Turn
from qurl_megatron.machine.processes import contain, die_with_parent
from qurl_megatron.model.tokenizer import load_tokenizer

TICK_S = 0.5  # between two signs of life of an idle loop
LOAD_LIMIT_S = 60.0  # for the import of an agent
TIDY_UP_S = 2.0  # for an agent that is cancelled
NOBODY = -1  # in place of the key of an episode


ENDS = ("answered", "turns", "tokens", "deadline", "error")
"""What ends an episode: the agent's function returned; it asked for more turns, or for more tokens,
than there may be; it took too long; it raised or lost its process. The last two are failures."""


class Settings(NamedTuple):
    """What a worker needs to know."""

    agent: str  # FILE.py:NAME or MODULE:NAME
    tokenizer: tuple[Path, Mapping[str, Any], str, str]  # what `load_tokenizer` takes
    episodes: int  # at once; 0: no limit
    timeout_s: float  # of an episode
    turn_timeout_s: float  # of the agent, between two turns


class Ended(NamedTuple):
    """How an episode ended, as its process reports it."""

    end: str  # of `ENDS`
    score: Score | None  # None: the run's reward scores the last turn
    failure: str  # why the episode failed; empty if it did not


class Marks:
    """Memory that rank 0 shares with a worker: the episode whose code runs, and a sign of life.

    It outlasts the process, so rank 0 can see whose code ran when the process died.
    """

    SIZE = 16  # bytes, two words of 64 bits

    def __init__(self, descriptor: int) -> None:
        self._words = memoryview(mmap.mmap(descriptor, self.SIZE)).cast("q")

    @property
    def running(self) -> int:
        """Key of the episode whose code runs, or `NOBODY`."""
        return self._words[0]

    @property
    def ticks(self) -> int:
        """A count that grows as long as the worker's loop is alive."""
        return self._words[1]

    def set(self, key: int) -> None:
        """Mark the episode whose code runs from now on."""
        self._words[0] = key
        self._words[1] += 1


_episode: contextvars.ContextVar[int] = contextvars.ContextVar("episode", default=NOBODY)


class _Worker:
    def __init__(
        self, connection: Connection, settings: Settings, agent: Any, tokenizer: Any, marks: Marks
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._agent = agent
        self._tokenizer = tokenizer
        self._marks = marks
        self._turns: dict[int, asyncio.Future[Turn | None]] = {}
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(settings.episodes or sys.maxsize)
        self._endpoint: Any = None

    async def run(self) -> None:
        """Play until the connection is closed."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)  # type: ignore[arg-type]
        closed = asyncio.Event()

        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(self._receive, self._connection.recv())
            except (EOFError, OSError):
                loop.call_soon_threadsafe(closed.set)

        threading.Thread(target=read, daemon=True).start()
        while not closed.is_set():
            self._marks.set(NOBODY)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closed.wait(), TICK_S)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        """Return a task that marks its episode while it runs, as all tasks of an agent do."""
        context = options.get("context") or contextvars.copy_context()
        key = context.get(_episode, NOBODY)
        if key != NOBODY and inspect.iscoroutine(work):
            work = _Marked(work, key, self._marks)
        return asyncio.Task(work, loop=loop, **options)

    def _receive(self, message: tuple[Any, ...]) -> None:
        kind, key, *rest = message
        if kind == "play":
            context = contextvars.copy_context()
            context.run(_episode.set, key)
            playing = asyncio.get_running_loop().create_task(
                self._play(key, *rest), context=context
            )
            self._episodes[key] = playing
            playing.add_done_callback(lambda _: self._episodes.pop(key))
        elif kind == "turn" and (turn := self._turns.pop(key, None)) and not turn.done():
            turn.set_result(rest[0])
        elif kind == "cancel" and (cancelled := self._episodes.get(key)):
            cancelled.cancel()

    async def _play(
        self, key: int, problem: Question, prompt_ids: list[int], limits: Limits
    ) -> None:
        async with self._room:
            ended = await self._play_one(key, problem, prompt_ids, limits)
            with contextlib.suppress(OSError):  # rank 0 is gone
                self._connection.send(("end", key, ended))

    async def _play_one(
        self, key: int, problem: Question, prompt_ids: list[int], limits: Limits
    ) -> Ended:
        loop = asyncio.get_running_loop()
        settings, process = self._settings, os.getpid()
        ends_at = loop.time() + settings.timeout_s
        over: asyncio.Future[str] = loop.create_future()
        timer: asyncio.TimerHandle | None = None

        def limit(seconds: float, of: str) -> None:
            """End the episode after `seconds`, or sooner if its own time is over."""
            nonlocal timer
            at = loop.time() + seconds
            if ends_at <= at:
                at, of = ends_at, f"agent_timeout_s {settings.timeout_s:g}"
            if timer:
                timer.cancel()
            timer = loop.call_at(at, end, of)

        def end(of: str) -> None:
            if not over.done():
                over.set_result(of)

        def limit_between_turns() -> None:
            seconds = settings.turn_timeout_s
            limit(seconds, f"agent_turn_timeout_s {seconds:g} between two turns")

        async def sample(request: Request) -> Turn | None:
            if key not in self._episodes:
                raise RuntimeError("the episode has ended")
            if asyncio.get_running_loop() is not loop or os.getpid() != process:
                raise RuntimeError("a policy belongs to the event loop that its agent runs in")
            limit(settings.timeout_s, "")  # while rank 0 samples, only the episode's time counts
            answer = self._turns[key] = loop.create_future()
            self._connection.send(("sample", key, request))
            turn = await answer
            limit_between_turns()
            return turn

        def abandon() -> None:
            if key in self._turns:
                self._connection.send(("abandon", key, None))

        policy = Policy(prompt_ids, limits, sample, self._tokenizer, self._base_url, abandon)
        limit_between_turns()
        agent = loop.create_task(self._agent(policy, problem))
        try:
            await asyncio.wait({agent, over}, return_when=asyncio.FIRST_COMPLETED)
            if not agent.done():
                agent.cancel()
                await asyncio.wait({agent}, timeout=TIDY_UP_S)  # no longer: it may not end at all
                return Ended("deadline", None, f"took longer than {over.result()}")
            try:
                result = agent.result()
                if not policy.num_turns:
                    return Ended("error", None, "the agent returned without a turn of the policy")
                score = None if result is None else score_of(result)
                return Ended(policy.over or "answered", score, "")
            except EpisodeOver as why:
                if not policy.num_turns:
                    return Ended("error", None, str(why))
                return Ended(why.end, None, "")
            except BaseException as error:  # CancelledError too, of a task that the agent cancelled
                return _failed(error)
        finally:
            agent.cancel()
            if timer:
                timer.cancel()
            if turn := self._turns.pop(key, None):
                turn.cancel()
            if self._endpoint:
                self._endpoint.drop(policy)

    def _base_url(self, policy: Policy) -> str:
        if self._endpoint is None:
            from qurl_megatron.extensions.agents.endpoint import Endpoint

            self._endpoint = Endpoint()
        url: str = self._endpoint.add(policy)
        return url


def _failed(error: BaseException) -> Ended:
    """Return the end of an episode that has raised; its traceback goes to the log."""
    with contextlib.suppress(Exception):  # the disk is full
        traceback.print_exception(error)
    lines = traceback.format_exception_only(error)  # works whatever its __str__ does
    return Ended("error", None, one_line(lines[-1]))


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine that marks its episode while its code runs."""

    def __init__(self, inner: Coroutine[Any, Any, Any], key: int, marks: Marks) -> None:
        self._inner, self._key, self._marks = inner, key, marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # anyio reads `cr_running` and the like before it cancels

    def send(self, value: Any) -> Any:
        return self._run(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self._inner.throw, *error)

    def _run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        process = os.getpid()
        self._marks.set(self._key)
        try:
            return step(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, and all its episodes
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            if os.getpid() != process:  # a fork, which would go on playing all episodes
                os._exit(0)
            self._marks.set(NOBODY)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()


class _Log:
    """Standard output that begins each line with the number of the episode that prints it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._begun: dict[int, str] = {}  # the unfinished line of each episode

    def write(self, text: str) -> int:
        key = _episode.get()
        *lines, rest = (self._begun.pop(key, "") + text).split("\n")
        if rest:
            self._begun[key] = rest
        name = f"episode {key}: " if key != NOBODY else ""
        for line in lines:
            self._file.write(f"{name}{line}\n")
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def load_agent(settings: Settings) -> tuple[Any, Any]:
    """Return the agent's function and the tokenizer.

    Raises:
        TypeError: it is not an async function of a policy and a problem.
        Exception: its import raised this.
    """
    agent = load_function(settings.agent)
    is_async = inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(
        getattr(agent, "__call__", None)  # noqa: B004 - an object with an async __call__
    )
    if not is_async:
        raise TypeError("it is not async; expected `async def NAME(policy, problem)`")
    signature = inspect.signature(agent)
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(f"its parameters are {signature}; expected (policy, problem)") from None
    return agent, load_tokenizer(*settings.tokenizer)


def work(descriptor: int, marks: int) -> None:
    """Be a worker: load an agent, then play episodes until the connection is closed."""
    die_with_parent()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout = sys.stderr = _Log(sys.stdout)  # type: ignore[assignment]
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):  # the other side is gone
        settings: Settings = connection.recv()
        contain()
        signal.setitimer(signal.ITIMER_REAL, LOAD_LIMIT_S)  # then SIGALRM ends the process
        try:
            agent, tokenizer = load_agent(settings)
        except BaseException as error:
            connection.send(why(error))
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send("")
        asyncio.run(_Worker(connection, settings, agent, tokenizer, Marks(marks)).run())
