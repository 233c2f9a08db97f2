"""Evaluation during a run: publish the policy in BF16, generate answers, score them."""

from __future__ import annotations

import dataclasses
from statistics import fmean

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import HELD_OUT, Config
from qurl_megatron.data.scoring import StartScoring
from qurl_megatron.evaluation.avg_at_k import (
    ProblemResult,
    averages,
    measure,
    write_answers,
)
from qurl_megatron.report.metrics import Evaluation
from qurl_megatron.report.run_log import evaluation_directory
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.weight_sync.publish import Publisher


class Evaluator:
    """Measures the learner's policy on a set of BF16 servers. Collective over all learner ranks.

    The response limit is always that of the longest stage, so a run's evaluations are comparable.
    """

    def __init__(
        self,
        config: Config,
        publisher: Publisher,
        client: RolloutClient,
        score: StartScoring,
        *,
        held_out: list[Prompt],
        files: dict[str, list[Prompt]],
        warmup_check: list[Prompt],
    ) -> None:
        """Store the parts; only global rank 0 uses `client`, `score` and the prompts."""
        self._config = config
        self._publisher = publisher
        self._client = client
        self._score = score
        self._held_out = held_out
        self._files = files
        self._warmup_check = warmup_check

    def evaluate(self, step: int) -> Evaluation:
        """Measure held-out problems and files, and write every answer to the run's directory."""
        self._publisher.publish()
        return self._publisher.while_serving(lambda: self._evaluate(step))

    def warmup_accuracy(self) -> float:
        """Return the fraction of the warm-up's check problems whose greedy answer is right."""
        self._publisher.publish()
        return self._publisher.while_serving(lambda: _accuracy(self._answer(self._warmup_check)))

    def _evaluate(self, step: int) -> Evaluation:
        directory = evaluation_directory(self._config.run_dir, step)
        directory.mkdir(parents=True, exist_ok=True)
        evaluation = self._config.evaluation
        by_file = {}
        for name, prompts in self._files.items():
            results = self._answer(
                prompts,
                k=evaluation.k,
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
            )
            write_answers(results, directory / f"{name}.jsonl")
            by_file[name] = {
                metric: dataclasses.asdict(average) for metric, average in averages(results).items()
            }
        if not self._held_out:
            return Evaluation(None, by_file)
        results = self._answer(self._held_out)
        write_answers(results, directory / f"{HELD_OUT}.jsonl")
        return Evaluation(_accuracy(results), by_file)

    def _answer(
        self, prompts: list[Prompt], *, k: int = 0, temperature: float = 1.0, top_p: float = 1.0
    ) -> list[ProblemResult]:
        return measure(
            self._client,
            self._score,
            prompts,
            self._config.rollout.longest_response,
            k=k,
            temperature=temperature,
            top_p=top_p,
        )


def _accuracy(results: list[ProblemResult]) -> float:
    return fmean(result.greedy.accuracy for result in results)
