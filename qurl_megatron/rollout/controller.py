"""The thread of global rank 0 in which all servers are asked, in one asyncio loop.

Its coroutines sample, wait for scores and watch the servers. The training loop starts them, and
waits for their results.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Controller:
    """A thread with an asyncio loop. Coroutines can be started from any other thread."""

    def __init__(self) -> None:
        """Prepare the thread; the first coroutine starts it."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the background; cancelling the future cancels it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; cancel it if this wait is interrupted."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def wait_for_all(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run coroutines at the same time, and wait until all have ended."""

        async def together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
            await asyncio.gather(*works)

        if works := list(works):
            self.wait(together(works))

    def close(self) -> None:
        """Cancel all coroutines and end the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        """Run the loop until `close`; the runner then cancels all coroutines and waits for them."""
        loop = self._loop
        assert loop is not None
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._closing.wait())


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
