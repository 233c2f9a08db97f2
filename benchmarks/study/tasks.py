"""A task whose score is computed exactly, by summing over everything that could be sampled.

The prompt is a start and a row of numbers. The answer adds them up modulo `SYMBOLS`, one symbol per
number, and is right if its last symbol is. One slip early in a chain spoils its end, so the reward
says little about each token, as in long reasoning.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.study.policy import SYMBOLS

HELD_OUT_PROMPTS = 64


@dataclass(frozen=True)
class Rollouts:
    """What the engines sampled: `rows` completions of each seed."""

    states: Tensor  # [seeds, rows, time] int64: the state that a symbol was sampled in
    symbols: Tensor  # [seeds, rows, time] int64
    rewards: Tensor  # [seeds, rows] float32: 0 or 1


class Chain:
    """Sums modulo `SYMBOLS`, `length` symbols long."""

    def __init__(self, length: int) -> None:
        self.length = length
        held_out = torch.Generator().manual_seed(1)
        self._start, self._numbers = self._prompts((HELD_OUT_PROMPTS,), held_out)

    def sample(
        self, logprobs: Tensor, prompts: int, completions: int, generator: torch.Generator
    ) -> Rollouts:
        """Sample `completions` answers to each of `prompts` new prompts.

        Each seed has prompts of its own. `logprobs` is the engines' table `[seeds, STATES,
        SYMBOLS]`. The rows of a prompt follow each other.
        """
        seeds = logprobs.shape[0]
        start, numbers = self._prompts((seeds, prompts), generator)
        start = start.repeat_interleave(completions, dim=1)
        numbers = numbers.repeat_interleave(completions, dim=1)
        cumulative = _cumulative(logprobs)
        seed = torch.arange(seeds)[:, None]
        states, symbols, current = [], [], start
        for time in range(self.length):
            state = current * SYMBOLS + numbers[..., time]
            uniform = torch.rand(state.shape, generator=generator)
            current = (cumulative[seed, state] <= uniform[..., None]).sum(-1)
            states.append(state)
            symbols.append(current)
        rewards = (current == (start + numbers.sum(-1)) % SYMBOLS).float()
        return Rollouts(torch.stack(states, -1), torch.stack(symbols, -1), rewards)

    def score(self, logprobs: Tensor) -> Tensor:
        """Return the expected reward, relative to the best possible: `[seeds]` float32."""
        # Propagate the distribution over the current symbol through each chain.
        transitions = logprobs.exp().unflatten(1, (SYMBOLS, SYMBOLS))  # [seeds, current, number, +]
        distribution = torch.zeros(len(logprobs), HELD_OUT_PROMPTS, SYMBOLS)
        distribution[:, torch.arange(HELD_OUT_PROMPTS), self._start] = 1
        for time in range(self.length):
            of_number = transitions[:, :, self._numbers[:, time]]  # [seeds, current, prompts, next]
            distribution = torch.einsum("spc,scpn->spn", distribution, of_number)
        ends = (self._start + self._numbers.sum(-1)) % SYMBOLS
        return distribution[:, torch.arange(HELD_OUT_PROMPTS), ends].mean(-1)

    def _prompts(self, shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        start = torch.randint(SYMBOLS, shape, generator=generator)
        return start, torch.randint(SYMBOLS, (*shape, self.length), generator=generator)


def _cumulative(logprobs: Tensor) -> Tensor:
    """Return the sums of probabilities up to each symbol, and 1 from the last possible one on."""
    cumulative = logprobs.exp().cumsum(-1)
    return cumulative.masked_fill_(cumulative == cumulative[..., -1:], 1)  # rounded it may be less
