"""What a pass over the weights measures: checksums, drift, NaN and infinity.

All of it stays on the device until the pass ends, and then reaches the host in one transfer: a GPU
is waited for once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.device import device, rank
from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.quantization import quantize
from qurl_megatron.weight_sync.drift import DriftMeter, WeightDrift
from qurl_megatron.weight_sync.gather import Team
from qurl_megatron.weight_sync.layout import PlannedBucket


@dataclass
class Conversion:
    """Measurements of one pass over the weights."""

    checksums: dict[str, int] = field(default_factory=dict)  # every sent tensor's, by name
    drift: dict[str, WeightDrift] = field(default_factory=dict)  # every quantized weight's, by name
    num_bytes: int = 0  # of all full tensors
    # Rank, name and place of a weight that holds NaN or infinity. What was sent is then worthless.
    non_finite: str = ""

    @classmethod
    def merged(cls, parts: Iterable[Conversion]) -> Conversion:
        """Join the measurements of different tensors."""
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
    """Collects, on the device, what this rank measures of its parts of a team's tensors."""

    def __init__(self, meter: DriftMeter, weight_format: str) -> None:
        """Begin a pass; `meter` measures drift from one pass to the next."""
        self.meter = meter
        self._format = weight_format
        self._summed: list[str] = []  # names of tensors, one for each of `_sums`' elements
        self._sums: list[Tensor] = []  # [parts] int64
        self._absmaxes: list[tuple[TensorPart, Tensor]] = []
        self._names: list[str] = []  # of all tensors of the pass
        self._quantized: list[str] = []  # of all quantized weights
        self._num_bytes = 0

    def begin(self, planned: PlannedBucket) -> None:
        """Note what a bucket holds, of which parts are measured next."""
        self._names += [tensor.name for tensor in planned.tensors]
        self._quantized += [each.part.name for each in planned.weights if each.is_quantized]
        self._num_bytes += sum(weight.num_bytes for weight in planned.weights)

    def add_sums(self, names: Sequence[str], checksums: Tensor) -> None:
        """Add the checksums `[parts]` int64 of parts of tensors of these names."""
        self._summed += names
        self._sums.append(checksums)

    def add_absmax(self, part: TensorPart, absmax: Tensor) -> None:
        """Note the absmax of a part, which says whether it holds NaN or infinity."""
        self._absmaxes.append((part, absmax))

    def finish(self, team: Team) -> Conversion:
        """Return what was measured. Collective over the team; complete on each of its ranks."""
        names, quantized = self._names, self._quantized
        at = {name: number for number, name in enumerate(names)}
        nothing = torch.zeros(0, dtype=torch.int64, device=device())
        sums = torch.cat([nothing, *self._sums])
        sums = _scatter(sums, [at[name] for name in self._summed], len(names))
        flags = torch.cat([absmax.reshape(-1) for _, absmax in self._absmaxes] or [sums.float()])
        integers = torch.cat([sums, (~flags.isfinite()).any().long().view(1)])
        measured, drift = self.meter.results()
        at = {name: number for number, name in enumerate(quantized)}
        drift = _scatter(drift.to(device()), [at[name] for name in measured], len(quantized))
        if team.size > 1:
            dist.all_reduce(integers, group=team.group)  # int64 wraps around, as the checksum does
            dist.all_reduce(drift, group=team.group)
        host = torch.cat([integers, drift.view(torch.int64).view(-1)]).cpu()
        *totals, num_spoilt = host[: len(integers)].tolist()
        drifts = host[len(integers) :].view(torch.float64).view(-1, drift.shape[1]).tolist()
        conversion = Conversion(dict(zip(names, totals, strict=True)), num_bytes=self._num_bytes)
        conversion.drift = {
            name: WeightDrift(*values) for name, values in zip(quantized, drifts, strict=True)
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
    """Return [length, ...] with `values` added up at their positions."""
    total = torch.zeros(length, *values.shape[1:], dtype=values.dtype, device=values.device)
    index = torch.tensor(positions, dtype=torch.int64).to(values.device, non_blocking=True)
    return total.index_add_(0, index, values)
