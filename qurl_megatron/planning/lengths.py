"""The assumed distribution of response lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True)
class ResponseLengths:
    """Response lengths in tokens, with a given mean, of which the longest reach `maximum`.

    Without `log_deviation`, P(length > x) = 1 - (x / maximum)^k with k = mean / (maximum - mean).
    A mean of half the maximum is then a uniform distribution. With it, lengths are lognormal and
    truncated at the maximum, as a server truncates them.
    """

    mean: float
    maximum: float
    log_deviation: float | None = None  # standard deviation of log(length); None: not lognormal

    def quantile(self, fraction: float) -> float:
        """Return the length that `fraction` of the responses do not exceed."""
        if self.mean >= self.maximum:
            return self.maximum
        if self.log_deviation is None:
            return self.maximum * fraction ** ((self.maximum - self.mean) / self.mean)
        logarithm = self._log_median + self.log_deviation * _NORMAL.inv_cdf(fraction)
        return min(math.exp(logarithm), self.maximum)

    def fraction_longer(self, length: float) -> float:
        """Return the fraction of responses longer than `length`, which is below the maximum."""
        if self.mean >= self.maximum or length <= 0:
            return 1.0
        if self.log_deviation is None:
            return 1 - (length / self.maximum) ** (self.mean / (self.maximum - self.mean))
        return 1 - _NORMAL.cdf((math.log(length) - self._log_median) / self.log_deviation)

    @property
    def mean_age(self) -> float:
        """Mean number of tokens that a running response has: E[length^2] / (2 E[length])."""
        if self.mean >= self.maximum:
            return self.maximum / 2
        if self.log_deviation is None:
            exponent = self.mean / (self.maximum - self.mean)
            return self.maximum / 2 * (exponent + 1) / (exponent + 2)
        return self._moment(self._log_median, 2) / (2 * self.mean)

    @cached_property
    def _log_median(self) -> float:
        """The mean of log(length) before truncation, found by bisection of the truncated mean."""
        low, high = math.log(self.mean), math.log(self.maximum) + 10 * (self.log_deviation or 0)
        low -= 10 * (self.log_deviation or 0)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (low, middle) if self._moment(middle, 1) > self.mean else (middle, high)
        return (low + high) / 2

    def _moment(self, log_median: float, power: int) -> float:
        """Return E[min(X, maximum)^power] of a lognormal X."""
        deviation = self.log_deviation or 0.0
        edge = (math.log(self.maximum) - log_median) / deviation
        below = math.exp(power * log_median + (power * deviation) ** 2 / 2)
        below *= _NORMAL.cdf(edge - power * deviation)
        return below + self.maximum**power * (1 - _NORMAL.cdf(edge))
