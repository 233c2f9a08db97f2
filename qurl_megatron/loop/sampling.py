"""The data of a step: scored groups -> advantages -> a training batch, and samples of it.

The producer samples and scores groups on global rank 0, which has the batch: the learner and the
critic distribute it. Other ranks get the summary. Some completions of the batch are kept for
people to read.
"""

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.advantages import (
    WHITENED,
    group_advantages,
    is_zero_variance,
    soft_overlong_penalty,
    whiten,
)
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.proof import check_differ
from qurl_megatron.algorithm.score import mean_parts
from qurl_megatron.config.schema import OBJECTIVES, Config, RolloutConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.rewards import first_value, what_decides_scores
from qurl_megatron.data.scoring import StartScoring
from qurl_megatron.device import SharedError, from_rank_zero, rank
from qurl_megatron.learner.shares import Share
from qurl_megatron.loop.producer import Producer
from qurl_megatron.report.metrics import KINDS, SHOWN_TOKENS, Sample, count_rewards, shorten
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.weight_sync.publish import Publisher

DIGITS = 3  # decimals of a ratio in a sample
TRIES = 3  # to get a step's completions scored

Row = tuple[int, int]
"""Index of a group of the step, and index of a completion in the group."""


class NothingToTrainOn(RuntimeError, SharedError):
    """There is nothing to train on; the text says why."""


class Sampler:
    """Makes training batches from an endless stream of prompts. Collective over learner ranks.

    Ranks other than global rank 0 get empty batches, and no samples.
    """

    def __init__(
        self,
        config: Config,
        client: RolloutClient,
        publisher: Publisher,
        score: StartScoring,
        prompts: list[Prompt],
        tokenizer: Any,
        say: Callable[[str], None],
    ) -> None:
        """Store the parts; only global rank 0 uses them, apart from the publisher.

        The publisher sends the current weights to servers of the client's fleet that wait for them.
        """
        self._config = config
        self._say = say
        self._tokenizer = tokenizer
        self._client = client
        self._publisher = publisher

        def sample(prompt: Prompt, rollout: RolloutConfig) -> Awaitable[list[Completion]]:
            return client.group(prompt, client.sampling(**settings_of(rollout)))

        self._batch = TrainBatch.empty()  # the last batch; like its groups, on global rank 0 only
        self._groups: list[RolloutGroup] = []
        if rank() == 0:
            self._stream = PromptStream(
                prompts,
                config.seed,
                shuffle=config.prompts.shuffle,
                weights=config.prompts.weights,
                retire_after=config.rollout.retire_after,
                least=config.rollout.prompts_per_step,
            )
            self._stream.visit_under(what_decides_rewards(config, step=1))
            self._wait = client.fleet.controller.wait
            self._producer = Producer(config.rollout, config.steps, self._stream, sample, score)

    def state(self) -> dict[str, Any]:
        """Return the position in the stream of prompts; an empty dictionary on other ranks."""
        return self._stream.state() if rank() == 0 else {}

    def restore(self, state: dict[str, Any], steps_done: int) -> None:
        """Continue from `state`, which is of so many steps done.

        Raises:
            DataError: the state belongs to other prompts; on global rank 0.
        """
        if rank() == 0:
            self._stream.restore(state)
            self._stream.visit_under(what_decides_rewards(self._config, steps_done + 1))

    def close(self) -> None:
        """Cancel all requests that run."""
        if rank() == 0:
            self._wait(self._producer.close())

    def sample(self, step: int, version: int) -> tuple[TrainBatch, dict[str, Any]]:
        """Return the batch of `step`, which starts from weight version `version`.

        It has the settings of the step's stage. It has no log-probs of the learner yet, and with
        `objective.advantage_estimator=gae` no advantages: the critic computes them.

        Returns:
            The batch, and the fields of `StepMetrics` about sampling and rewards, with the number
            of `sampled_tokens`.

        Raises:
            NothingToTrainOn: no completion can be trained on, in any of `TRIES` tries.
        """
        self._batch = TrainBatch.empty()
        sampling = self._sample(step, version)
        with self._publisher.serving():
            # Rank 0 yields when a server joins: it takes all ranks to send that server the weights.
            while (summary := from_rank_zero(lambda: next(sampling))) is None:
                self._publisher.admit()
        return self._batch, summary

    def samples(self, step: int, shares: Sequence[Share]) -> list[Sample]:
        """Return the completions of the step's batch that are kept for people to read.

        `shares` are the shares of the last batch that was sampled, with its proximal log-probs.
        """
        count = self._config.samples_per_step
        if not count:
            return []
        proximal = [each for share in shares for each in share.collect("proximal_logprobs")]
        return make_samples(step, self._groups, proximal, self._tokenizer, count)

    def _sample(self, step: int, version: int) -> Generator[dict[str, Any] | None]:
        """Make the batch; yield None whenever a server waits for weights, and finally the summary.

        Only global rank 0 calls this.
        """
        rollout = self._config.rollout.at(step)
        producer = self._producer
        dropped, waited_s, scoring_s = producer.dropped, producer.waited_s, producer.scoring_s

        def take(count: int) -> Generator[None, None, list[RolloutGroup]]:
            interrupted = self._client.fleet.has_joining
            while True:
                groups = self._wait(
                    producer.take(count, step=step, version=version, interrupted=interrupted)
                )
                if groups is not None:
                    return groups
                yield

        for attempt in range(1, TRIES + 1):
            chosen = yield from take(rollout.prompts_per_step)
            sampled = list(chosen)
            for _ in range(rollout.dynamic_sampling_tries):
                rows = [row for row, group in enumerate(chosen) if is_zero_variance(group.rewards)]
                if not rows or _why_untrained(chosen, rollout):
                    break
                replacements = yield from take(len(rows))
                sampled += replacements
                for row, replacement in zip(rows, replacements, strict=True):
                    chosen[row] = replacement
            if not rollout.accept_mismatch:
                check_differ(group.completions for group in sampled)
            why = _why_untrained(chosen, rollout)
            if not why:
                break
            tried = f"in try {attempt} of {TRIES}"
            failure = f"no completion of step {step} can be trained on, {tried}"
            if attempt == TRIES:
                raise NothingToTrainOn(f"{failure}; {why}; mend that and resume")
            self._say(f"warning: {failure}; {why}")
            self._wait(producer.take_again(step, version))
        producer.end_step()
        for group in sampled:
            if not (group.failed or any(score.failure for score in group.scores)):
                firsts = [first_value(self._config, group.prompt.asked, s) for s in group.scores]
                self._stream.visited(group.prompt, is_equal=is_zero_variance(firsts))
        # Here and not when the next step begins: a checkpoint may begin the next epoch.
        self._stream.visit_under(what_decides_rewards(self._config, step + 1))
        self._groups = [_penalize_length(group, rollout) for group in chosen]
        estimator, advantages = self._config.objective.advantage_estimator, None
        if estimator != "gae":
            advantages = group_advantages([group.rewards for group in self._groups], estimator)
        self._batch = pack(
            self._groups,
            advantages,
            version,
            leaves_out_truncated=rollout.mask_truncated,
            has_group_means=self._config.objective.objective not in OBJECTIVES,
        )
        if estimator in WHITENED and self._batch.advantages is not None:
            self._batch.advantages = whiten(self._batch.advantages, self._batch.loss_mask)
        yield {
            **_summarize(sampled, chosen, self._batch),
            **self._client.metrics(sampled),
            "prompts_retired": len(self._stream.retired),
            "groups_dropped": producer.dropped - dropped,
            "groups_in_flight": producer.in_flight,
            "time_waited_s": producer.waited_s - waited_s,
            "time_scoring_s": producer.scoring_s - scoring_s,
        }


def settings_of(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the arguments of `RolloutClient.sampling` for rollouts."""
    return {
        "completions_per_prompt": rollout.completions_per_prompt,
        "temperature": rollout.temperature,
        "max_completion_length": rollout.max_completion_length,
        "top_p": rollout.top_p,
        "records_masks": rollout.top_p < 1,
    }


def what_decides_rewards(config: Config, step: int) -> dict[str, Any]:
    """Return the settings, as JSON, that decide which rewards a prompt's completions may get."""
    return {**settings_of(config.rollout.at(step)), **what_decides_scores(config)}


def _penalize_length(group: RolloutGroup, rollout: RolloutConfig) -> RolloutGroup:
    penalized = [
        reward
        + soft_overlong_penalty(
            completion.longest_turn, rollout.max_completion_length, rollout.soft_overlong_tokens
        )
        for reward, completion in zip(group.rewards, group.completions, strict=True)
    ]
    return replace(group, rewards=penalized)


def _summarize(
    sampled: list[RolloutGroup], chosen: list[RolloutGroup], batch: TrainBatch
) -> dict[str, Any]:
    """Return metrics of all `sampled` groups, and of the `chosen` ones, which make the batch."""
    assert batch.token_staleness is not None
    staleness = batch.token_staleness[batch.trained]
    completions = [completion for group in sampled for completion in group.completions]
    values = [reward for group in sampled for reward in group.rewards]
    lengths = [completion.num_sampled for completion in completions]
    scores = [score for group in sampled for score in group.scores]
    failures = [
        f"{score.failure}; question {group.prompt.question[:80]!r}, "
        f"end of the completion {completion.text[-80:]!r}"
        for group in sampled
        for completion, score in zip(group.completions, group.scores, strict=True)
        if score.failure
    ]
    return {
        "reward_mean": fmean(values),
        "completion_length_mean": fmean(lengths),
        "completion_truncated_fraction": fmean(each.truncated for each in completions),
        "reward_parts": mean_parts(scores),
        "reward_counts": count_rewards(values),
        "verifier_failures": len(failures),
        "verifier_timeouts": sum(score.timed_out for score in scores),
        "verifier_failure": failures[0] if failures else "",
        "groups_replaced": len(sampled) - len(chosen),
        "equal_reward_fraction": fmean(is_zero_variance(group.rewards) for group in chosen),
        "sampled_tokens": sum(lengths),
        "token_staleness_mean": staleness.double().mean().item(),
        "token_staleness_max": int(staleness.max()),
        "stale_token_fraction": (staleness > 0).double().mean().item(),
    }


def _why_untrained(groups: list[RolloutGroup], rollout: RolloutConfig) -> str:
    """Return why no completion can be trained on; empty if one can.

    Either none has a score, and the first says why, or all were cut off.
    """
    failures = [score.failure for group in groups for score in group.scores]
    if "" not in failures:
        return [*failures, *(each.failure for group in groups for each in group.failed)][0]
    if rollout.mask_truncated and all(c.truncated for group in groups for c in group.completions):
        return (
            "all were cut off, and rollout.mask_truncated leaves them out; raise "
            f"rollout.max_completion_length={rollout.max_completion_length}"
        )
    return ""


def make_samples(
    step: int, groups: list[RolloutGroup], proximal: list[Tensor], tokenizer: Any, count: int
) -> list[Sample]:
    """Return at most `count` completions of `groups`.

    `proximal` has the proximal log-probs `[tokens]` of each sequence in the batch of `groups`.
    """
    log_ratios: dict[Row, Tensor] = {}  # of the sampled tokens
    logprobs = iter(proximal)
    for prompt, group in enumerate(groups):
        for index, completion in enumerate(group.completions):
            of_sequences = [next(logprobs) for _ in completion.sequences()]
            # The last sequence is the completion itself; branches come before it.
            of_completion = of_sequences[-1][-len(completion.token_ids) :]
            behaviour = torch.tensor(completion.behaviour_logprobs)
            log_ratios[prompt, index] = of_completion[torch.tensor(completion.sampled)] - behaviour
    samples = []
    half = SHOWN_TOKENS // 2  # a longer completion is shown with its two ends
    for (prompt, index), kind in _choose(groups, log_ratios, count).items():
        group = groups[prompt]
        completion = group.completions[index]
        of_sampled = iter(log_ratios[prompt, index].exp().tolist())
        ratios = [round(next(of_sampled), DIGITS) if each else None for each in completion.sampled]
        length = len(completion.token_ids)
        shown = [at for at in range(length) if at < half or at >= length - half]
        samples.append(
            Sample(
                step=step,
                kind=kind,
                prompt=shorten(group.prompt.question),
                text=shorten(completion.text),
                reward=group.rewards[index],
                parts=group.scores[index].parts,
                length=length,
                truncated=completion.truncated,
                weight_versions=sorted(set(completion.token_versions)),
                tokens=tokenizer.batch_decode([[completion.token_ids[place]] for place in shown]),
                ratios=[ratios[place] for place in shown],
                end=completion.episode.end if completion.episode else "",
            )
        )
    return samples


def _choose(
    groups: list[RolloutGroup], log_ratios: dict[Row, Tensor], count: int
) -> dict[Row, str]:
    """Return the kind of each chosen completion.

    The choice depends on the step's data alone. It takes turns between four kinds: the best and the
    worst completion of the prompt whose rewards differ most, a completion that was cut off, and the
    one with the token that quantization changed most. Then the next of each kind follow.
    """

    def agreement(numbered: tuple[int, RolloutGroup]) -> float:
        rewards = numbered[1].rewards
        return min(rewards) - max(rewards)

    def largest(row: Row) -> float:
        return max(map(abs, log_ratios[row].tolist()), default=0.0)

    with_rewards = [each for each in enumerate(groups) if each[1].rewards]
    prompts = sorted(with_rewards, key=agreement)  # the sort is stable
    candidates = (
        [(prompt, group.rewards.index(max(group.rewards))) for prompt, group in prompts],
        [(prompt, group.rewards.index(min(group.rewards))) for prompt, group in prompts],
        [row for row in log_ratios if groups[row[0]].completions[row[1]].truncated],
        sorted(log_ratios, key=largest, reverse=True),
    )
    queues = dict(zip(KINDS, map(iter, candidates), strict=True))
    chosen: dict[Row, str] = {}
    # This ends, because the last kind has all completions.
    while len(chosen) < min(count, len(log_ratios)):
        for kind, queue in queues.items():
            row = next((row for row in queue if row not in chosen), None)
            if row is not None and len(chosen) < count:
                chosen[row] = kind
    return chosen
