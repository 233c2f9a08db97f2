"""Accuracy in full precision: publish in BF16, answer greedily, score."""

from __future__ import annotations

from statistics import fmean

from qurl_megatron.avg_at_k import greedy_answers
from qurl_megatron.batch import Prompt
from qurl_megatron.device import from_rank_zero
from qurl_megatron.publish import Publisher
from qurl_megatron.rollout import RolloutClient


class Evaluator:
    """Measures the learner's policy on a BF16 server set. Collective over all learner ranks."""

    def __init__(
        self, publisher: Publisher, client: RolloutClient, reward: str, max_response_length: int
    ) -> None:
        """`client` is used on global rank 0 only."""
        self._publisher = publisher
        self._client = client
        self._reward = reward
        self._max_response_length = max_response_length

    def accuracy(self, prompts: list[Prompt]) -> float:
        """Fraction of `prompts`, those of global rank 0, whose greedy answer is right."""
        self._publisher.publish()
        return from_rank_zero(lambda: self._measure(prompts))

    def _measure(self, prompts: list[Prompt]) -> float:
        answers = greedy_answers(self._client, prompts, self._reward, self._max_response_length)
        return fmean(answer.reward for answer in answers)
