"""Accuracy in full precision: publish in BF16, answer, score."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import HELD_OUT, Config
from qurl_megatron.device import from_rank_zero
from qurl_megatron.loop.avg_at_k import averages, measure, write_answers
from qurl_megatron.report.metrics import Evaluation
from qurl_megatron.report.run_log import evaluation_directory
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.weight_sync.publish import Publisher


class Evaluator:
    """Measures the learner's policy on a BF16 server set. Collective over all learner ranks.

    Responses may be as long as those of the longest stage, so that what is measured stays the same
    thing throughout a run.
    """

    def __init__(self, config: Config, publisher: Publisher, client: RolloutClient) -> None:
        """`client` is used on global rank 0 only."""
        self._config = config
        self._publisher = publisher
        self._client = client

    def accuracy(self, prompts: list[Prompt]) -> float:
        """Fraction of `prompts`, those of global rank 0, whose greedy answer is right."""
        self._publisher.publish()
        return from_rank_zero(lambda: self._held_out(prompts, None))

    def evaluate(
        self, step: int, held_out: list[Prompt], files: dict[str, list[Prompt]]
    ) -> Evaluation:
        """Measure what is on global rank 0, and leave every answer in the run's directory."""
        self._publisher.publish()
        return from_rank_zero(lambda: self._evaluate(step, held_out, files))

    def _evaluate(
        self, step: int, held_out: list[Prompt], files: dict[str, list[Prompt]]
    ) -> Evaluation:
        directory = evaluation_directory(self._config.run_dir, step)
        directory.mkdir(parents=True, exist_ok=True)
        evaluation = self._config.evaluation
        measured = {}
        for name, prompts in files.items():
            results = measure(
                self._client,
                prompts,
                self._config.reward,
                self._config.rollout.longest_response,
                k=evaluation.k,
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
            )
            write_answers(results, directory / f"{name}.jsonl")
            measured[name] = {
                what: dataclasses.asdict(average) for what, average in averages(results).items()
            }
        accuracy = self._held_out(held_out, directory) if held_out else None
        return Evaluation(accuracy, measured)

    def _held_out(self, prompts: list[Prompt], directory: Path | None) -> float:
        results = measure(
            self._client, prompts, self._config.reward, self._config.rollout.longest_response
        )
        if directory is not None:
            write_answers(results, directory / f"{HELD_OUT}.jsonl")
        return fmean(result.greedy.reward for result in results)
