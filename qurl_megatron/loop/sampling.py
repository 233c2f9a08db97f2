"""The data of a step: prompts -> completions -> rewards -> advantages -> a training batch.

Global rank 0 samples and scores, then sends the batch to all ranks. It scores in its main thread,
because a signal limits the time of verifiers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from qurl_megatron.algorithm.advantages import (
    grpo_advantages,
    is_zero_variance,
    soft_overlong_penalty,
)
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.config.schema import Config, RolloutConfig
from qurl_megatron.data import rewards
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.device import from_rank_zero, rank
from qurl_megatron.loop.samples import pick_samples
from qurl_megatron.report.metrics import count_rewards
from qurl_megatron.report.samples import Sample
from qurl_megatron.rollout.client import RolloutClient


@dataclass(frozen=True)
class SampleSummary:
    """Statistics over the completions of a step, including those of replaced groups."""

    reward_mean: float  # from the verifier, without the penalty for length
    response_length_mean: float  # tokens
    response_truncated_fraction: float  # fraction of completions
    verifier_failures: int
    groups_replaced: int  # by dynamic sampling
    sampled_tokens: int
    equal_reward_fraction: float  # fraction of the batch's groups
    reward_counts: list[tuple[float, int]]  # as in StepMetrics


class Sampler:
    """Samples training batches from an endless stream of prompts. Collective over learner ranks."""

    def __init__(
        self, config: Config, client: RolloutClient, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        """Store the parts; only global rank 0 uses `client`, `prompts` and `tokenizer`."""
        self._config = config
        self._client = client
        self._tokenizer = tokenizer
        self._groups: list[RolloutGroup] = []  # of the last batch; on global rank 0
        if rank() == 0:
            self._stream = PromptStream(prompts, config.seed)

    def state(self) -> dict[str, Any]:
        """Return the position in the stream of prompts; an empty dictionary on other ranks."""
        return self._stream.state() if rank() == 0 else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            DataError: the state belongs to other prompts; on global rank 0.
        """
        if rank() == 0:
            self._stream.restore(state)

    def sample(self, step: int) -> tuple[TrainBatch, SampleSummary]:
        """Sample and score completions of the next prompts, with the settings of `step`'s stage.

        The batch has no log-probs of the learner yet, and with `advantage_estimator=gae` no
        advantages: the critic computes them.
        """
        return from_rank_zero(lambda: self._sample(self._config.rollout.at(step)))

    def samples(self, step: int, batch: TrainBatch) -> list[Sample]:
        """Return the completions of the step's batch to keep; none on other ranks than 0.

        `batch` is the last one that was sampled, with its proximal log-probs.
        """
        count = self._config.samples_per_step
        return pick_samples(step, self._groups, batch, self._tokenizer, count)

    def answers(self) -> TrainBatch:
        """Return the next prompts with their answers as responses, for supervised training."""
        return from_rank_zero(self._answers)

    def _sample(self, rollout: RolloutConfig) -> tuple[TrainBatch, SampleSummary]:
        groups, failures = self._sample_groups(rollout, rollout.prompts_per_step)
        all_groups = list(groups)
        for _ in range(rollout.dynamic_sampling_tries):
            rows = [row for row, group in enumerate(groups) if is_zero_variance(group.rewards)]
            if not rows:
                break
            replacements, more_failures = self._sample_groups(rollout, len(rows))
            all_groups += replacements
            failures += more_failures
            for row, replacement in zip(rows, replacements, strict=True):
                groups[row] = replacement
        summary = _summarize(all_groups, groups, failures)
        groups = [_penalize_length(group, rollout) for group in groups]
        self._groups = groups
        advantages = None
        if self._config.advantage_estimator == "grpo":
            advantages = grpo_advantages([group.rewards for group in groups])
        return pack(groups, pad_token_id(self._tokenizer), advantages), summary

    def _sample_groups(
        self, rollout: RolloutConfig, num_prompts: int
    ) -> tuple[list[RolloutGroup], int]:
        """Return scored completions of the next prompts, and the number of verifier failures."""
        prompts = self._stream.next(num_prompts)
        completions_by_prompt = self._client.generate(
            prompts,
            completions_per_prompt=rollout.completions_per_prompt,
            temperature=rollout.temperature,
            max_response_length=rollout.max_response_length,
        )
        groups, failures = [], 0
        for prompt, completions in zip(prompts, completions_by_prompt, strict=True):
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
            groups.append(RolloutGroup(prompt, [answer], [0.0]))  # supervised loss: no rewards
        return pack(groups, pad_token_id(self._tokenizer))


def pad_token_id(tokenizer: Any) -> int:
    """Return the id of the padding token; any id would do, because padding is masked."""
    padding = tokenizer.pad_token_id
    return tokenizer.eos_token_id if padding is None else padding


def _penalize_length(group: RolloutGroup, rollout: RolloutConfig) -> RolloutGroup:
    penalized = [
        reward
        + soft_overlong_penalty(
            len(completion.token_ids), rollout.max_response_length, rollout.soft_overlong_tokens
        )
        for reward, completion in zip(group.rewards, group.completions, strict=True)
    ]
    return replace(group, rewards=penalized)


def _summarize(
    sampled: list[RolloutGroup], kept: list[RolloutGroup], verifier_failures: int
) -> SampleSummary:
    """Return the statistics over all `sampled` groups, of which the batch has those `kept`."""
    completions = [completion for group in sampled for completion in group.completions]
    values = [reward for group in sampled for reward in group.rewards]
    lengths = [len(completion.token_ids) for completion in completions]
    return SampleSummary(
        reward_mean=fmean(values),
        response_length_mean=fmean(lengths),
        response_truncated_fraction=fmean(completion.truncated for completion in completions),
        verifier_failures=verifier_failures,
        groups_replaced=len(sampled) - len(kept),
        sampled_tokens=sum(lengths),
        equal_reward_fraction=fmean(is_zero_variance(group.rewards) for group in kept),
        reward_counts=count_rewards(values),
    )
