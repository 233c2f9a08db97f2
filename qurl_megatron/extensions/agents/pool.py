"""The processes that play episodes, as rank 0 of the learner sees them.

No episode costs another one. An exception ends only the episode that raised it. If an episode's
code blocks its process for too long, or ends the process, that episode fails. The others that were
played there begin again in another process, and lose what they have sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import ConfigError, SamplingConfig
from qurl_megatron.extensions.agents.policy import Limits, Request, Turn
from qurl_megatron.extensions.agents.worker import (
    LOAD_LIMIT_S,
    NOBODY,
    Ended,
    Marks,
    Settings,
    work,
)
from qurl_megatron.machine.processes import END_CONTAINED, raise_open_file_limit, start_worker

PROGRAM = f"import sys; from {work.__module__} import work; work(*map(int, sys.argv[1:]))"
CORES_PER_WORKER = 4
MAX_DEFAULT_WORKERS = 16
WATCH_S = 1.0  # between two looks at the sign of life of a process
READY_POLL_S = 0.2  # between two checks whether a process has loaded the agent
GRACE_S = 10.0  # beyond a time limit, for a process to end an episode by itself
MOST_PROCESSES = 3  # in which an episode begins, if other episodes end them


class Agents(contextlib.AbstractContextManager["Agents"]):
    """Processes that play episodes; `close` ends them, and they die with this process."""

    def __init__(
        self,
        config: SamplingConfig,
        model: str | Path,
        template: tuple[Mapping[str, Any], str, str] = ({}, "", ""),
        logs: Path | None = None,
    ) -> None:
        """Start the processes, which load the agent in the background.

        Args:
            model: directory of the tokenizer.
            template: the options of the chat template, the day that it prints, and its text if it
                is not the model's.
            logs: directory for what they print; None: this process's standard error.
        """
        cores = len(os.sched_getaffinity(0)) // CORES_PER_WORKER
        count = config.agent_workers or max(1, min(MAX_DEFAULT_WORKERS, cores))
        self._config = config
        self._settings = Settings(
            config.agent,
            (Path(model), *template),
            config.agent_episodes,
            config.agent_timeout_s,
            config.agent_turn_timeout_s,
        )
        raise_open_file_limit()
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        self._keys = itertools.count()
        self._processes = [
            _Process(self._settings, logs / f"agents_{number}.log" if logs else None)
            for number in range(count)
        ]

    async def play(
        self,
        prompt: Prompt,
        max_turn_tokens: int,
        begin: Callable[[], Callable[[Request], Awaitable[Turn]]],
    ) -> Ended:
        """Play an episode in the process that plays the fewest.

        `begin` begins a record of the episode, and returns what samples its turns.

        Raises:
            ConfigError: the agent cannot be loaded.
            Exception: what sampling raised.
        """
        config = self._config
        drawn = config.temperature, config.top_p
        # Of this stage or evaluation; `config.max_length` is the longest of a run's stages.
        longest = config.max_episode_tokens or config.max_prompt_length + max_turn_tokens
        limits = Limits(config.max_turns, max_turn_tokens, longest, *drawn)
        for _ in range(MOST_PROCESSES):
            process = min(self._processes, key=lambda each: each.num_episodes)
            key = next(self._keys)
            ended = await process.play(key, (prompt.asked, prompt.token_ids, limits), begin())
            if ended is not None:
                return ended
        return Ended("error", None, f"{MOST_PROCESSES} processes died while they played it")

    def wait_ready(self) -> None:
        """Wait until the first process has loaded the agent.

        Raises:
            ConfigError: it cannot be loaded; the text says why.
        """
        self._processes[0].wait_ready()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Playing:
    """An episode in progress; it belongs to the event loop of the thread that samples."""

    def __init__(self, send: Callable[[Turn | None], None], sample: Any) -> None:
        self._send = send
        self._sample = sample
        self._loop = asyncio.get_running_loop()
        self._sampling: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[Ended | None] = self._loop.create_future()

    def deliver(self, kind: str, content: Any) -> None:
        """Pass on a message of the worker; called in the thread that reads."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the episode
            self._loop.call_soon_threadsafe(self._take, kind, content)

    def _take(self, kind: str, content: Any) -> None:
        if self.ended.done():
            return
        if kind == "sample":
            self._sampling = self._loop.create_task(self._turn(content))
            # The worker waits for an answer, also to a turn that was abandoned.
            self._sampling.add_done_callback(self._answer_abandoned)
        elif kind == "abandon":
            # Not before the turn has begun: what it reads is in the sequence, as the policy counts.
            self._loop.call_soon(self.close)
        else:
            self.ended.set_result(content)

    async def _turn(self, request: Request) -> None:
        try:
            self._send(await self._sample(request))
        except Exception as error:
            if not self.ended.done():
                self.ended.set_exception(error)

    def _answer_abandoned(self, turn: asyncio.Task[None]) -> None:
        if turn.cancelled():
            self._send(None)

    def close(self) -> None:
        if self._sampling:
            self._sampling.cancel()


class _Process:
    """A process that plays episodes, and its successors; a thread reads their messages."""

    def __init__(self, settings: Settings, log_file: Path | None) -> None:
        self._settings = settings
        self._log_file = log_file
        # The longest that the loop of the process may stand still.
        self._patience_s = min(settings.turn_timeout_s, settings.timeout_s) + GRACE_S
        self.num_episodes = 0  # played here, or waiting for the process to start
        self._playing: dict[int, _Playing] = {}
        self._lock = threading.RLock()  # `_begin` calls `_send` while it holds it
        self._closed = False
        self._error: str | None = None  # why the agent cannot be loaded; None: not known yet
        self._ready = threading.Event()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends a process with the thread that started it, so one starts them all.
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        self._ready.wait()
        if self._error:
            raise ConfigError(f"agent={self._settings.agent}: {self._error}")

    async def play(self, key: int, episode: tuple[Any, ...], sample: Any) -> Ended | None:
        """Play an episode; return None if another one ends the process."""
        playing = _Playing(lambda turn: self._send(("turn", key, turn)), sample)
        self.num_episodes += 1
        try:
            while not self._begin(key, playing, episode):
                await asyncio.sleep(READY_POLL_S)
            return await playing.ended
        except BaseException:
            self._send(("cancel", key))
            raise
        finally:
            self.num_episodes -= 1
            playing.close()
            self._playing.pop(key, None)

    def _begin(self, key: int, playing: _Playing, episode: tuple[Any, ...]) -> bool:
        """Send an episode to the process; return False while no process is ready.

        Raises:
            ConfigError: none will be, because the agent cannot be loaded.
        """
        with self._lock:
            if self._closed:
                raise asyncio.CancelledError
            if not self._ready.is_set():
                return False
            self.wait_ready()
            self._playing[key] = playing
            self._send(("play", key, *episode))
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._process:
                self._process.send_signal(END_CONTAINED)
        self._thread.join()

    def _send(self, message: tuple[Any, ...]) -> None:
        # Nothing can be sent to a dead process; the thread that reads will notice its end.
        with self._lock, contextlib.suppress(OSError):
            if self._connection:
                self._connection.send(message)

    def _run(self) -> None:
        while not self._closed:
            try:
                marks = self._start()
                if self._error:
                    break
                self._read(marks)
            except (EOFError, OSError) as error:
                code = self._end()
                why = str(error) if code is None else f"its process ended with code {code}"
                if code == -signal.SIGALRM:
                    why = f"took longer than {LOAD_LIMIT_S:g} s"
                if not self._ready.is_set():
                    self._error = f"{why} while it loaded the agent"
                    break
                self._lose(marks.running, why)
        self._ready.set()
        self._end()

    def _end(self) -> int | None:
        """End the process and what its agents started; return its exit code, None without one."""
        if self._process is None:
            return None
        self._process.send_signal(END_CONTAINED)
        return self._process.wait()

    def _start(self) -> Marks:
        """Start a process, and wait until it has loaded the agent."""
        descriptor = os.memfd_create("marks")
        os.truncate(descriptor, Marks.SIZE)
        marks = Marks(descriptor)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            output: Any = 2  # standard error
            if self._log_file:
                output = stack.enter_context(self._log_file.open("ab"))
            with self._lock:
                if self._closed:
                    raise EOFError  # for `_run`, as if the process had ended
                self._process, connection = start_worker(PROGRAM, descriptor, output=output)
        connection.send(self._settings)
        self._error = connection.recv()
        with self._lock:
            self._connection = connection
            self._ready.set()
        return marks

    def _read(self, marks: Marks) -> None:
        """Deliver messages until the process dies, or is killed because its loop stands still."""
        assert self._connection is not None
        ticks, changed_at = marks.ticks, time.monotonic()
        while True:
            if self._connection.poll(WATCH_S):
                kind, key, content = self._connection.recv()
                if playing := self._playing.get(key):
                    playing.deliver(kind, content)
            now = time.monotonic()
            if marks.ticks != ticks:
                ticks, changed_at = marks.ticks, now
            elif now - changed_at > self._patience_s:
                self._end()
                limit_s = self._settings.turn_timeout_s
                self._lose(
                    marks.running,
                    f"blocked its process for longer than agent_turn_timeout_s {limit_s:g}; use "
                    "await, or asyncio.to_thread",
                    "deadline",
                )
                return

    def _lose(self, culprit: int, why: str, end: str = "error") -> None:
        """End the episode that ended the process; let the others be played again."""
        with self._lock:
            self._connection = None
            self._ready.clear()
            for key, playing in list(self._playing.items()):
                # A lone episode is the culprit even if it left no mark.
                is_culprit = key == culprit or (culprit == NOBODY and len(self._playing) == 1)
                playing.deliver("end", Ended(end, None, why) if is_culprit else None)
