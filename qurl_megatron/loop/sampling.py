"""The data of a step: scored groups -> advantages -> a training batch.

The producer samples and scores groups on global rank 0, which has the batch: the learner and the
critic deal it out. Other ranks get the summary.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from qurl_megatron.algorithm.advantages import (
    grpo_advantages,
    is_zero_variance,
    soft_overlong_penalty,
)
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.score import mean_parts
from qurl_megatron.config.schema import Config, RolloutConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.scoring import StartScoring
from qurl_megatron.device import from_rank_zero, rank
from qurl_megatron.learner.shares import Share
from qurl_megatron.loop.producer import Producer, ScoredGroup
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
    reward_parts: dict[str, float]  # mean of each named part of the scores
    verifier_failures: int
    verifier_timeouts: int  # of these failures
    verifier_failure: str  # one of them, with its question and answer; empty if there is none
    groups_replaced: int  # by dynamic sampling
    groups_dropped: int  # sampled again, because they were too old
    groups_in_flight: int  # asked for and not trained yet, when the batch was complete
    waited_s: float  # time that training waited for groups
    scoring_s: float  # of this, with nothing but scores missing
    sampled_tokens: int
    equal_reward_fraction: float  # fraction of the batch's groups
    reward_counts: list[tuple[float, int]]  # as in StepMetrics
    token_lag_mean: float  # of the batch's tokens
    token_lag_max: int
    stale_token_fraction: float  # of the batch's tokens, those of a lag above 0


class Sampler:
    """Makes training batches from an endless stream of prompts. Collective over learner ranks."""

    def __init__(
        self,
        config: Config,
        client: RolloutClient,
        score: StartScoring,
        prompts: list[Prompt],
        tokenizer: Any,
        *,
        servers_join: Callable[[], bool],
        admit: Callable[[], None],
    ) -> None:
        """Store the parts; only global rank 0 uses them, apart from `admit`.

        Args:
            servers_join: returns True if a server waits for the current weights.
            admit: collective; sends the current weights to the servers that wait for them.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._servers_join = servers_join
        self._admit = admit

        def sample(prompt: Prompt, rollout: RolloutConfig) -> Awaitable[list[Completion]]:
            settings = client.sampling(
                completions_per_prompt=rollout.completions_per_prompt,
                temperature=rollout.temperature,
                max_response_length=rollout.max_response_length,
            )
            return client.group(prompt, settings)

        self._groups: list[RolloutGroup] = []  # of the last batch; on global rank 0
        if rank() == 0:
            self._stream = PromptStream(prompts, config.seed)
            self._producer = Producer(config.rollout, config.steps, self._stream, sample, score)

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

    def close(self) -> None:
        """Cancel what is being sampled."""
        if rank() == 0:
            self._producer.close()

    def sample(self, step: int, version: int) -> tuple[TrainBatch, SampleSummary]:
        """Return the batch of `step`, which starts from weight version `version`.

        It has the settings of the step's stage. It has no log-probs of the learner yet, and with
        `advantage_estimator=gae` no advantages: the critic computes them. Ranks other than global
        rank 0 get an empty batch.
        """
        batch = TrainBatch.empty()
        sampling = self._sample(self._config.rollout.at(step), step, version)

        def advance() -> SampleSummary | None:
            nonlocal batch
            sampled = next(sampling)
            if sampled is None:
                return None
            batch, summary = sampled
            return summary

        while (summary := from_rank_zero(advance)) is None:
            self._admit()
        return batch, summary

    def samples(self, step: int, shares: Sequence[Share]) -> list[Sample]:
        """Return the completions of the step's batch to keep; none on other ranks than 0.

        `shares` are those of the last batch that was sampled, with its proximal log-probs.
        """
        count = self._config.samples_per_step
        return pick_samples(step, self._groups, shares, self._tokenizer, count) if count else []

    def answers(self) -> TrainBatch:
        """Return the next prompts with their answers as responses, for supervised training.

        Ranks other than global rank 0 get an empty batch.
        """
        return self._answers() if rank() == 0 else TrainBatch.empty()

    def _sample(
        self, rollout: RolloutConfig, step: int, version: int
    ) -> Generator[tuple[TrainBatch, SampleSummary] | None]:
        """Yield None whenever a server waits for weights, and at the end batch and summary."""
        producer = self._producer
        dropped, waited_s, scoring_s = producer.dropped, producer.waited_s, producer.scoring_s

        def take(count: int) -> Generator[None, None, list[ScoredGroup]]:
            while True:
                groups = producer.take(
                    count, step=step, version=version, interrupted=self._servers_join
                )
                if groups is not None:
                    return groups
                yield None

        chosen = yield from take(rollout.prompts_per_step)
        sampled = list(chosen)
        for _ in range(rollout.dynamic_sampling_tries):
            rows = [row for row, group in enumerate(chosen) if is_zero_variance(group.rewards)]
            if not rows:
                break
            replacements = yield from take(len(rows))
            sampled += replacements
            for row, replacement in zip(rows, replacements, strict=True):
                chosen[row] = replacement
        producer.end_step()
        groups = [_penalize_length(group, rollout) for group in chosen]
        self._groups = groups
        advantages = None
        if self._config.advantage_estimator == "grpo":
            advantages = grpo_advantages([group.rewards for group in groups])
        batch = pack(groups, advantages, version)
        summary = _summarize(
            sampled,
            chosen,
            batch,
            dropped=producer.dropped - dropped,
            in_flight=producer.in_flight,
            waited_s=producer.waited_s - waited_s,
            scoring_s=producer.scoring_s - scoring_s,
        )
        yield batch, summary

    def _answers(self) -> TrainBatch:
        groups = []
        for prompt in self._stream.next(self._config.warmup.batch_size):
            token_ids = self._tokenizer.encode(prompt.answer, add_special_tokens=False)
            token_ids = [*token_ids, self._tokenizer.eos_token_id]
            answer = Completion(token_ids, [0.0] * len(token_ids), prompt.answer, False, [])
            groups.append(RolloutGroup(prompt, [answer], [0.0]))  # supervised loss: no rewards
        return pack(groups)


def _penalize_length(group: ScoredGroup, rollout: RolloutConfig) -> RolloutGroup:
    penalized = [
        reward
        + soft_overlong_penalty(
            len(completion.token_ids), rollout.max_response_length, rollout.soft_overlong_tokens
        )
        for reward, completion in zip(group.rewards, group.completions, strict=True)
    ]
    parts = [score.parts for score in group.scores]
    return RolloutGroup(group.prompt, group.completions, penalized, parts)


def _summarize(
    sampled: list[ScoredGroup],
    chosen: list[ScoredGroup],
    batch: TrainBatch,
    *,
    dropped: int,
    in_flight: int,
    waited_s: float,
    scoring_s: float,
) -> SampleSummary:
    """Return the statistics over all `sampled` groups, of which the batch has those `chosen`."""
    assert batch.token_lags is not None
    lags = batch.token_lags[batch.loss_mask]
    completions = [completion for group in sampled for completion in group.completions]
    values = [reward for group in sampled for reward in group.rewards]
    lengths = [len(completion.token_ids) for completion in completions]
    scores = [score for group in sampled for score in group.scores]
    failed = [score for score in scores if score.failure]
    return SampleSummary(
        reward_mean=fmean(values),
        response_length_mean=fmean(lengths),
        response_truncated_fraction=fmean(completion.truncated for completion in completions),
        reward_parts=mean_parts(scores),
        verifier_failures=len(failed),
        verifier_timeouts=sum(score.timed_out for score in failed),
        verifier_failure=_example_of_failure(sampled),
        groups_replaced=len(sampled) - len(chosen),
        groups_dropped=dropped,
        groups_in_flight=in_flight,
        waited_s=waited_s,
        scoring_s=scoring_s,
        sampled_tokens=sum(lengths),
        equal_reward_fraction=fmean(is_zero_variance(group.rewards) for group in chosen),
        reward_counts=count_rewards(values),
        token_lag_mean=lags.double().mean().item(),
        token_lag_max=int(lags.max()),
        stale_token_fraction=(lags > 0).double().mean().item(),
    )


def _example_of_failure(groups: list[ScoredGroup]) -> str:
    """Describe the first completion whose verifier failed; an empty text if none did."""
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            if score.failure:
                question, end = group.prompt.question[:80], completion.text[-80:]
                return f"{score.failure}; question {question!r}, end of the response {end!r}"
    return ""
