"""A rollout client that samples episodes, which agents play, in place of single completions.

Rank 0 keeps the record of each episode here. It says of every token whether it was sampled, and
holds for a sampled token the log-prob, the weight version and whatever else the server reported.
One server samples all of a turn. If that server is lost, another one samples the turn from the
same tokens.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from qurl_megatron.algorithm.batch import (
    Completion,
    Episode,
    Prompt,
    RolloutGroup,
    SamplingMasks,
    TurnTokens,
)
from qurl_megatron.algorithm.score import ACCURACY, Score
from qurl_megatron.extensions.agents import policy
from qurl_megatron.extensions.agents.policy import Request
from qurl_megatron.extensions.agents.pool import Agents
from qurl_megatron.extensions.agents.worker import ENDS
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.server import Server

COLLECT_AT = 50_000  # new objects between two collections
TURN_NAMES = ("1", "2", "3", "4+")


@dataclass
class _Sequence:
    """A sequence of an episode; tokens are only ever appended to it."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: torch.Tensor | None = None
    masks: list[SamplingMasks] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.token_ids

    def observe(self, ids: list[int]) -> None:
        self.token_ids += ids
        self.sampled += [False] * len(ids)

    def sample(self, turn: Completion) -> None:
        self.token_ids += turn.token_ids
        self.sampled += [True] * len(turn.token_ids)
        self.logprobs += turn.behaviour_logprobs
        self.versions += turn.token_versions
        if turn.sampling_masks:
            self.masks.append(turn.sampling_masks)
        if turn.routed_experts is not None:
            # Tokens of earlier turns keep the experts that were recorded with those turns.
            known = 0 if self.experts is None else len(self.experts)
            added = turn.routed_experts[known:]
            self.experts = added if self.experts is None else torch.cat([self.experts, added])

    def completion(self, **of_episode: Any) -> Completion:
        """Return the sequence up to its last sampled token; nothing is learned from later ones."""
        length = len(self.sampled) - self.sampled[::-1].index(True) if any(self.sampled) else 0
        return Completion(
            token_ids=self.token_ids[:length],
            behaviour_logprobs=self.logprobs,
            text="",
            truncated=False,
            token_versions=self.versions,
            routed_experts=self.experts,
            sampling_masks=SamplingMasks(*map(torch.cat, zip(*self.masks, strict=True)))
            if self.masks
            else None,
            episode=Episode(self.prompt_ids, self.sampled[:length], **of_episode),
        )


class _Record:
    """What has been sampled of an episode so far."""

    def __init__(self, client: AgentClient, sampling: dict[str, Any]) -> None:
        self._client = client
        self._sampling = sampling
        self._server: Server | None = None  # has the tokens so far in its cache
        self.sequences: list[_Sequence] = []
        self.turns: list[TurnTokens] = []
        self.text = ""  # of the last turn

    async def sample(self, request: Request) -> policy.Turn:
        """Sample the turn that a policy asks for, and record it."""
        if request.begins:
            self.sequences.append(_Sequence(request.ids))
        else:
            self.sequences[-1].observe(request.ids)
        sequence = self.sequences[-1]
        stops = [*self._sampling["stop_token_ids"], *request.stop_token_ids]
        settings = {
            **self._sampling,
            "n": 1,
            "max_new_tokens": request.max_tokens,
            "stop_token_ids": stops,
        }
        context = sequence.ids
        (turn,), self._server = await self._client.complete(context, settings, self._server)
        turn = self._client.until(turn, request.stop_texts, len(context))
        sequence.sample(turn)
        self.turns.append(TurnTokens(len(turn.token_ids), len(context), turn.cached_tokens))
        self.text = turn.text
        is_cut = turn.truncated and turn.token_ids[-1] not in stops
        return policy.Turn(
            ids=turn.token_ids,
            text=turn.text,
            logprobs=turn.behaviour_logprobs,
            finish="length" if is_cut else "stop",
            weight_versions=turn.token_versions,
            cached_tokens=turn.cached_tokens,
        )

    def completion(self, end: str, score: Score | None) -> Completion:
        """Return the episode: its last sequence, with the earlier ones as branches."""
        # A sequence in which nothing was sampled trains nothing.
        whole = [each for each in self.sequences if each.logprobs] or [_Sequence([])]
        *branches, last = whole
        completion = last.completion(
            end=end,
            turns=self.turns,
            branches=[branch.completion() for branch in branches],
        )
        is_cut = end in ("turns", "tokens")
        return dataclasses.replace(completion, text=self.text, truncated=is_cut, score=score)


class AgentClient(RolloutClient):
    """Samples episodes from a fleet of servers."""

    def __init__(self, agents: Agents, reward_wrong: float, *parts: Any, **named: Any) -> None:
        """Store the agents and the reward of a failed episode; `RolloutClient` takes the rest.

        Python's garbage collector would visit all imported modules and all that thousands of
        episodes hold again and again, which is more than a third of the cost of a turn. From now on
        it visits fewer objects; episodes make many, but few cycles.
        """
        super().__init__(*parts, **named)
        self._agents = agents
        self._reward_wrong = reward_wrong
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AT)

    async def group(self, prompt: Prompt, sampling: dict[str, Any]) -> list[Completion]:
        """Play all episodes of one prompt at the same time, and return them."""
        episodes = (self._episode(prompt, sampling) for _ in range(sampling["n"]))
        return list(await asyncio.gather(*episodes))

    def metrics(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Return the metrics of episodes; nothing if all have failed."""
        completions = [each for group in groups for each in group.completions]
        failed = [each for group in groups for each in group.failed]
        episodes = [each.episode for each in completions if each.episode]
        if not episodes:
            return {}
        branches = [each.sequences() for each in completions]
        observed = [
            sum(len(each.token_ids) - len(each.behaviour_logprobs) for each in sequences)
            for sequences in branches
        ]
        ends = Counter(each.episode.end for each in (*completions, *failed) if each.episode)
        cached: dict[str, Counter[str]] = {}
        for episode in episodes:
            for number, turn in enumerate(episode.turns):
                sums = cached.setdefault(TURN_NAMES[min(number, len(TURN_NAMES) - 1)], Counter())
                sums.update(context=turn.context, cached=turn.cached_tokens)
        return {
            "turns_mean": fmean(len(episode.turns) for episode in episodes),
            "observed_length_mean": fmean(observed),
            "branches_mean": fmean(map(len, branches)),
            "episode_ends": {end: ends[end] for end in ENDS},
            "episodes_failed": len(failed),
            "episode_failure": failed[0].failure if failed else "",
            "prefix_cached_by_turn": {
                turn: sums["cached"] / max(1, sums["context"]) for turn, sums in cached.items()
            },
        }

    def until(self, turn: Completion, stops: Sequence[str], context: int) -> Completion:
        """Return a turn up to the token with which one of the texts `stops` is complete.

        Servers know tokens only. `context` is the number of tokens before the turn.
        """
        ids = turn.token_ids

        def has_ended(length: int) -> bool:
            text = self._tokenizer.decode(ids[:length], skip_special_tokens=False)
            return any(stop in text for stop in stops)

        if not stops or not has_ended(len(ids)):
            return turn
        # Once a text is there it stays, whatever follows.
        length = 1 + bisect.bisect_left(range(1, len(ids)), True, key=has_ended)
        experts, masks = turn.routed_experts, turn.sampling_masks
        if masks:
            sizes = masks.sizes[:length]
            masks = SamplingMasks(sizes, masks.token_ids[: int(sizes.sum())])
        return dataclasses.replace(
            turn,
            token_ids=ids[:length],
            behaviour_logprobs=turn.behaviour_logprobs[:length],
            text=self._tokenizer.decode(ids[:length], skip_special_tokens=True),
            truncated=False,
            token_versions=turn.token_versions[:length],
            routed_experts=None if experts is None else experts[: context + length - 1],
            sampling_masks=masks,
        )

    async def _episode(self, prompt: Prompt, sampling: dict[str, Any]) -> Completion:
        records: list[_Record] = []

        # Called again if the episode begins anew in another process; only its last record counts.
        def begin() -> Callable[[Request], Any]:
            records.append(_Record(self, sampling))
            return records[-1].sample

        ended = await self._agents.play(prompt, sampling["max_new_tokens"], begin)
        score = ended.score
        # An episode that met a limit and has no reward of its own counts as wrong.
        if ended.failure or (score is None and ended.end in ("turns", "tokens")):
            score = Score(self._reward_wrong, {ACCURACY: 0.0}, ended.failure)
        return records[-1].completion(ended.end, score)
