"""Avg@1 and Avg@k of a served policy, as the QuRL paper evaluates (Section 5.1).

Avg@1 is the share of problems whose greedy answer is right; Avg@k the mean over problems of the
share of k sampled answers that are. Both with the standard error over problems.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Annotated

from annotated_types import Gt, Le

from qurl_megatron import rewards
from qurl_megatron.batch import Completion, Prompt
from qurl_megatron.config import Count, CountOrNone, Positive, Reward, ServerConfig, WeightFormat
from qurl_megatron.rollout import RolloutClient


@dataclass
class EvalConfig:
    """What `qurl eval` measures."""

    model: str = ""  # a Hugging Face directory, or a run's checkpoint
    data: list[str] = dataclasses.field(default_factory=list)  # each a file or reasoning_gym:TASK
    reward: Reward = "math"
    k: CountOrNone = 0  # sampled answers a problem; 0: Avg@1 only
    temperature: Positive = 1.0  # of sampled answers
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
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


@dataclass(frozen=True)
class ProblemResult:
    """One line of a data file's results."""

    question: str
    answer: str  # the right one
    greedy: Answer
    sampled: list[Answer]


def measure(
    client: RolloutClient, prompts: list[Prompt], config: EvalConfig
) -> list[ProblemResult]:
    """Answers to every prompt, greedy and sampled, with what they are worth. Main thread only."""

    greedy = greedy_answers(client, prompts, config.reward, config.max_response_length)
    sampled: list[list[Answer]] = [[] for _ in prompts]
    if config.k:
        groups = client.generate(
            prompts,
            completions_per_prompt=config.k,
            temperature=config.temperature,
            top_p=config.top_p,
            max_response_length=config.max_response_length,
        )
        sampled = _scored(config.reward, prompts, groups)
    return [
        ProblemResult(prompt.question, prompt.answer, one, many)
        for prompt, one, many in zip(prompts, greedy, sampled, strict=True)
    ]


def greedy_answers(
    client: RolloutClient, prompts: list[Prompt], reward: str, max_response_length: int
) -> list[Answer]:
    """The greedy answer to every prompt and what it is worth. Main thread only."""
    groups = client.generate(
        prompts,
        completions_per_prompt=1,
        temperature=0.0,
        max_response_length=max_response_length,
    )
    return [answer for (answer,) in _scored(reward, prompts, groups)]


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
        [Answer(c.text, rewards.score(reward, c.text, prompt).value, c.truncated) for c in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]
