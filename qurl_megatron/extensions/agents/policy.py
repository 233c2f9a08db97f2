"""The policy that an agent's function gets: it samples turns, and holds the episode's tokens.

    async def agent(policy, problem) -> float | dict[str, float]:
        while ...:
            turn = await policy.generate()          # or: reply = await policy.chat(messages)
            policy.observe(policy.encode("..."))    # what the policy reads next

It runs in an agents' process, which imports no torch. Rank 0 of the learner keeps the record of
what is sampled. A `Policy` sends only new tokens to rank 0, so it can add tokens but change none.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NoReturn

from qurl_megatron.extensions.agents.chat import Chat
from qurl_megatron.extensions.agents.tools import Message, Tool


class EpisodeOver(Exception):
    """The episode has reached a limit; an agent may catch this and give its reward."""

    def __init__(self, end: str, message: str) -> None:
        super().__init__(message)
        self.end = end  # "turns" or "tokens"


@dataclass(frozen=True)
class Turn:
    """The tokens that the policy sampled for one request."""

    ids: list[int]  # sampled tokens, with the one that ended the turn
    text: str  # decoded without special tokens
    logprobs: list[float]  # one per token, natural
    finish: str  # "stop": the policy ended its turn; "length": it was cut off
    weight_versions: list[int]  # one per token
    cached_tokens: int  # how many tokens before it the server had in its cache


@dataclass(frozen=True)
class Request:
    """What a policy asks rank 0 to sample."""

    begins: bool  # `ids` begin a new sequence; else they follow the last one
    ids: list[int]  # what is new since the last request
    max_tokens: int
    stop_token_ids: list[int]
    stop_texts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """What an episode may use."""

    max_turns: int  # 0: no limit
    max_turn_tokens: int
    max_episode_tokens: int  # of a sequence, with its prompt
    temperature: float = 1.0  # the run's, as is `top_p`
    top_p: float = 1.0


SampleTurn = Callable[[Request], Awaitable[Turn | None]]
"""Samples a turn; returns None if the turn was abandoned before it was sampled."""


class Policy:
    """The policy in one episode; tokens are only ever appended to a sequence."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        limits: Limits,
        sample: SampleTurn,
        tokenizer: Any,
        base_url: Callable[[Policy], str] = lambda policy: "",
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin an episode with a prompt.

        Args:
            sample: asks rank 0 for a turn.
            base_url: serves the episode over HTTP, and returns its URL.
            abandon: tells rank 0 to give up the turn that is being sampled.
        """
        self.tokenizer = tokenizer
        """The policy's tokenizer, from transformers."""
        self.num_turns = 0
        self.last_turn: Turn | None = None
        self.over = ""
        """Which limit has been reached, "turns" or "tokens". Empty: none."""
        self.limits = limits
        self._sample = sample
        self._serve = base_url
        self._abandon = abandon
        self._ids = list(prompt_ids)
        self._sent = 0  # how many of `_ids` rank 0 has
        self._begins = True
        self._chat = Chat(self)
        self._is_sampling = False

    @property
    def ids(self) -> list[int]:
        """All tokens of the sequence so far: prompt, sampled and observed."""
        return list(self._ids)

    @property
    def room(self) -> int:
        """Number of tokens that the sequence may still get."""
        return max(0, self.limits.max_episode_tokens - len(self._ids))

    @property
    def base_url(self) -> str:
        """URL of an OpenAI-compatible endpoint whose chat completions are turns of this episode."""
        return self._serve(self)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; no special tokens are added.

        Raises:
            EpisodeOver: the text has more tokens than an episode may have.
        """
        # Before it is tokenized: that takes 1 s and 300 MB for a million characters.
        if len(text) > self.limits.max_episode_tokens * _longest(self.tokenizer):
            self._end("tokens", f"a text of {len(text):,} characters does not fit into an episode")
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def begin(self, ids: Sequence[int]) -> None:
        """Replace all tokens so far.

        After a turn this opens a branch: a further sequence of the episode. Earlier turns are still
        trained on, in the sequence in which they were sampled.

        Raises:
            ValueError, TypeError: `ids` are not tokens of the tokenizer.
            RuntimeError: a turn is being sampled.
        """
        self._check_idle()
        self._ids, self._sent, self._begins = self._checked(ids), 0, True

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy reads; they are never trained on.

        Raises:
            ValueError, TypeError: `ids` are not tokens of the tokenizer.
            RuntimeError: a turn is being sampled.
        """
        self._check_idle()
        self._ids += self._checked(ids)

    async def generate(
        self, *, max_tokens: int | None = None, stop: str | Sequence[int | str] = ()
    ) -> Turn:
        """Sample a turn.

        Args:
            max_tokens: most tokens of the turn; None: `rollout.max_completion_length`, which
                is also the limit of any number here.
            stop: more tokens and texts that end the turn. The token with which a text is complete
                is the last one of the turn.

        A call that is cancelled ends when rank 0 has given the turn up, so another may follow.

        Raises:
            EpisodeOver: the episode has no turn left, or no room for a token.
            ValueError, TypeError: an argument is wrong, or the policy has nothing to read.
            RuntimeError: a turn is being sampled already.
        """
        self._check_idle()
        given = [stop] if isinstance(stop, str) else list(stop)
        texts = [each for each in given if isinstance(each, str)]
        stops = self._checked(each for each in given if not isinstance(each, str))
        if "" in texts:
            raise ValueError("stop='': an empty text ends no turn")
        # The server stops at a text of one token, so that it samples nothing in vain.
        stops += [ids[0] for ids in map(self.encode, texts) if len(ids) == 1]
        most = self.limits.max_turn_tokens
        if max_tokens is not None:
            most = min(most, int(index(max_tokens)))
        if most < 1:
            raise ValueError(f"max_tokens={max_tokens}: expected at least 1")
        if not self._ids:
            raise ValueError("the sequence is empty; the policy must read a token before its turn")
        if self.limits.max_turns and self.num_turns >= self.limits.max_turns:
            self._end("turns", f"max_turns is {self.limits.max_turns}")
        if not self.room:
            self._end("tokens", f"the sequence has {len(self._ids)} tokens")
        request = Request(self._begins, self._ids[self._sent :], min(most, self.room), stops, texts)
        self._is_sampling = True
        turn = asyncio.ensure_future(self._take(request))
        try:
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            self._abandon()
            await asyncio.wait({turn})  # rank 0 knows whether it was sampled
            raise

    async def _take(self, request: Request) -> Turn:
        try:
            turn = await self._sample(request)
        finally:
            self._is_sampling = False
        self._begins, self._sent = False, len(self._ids)
        if turn is None:
            raise asyncio.CancelledError
        self._ids += turn.ids
        self._sent = len(self._ids)
        self.num_turns, self.last_turn = self.num_turns + 1, turn
        if turn.finish == "length" and not self.room:
            self.over = "tokens"
        return turn

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        stop: str | Sequence[int | str] = (),
    ) -> Message:
        """Return the policy's next message in a conversation, in the form of OpenAI's API.

        Args:
            messages: the whole conversation so far, with the messages that the policy
                returned. Their tokens stay as sampled.
            tools: functions with type hints and a docstring, or their JSON schemas.
            max_tokens, stop: as in `generate`; the message lacks the token that ended it.

        Raises:
            EpisodeOver: as in `generate`.
            TemplateError: the chat template cannot append messages.
            TypeError: a tool has no schema; the text says what is missing.
        """
        return await self._chat.reply(list(messages), list(tools), max_tokens, stop)

    def _end(self, end: str, why: str) -> NoReturn:
        self.over = end
        limit = f"; max_episode_tokens is {self.limits.max_episode_tokens}"
        raise EpisodeOver(end, why + limit * (end == "tokens"))

    def _check_idle(self) -> None:
        if self._is_sampling:
            raise RuntimeError("the policy is taking a turn; wait until it has ended")

    def _checked(self, ids: Iterable[int]) -> list[int]:
        """Return token ids as integers; one that the model lacks would end a server."""
        checked, size = [int(index(each)) for each in ids], _size(self.tokenizer)
        for each in checked:
            if not 0 <= each < size:
                raise ValueError(f"token {each}: the tokenizer has {size}, from 0")
        return checked


@functools.cache
def _size(tokenizer: Any) -> int:
    """Return the size of a tokenizer's vocabulary, which takes a while to count."""
    return len(tokenizer)


@functools.cache
def _longest(tokenizer: Any) -> int:
    """Return the number of characters of a tokenizer's longest token."""
    return max(map(len, tokenizer.get_vocab()))
