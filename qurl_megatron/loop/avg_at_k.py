"""Avg@1 and Avg@k of a served policy, as the QuRL paper evaluates (Section 5.1).

Avg@1 is the fraction of problems whose greedy answer is right. Avg@k is the fraction of right
answers among k sampled answers, averaged over problems. Both come with the standard error over
problems.
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
    """The settings of `qurl eval`."""

    model: str = ""
    """Hugging Face directory, or a checkpoint of a run."""
    data: list[str] = dataclasses.field(default_factory=list)
    """Files, dataset directories or reasoning_gym:TASK, each measured separately."""
    reward: Reward = "math"
    """Verifier of the answers."""
    k: CountOrZero = 0
    """Number of sampled answers per problem. 0: Avg@1 only."""
    temperature: Positive = 1.0
    """Sampling temperature of the sampled answers; Avg@1 is greedy."""
    top_p: TopP = 1.0
    """Probability mass that nucleus sampling keeps, in the sampled answers."""
    format: WeightFormat = "bf16"
    """Format of the served weights."""
    max_prompt_length: Count = 1024
    """Maximum prompt length in tokens; a longer prompt is refused."""
    max_response_length: Count = 1024
    """Maximum response length in tokens."""
    output: str = "eval"
    """Directory of the results; it must not exist."""
    seed: int = 0
    """Seed of sampling, and of reasoning-gym's problems."""
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    """The SGLang server that answers."""
    question_key: str = ""
    """Field of the data that holds the question. Empty: question, prompt, problem or messages."""
    answer_key: str = ""
    """Field of the data that holds the answer. Empty: answer, reward_model.ground_truth, or the
    assistant's last message."""
    system_prompt: str = ""
    """System message put before each question that has none. Empty: none."""


@dataclass(frozen=True)
class Average:
    """A mean over problems and its standard error, which is 0 for a single problem."""

    mean: float
    standard_error: float

    @staticmethod
    def over(values: list[float]) -> Average:
        """Return the average of one value per problem."""
        standard_error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
        return Average(fmean(values), standard_error)


@dataclass(frozen=True)
class Answer:
    """A generated answer with its reward."""

    text: str
    reward: float
    truncated: bool
    verifier_failed: bool  # the verifier raised or timed out; the reward is 0


@dataclass(frozen=True)
class ProblemResult:
    """A problem with its generated answers: one line of an answers file."""

    question: str
    answer: str  # the right answer
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
    """Generate and score one greedy and `k` sampled answers to every prompt.

    Call this in the main thread, because a signal limits the time of verifiers.
    """
    groups = client.generate(
        prompts,
        completions_per_prompt=1,
        temperature=0.0,
        max_response_length=max_response_length,
    )
    greedy = [answer for (answer,) in _score(reward, prompts, groups)]
    sampled: list[list[Answer]] = [[] for _ in prompts]
    if k:
        groups = client.generate(
            prompts,
            completions_per_prompt=k,
            temperature=temperature,
            top_p=top_p,
            max_response_length=max_response_length,
        )
        sampled = _score(reward, prompts, groups)
    return [
        ProblemResult(prompt.question, prompt.answer, greedy_answer, sampled_answers)
        for prompt, greedy_answer, sampled_answers in zip(prompts, greedy, sampled, strict=True)
    ]


def write_answers(results: list[ProblemResult], path: Path) -> None:
    """Write `results` as jsonl, one problem per line."""
    lines = (json.dumps(dataclasses.asdict(result)) + "\n" for result in results)
    write_whole(path, "".join(lines))


def averages(results: list[ProblemResult]) -> dict[str, Average]:
    """Return `Avg@1` and, if answers were sampled, `Avg@k sampled` (with the value of k)."""
    by_name = {"Avg@1": Average.over([result.greedy.reward for result in results])}
    if k := len(results[0].sampled):
        fractions = [fmean(answer.reward for answer in result.sampled) for result in results]
        by_name[f"Avg@{k} sampled"] = Average.over(fractions)
    return by_name


def _score(
    reward: str, prompts: list[Prompt], groups: list[list[Completion]]
) -> list[list[Answer]]:
    return [
        [_answer(reward, prompt, completion) for completion in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def _answer(reward: str, prompt: Prompt, completion: Completion) -> Answer:
    score = rewards.score(reward, completion.text, prompt)
    return Answer(completion.text, score.value, completion.truncated, score.failed)
