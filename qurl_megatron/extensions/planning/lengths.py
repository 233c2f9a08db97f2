"""How long prompts and completions are; a configuration has only their maxima.

Lengths of completions are lognormal, and cut off at their maximum as a server cuts them. All
prompts have the mean length. An agent's episode is a completion too: what its turns sample, and
what it reads between them. All episodes read the same fraction.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

from qurl_megatron.config.schema import Config

_NORMAL = NormalDist()


@dataclass(frozen=True)
class CompletionLengths:
    """Completion lengths in tokens, with a given mean; the longest reach `maximum`."""

    mean: float
    maximum: float
    log_deviation: float  # standard deviation of log(length), before it is cut off

    def fraction_longer(self, length: float) -> float:
        """Return the fraction of completions longer than `length`, which is below the maximum."""
        if self.mean >= self.maximum or length <= 0:
            return 1.0
        return 1 - _NORMAL.cdf((math.log(length) - self._log_median) / self.log_deviation)

    @cached_property
    def mean_square(self) -> float:
        """Mean of length^2."""
        return self._moment(self._log_median, 2) if self.mean < self.maximum else self.maximum**2

    @cached_property
    def mean_age(self) -> float:
        """Mean number of tokens that a running completion has: E[length^2] / (2 E[length])."""
        return self.mean_square / (2 * min(self.mean, self.maximum))

    @cached_property
    def _log_median(self) -> float:
        """The mean of log(length) before the cut, found by bisection on the mean after it."""
        low = math.log(self.mean) - 10 * self.log_deviation
        high = math.log(self.maximum) + 10 * self.log_deviation
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (low, middle) if self._moment(middle, 1) > self.mean else (middle, high)
        return (low + high) / 2

    def _moment(self, log_median: float, power: int) -> float:
        """Return E[min(X, maximum)^power] of a lognormal X."""
        edge = (math.log(self.maximum) - log_median) / self.log_deviation
        below = math.exp(power * log_median + (power * self.log_deviation) ** 2 / 2)
        below *= _NORMAL.cdf(edge - power * self.log_deviation)
        return below + self.maximum**power * (1 - _NORMAL.cdf(edge))


# One object for each, which computes its moments once: a search asks for thousands of layouts.
_completion_lengths = cache(CompletionLengths)


@dataclass(frozen=True)
class Workload:
    """Mean lengths in tokens, and how much the lengths of completions vary."""

    mean_prompt: float
    mean_completion: float
    log_deviation: float = 1.0  # around 1 for reasoning
    observed: float = 0.0  # fraction of a completion that an agent's policy reads, not samples

    @classmethod
    def of(cls, config: Config) -> "Workload":
        """Return what a plan assumes: half the longest prompt, a quarter of the longest completion.

        An agent reads half of its completion.
        """
        rollout = config.rollout
        observed = 0.5 if rollout.agent else 0.0
        return cls(rollout.max_prompt_length / 2, longest_completion(config) / 4, observed=observed)

    @property
    def mean_length(self) -> float:
        """Mean of prompt plus completion."""
        return self.mean_prompt + self.mean_completion

    def completions(self, config: Config) -> CompletionLengths:
        """Return the lengths of completions that `config` cuts off."""
        longest = longest_completion(config)
        return _completion_lengths(self.mean_completion, longest, self.log_deviation)

    def mean_square_length(self, config: Config) -> float:
        """Return the mean square of prompt plus completion."""
        prompt = self.mean_prompt
        return prompt**2 + 2 * prompt * self.mean_completion + self.completions(config).mean_square


def longest_completion(config: Config) -> int:
    """Return the most tokens after a prompt; for an agent, its turns and what it reads."""
    rollout = config.rollout
    if rollout.max_episode_tokens:
        return rollout.max_episode_tokens - rollout.max_prompt_length
    return rollout.max_completion_length
