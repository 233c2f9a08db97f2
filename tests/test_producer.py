"""Groups sampled ahead: their order, their age, and what a stop at any moment leaves behind."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import Config, RolloutConfig, StageConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.loop import producer as producer_module
from qurl_megatron.loop.producer import Producer
from qurl_megatron.loop.sampling import NothingToTrainOn, Sampler
from qurl_megatron.rollout.controller import Controller
from samplers import sampler_of, scores_of

PROMPTS = [Prompt(str(number), "", "", [number]) for number in range(7)]
REJECTED = {"2", "5"}
STEPS = 12
CONTROLLER = Controller()
PER_STEP = 3


class Killed(Exception):
    """Ends a simulated run."""


@dataclass
class Servers:
    """Servers that answer after `delay_s(prompt)` seconds, and a verifier.

    Of a prompt's completions the first is right, except that none is of a prompt in `REJECTED`.
    None can be scored while `is_down`.
    """

    delay_s: Callable[[Prompt], float] = lambda prompt: 0.0
    version: int = 1
    asked: list[tuple[Prompt, RolloutConfig]] = field(default_factory=list)
    cancelled: int = 0
    is_down: bool = False

    async def sample(self, prompt: Prompt, settings: RolloutConfig) -> list[Completion]:
        """Return one completion; its last token has the weight version at its end."""
        self.asked.append((prompt, settings))
        first = self.version
        try:
            await asyncio.sleep(self.delay_s(prompt))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        versions = [first] * 3 + [self.version]
        return [Completion([5] * 4, [0.0] * 4, "", False, versions)] * (
            settings.completions_per_prompt
        )

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        """Return the scores at once."""
        right = prompt.id not in REJECTED
        if self.is_down:
            failed: Future[list[Score]] = Future()
            failed.set_result([Score(0.0, {}, "no such host")] * len(completions))
            return failed
        return scores_of(float(right and n == 0) for n in range(len(completions)))

    def sampling(self, *, records_masks: bool, **settings: Any) -> RolloutConfig:
        """Return the settings of `group`, as those of a step."""
        return RolloutConfig(**settings)

    group = sample


def rollout(max_staleness: int, stages: dict[int, StageConfig] | None = None) -> RolloutConfig:
    return RolloutConfig(
        prompts_per_step=PER_STEP,
        completions_per_prompt=2,
        max_staleness=max_staleness,
        stages=stages or {},
    )


@contextmanager
def closed_at_end(producer: Producer) -> Iterator[Producer]:
    try:
        yield producer
    finally:
        CONTROLLER.wait(producer.close())


def made(
    servers: Servers, config: RolloutConfig, stream: PromptStream | None = None
) -> AbstractContextManager[Producer]:
    stream = stream or PromptStream(PROMPTS, seed=0)
    return closed_at_end(Producer(config, STEPS, stream, servers.sample, servers.score))


def take(producer: Producer, number: int, step: int, servers: Servers) -> list[RolloutGroup]:
    taking = producer.take(number, step=step, version=servers.version, interrupted=lambda: False)
    groups = CONTROLLER.wait(taking)
    assert groups is not None
    return groups


def number_asked(producer: Producer, servers: Servers) -> int:
    """Return the number of prompts sent, after the producer has sent all that it wants to."""
    CONTROLLER.wait(asyncio.sleep(0.01))
    return len(servers.asked)


def ids(groups: list[RolloutGroup]) -> list[str]:
    return [group.prompt.id for group in groups]


def in_order(number: int) -> list[str]:
    """Return the ids of the first prompts of the stream."""
    return [prompt.id for prompt in PromptStream(PROMPTS, seed=0).next(number)]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_groups_are_taken_in_the_order_of_the_stream_whichever_is_answered_first(
    max_staleness: int,
) -> None:
    delays = random.Random(max_staleness)
    servers = Servers(delay_s=lambda prompt: delays.choice([0.0, 0.001, 0.03]))
    taken = []
    with made(servers, rollout(max_staleness)) as producer:
        for step in range(1, STEPS + 1):
            taken += ids(take(producer, PER_STEP, step, servers))
            if step % 2:  # whether a step has ended makes no difference to what is taken
                producer.end_step()
            servers.version += 1
    assert taken == in_order(PER_STEP * STEPS)
    assert [prompt.id for prompt, _ in servers.asked] == taken  # none twice, none after the end
    assert producer.dropped == 0


def test_without_staleness_nothing_is_asked_for_before_it_is_taken() -> None:
    servers = Servers()
    with made(servers, rollout(0)) as producer:
        assert servers.asked == []
        for number in (3, 1, 1, 3):
            before = len(servers.asked)
            take(producer, number, 1, servers)
            assert number_asked(producer, servers) == before + number
            assert producer.in_flight == 0


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_no_more_is_asked_for_than_the_staleness_allows_and_no_less(max_staleness: int) -> None:
    servers = Servers()
    oldest = []
    rejected = 0
    with made(servers, rollout(max_staleness)) as producer:
        for step in range(1, STEPS + 1):
            groups = take(producer, PER_STEP, step, servers)
            if step % 3 == 0:  # as dynamic sampling does
                rejected += 2
                groups += take(producer, 2, step, servers)
            oldest.append(
                servers.version - min(group.completions[0].token_versions[0] for group in groups)
            )
            steps_asked_for = min(max_staleness + step, STEPS)
            assert number_asked(producer, servers) - rejected == steps_asked_for * PER_STEP
            assert producer.in_flight == (steps_asked_for - step) * PER_STEP
            servers.version += 1
    assert max(oldest) == max_staleness
    assert producer.dropped == 0


def test_answers_that_are_not_needed_yet_are_not_waited_for() -> None:
    late = in_order(PER_STEP + 1)[-1]
    servers = Servers(delay_s=lambda prompt: 60.0 if prompt.id == late else 0.0)
    with made(servers, rollout(2)) as producer:
        assert ids(take(producer, PER_STEP, 1, servers)) == in_order(PER_STEP)
        assert producer.waited_s < 10
        interrupted = iter([False, True])
        taking = producer.take(PER_STEP, step=2, version=1, interrupted=lambda: next(interrupted))
        groups = CONTROLLER.wait(taking)
        assert groups is None and producer.in_flight == 3 * PER_STEP


def test_a_wait_that_was_interrupted_goes_on() -> None:
    servers = Servers(delay_s=lambda prompt: 0.4)
    with made(servers, rollout(0)) as producer:
        times = 0
        groups = None
        while not groups:
            taking = producer.take(PER_STEP, step=1, version=1, interrupted=lambda: True)
            groups = CONTROLLER.wait(taking)
            times += not groups
        assert times >= 1 and ids(groups) == in_order(PER_STEP)
        assert len(servers.asked) == PER_STEP
        assert 0.3 < producer.waited_s < 10


def test_only_the_wait_for_scores_alone_counts_as_scoring() -> None:
    class SlowVerifier(Servers):
        def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
            scores: Future[list[Score]] = Future()
            done = super().score(prompt, completions).result()
            threading.Timer(0.3, scores.set_result, [done]).start()
            return scores

    slow_samplers = Servers(delay_s=lambda prompt: 1.0)
    for servers, least_s, most_s in ((SlowVerifier(), 0.25, 10), (slow_samplers, 0, 0.5)):
        with made(servers, rollout(0)) as producer:
            take(producer, PER_STEP, 1, servers)
            assert least_s <= producer.scoring_s <= most_s
            assert producer.scoring_s <= producer.waited_s


def test_groups_that_are_too_old_are_dropped_and_their_prompts_are_sampled_again_first() -> None:
    servers = Servers()
    with made(servers, rollout(1)) as producer:
        take(producer, PER_STEP, 1, servers)
        assert number_asked(producer, servers) == 2 * PER_STEP
        servers.version += 2  # two updates in one step: the groups in flight are too old
        groups = take(producer, PER_STEP, 2, servers)
        assert ids(groups) == in_order(2 * PER_STEP)[PER_STEP:]
        assert producer.dropped == PER_STEP
        assert {tuple(group.completions[0].token_versions) for group in groups} == {(3,) * 4}
        assert ids(take(producer, PER_STEP, 3, servers)) == in_order(3 * PER_STEP)[-PER_STEP:]
        assert producer.dropped == PER_STEP


def test_a_group_that_is_dropped_while_it_is_sampled_is_cancelled() -> None:
    late, delays = in_order(PER_STEP + 1)[-1], iter([60.0, 0.0])
    servers = Servers(delay_s=lambda prompt: next(delays) if prompt.id == late else 0.0)
    with made(servers, rollout(1, stages={2: StageConfig(8, 4)})) as producer:
        take(producer, PER_STEP, 1, servers)
        assert number_asked(producer, servers) == 2 * PER_STEP
        (moved,) = take(producer, 1, 1, servers)  # to step 1, with its number of completions
        assert moved.prompt.id == late and len(moved.completions) == 2
        number_asked(producer, servers)
        assert servers.cancelled == producer.dropped == 1


def test_the_oldest_token_of_a_group_decides_its_age() -> None:
    servers = Servers(delay_s=lambda prompt: 0.0 if prompt.id in in_order(PER_STEP) else 0.3)
    with made(servers, rollout(1)) as producer:
        take(producer, PER_STEP, 1, servers)
        assert number_asked(producer, servers) == 2 * PER_STEP
        servers.version += 2  # requests are running: their first tokens have version 1
        take(producer, PER_STEP, 2, servers)
        assert producer.dropped == PER_STEP


def test_servers_that_keep_sampling_with_old_weights_are_an_error() -> None:
    servers = Servers()
    with made(servers, rollout(1)) as producer:
        with pytest.raises(RuntimeError, match="weight version 5 was answered with weights 4 ver"):
            CONTROLLER.wait(producer.take(PER_STEP, step=1, version=5, interrupted=lambda: False))


def test_a_group_has_the_settings_of_the_step_that_trains_it() -> None:
    config = rollout(2, stages={3: StageConfig(8, 4), 4: StageConfig(16, 3)})
    servers = Servers()
    sizes = {step: config.at(step).completions_per_prompt for step in range(1, STEPS + 1)}
    assert list(sizes.values())[:5] == [2, 2, 4, 3, 3]
    taken = []
    with made(servers, config) as producer:
        for step in range(1, STEPS + 1):
            # One group of each step is rejected, so later groups move to an earlier step.
            groups = take(producer, PER_STEP, step, servers) + take(producer, 1, step, servers)
            assert {len(group.completions) for group in groups} == {sizes[step]}
            taken += ids(groups)
            servers.version += 1
    assert taken == in_order((PER_STEP + 1) * STEPS)
    # At each change of stage, two groups asked for with its settings move to the step before it.
    assert producer.dropped == 2 * 2


def test_a_checkpoint_counts_the_groups_of_whole_steps_only() -> None:
    servers, stream = Servers(), PromptStream(PROMPTS, seed=0)
    with made(servers, rollout(1), stream) as producer:
        take(producer, PER_STEP, 1, servers)
        take(producer, 2, 1, servers)  # replacements
        assert stream.position == 0
        producer.end_step()
        assert stream.position == PER_STEP + 2
        take(producer, PER_STEP, 2, servers)
        assert stream.position == PER_STEP + 2


def test_what_sampling_or_scoring_raises_is_raised_by_take() -> None:
    async def fail(prompt: Prompt, settings: RolloutConfig) -> list[Completion]:
        await asyncio.sleep(60.0 if prompt.id != in_order(2)[1] else 0.0)
        raise OSError("the server is gone")

    def fail_to_score(prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        raise OSError("no such verifier")

    servers, stream = Servers(), PromptStream(PROMPTS, seed=0)
    for sample, score, message in (
        (fail, servers.score, "the server is gone"),
        (servers.sample, fail_to_score, "no such verifier"),
    ):
        with closed_at_end(Producer(rollout(1), STEPS, stream, sample, score)) as producer:
            with pytest.raises(OSError, match=message):
                CONTROLLER.wait(
                    producer.take(PER_STEP, step=1, version=1, interrupted=lambda: False)
                )
            assert producer.waited_s < 30
            assert stream.position == 0


def test_closing_cancels_what_is_being_sampled() -> None:
    servers = Servers(delay_s=lambda prompt: 0.0 if prompt.id in in_order(PER_STEP) else 60.0)
    with made(servers, rollout(1)) as producer:
        take(producer, PER_STEP, 1, servers)
    assert servers.cancelled == PER_STEP


def run_config(max_staleness: int) -> Config:
    """Return a run with stages, and with dynamic sampling, which replaces prompts of `REJECTED`."""
    config = Config(steps=STEPS, rollout=rollout(max_staleness, stages={5: StageConfig(8, 4)}))
    config.rollout.dynamic_sampling_tries = 2
    return config


def plain_program() -> tuple[list[list[str]], list[tuple[str, int]]]:
    """Return the ids of each step's batch, and id and size of every request, one after another."""
    config, stream = run_config(0), PromptStream(PROMPTS, seed=0)
    batches, asked = [], []
    for step in range(1, STEPS + 1):
        settings = config.rollout.at(step)
        batch = stream.next(PER_STEP)
        asked += [(prompt.id, settings.completions_per_prompt) for prompt in batch]
        for _ in range(settings.dynamic_sampling_tries):
            rows = [row for row, prompt in enumerate(batch) if prompt.id in REJECTED]
            for row, prompt in zip(rows, stream.next(len(rows)), strict=True):
                batch[row] = prompt
                asked.append((prompt.id, settings.completions_per_prompt))
        batches.append([prompt.id for prompt in batch])
    return batches, asked


def ids_in(batch: TrainBatch, settings: RolloutConfig) -> list[str]:
    """Return the id of each prompt in a batch, which must have the settings' number of rows."""
    assert len(batch) == PER_STEP * settings.completions_per_prompt
    starts = (batch.lengths.cumsum(0) - batch.lengths)[:: settings.completions_per_prompt]
    return [PROMPTS[token].id for token in batch.tokens[starts]]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_batches_are_those_of_a_plain_program(max_staleness: int) -> None:
    config, servers = run_config(max_staleness), Servers(delay_s=lambda prompt: 0.001)
    expected, asked = plain_program()
    with sampler_of(config, servers, servers.score, PROMPTS) as sampler:
        for step in range(1, STEPS + 1):
            batch, summary = sampler.sample(step, servers.version)
            assert ids_in(batch, config.rollout.at(step)) == expected[step - 1]
            servers.version += 1
    if max_staleness == 0:  # the requests are the same as well
        assert summary["groups_dropped"] == 0
        requests = [(prompt.id, size.completions_per_prompt) for prompt, size in servers.asked]
        assert requests == asked


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_what_could_not_be_scored_is_sampled_again_and_ends_the_run_the_third_time(
    max_staleness: int,
) -> None:
    config, servers = run_config(max_staleness), Servers(is_down=True)
    expected, _ = plain_program()
    if max_staleness:  # a group that was scored too early would be replaced alone
        config.rollout.dynamic_sampling_tries = 0
        ordered = iter(in_order(PER_STEP * STEPS))
        expected = [list(batch) for batch in zip(*[ordered] * PER_STEP, strict=True)]
    batches: list[list[str]] = []
    said = []

    def mend(text: str) -> None:
        said.append(text)
        servers.is_down = len(batches) >= 6 or "step 1 can be trained on, in try 1" in text

    def sample_on(sampler: Sampler) -> None:
        for step in range(1 + len(batches), STEPS + 1):
            batch, _ = sampler.sample(step, servers.version)
            batches.append(ids_in(batch, config.rollout.at(step)))
            servers.version += 1
            servers.is_down |= step == 6

    with sampler_of(config, servers, servers.score, PROMPTS, say=mend) as sampler:
        with pytest.raises(NothingToTrainOn, match="in try 3 of 3; no such host; mend that and"):
            sample_on(sampler)
        state = sampler.state()
    assert 6 <= len(batches) < STEPS
    assert said[:2] == [
        f"warning: no completion of step 1 can be trained on, in try {number} of 3; no such host"
        for number in (1, 2)
    ]
    servers.is_down = False
    with sampler_of(config, servers, servers.score, PROMPTS) as sampler:
        sampler.restore(state, len(batches))
        sample_on(sampler)
    assert batches == expected


def run_with_kills(seed: int) -> tuple[list[list[str]], int]:
    """Run all steps, killed at random moments; return the ids in their batches, and the kills.

    A killed run goes on from its last checkpoint. Some save a checkpoint at their end, as a run
    does that ends in the middle of a step because its servers are gone.
    """
    chance = random.Random(seed)
    config = run_config(chance.randint(0, 3))
    every = chance.randint(1, 3)  # steps between two checkpoints
    batches: list[list[str]] = []  # of the steps until the checkpoint
    state = ""
    for kills in count():
        servers = Servers(delay_s=lambda prompt: chance.random() * 0.02, version=1 + len(batches))
        # `killed` is called at least twice a step, and every millisecond of a wait.
        calls = iter(range(chance.randrange(2 * STEPS) if kills < 6 else 10**9))

        def killed() -> bool:
            if next(calls, None) is None:  # noqa: B023
                raise Killed
            return False

        score = servers.score
        with sampler_of(config, servers, score, PROMPTS, servers_join=killed) as sampler:
            if state:
                sampler.restore(json.loads(state), len(batches))
            new = list(batches)
            try:
                for step in range(1 + len(batches), STEPS + 1):
                    killed()
                    batch, _ = sampler.sample(step, servers.version)
                    new.append(ids_in(batch, config.rollout.at(step)))
                    killed()
                    servers.version += 1
                    if step % every == 0:
                        batches, state = list(new), json.dumps(sampler.state())
                return new, kills
            except Killed:
                if chance.random() < 0.3:
                    batches, state = new, json.dumps(sampler.state())
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_no_prompt_is_lost_or_trained_twice_when_a_run_is_killed_at_any_moment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer_module, "POLL_S", 0.001)
    batches, kills = run_with_kills(seed)
    assert batches == plain_program()[0]
    assert kills > 0
