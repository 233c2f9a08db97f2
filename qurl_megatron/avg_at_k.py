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

    def answers(temperature: float, top_p: float, count: int) -> list[list[Answer]]:
        groups = client.generate(
            prompts,
            completions_per_prompt=count,
            temperature=temperature,
            top_p=top_p,
            max_response_length=config.max_response_length,
        )
        return [
            [_answer(config.reward, prompt, completion) for completion in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    greedy = answers(0.0, 1.0, 1)
    sampled: list[list[Answer]] = [[] for _ in prompts]
    if config.k:
        sampled = answers(config.temperature, config.top_p, config.k)
    return [
        ProblemResult(prompt.question, prompt.answer, one, many)
        for prompt, (one,), many in zip(prompts, greedy, sampled, strict=True)
    ]


def averages(results: list[ProblemResult]) -> dict[str, Average]:
    """`Avg@1`, and `Avg@k` under its own k where answers were sampled."""
    found = {"Avg@1": Average.over([result.greedy.reward for result in results])}
    if k := len(results[0].sampled):
        shares = [fmean(answer.reward for answer in result.sampled) for result in results]
        found[f"Avg@{k} sampled"] = Average.over(shares)
    return found


def _answer(reward: str, prompt: Prompt, completion: Completion) -> Answer:
    value = rewards.score(reward, completion.text, prompt).value
    return Answer(completion.text, value, completion.truncated)
