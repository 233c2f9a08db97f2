"""Avg@1 and Avg@k of a served policy, as the QuRL paper evaluates (Section 5.1).

Avg@1 is the fraction of problems whose greedy answer is right. Avg@k is the fraction of right
answers among k sampled answers, averaged over problems. Both come with the standard error over
problems.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import RewardName, ServerConfig, WeightFormat
from qurl_megatron.config.values import (
    Count,
    CountOrZero,
    Directory,
    Seconds,
    Seed,
    SequencesOrZero,
    Temperature,
    Text,
    TopP,
)
from qurl_megatron.data.scoring import StartScoring
from qurl_megatron.files import write_whole
from qurl_megatron.rollout.client import RolloutClient


@dataclass
class EvalConfig:
    """The settings of `qurl eval`."""

    model: Text = ""
    """Hugging Face directory, or a checkpoint of a run."""
    data: list[Text] = dataclasses.field(default_factory=list)
    """Files, dataset directories or reasoning_gym:TASK, each measured separately."""
    reward: RewardName = "math"
    """Verifier of the answers, as in a run. Avg@1 and Avg@k are averages of its `accuracy`; with a
    reward function that gives no such number, of the reward itself."""
    k: SequencesOrZero = 0
    """Number of sampled answers per problem. 0: Avg@1 only."""
    temperature: Temperature = 1.0
    """Sampling temperature of the sampled answers; Avg@1 is greedy."""
    top_p: TopP = 1.0
    """Probability mass that nucleus sampling keeps, in the sampled answers."""
    format: WeightFormat = "bf16"
    """Format of the served weights."""
    max_prompt_length: Count = 1024
    """Maximum prompt length in tokens; a longer prompt is refused."""
    max_response_length: Count = 1024
    """Maximum response length in tokens."""
    output: Directory = "eval"
    """Directory of the results; it must not exist."""
    seed: Seed = 0
    """Seed of sampling, and of reasoning-gym's problems."""
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    """The SGLang server that answers."""
    reward_timeout_s: Seconds = 60.0
    """Maximum time of one call of a reward function of your own, in seconds."""
    scoring_workers: CountOrZero = 0
    """Number of processes that score answers. 0: a quarter of the cores, from 1 to 16."""
    question_key: str = ""
    """Field of the data that holds the question. Empty: question, prompt, problem or messages."""
    answer_key: str = ""
    """Field of the data that holds the answer. Empty: answer, reward_model.ground_truth, or the
    assistant's last message."""
    system_prompt: str = ""
    """System message put before each question that has none. Empty: none."""
    keep: list[Text] = dataclasses.field(default_factory=list)
    """Linear layers that stay in BF16 in any `format`: a run's `quantization.keep`."""

    @property
    def max_length(self) -> int:
        """Maximum prompt plus response length, in tokens."""
        return self.max_prompt_length + self.max_response_length


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
    verifier_failed: bool
    accuracy: float  # 1 if the answer is right; see `Score.accuracy`
    failure: str  # why the verifier failed; empty if it did not


@dataclass(frozen=True)
class ProblemResult:
    """A problem with its generated answers: one line of an answers file."""

    question: str
    answer: str  # the right answer
    greedy: Answer
    sampled: list[Answer]


def measure(
    client: RolloutClient,
    score: StartScoring,
    prompts: list[Prompt],
    max_response_length: int,
    *,
    k: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    answered: Callable[[], None] = lambda: None,
) -> list[ProblemResult]:
    """Generate and score one greedy and `k` sampled answers to every prompt.

    The greedy answers are scored while others are sampled. `answered` is called when a prompt has
    its greedy answer, and again when it has the others.
    """
    groups = client.generate(
        prompts,
        completions_per_prompt=1,
        temperature=0.0,
        max_response_length=max_response_length,
        answered=answered,
    )
    greedy_scores = _start_scoring(score, prompts, groups)
    sampled: list[list[Answer]] = [[] for _ in prompts]
    if k:
        sampled_groups = client.generate(
            prompts,
            completions_per_prompt=k,
            temperature=temperature,
            top_p=top_p,
            max_response_length=max_response_length,
            answered=answered,
        )
        sampled = _answers(sampled_groups, _start_scoring(score, prompts, sampled_groups))
    greedy = [answer for (answer,) in _answers(groups, greedy_scores)]
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
    by_name = {"Avg@1": Average.over([result.greedy.accuracy for result in results])}
    if k := len(results[0].sampled):
        fractions = [fmean(answer.accuracy for answer in result.sampled) for result in results]
        by_name[f"Avg@{k} sampled"] = Average.over(fractions)
    return by_name


def _start_scoring(
    score: StartScoring, prompts: list[Prompt], groups: list[list[Completion]]
) -> list[Future[list[Score]]]:
    return list(map(score, prompts, groups))


def _answers(
    groups: list[list[Completion]], scores: list[Future[list[Score]]]
) -> list[list[Answer]]:
    return [
        list(map(_answer, group, future.result()))
        for group, future in zip(groups, scores, strict=True)
    ]


def _answer(completion: Completion, score: Score) -> Answer:
    return Answer(
        text=completion.text,
        reward=score.value,
        truncated=completion.truncated,
        verifier_failed=bool(score.failure),
        accuracy=score.accuracy,
        failure=score.failure,
    )
