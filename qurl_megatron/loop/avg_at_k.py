"""Avg@1 and Avg@k of a served policy, as the QuRL paper evaluates (Section 5.1).

Avg@1 is the share of problems whose greedy answer is right; Avg@k the mean over problems of the
share of k sampled answers that are. Both with the standard error over problems.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import (
    Count,
    CountOrZero,
    Positive,
    Reward,
    ServerConfig,
    TopP,
    WeightFormat,
)
from qurl_megatron.data import rewards
from qurl_megatron.files import write_whole
from qurl_megatron.rollout.client import RolloutClient


@dataclass
class EvalConfig:
    """What `qurl eval` measures."""

    model: str = ""  # a Hugging Face directory, or a run's checkpoint
    data: list[str] = dataclasses.field(default_factory=list)  # each a file or reasoning_gym:TASK
    reward: Reward = "math"
    k: CountOrZero = 0  # sampled answers a problem; 0: Avg@1 only
    temperature: Positive = 1.0  # of sampled answers
    top_p: TopP = 1.0
    format: WeightFormat = "bf16"  # of the served weights
    max_prompt_length: Count = 1024
    max_response_length: Count = 1024
    output: str = "eval"  # a directory to be made
    seed: int = 0
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)


@dataclass(frozen=True)
class Average:
    """A mean over problems, and its standard error; 0 of a single problem."""

    mean: float
    standard_error: float

    @staticmethod
    def over(values: list[float]) -> Average:
        spread = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
        return Average(fmean(values), spread)


@dataclass(frozen=True)
class Answer:
    text: str
    reward: float
    truncated: bool
    verifier_failed: bool  # it raised or timed out, and the reward is 0


@dataclass(frozen=True)
class ProblemResult:
    """One line of a data file's results."""

    question: str
    answer: str  # the right one
    greedy: Answer
    sampled: list[Answer]


def measure(
    client: RolloutClient,
    prompts: list[Prompt],
    reward: str,
    max_response_length: int,
    *,
    k: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> list[ProblemResult]:
    """Answers to every prompt, a greedy one and `k` sampled, with what they are worth.

    Main thread only.
    """
    groups = client.generate(
        prompts,
        completions_per_prompt=1,
        temperature=0.0,
        max_response_length=max_response_length,
    )
    greedy = [answer for (answer,) in _scored(reward, prompts, groups)]
    sampled: list[list[Answer]] = [[] for _ in prompts]
    if k:
        groups = client.generate(
            prompts,
            completions_per_prompt=k,
            temperature=temperature,
            top_p=top_p,
            max_response_length=max_response_length,
        )
        sampled = _scored(reward, prompts, groups)
    return [
        ProblemResult(prompt.question, prompt.answer, one, many)
        for prompt, one, many in zip(prompts, greedy, sampled, strict=True)
    ]


def write_answers(results: list[ProblemResult], path: Path) -> None:
    """A jsonl of `results`, one problem a line."""
    lines = (json.dumps(dataclasses.asdict(result)) + "\n" for result in results)
    write_whole(path, "".join(lines))


def averages(results: list[ProblemResult]) -> dict[str, Average]:
    """`Avg@1`, and `Avg@k` under its own k where answers were sampled."""
    found = {"Avg@1": Average.over([result.greedy.reward for result in results])}
    if k := len(results[0].sampled):
        shares = [fmean(answer.reward for answer in result.sampled) for result in results]
        found[f"Avg@{k} sampled"] = Average.over(shares)
    return found


def _scored(
    reward: str, prompts: list[Prompt], groups: list[list[Completion]]
) -> list[list[Answer]]:
    return [
        [_answer(reward, prompt, one) for one in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def _answer(reward: str, prompt: Prompt, completion: Completion) -> Answer:
    score = rewards.score(reward, completion.text, prompt)
    return Answer(completion.text, score.value, completion.truncated, score.failed)
