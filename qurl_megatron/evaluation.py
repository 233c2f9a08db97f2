"""Accuracy in full precision: publish in BF16, answer greedily, score."""

from __future__ import annotations

from qurl_megatron import rewards
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
        answers = self._client.generate(
            prompts,
            completions_per_prompt=1,
            temperature=0.0,
            max_response_length=self._max_response_length,
        )
        scores = [
            rewards.score(self._reward, completion.text, prompt).value
            for prompt, (completion,) in zip(prompts, answers, strict=True)
        ]
        return sum(scores) / len(scores)
