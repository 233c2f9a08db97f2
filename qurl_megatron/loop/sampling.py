"""One step's data: prompts -> completions -> rewards -> advantages -> a training batch.

Global rank 0 samples and scores, in its main thread (verifiers are limited in time by a signal);
every rank is given the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from qurl_megatron.algorithm.advantages import (
    grpo_advantages,
    soft_overlong_penalty,
    teaches_nothing,
)
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.config.schema import Config, RolloutConfig
from qurl_megatron.data import rewards
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.device import from_rank_zero, rank
from qurl_megatron.rollout.client import RolloutClient


@dataclass(frozen=True)
class SampleSummary:
    """What the completions of a step were like, those of replaced groups included."""

    reward_mean: float  # by the verifier, without a penalty for length
    response_length_mean: float  # tokens
    response_truncated_fraction: float  # of completions
    verifier_failures: int
    groups_replaced: int  # by dynamic sampling
    sampled_tokens: int


class Sampler:
    """Serves training batches from an endless stream of prompts. Collective over learner ranks."""

    def __init__(
        self, config: Config, client: RolloutClient, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        """`client`, `prompts` and `tokenizer` are used on global rank 0 only."""
        self._config = config
        self._client = client
        self._tokenizer = tokenizer
        if rank() == 0:
            self._stream = PromptStream(prompts, config.seed)

    def state(self) -> dict[str, Any]:
        """Where the stream of prompts is, on global rank 0; elsewhere nothing."""
        return self._stream.state() if rank() == 0 else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`. Raises DataError on global rank 0 if it is of other prompts."""
        if rank() == 0:
            self._stream.restore(state)

    def sample(self, step: int) -> tuple[TrainBatch, SampleSummary]:
        """The next prompts' completions, scored and laid out, without proximal log-probs.

        As many and as long as the stage that `step` is in says.
        """
        return from_rank_zero(lambda: self._sample(self._config.rollout.at(step)))

    def answers(self) -> TrainBatch:
        """The next prompts with their own answers as responses, for supervised training."""
        return from_rank_zero(self._answers)

    def _sample(self, rollout: RolloutConfig) -> tuple[TrainBatch, SampleSummary]:
        groups, failures = self._groups(rollout, rollout.prompts_per_step)
        sampled = list(groups)
        for _ in range(rollout.dynamic_sampling_tries):
            dull = [row for row, group in enumerate(groups) if teaches_nothing(group.rewards)]
            if not dull:
                break
            others, failed = self._groups(rollout, len(dull))
            sampled += others
            failures += failed
            for row, other in zip(dull, others, strict=True):
                groups[row] = other
        penalized = [_penalized(group, rollout) for group in groups]
        # PPO's come of its critic; in their place until then are GRPO's, 0 for groups of one.
        batch = pack(groups, penalized, grpo_advantages(penalized), pad_token_id(self._tokenizer))
        return batch, _summary(sampled, failures, replaced=len(sampled) - len(groups))

    def _groups(self, rollout: RolloutConfig, prompts_count: int) -> tuple[list[RolloutGroup], int]:
        """The next prompts' completions with their rewards, and how many verifiers failed."""
        prompts = self._stream.next(prompts_count)
        answers = self._client.generate(
            prompts,
            completions_per_prompt=rollout.completions_per_prompt,
            temperature=rollout.temperature,
            max_response_length=rollout.max_response_length,
        )
        groups, failures = [], 0
        for prompt, completions in zip(prompts, answers, strict=True):
            scores = [
                rewards.score(self._config.reward, completion.text, prompt)
                for completion in completions
            ]
            groups.append(RolloutGroup(prompt, completions, [score.value for score in scores]))
            failures += sum(score.failed for score in scores)
        return groups, failures

    def _answers(self) -> TrainBatch:
        groups = []
        for prompt in self._stream.next(self._config.warmup.batch_size):
            token_ids = self._tokenizer.encode(prompt.answer, add_special_tokens=False)
            token_ids = [*token_ids, self._tokenizer.eos_token_id]
            answer = Completion(token_ids, [0.0] * len(token_ids), prompt.answer, False, 0)
            groups.append(RolloutGroup(prompt, [answer], [1.0]))
        nothing = [[0.0]] * len(groups)
        return pack(groups, nothing, nothing, pad_token_id(self._tokenizer))


def pad_token_id(tokenizer: Any) -> int:
    """What fills up a batch's rows: any token would do, none of them counts."""
    padding = tokenizer.pad_token_id
    return tokenizer.eos_token_id if padding is None else padding


def _penalized(group: RolloutGroup, rollout: RolloutConfig) -> list[float]:
    return [
        reward
        + soft_overlong_penalty(
            len(completion.token_ids), rollout.max_response_length, rollout.soft_overlong_tokens
        )
        for reward, completion in zip(group.rewards, group.completions, strict=True)
    ]


def _summary(groups: list[RolloutGroup], verifier_failures: int, replaced: int) -> SampleSummary:
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    return SampleSummary(
        reward_mean=fmean(reward for group in groups for reward in group.rewards),
        response_length_mean=fmean(lengths),
        response_truncated_fraction=fmean(completion.truncated for completion in completions),
        verifier_failures=verifier_failures,
        groups_replaced=replaced,
        sampled_tokens=sum(lengths),
    )
