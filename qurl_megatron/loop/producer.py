"""Groups for training, sampled and scored up to `rollout.max_staleness` steps ahead.

Requests and scores are awaited in the controller's loop while the caller trains. With
`max_staleness` 0 each group is asked for when it is needed, so nothing runs while the caller
trains.

Invariants:
- Groups are taken in the order of the stream, whichever is answered first: so the length of an
  answer does not influence whether it is trained on.
- While step s is sampled, the groups of steps up to s + max_staleness are in flight. Apart from
  groups that dynamic sampling rejects or that are taken again, at most
  (max_staleness + version + 1) x prompts_per_step groups have then been asked for, where
  `version` counts the steps done: the bound of AReaL.
- No token of a taken group is more than `max_staleness` weight versions old, and the group has the
  settings of the step that trains it. Any other group is dropped, and its prompt is sampled again
  in its place.
- `PromptStream.position` counts the prompts of steps that got all their groups. A checkpoint needs
  nothing else: after a resume, all other prompts are sampled again, before any new one.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice

from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup
from qurl_megatron.config.schema import RolloutConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.data.scoring import StartScoring
from qurl_megatron.rollout.controller import end
from qurl_megatron.rollout.server import POLL_S

SampleCompletions = Callable[[Prompt, RolloutConfig], Awaitable[list[Completion]]]


@dataclass(frozen=True)
class _InFlight:
    """A group that was asked for and is not taken yet."""

    prompt: Prompt
    settings: RolloutConfig  # of the step that will train it
    version: int  # the weight version that the servers had when it was asked for
    group: asyncio.Task[RolloutGroup]

    def staleness(self, version: int) -> int:
        """Return how many versions the oldest token of the finished group is behind `version`."""
        completions = self.group.result().completions
        return version - min((each.oldest_version for each in completions), default=version)


class Producer:
    """Samples and scores the groups of a stream of prompts. Only global rank 0 has one.

    Its coroutines run in the controller's loop.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        steps: int,
        stream: PromptStream,
        sample: SampleCompletions,
        score: StartScoring,
    ) -> None:
        """Store the parts; the first `take` asks for groups.

        Args:
            steps: number of steps of the run; nothing is sampled for a step after them.
        """
        self._rollout = rollout
        self._steps = steps
        self._stream = stream
        self._sample = sample
        self._score = score
        self._queue: deque[_InFlight] = deque()  # in the order of the stream
        self._taken = 0  # groups of the step, which the stream's position does not count yet
        self.dropped = 0  # groups so far
        self.waited_s = 0.0  # seconds that calls of `take` have waited so far
        self.scoring_s = 0.0  # of these, seconds in which only scores were missing

    @property
    def in_flight(self) -> int:
        """Number of groups that were asked for and are not taken yet."""
        return len(self._queue)

    async def take(
        self, count: int, *, step: int, version: int, interrupted: Callable[[], bool]
    ) -> list[RolloutGroup] | None:
        """Wait for the next `count` groups and return them; None if `interrupted()` is true first.

        After None, repeat the call to go on waiting.

        Args:
            step: the step that trains the groups.
            version: the weight version that the step starts from; the servers have it.

        Raises:
            RuntimeError: the servers sample with weights that are older than `version` allows.
            Exception: what `sample` or `score` raised for one of the groups.
        """
        settings = self._rollout.at(step)
        self._ask_for(count, step, version)
        # Dynamic sampling takes groups that were asked for with the settings of a later step.
        for place in range(count):
            if self._queue[place].settings != settings:
                self._drop(place, settings, version)
        while await self._wait(count, interrupted):
            old = [
                place
                for place in range(count)
                if self._queue[place].staleness(version) > self._rollout.max_staleness
            ]
            if not old:
                self._taken += count
                return [self._queue.popleft().group.result() for _ in range(count)]
            for place in old:
                if self._queue[place].version == version:
                    staleness = self._queue[place].staleness(version)
                    raise RuntimeError(
                        f"a prompt that was sent after the publish of weight version {version} was "
                        f"answered with weights {staleness} versions older"
                    )
                self._drop(place, settings, version)
        return None

    def end_step(self) -> None:
        """Advance the stream's position by the groups that were taken since the last call."""
        self._stream.position += self._taken
        self._taken = 0

    async def take_again(self, step: int, version: int) -> None:
        """Ask again for the groups taken since `end_step`; the next calls of `take` return them.

        Args:
            step, version: as in the calls that took them.
        """
        settings, first = self._rollout.at(step), self._stream.position
        for ordinal in reversed(range(first, first + self._taken)):
            self._queue.appendleft(self._start(self._stream.prompt(ordinal), settings, version))
        self._taken = 0

    async def close(self) -> None:
        """Cancel all requests."""
        await end(each.group for each in self._queue)

    def _ask_for(self, count: int, step: int, version: int) -> None:
        """Ask for the `count` groups that `step` still needs and for those of the steps ahead."""
        per_step = self._rollout.prompts_per_step
        ahead = min(self._rollout.max_staleness, self._steps - step)
        for place in range(len(self._queue), count + ahead * per_step):
            prompt = self._stream.prompt(self._stream.position + self._taken + place)
            settings = self._rollout.at(step + place // per_step)
            self._queue.append(self._start(prompt, settings, version))

    def _drop(self, place: int, settings: RolloutConfig, version: int) -> None:
        """Ask for the group at this place of the queue again, with other weights or settings."""
        dropped = self._queue[place]
        dropped.group.cancel()
        self._queue[place] = self._start(dropped.prompt, settings, version)
        self.dropped += 1

    def _start(self, prompt: Prompt, settings: RolloutConfig, version: int) -> _InFlight:
        group = asyncio.create_task(self._sample_and_score(prompt, settings))
        return _InFlight(prompt, settings, version, group)

    async def _sample_and_score(self, prompt: Prompt, settings: RolloutConfig) -> RolloutGroup:
        sampled = await self._sample(prompt, settings)
        sampled_at_s = time.perf_counter()
        completions = [each for each in sampled if not each.failure]
        failed = [each for each in sampled if each.failure]
        scores = await asyncio.wrap_future(self._score(prompt, completions))
        rewards = [score.value for score in scores]
        return RolloutGroup(prompt, completions, rewards, scores, sampled_at_s, failed)

    async def _wait(self, count: int, interrupted: Callable[[], bool]) -> bool:
        """Return True when the first `count` groups are done, False if interrupted before."""
        groups = [each.group for each in islice(self._queue, count)]
        begin = time.perf_counter()
        try:
            while True:
                done, missing = await asyncio.wait(groups, timeout=POLL_S)
                for group in done:
                    group.result()  # raises what sampling or scoring raised
                if not missing:
                    last_s = max(group.result().sampled_at_s for group in groups)
                    self.scoring_s += time.perf_counter() - max(begin, last_s)
                    return True
                if interrupted():
                    return False
        finally:
            self.waited_s += time.perf_counter() - begin
