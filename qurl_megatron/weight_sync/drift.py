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

from qurl_megatron.config.schema import MEASURED_ROWS
from qurl_megatron.quantization import checksum, quantize
from qurl_megatron.quantization.quantize import QuantizedTensor

BATCH_ELEMENTS = 2**20  # that are compared together at most: 4 MiB in float32
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
    """Measures the drift of each weight between passes; keeps the rows it measures.

    A pass gives each weight to `measure`, bucket by bucket, and reads all sums from `results`.
    """

    def __init__(self, measured_rows: int = MEASURED_ROWS) -> None:
        """Measure at most this many rows of a part of a weight."""
        self._measured_rows = measured_rows
        # Rows of weights and of their codes, by name and by where the weight's part begins.
        self._previous: dict[tuple[str, tuple[int, int]], tuple[Tensor, Tensor]] = {}
        self._waiting: list[_Sample] = []
        self._names: list[str] = []  # of the weights that were added up
        self._factors: list[list[float]] = []  # codes, and rows for each measured one
        self._sums: list[Tensor] = []  # [samples, 5]

    def measure(self, name: str, weight: Tensor, quantized: QuantizedTensor) -> None:
        """Take rows of a part of a weight, [out, in], to compare with those of the pass before."""
        key = name, quantized.offset
        num_rows = weight.shape[0]
        step = -(-num_rows // self._measured_rows)
        rows = slice(step // 2, None, step)
        kept, codes = weight[rows].clone(), quantized.codes[rows].clone()
        scale = quantize.spread_scale(quantized, rows).expand(len(kept), -1)
        previous = self._previous.get(key)
        if previous is not None and previous[0].shape != kept.shape:
            previous = None  # the weight was measured in other parts
        self._waiting.append(_Sample(name, kept, codes, scale, num_rows / len(kept), previous))
        self._previous[key] = kept, codes

    def add_up(self) -> None:
        """Add up the sums of the weights measured since the last call."""
        alike: dict[tuple[object, ...], list[_Sample]] = {}
        for sample in self._waiting:
            key = sample.kept.shape, sample.scale.shape, sample.previous is None
            alike.setdefault(key, []).append(sample)
        self._waiting = []
        for samples in alike.values():
            kept = samples[0].kept
            size = max(1, _elements_at_once(kept) // max(1, kept.numel()))
            for start in range(0, len(samples), size):
                batch = samples[start : start + size]
                self._sums.append(_sums(batch))
                self._names += [sample.name for sample in batch]
                self._factors += [[s.factor * s.codes.numel(), s.factor] for s in batch]

    def results(self) -> tuple[list[str], Tensor]:
        """Return the names measured since the last call, and their drift, [names, 6] float64.

        A weight that was measured in parts has a name for each. A row has the fields of
        `WeightDrift`. No GPU is waited for.
        """
        self.add_up()
        names, factors, sums = self._names, self._factors, self._sums
        self._names, self._factors, self._sums = [], [], []
        if not names:
            return [], torch.zeros(0, 6, dtype=torch.float64)
        values = torch.cat(sums)
        scaling = torch.tensor(factors, dtype=torch.float64).to(values.device, non_blocking=True)
        return names, torch.cat([scaling[:, :1], values * scaling[:, 1:]], dim=1)


class _Sample(NamedTuple):
    """The measured rows of one weight, in this pass and in the one before."""

    name: str
    kept: Tensor  # [rows, in]
    codes: Tensor  # [rows, in]
    scale: Tensor  # [rows, 1] or [rows, in]
    factor: float  # rows of the weight for each measured one
    previous: tuple[Tensor, Tensor] | None


def _elements_at_once(tensor: Tensor) -> int:
    """Return how many elements are compared at once: on a CPU 2^17, which stay in its cache."""
    return min(BATCH_ELEMENTS, quantize.elements_at_once(tensor) // 2)


def _sums(samples: list[_Sample]) -> Tensor:
    """Return [samples, 5] float64: all fields of `WeightDrift` but the first, of measured rows."""
    num_rows, columns = samples[0].kept.shape
    step = max(1, _elements_at_once(samples[0].kept) // max(1, len(samples) * columns))
    starts = range(0, num_rows, step)
    parts = [_sums_of_rows(samples, slice(start, start + step)) for start in starts]
    return torch.stack(parts).sum(0)


def _sums_of_rows(samples: list[_Sample], rows: slice) -> Tensor:
    """Return what `_sums` does, of some of the measured rows."""
    codes = checksum.stack([sample.codes[rows] for sample in samples])
    exact = torch.stack([sample.kept[rows] for sample in samples]).float()
    values = codes.view(samples[0].codes.dtype).float()
    error = values * torch.stack([sample.scale[rows] for sample in samples]) - exact
    sums = [_sums_of_squares(error), _sums_of_squares(exact)]
    flips = torch.zeros_like(sums[0])
    before = [sample.previous for sample in samples if sample.previous is not None]
    if before:
        previous = torch.stack([kept[rows] for kept, _ in before]).float()
        previous_codes = checksum.stack([codes[rows] for _, codes in before])
        flips = (previous_codes != codes).sum((1, 2)).double()
        sums += [_sums_of_squares(exact - previous), _sums_of_squares(previous)]
    else:
        sums += [flips, flips]
    return torch.stack([flips, *sums], dim=1)


def _sums_of_squares(tensor: Tensor) -> Tensor:
    return tensor.square().sum((1, 2), dtype=torch.float64)
