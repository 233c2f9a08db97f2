"""Reward functions of a user's own: `reward=FILE.py:NAME` or `reward=MODULE:NAME`.

    def NAME(completion: str, problem) -> float | dict[str, float]
    def NAME(completions: list[str], problem) -> list of the same

`problem` has `question`, `answer` and `metadata`. A dict has the reward as "reward"; its other
numbers become metrics. A function whose first parameter is called `completions` gets all of a
prompt's completions at once. Either form may be `async def`; the completions of a prompt are then
scored concurrently.

A module is imported from where Python finds modules, and from the directory where the run is
started. A file may import its neighbours.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from qurl_megatron.algorithm.score import Score
from qurl_megatron.data.reward_types import Question, RewardSettings

REWARD = "reward"
BATCH_PARAMETER = "completions"


def absolute(reward: str) -> str:
    """Return `reward` with the absolute path of its file, so that a resumed run finds it."""
    place, colon, name = reward.rpartition(":")
    return f"{Path(place).absolute()}{colon}{name}" if place.endswith(".py") else reward


class RewardFunction:
    """A reward function with its time limit."""

    def __init__(self, function: Callable[..., Any], settings: RewardSettings) -> None:
        """Find out how the function is called.

        Raises:
            TypeError: it cannot be called with a completion and a problem.
        """
        if not callable(function):
            raise TypeError(f"a {type(function).__name__}, which cannot be called")
        signature = inspect.signature(function)
        try:
            signature.bind("", None)
        except TypeError:
            raise TypeError(
                f"its parameters are {signature}; expected (completion, problem), or (completions, "
                "problem) for all completions of a prompt at once"
            ) from None
        self._function = function
        self._settings = settings
        self._is_batch = next(iter(signature.parameters)) == BATCH_PARAMETER
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._runner = asyncio.Runner()  # one event loop, so that a client can outlive a call

    @property
    def whole_groups(self) -> bool:
        """Whether a group's scores come all at once."""
        return self._is_batch or self._is_async

    def score(self, texts: Sequence[str], question: Question) -> Iterator[Score]:
        """Yield the score of each text."""
        if self._is_async:
            yield from self._runner.run(self._score_async(texts, question))
        elif self._is_batch:
            try:
                yield from self._scores(self._function(list(texts), question), len(texts))
            except (Exception, SystemExit) as error:
                yield from [self._failed(error)] * len(texts)
        else:
            for text in texts:
                try:
                    yield self._score(self._function(text, question))
                except (Exception, SystemExit) as error:
                    yield self._failed(error)

    def unverifiable(self, question: Question) -> str:
        """Return an empty text: only the function itself knows."""
        return ""

    async def _score_async(self, texts: Sequence[str], question: Question) -> list[Score]:
        if self._is_batch:
            try:
                results = await self._limited(self._function(list(texts), question))
                return self._scores(results, len(texts))
            except (Exception, SystemExit) as error:
                return [self._failed(error)] * len(texts)

        async def one(text: str) -> Score:
            try:
                return self._score(await self._limited(self._function(text, question)))
            except (Exception, SystemExit) as error:
                return self._failed(error)

        return await asyncio.gather(*map(one, texts))

    async def _limited(self, call: Awaitable[Any]) -> Any:
        async with asyncio.timeout(self._settings.timeout_s):
            return await call

    def _failed(self, error: BaseException) -> Score:
        if isinstance(error, TimeoutError):
            return self._settings.timed_out()
        return self._settings.failed(f"{type(error).__name__}: {error}")

    def _scores(self, results: Any, count: int) -> list[Score]:
        if not isinstance(results, Sequence) or len(results) != count:
            raise TypeError(f"it returned {_shown(results)}; expected a list of {count} rewards")
        return [self._score(result) for result in results]

    def _score(self, result: Any) -> Score:
        if not isinstance(result, Mapping):
            return Score(_number(result, "it returned"), {}, "")
        if REWARD not in result:
            raise TypeError(f'it returned {_shown(result)}, which has no "{REWARD}"')
        numbers = {str(name): _number(value, f'"{name}" is') for name, value in result.items()}
        return Score(numbers.pop(REWARD), numbers, "")


def load(settings: RewardSettings) -> RewardFunction:
    """Import the reward function.

    Raises:
        ImportError, OSError, SyntaxError, TypeError, or what else the import raises: it cannot be
            used.
    """
    place, _, name = settings.reward.rpartition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    if not hasattr(module, name):
        raise ImportError(f"{place} has no function {name}")
    return RewardFunction(getattr(module, name), settings)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    sys.path.insert(0, str(path.absolute().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _number(value: Any, what: str) -> float:
    """Return a finite float.

    Raises:
        TypeError: the value is no number.
        ValueError: it is not finite.
    """
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} {_shown(value)}; expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}; expected a finite number")
    return number


def _shown(value: Any) -> str:
    return repr(value)[:80]
