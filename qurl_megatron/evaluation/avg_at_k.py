"""Avg@1 and Avg@k of a served policy, as the QuRL paper evaluates (Section 5.1).

Avg@1 is the fraction of problems whose greedy answer is right. Avg@k is the fraction of right
answers among k sampled answers, averaged over problems. Both come with the standard error over
problems.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pydantic

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.proof import check_differ
from qurl_megatron.algorithm.score import Score
from qurl_megatron.data.scoring import StartScoring
from qurl_megatron.files import append_lines, read_json_lines, write_whole
from qurl_megatron.report.metrics import measures
from qurl_megatron.rollout.client import RolloutClient


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
    parts: dict[str, float] = dataclasses.field(default_factory=dict)  # see `Score.parts`


@dataclass(frozen=True)
class ProblemResult:
    """A problem with its generated answers: one line of an answers file."""

    problem: int  # its number in the data, from 0
    question: str
    answer: Any  # the right answer, or a list of several; for a user's function any JSON value
    greedy: Answer
    sampled: list[Answer]


_RESULT = pydantic.TypeAdapter(ProblemResult)


def measure(
    client: RolloutClient,
    score: StartScoring,
    prompts: list[Prompt],
    max_completion_length: int,
    *,
    k: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    answered: Callable[[], None] = lambda: None,
    known: Mapping[int, ProblemResult] = {},
    keep: Callable[[ProblemResult], None] = lambda result: None,
) -> list[ProblemResult]:
    """Generate and score one greedy and `k` sampled answers to every prompt.

    Args:
        answered: called when a prompt has its greedy answer, and again when it has the others.
        known: results that an earlier call has kept, by the number of the prompt; they are returned
            as they are.
        keep: called with each new result, once it is complete.

    Raises:
        WrongRollouts: sampled answers are equal that must differ; not checked with a `top_p`
            below 1.
    """
    settings = [
        client.sampling(
            completions_per_prompt=count,
            max_completion_length=max_completion_length,
            temperature=drawn_at,
            top_p=mass,
        )
        for count, drawn_at, mass in ((1, 0.0, 1.0), (k, temperature, top_p))
        if count
    ]
    groups: list[list[Completion]] = []  # of sampled answers

    async def answer(number: int, prompt: Prompt) -> ProblemResult:
        if number in known:
            return known[number]
        asked = []
        for sampling in settings:
            completions = await client.group(prompt, sampling)
            answered()
            asked.append((completions, score(prompt, completions)))
        groups.extend(completions for completions, _ in asked[1:])
        (greedy,), *others = [
            _answers(completions, await asyncio.wrap_future(scores))
            for completions, scores in asked
        ]
        sampled = [each for group in others for each in group]
        answers = list(prompt.answers) or prompt.answer
        result = ProblemResult(number, prompt.question, answers, greedy, sampled)
        keep(result)
        return result

    results = client.gather(answer(*numbered) for numbered in enumerate(prompts))
    if top_p == 1:  # else the log-probs are not over the tokens that could be drawn
        check_differ(groups)
    return results


def _answers(completions: list[Completion], scores: list[Score]) -> list[Answer]:
    return [
        Answer(
            text=completion.text,
            reward=score.value,
            truncated=completion.truncated,
            verifier_failed=bool(score.failure),
            accuracy=score.accuracy,
            failure=score.failure,
            parts=score.parts,
        )
        for completion, score in zip(completions, scores, strict=True)
    ]


def averages(results: list[ProblemResult]) -> dict[str, Average]:
    """Return `Avg@1` and, if answers were sampled, `Avg@k sampled` (with the value of k)."""
    groups = [[[result.greedy] for result in results]]
    if k := len(results[0].sampled):
        groups.append([result.sampled for result in results])
    shares = [[fmean(answer.accuracy for answer in each) for each in group] for group in groups]
    return dict(zip(measures(k), map(Average.over, shares), strict=True))


def failures(results: Iterable[ProblemResult]) -> str:
    """Return how many answers count as wrong because scoring them failed; empty: none."""
    answers = [answer for each in results for answer in (each.greedy, *each.sampled)]
    reasons = [answer.failure for answer in answers if answer.failure]
    if not reasons:
        return ""
    return f"{len(reasons)} of {len(answers)} answers, which count as wrong: {reasons[0]}"


def write_answers(results: list[ProblemResult], path: Path) -> None:
    """Write `results` as jsonl, one problem per line."""
    write_whole(path, "".join(f"{_as_json(result)}\n" for result in results))


def append_answer(result: ProblemResult, path: Path) -> None:
    """Add one problem to such a file."""
    append_lines(path, [json.loads(_as_json(result))])


def _as_json(result: ProblemResult) -> str:
    return json.dumps(dataclasses.asdict(result), default=str)


def read_answers(path: Path) -> dict[int, ProblemResult]:
    """Return the results in an answers file, by the number of the problem."""
    rows = map(_RESULT.validate_python, read_json_lines(path, ProblemResult))
    return {result.problem: result for result in rows}
