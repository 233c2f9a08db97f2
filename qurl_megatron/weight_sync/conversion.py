"""Measures of a pass over the weights: checksums, drift, NaN and infinity.

All of it stays on the device until the pass ends, and then reaches the host in one transfer, so the
host waits for a GPU once.

Drift means updates and quantization errors. For a weight W, its quantized value
Q(W) = codes * scale, and V, the value of W one pass earlier:

    update_norm          |W - V|^2 / |V|^2        QuRL Eq. 13, normalized weight update
    quant_error          |Q(W) - W|^2 / |W|^2     QuRL Eq. 14, normalized weight quantization error
    code_flip_fraction   codes that changed since the last pass / codes

Each is a ratio of sums over elements. The sums are added up over shards and over weights before
they are divided, so the ratio of a whole model counts all its elements equally.

The sums are estimated from a sample of each weight's rows: at most `MEASURED_ROWS` evenly spaced
rows of each shard stand for the rest. A shard with no more rows is measured whole. Measuring all
rows would keep the last pass's weights and codes: one and a half models in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.config.schema import MEASURED_ROWS
from qurl_megatron.device import device, rank
from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.quantization import checksum, quantize
from qurl_megatron.quantization.quantize import QuantizedTensor
from qurl_megatron.weight_sync.bucket import PlannedBucket
from qurl_megatron.weight_sync.gather import Team

BATCH_ELEMENTS = 2**22  # compared at once at most: 16 MiB in float32
WAITING_ELEMENTS = 2**25  # may wait on a GPU until more of the same shape have come
_TINY = 1e-300  # keeps 0 / 0 at 0


class WeightDrift(NamedTuple):
    """Sums over the elements of quantized weights; flips and the last two are 0 in the first pass.

    An adapter counts as quantized: its codes are the BF16 values that servers get.
    """

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
        return self.update_squares / self.previous_squares if self.previous_squares else 0.0

    @property
    def code_flip_fraction(self) -> float:
        """Fraction of codes that changed since the last pass; 0 in the first pass."""
        return self.code_flips / max(self.num_codes, 1)


@dataclass
class Conversion:
    """Measurements of one pass over the weights."""

    checksums: dict[str, int] = field(default_factory=dict)  # every sent tensor's, by name
    drift: dict[str, WeightDrift] = field(default_factory=dict)  # every quantized weight's, by name
    num_bytes: int = 0  # of all full tensors
    # Rank, name and place of a weight with NaN or infinity; empty: none. Its codes are worthless.
    non_finite: str = ""

    @classmethod
    def merged(cls, parts: Iterable[Conversion]) -> Conversion:
        """Join the measurements of disjoint sets of tensors."""
        total = cls()
        for part in parts:
            total.checksums |= part.checksums
            total.drift |= part.drift
            total.num_bytes += part.num_bytes
            total.non_finite = total.non_finite or part.non_finite
        return total

    @property
    def total_drift(self) -> WeightDrift:
        """Drift of all quantized weights together."""
        return WeightDrift.total(self.drift.values())


class Measures:
    """Collects, on the device, measurements of this rank's parts of a team's tensors."""

    def __init__(self, meter: DriftMeter, weight_format: str) -> None:
        """Begin a pass; `meter` measures drift from one pass to the next."""
        self.meter = meter
        self._format = weight_format
        self._summed: list[str] = []  # one tensor's name for each element of `_sums`
        self._sums: list[Tensor] = []  # [parts] int64
        self._absmaxes: list[tuple[TensorPart, Tensor]] = []
        self._names: list[str] = []  # of all tensors of the pass
        self._drifting: list[str] = []  # of all weights whose drift is measured
        self._num_bytes = 0

    def begin(self, planned: PlannedBucket) -> None:
        """Note the tensors of a bucket, whose parts are measured next."""
        self._names += [tensor.name for tensor in planned.tensors]
        self._drifting += [each.part.name for each in planned.weights if each.drifts]
        self._num_bytes += sum(weight.num_bytes for weight in planned.weights)

    def add_sums(self, names: Sequence[str], checksums: Tensor) -> None:
        """Add the checksums `[parts]` int64 of parts; each belongs to the tensor of that name."""
        self._summed += names
        self._sums.append(checksums)

    def add_absmax(self, part: TensorPart, absmax: Tensor) -> None:
        """Note the absmax of a part, which is not finite if the part holds NaN or infinity."""
        self._absmaxes.append((part, absmax))

    def finish(self, team: Team) -> Conversion:
        """Return the measurements. Collective over the team; complete on each of its ranks."""
        names, drifting = self._names, self._drifting
        at = {name: number for number, name in enumerate(names)}
        nothing = torch.zeros(0, dtype=torch.int64, device=device())
        sums = torch.cat([nothing, *self._sums])
        sums = _scatter(sums, [at[name] for name in self._summed], len(names))
        flags = torch.cat([absmax.reshape(-1) for _, absmax in self._absmaxes] or [sums.float()])
        integers = torch.cat([sums, (~flags.isfinite()).any().long().view(1)])
        measured, drift = self.meter.results()
        at = {name: number for number, name in enumerate(drifting)}
        drift = _scatter(drift.to(device()), [at[name] for name in measured], len(drifting))
        if team.size > 1:
            dist.all_reduce(integers, group=team.group)  # int64 wraps around, as the checksum does
            dist.all_reduce(drift, group=team.group)
        # One transfer: the float64 values travel as their bits.
        host = torch.cat([integers, drift.view(torch.int64).view(-1)]).cpu()
        *totals, num_spoilt = host[: len(integers)].tolist()
        drifts = host[len(integers) :].view(torch.float64).view(-1, drift.shape[1]).tolist()
        conversion = Conversion(dict(zip(names, totals, strict=True)), num_bytes=self._num_bytes)
        conversion.drift = {
            name: WeightDrift(*values) for name, values in zip(drifting, drifts, strict=True)
        }
        if num_spoilt:
            notes: list[str] = [""] * team.size
            dist.all_gather_object(notes, self._find_non_finite(), group=team.group)
            conversion.non_finite = next(filter(None, notes))
        return conversion

    def _find_non_finite(self) -> str:
        for part, absmax in self._absmaxes:
            try:
                with quantize.name_in_errors(part.name):
                    quantize.refuse_non_finite(absmax, self._format, part.offset)
            except quantize.NonFiniteWeight as error:
                return f"on learner rank {rank()} the weight {error}"
        return ""


def _scatter(values: Tensor, positions: list[int], length: int) -> Tensor:
    """Return zeros [length, ...] to which `values` are added at their positions."""
    total = torch.zeros(length, *values.shape[1:], dtype=values.dtype, device=values.device)
    index = torch.tensor(positions, dtype=torch.int64).to(values.device, non_blocking=True)
    return total.index_add_(0, index, values)


class DriftMeter:
    """Measures the drift of each weight between passes; keeps the rows that it measures.

    A pass calls `measure` for each weight, bucket by bucket, and reads all sums from `results`.
    """

    def __init__(self, measured_rows: int = MEASURED_ROWS) -> None:
        """Measure at most this many rows of a part of a weight."""
        self._measured_rows = measured_rows
        # Measured rows of weights and of their codes, by name and by the offset of the part.
        self._previous: dict[tuple[str, tuple[int, int]], tuple[Tensor, Tensor]] = {}
        self._waiting: list[_Sample] = []
        self._names: list[str] = []  # of the weights that were added up
        self._factors: list[list[float]] = []  # codes, and rows per measured row
        self._sums: list[Tensor] = []  # [samples, 5]

    def measure(self, name: str, weight: Tensor, sent: QuantizedTensor | Tensor) -> None:
        """Sample rows of a part of a weight, [out, in], to compare with the last pass's rows.

        `sent` has the codes and scales that servers get, or an adapter's values.
        """
        num_rows = weight.shape[0]
        step = -(-num_rows // self._measured_rows)
        rows = slice(step // 2, None, step)
        kept = weight[rows].clone()
        if isinstance(sent, QuantizedTensor):
            key, codes = (name, sent.offset), quantize.code_values(sent, rows).clone()
            scale = quantize.spread_scale(sent, rows).expand(len(kept), -1)
        else:  # a rank has only one part of an adapter
            key, codes = (name, (0, 0)), sent[rows].clone()
            scale = torch.ones(len(kept), 1, device=sent.device)
        previous = self._previous.get(key)
        if previous is not None and previous[0].shape != kept.shape:
            previous = None  # the weight was divided in another way
        self._waiting.append(_Sample(name, kept, codes, scale, num_rows / len(kept), previous))
        self._previous[key] = kept, codes

    def add_up(self, *, may_wait: bool = True) -> None:
        """Add up the sums of the weights measured since the last call.

        On a GPU it may wait for more weights, because small batches cost launches of kernels.
        """
        waiting = [sample.kept for sample in self._waiting]
        if may_wait and waiting and waiting[0].is_cuda:
            if sum(kept.numel() for kept in waiting) < WAITING_ELEMENTS:
                return
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

        The name of a weight occurs once for each of its parts. A row has the fields of
        `WeightDrift`. The host does not wait for the GPU.
        """
        self.add_up(may_wait=False)
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
    factor: float  # rows of the weight per measured row
    previous: tuple[Tensor, Tensor] | None


def _elements_at_once(tensor: Tensor) -> int:
    """Return how many elements to compare at once: on a CPU 2^17, which stay in its cache."""
    return min(BATCH_ELEMENTS, quantize.elements_at_once(tensor) // 2)


def _sums(samples: list[_Sample]) -> Tensor:
    """Return the fields of `WeightDrift` but the first, of measured rows, [samples, 5] float64."""
    num_rows, columns = samples[0].kept.shape
    step = max(1, _elements_at_once(samples[0].kept) // max(1, len(samples) * columns))
    starts = range(0, num_rows, step)
    parts = [_sums_of_rows(samples, slice(start, start + step)) for start in starts]
    return torch.stack(parts).sum(0)


def _sums_of_rows(samples: list[_Sample], rows: slice) -> Tensor:
    """Return the sums of `_sums`, over some of the measured rows."""
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
        sums += [flips, flips]  # zeros
    return torch.stack([flips, *sums], dim=1)


def _sums_of_squares(tensor: Tensor) -> Tensor:
    return tensor.square().sum((1, 2), dtype=torch.float64)
