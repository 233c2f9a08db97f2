"""Reward functions of the user's own, which a run without one does not import.

`reward=FILE.py:NAME` or `reward=MODULE:NAME` names one:

    def NAME(completion: str, problem) -> float | dict[str, float]
    def NAME(completions: list[str], problem) -> list of the same

`problem` has `question`, `answer` and `metadata`. A dict has the reward as "reward"; its other
numbers become metrics. A function whose first parameter is called `completions` gets all of a
prompt's completions at once. Either form may be `async def`; the completions of a prompt are then
scored concurrently.

Functions for two other frameworks run unchanged, and are recognized by their parameters' names:

    verl    data_source, solution_str, ground_truth, extra_info; "score" is a dict's reward
    TRL     completions and prompts of a group, and columns of the data; None is no score

The rewards of a group may be anything with a length: a list, a NumPy array, a tensor.

A module is imported from where Python finds modules, and from the directory where the run is
started. A file may import its neighbours.

The processes of `data/scoring.py` import this file, so it imports no torch.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from qurl_megatron.algorithm.score import ACCURACY, Question, Score
from qurl_megatron.config.schema import Config
from qurl_megatron.data.rewards import failed, timed_out

REWARD = "reward"
LARGEST_REWARD = 3.4028234e38  # of float32
Style = Literal["single", "batch", "verl", "trl"]


class RewardFunction:
    """A reward function with its time limit."""

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        """Find out how the function is called.

        Raises:
            TypeError: it cannot be called, yields, or has other parameters than expected.
        """
        if not callable(function):
            raise TypeError(f"a {type(function).__name__}, which cannot be called")
        call = getattr(function, "__call__", None)  # noqa: B004 - of an object
        if any(map(inspect.isgeneratorfunction, (function, call))) or any(
            map(inspect.isasyncgenfunction, (function, call))
        ):
            raise TypeError("it yields, and so returns no rewards; return them")
        self._parameters = inspect.signature(function).parameters
        self._style = _style(inspect.signature(function))
        self._function = function
        self._config = config
        self._is_batch = self._style in ("batch", "trl")
        self._is_async = any(map(inspect.iscoroutinefunction, (function, call)))
        self._runner = asyncio.Runner()  # one event loop, so that a client can outlive a call
        self.whole_groups = self._is_batch or self._is_async  # all scores come at once
        needed = [name for name, each in self._parameters.items() if _is_needed(each)]
        self.columns = (  # fields that each entry of the data must have
            [name for name in needed if name not in ("prompts", "completions")]
            if self._style == "trl"
            else []
        )

    def score(self, texts: Sequence[str], question: Question) -> Iterator[Score]:
        """Yield the score of each text; an exception of the function becomes a failure."""
        calls = [list(texts)] if self._is_batch else [[text] for text in texts]
        if self._is_async:
            for scores in self._runner.run(self._all_at_once(calls, question)):
                yield from scores
            return
        for call in calls:
            try:
                scores = self._scores(self._call(call, question), len(call))
            except (Exception, SystemExit) as error:
                scores = self._failed(error, len(call))
            yield from scores

    def unverifiable(self, question: Question) -> str:
        """Return why no text could be right; an empty text if one could, or if that is unknown."""
        return ""

    async def _all_at_once(self, calls: list[list[str]], question: Question) -> list[list[Score]]:
        async def one(call: list[str]) -> list[Score]:
            limit = asyncio.timeout(self._config.scoring.timeout_s)
            try:
                async with limit:
                    return self._scores(await self._call(call, question), len(call))
            except (Exception, SystemExit) as error:
                if limit.expired():
                    return [timed_out(self._config)] * len(call)
                return self._failed(error, len(call))

        return await asyncio.gather(*map(one, calls))

    def _call(self, texts: list[str], question: Question) -> Any:
        if self._style in ("single", "batch"):
            return self._function(texts if self._is_batch else texts[0], question)
        offered = _offered(self._style, texts, question)
        kinds = {each.kind for each in self._parameters.values()}
        takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        given = {n: value for n, value in offered.items() if takes_all or n in self._parameters}
        return self._function(**given)

    def _failed(self, error: BaseException, count: int) -> list[Score]:
        return [failed(self._config, f"{type(error).__name__}: {error}")] * count

    def _scores(self, result: Any, count: int) -> list[Score]:
        """Return the scores of the `count` texts of one call."""
        if not self._is_batch:
            return [_verl_score(result) if self._style == "verl" else score_of(result)]
        rewards = result.tolist() if hasattr(result, "tolist") else result
        if isinstance(rewards, str | bytes | Mapping | Set) or not hasattr(rewards, "__len__"):
            raise TypeError(f"it returned {_shown(result)}; expected a list of {count} rewards")
        if len(rewards) != count:
            raise TypeError(f"it returned {_shown(result)}; expected a list of {count} rewards")
        return [self._score_in_group(each) for each in rewards]

    def _score_in_group(self, reward: Any) -> Score:
        if reward is None and self._style == "trl":
            return failed(self._config, "it returned None, which is no score of this completion")
        return score_of(reward)


def _style(signature: inspect.Signature) -> Style:
    """Return how a reward function is called, by the names of its parameters.

    Raises:
        TypeError: the parameters fit none of the known forms.
    """
    names = [
        name
        for name, each in signature.parameters.items()
        if each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    needed = {name for name, each in signature.parameters.items() if _is_needed(each)}
    if "solution_str" in names and needed <= set(_VERL):
        return "verl"
    second = names[1] if len(names) > 1 else ""
    if second == "problem" or (second.startswith("_") and "completions" not in names[1:]):
        try:
            signature.bind("", None)
        except TypeError:
            pass
        else:
            if signature.parameters[second].annotation in (str, "str"):
                raise TypeError(f"its parameter {second} is no str, but has .question and .answer")
            return "batch" if names[0] == "completions" else "single"
    if "completions" in names:
        if "prompt" in needed:
            raise TypeError("its parameter prompt must be prompts, which has one a completion")
        return "trl"
    raise TypeError(
        f"its parameters are {signature}; expected (completion, problem), (completions, problem) "
        "for all completions of a prompt at once, verl's (data_source, solution_str, "
        "ground_truth, extra_info) or TRL's (completions, COLUMN, ...)"
    )


_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def _is_needed(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    return parameter.default is inspect.Parameter.empty and not is_variadic


def _offered(style: Style, texts: list[str], question: Question) -> dict[str, Any]:
    """Return the arguments that a function for verl or TRL may take, by parameter."""
    columns = question.columns
    if style == "verl":
        source, more = columns.get("data_source") or "", columns.get("extra_info") or {}
        return dict(zip(_VERL, (source, texts[0], question.given, more), strict=True))
    prompt = columns.get("prompt")
    is_chat = isinstance(prompt, list)
    return {name: [value] * len(texts) for name, value in columns.items() if name != "prompt"} | {
        "prompts": [prompt if is_chat else question.question] * len(texts),
        "completions": [
            [{"role": "assistant", "content": text}] if is_chat else text for text in texts
        ],
    }


def _verl_score(result: Any) -> Score:
    """Return the score of verl: "score" is the reward, "acc" the accuracy; texts are left out."""
    if not isinstance(result, Mapping):
        return score_of(result)
    names = {"score": REWARD, "acc": ACCURACY}
    return score_of(
        {
            names.get(name, name): value
            for name, value in result.items()
            if name in names or hasattr(value, "__float__")
        }
    )


def score_of(result: Any) -> Score:
    """Return the score that a user's function returned: a number, or a dict with "reward".

    Raises:
        TypeError, ValueError: it is neither, or has a value other than a finite number.
    """
    if not isinstance(result, Mapping):
        return Score(_number(result, "it returned"), {}, "")
    if REWARD not in result:
        raise TypeError(f'it returned {_shown(result)}, which has no "{REWARD}"')
    numbers = {str(name): _number(value, f'"{name}" is') for name, value in result.items()}
    return Score(numbers.pop(REWARD), numbers, "")


def load_function(function: str) -> Any:
    """Import FILE.py:NAME or MODULE:NAME.

    Raises:
        ImportError, OSError, SyntaxError, or what else the import raises.
    """
    place, _, name = function.rpartition(":")
    module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    if not hasattr(module, name):
        raise ImportError(f"{place} has no function {name}")
    return getattr(module, name)


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
        TypeError: the value is not a number.
        ValueError: it is not finite.
    """
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} {_shown(value)}; expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}; expected a finite number")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"{what} {number}, more than float32 holds; expected a smaller number")
    return number


def _shown(value: Any) -> str:
    return repr(value)[:80]
