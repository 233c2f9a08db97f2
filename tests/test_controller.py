"""One loop in one thread: what is started there ends there."""

import asyncio
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing

import pytest

from qurl_megatron.rollout.controller import Controller, end


def test_all_coroutines_run_in_one_thread_which_close_ends_with_them() -> None:
    ended: list[threading.Thread] = []
    controller = Controller()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            ended.append(threading.current_thread())

    async def here() -> threading.Thread:
        return threading.current_thread()

    with ThreadPoolExecutor() as threads:
        (thread,) = set(threads.map(lambda _: controller.wait(here()), range(20)))
    running = [controller.start(forever()) for _ in range(2)]
    controller.close()
    assert ended == [thread] * 2 and not thread.is_alive()
    with pytest.raises(CancelledError):
        running[0].result()
    Controller().close()


def test_what_a_caller_no_longer_waits_for_is_cancelled() -> None:
    cancelled = threading.Event()

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def fail() -> None:
        raise OSError("the server is gone")

    with closing(Controller()) as controller:
        with pytest.raises(OSError, match="the server is gone"):
            controller.wait(fail())
        running = controller.start(long())
        time.sleep(0.1)
        running.cancel()
        assert cancelled.wait(5)


def test_tasks_that_are_ended_have_tidied_up() -> None:
    ended: list[str] = []

    async def tidy_up(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(name)

    async def begin_and_end() -> None:
        tasks = [asyncio.create_task(tidy_up(name)) for name in "ab"]
        await asyncio.sleep(0)
        await end(tasks)
        assert ended == ["a", "b"]

    with closing(Controller()) as controller:
        controller.wait(begin_and_end())
