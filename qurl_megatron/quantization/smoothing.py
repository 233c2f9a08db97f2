"""Smoothing: scales by channel, which make activations easier to quantize and change no value.

The problem: a few channels of a layer's input are a hundred or a thousand times as large as the
others. All channels of a token share a scale, so the others get few codes. Smoothing divides each
channel by a number of its own and multiplies the weights that read it:

    W x = (W diag(s)) (x / s)                        QuRL Eq. 11, with a vector s
    s_j = 2^round(log2(max|x_j|^a / max|W_j|^(1-a)))      SmoothQuant, as powers of two

Nothing divides x itself. What gives the channels is divided instead:

    reads the channels                                gives them
    q, k, v, gate, up and all else fed by a norm      the norm's weight
    down                                              the rows of up, because the product is linear
                                                      in up

Invariants:
- Before quantization the model computes what it did, bit for bit, in BF16 and in float32: a power
  of two moves the exponent alone. This holds for values from 2^-78 on, and for 0. Rounding masters
  to BF16, by a dither too, gives the same numbers times s.
- A hybrid's norms multiply by 1 + w, and (1 + w) / s - 1 is rounded. So they are left alone.
- What reads one input has one s: max|W_j| is over all quantized layers that read channel j.
- The mean exponent of the channels that one tensor gives is about 0, and that of a channel whose
  inputs or weights were all 0 is 0. So an expert that no token reached stays as it is.
- The inputs of o and of a linear attention's out_proj stay as they are: dividing v, in as many ways
  as were tried, brought nothing (SmolLM2-135M).
- The masters do not change. Scales are applied to what is sent (`weight_sync.reshard`).

Example:

    maxima = Maxima(architecture, device)
    maxima.add_input("model.layers.0.mlp.down_proj.weight", x)     # [tokens, in]
    maxima.add_weight("model.layers.0.mlp.down_proj.weight", w)    # [out, in], every other as well
    smoothing = maxima.smoothing(0.5)
    smoothing.apply("model.layers.0.mlp.down_proj.weight", w)      # w * s
    smoothing.apply("model.layers.0.mlp.up_proj.weight", w)        # w / s for each row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.checksum import checksum

LARGEST_EXPONENT = 24  # of a scale, either way


class Largest(NamedTuple):
    """The channel that stands out most."""

    ratio: float  # of its largest input to the median of those of its layer's channels
    name: str  # the layer's


@dataclass(frozen=True)
class Smoothing:
    """The scales of a model's full tensors: float32, powers of two. A name that lacks one has 1."""

    columns: dict[str, Tensor]  # [in] of a tensor that reads channels
    rows: dict[str, Tensor]  # [out] of a tensor that gives channels: 1 / s

    @property
    def checksum(self) -> int:
        """A number of 64 bits, from 0, which is that of equal scales alone."""
        return checksum(torch.cat([*self.columns.values()])) % 2**64

    def apply(self, name: str, values: Tensor, offset: tuple[int, int] = (0, 0)) -> Tensor:
        """Return a full tensor, or its part that begins at `offset`, as servers hold it.

        `values` is `[rows, columns]` or `[rows]`, in BF16 or float32, and so is the result.
        """
        columns, rows = self.of_part(name, values.shape, offset)
        if columns is not None:
            values = values * columns.to(values)
        if rows is not None:
            values = values * rows.to(values).view(-1, *[1] * (values.dim() - 1))
        return values

    def of_part(
        self, name: str, shape: Sequence[int], offset: tuple[int, int] = (0, 0)
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what a full tensor's columns and its rows are multiplied by; None: by nothing."""
        (row, column), (num_rows, *num_columns) = offset, shape
        columns, rows = self.columns.get(name), self.rows.get(name)
        return (
            None if columns is None else columns[column : column + num_columns[0]],
            None if rows is None else rows[row : row + num_rows],
        )


class Maxima:
    """Largest magnitudes of each channel: of what layers read, and of the weights that read it."""

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        """Start with zeros on `device`."""
        self._architecture = architecture
        self._readers: dict[str, list[str]] = {}  # by the name of what gives their channels
        for name in sorted(weight_map.hugging_face_names(architecture)):
            if giver := giver_of(name, architecture):
                self._readers.setdefault(giver, []).append(name)
        places = (weight_map.in_file(giver, architecture) for giver in self._readers)
        sizes = [place.shape[0] for place in places]
        # One tensor, so that ranks can share it at once: [input or weight, channels of all givers].
        self.values = torch.zeros(2, sum(sizes), device=device)
        self._of = dict(zip(self._readers, self.values.split(sizes, dim=1), strict=True))

    def add_input(self, name: str, x: Tensor, first_column: int = 0) -> None:
        """Note the input `x` [tokens, columns] of a full tensor, or of its part from a column."""
        self._add(0, name, x, first_column)

    def add_weight(self, name: str, weight: Tensor, first_column: int = 0) -> None:
        """Note a full tensor, or its part `[rows, columns]` that begins at a column."""
        self._add(1, name, weight, first_column)

    def _add(self, kind: int, name: str, values: Tensor, first_column: int) -> None:
        giver = giver_of(name, self._architecture)
        if giver is None or not values.numel():
            return
        seen = self._of[giver][kind, first_column : first_column + values.shape[1]]
        seen.copy_(torch.maximum(seen, values.detach().abs().amax(0)))

    def smoothing(self, exponent: float) -> Smoothing:
        """Return the scales for SmoothQuant's exponent a."""
        columns: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        for giver, readers in self._readers.items():
            inputs, weights = self._of[giver]
            scale = _scales(inputs, weights, exponent)
            rows[giver] = 1 / scale
            columns |= dict.fromkeys(readers, scale)
        return Smoothing(columns, rows)

    def largest(self) -> Largest:
        """Return the channel whose input stands out most."""
        return max(
            Largest(float(inputs.max() / inputs.median().clamp(min=1e-30)), self._readers[giver][0])
            for giver, (inputs, _) in self._of.items()
        )


def giver_of(name: str, architecture: Architecture) -> str | None:
    """Return the name of the weight that gives the channels which a full tensor reads.

    None if there is none that can be divided without rounding.
    """
    rule, layer = weight_map.find_hugging_face(name)
    if rule.fed_by:
        return None if architecture.is_hybrid else rule.fed_by.format(layer=layer)
    module, is_down, _ = name.partition("down_proj.weight")
    return f"{module}up_proj.weight" if is_down else None


def _scales(inputs: Tensor, weights: Tensor, exponent: float) -> Tensor:
    """Return the scales [channels] float32 from the maxima of inputs and weights."""
    is_live = (inputs > 0) & (weights > 0)
    ratio = exponent * inputs.double().log2() - (1 - exponent) * weights.double().log2()
    ratio = torch.where(is_live, ratio, 0.0)
    ratio -= ratio.sum() / is_live.sum().clamp(min=1)
    ratio = torch.where(is_live, ratio, 0.0).round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    # Made of its bits: a power that is computed may be rounded.
    return ((ratio.int() + 127) << 23).view(torch.float32)
