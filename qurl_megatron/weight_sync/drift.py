"""Weight drift: updates and quantization errors, measured in each pass over the weights.

For a weight W, its quantized value Q(W) = codes * scale, and V, the value of W one pass earlier:

    update_norm          |W - V|^2 / |V|^2        QuRL Eq. 13, normalized weight update
    quant_error          |Q(W) - W|^2 / |W|^2     QuRL Eq. 14, normalized weight quantization error
    code_flip_fraction   codes that changed since the last pass / codes

Each is a ratio of sums over elements. The sums are added up over the shards of a weight and over
weights before they are divided, so the ratio of a whole model counts all its elements equally.

The sums are estimated from a sample of each weight's rows. Measuring all rows would need the last
pass's weights and codes: one and a half models in memory. At most `MEASURED_ROWS` evenly spaced
rows of each shard stand for the rest. A shard with no more rows than that is measured whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.quantize import QuantizedTensor

MEASURED_ROWS = 128  # maximum for each shard of a weight
_TINY = 1e-300  # keeps 0 / 0 at 0


class WeightDrift(NamedTuple):
    """Sums over the elements of quantized weights; the last two are 0 in the first pass."""

    num_codes: float = 0
    code_flips: float = 0  # codes that changed since the last pass
    error_squares: float = 0  # |Q(W) - W|^2
    weight_squares: float = 0  # |W|^2
    update_squares: float = 0  # |W - V|^2
    previous_squares: float = 0  # |V|^2

    @classmethod
    def total(cls, parts: Iterable[WeightDrift]) -> WeightDrift:
        """Add up the sums of several weights, or of the shards of one."""
        return cls(*map(sum, zip(cls(), *parts, strict=True)))

    @property
    def quant_error(self) -> float:
        """Normalized weight quantization error, QuRL Eq. 14."""
        return self.error_squares / max(self.weight_squares, _TINY)

    @property
    def update_norm(self) -> float:
        """Normalized weight update since the last pass, QuRL Eq. 13; 0 in the first pass."""
        return self.update_squares / max(self.previous_squares, _TINY)

    @property
    def code_flip_fraction(self) -> float:
        """Fraction of codes that changed since the last pass; 0 in the first pass."""
        return self.code_flips / max(self.num_codes, 1)


class DriftMeter:
    """Measures the drift of each weight between passes; keeps the rows it measures."""

    def __init__(self) -> None:
        self._previous: dict[str, tuple[Tensor, Tensor]] = {}  # name -> rows of weight and codes

    def measure(self, name: str, weight: Tensor, quantized: QuantizedTensor) -> WeightDrift:
        """Return the drift of `weight` [out, in] since the last call with this `name`."""
        num_rows = weight.shape[0]
        step = -(-num_rows // MEASURED_ROWS)
        rows = slice(step // 2, None, step)
        kept = weight[rows].clone()
        codes = quantized.codes[rows].clone()
        exact = kept.float()
        error = quantize.dequantize(quantized, rows) - exact
        sums = [_sum_of_squares(error), _sum_of_squares(exact)]
        flips = torch.zeros_like(sums[0])
        if name in self._previous:
            previous_kept, previous_codes = self._previous[name]
            previous = previous_kept.float()
            flips = quantize.code_flips(previous_codes, codes)
            sums += [_sum_of_squares(exact - previous), _sum_of_squares(previous)]
        self._previous[name] = kept, codes
        values = torch.stack([flips.double(), *sums]).tolist()  # a GPU is waited for once
        return WeightDrift(*(value * num_rows / len(kept) for value in [codes.numel(), *values]))


def _sum_of_squares(tensor: Tensor) -> Tensor:
    return tensor.square().sum(dtype=torch.float64)
