"""What finer scales would be worth: activations in groups, clipped and affine INT4.

Rollout servers have none of these. The rows say how much of a format's distance they would take
away, beside smoothing, which costs nothing. The distance is that of the chapter `smoothing`.

The package's file has this model in Q4_1: four bits, affine in groups of 32. So affine INT4 finds
its very values again, and its rows say nothing about other models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.pretrained import smoothing
from qurl_megatron.learner import quantized_forward
from qurl_megatron.model.weight_map import Rule
from qurl_megatron.weight_sync.reshard import Converter

GROUP = 32  # columns of a scale of INT4
RATIOS = [1 - 0.05 * number for number in range(11)]  # of the absmax, which a clipped scale keeps
ARMS: list[dict[str, Any]] = [
    {"format": weight_format, "scales": scales, "exponent": exponent}
    for weight_format, choices in {
        "int8": ("a token", "128 channels", "64 channels"),
        "int4-g32": ("absmax", "clipped", "affine"),
    }.items()
    for scales in choices
    for exponent in (0, 0.5)
]


def measure(model: Path, format: Any, scales: str, exponent: float) -> dict[str, Any]:
    """Return the distance of a copy whose activations or weights have other scales."""
    learner = smoothing.learner_of(model)
    smoothing.smooth(model, learner, exponent)
    if format == "int8":
        converter = Converter(learner, format, 2**26)
        if scales == "a token":
            row = smoothing.distance(model, learner, converter)
        else:
            columns = int(scales.split()[0])
            # What a rank of a server shares a scale over is asked of this method alone.
            layer = quantized_forward.QuantizedLayer
            with patch.object(layer, "_scales", lambda *_: (columns, None)):
                row = smoothing.distance(model, learner, converter)
    else:
        row = smoothing.distance(model, learner, _Int4(scales, learner, format, 2**26))
    print(format, scales, exponent, f"{row['kl']:.2e}", flush=True)
    return row


@dataclass(frozen=True)
class _Rounded:
    """Values in place of codes."""

    rounded: Tensor
    smoothing: Tensor | None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values, without smoothing."""
        values = self.rounded.to(dtype)
        return values if self.smoothing is None else values / self.smoothing


class _Int4(Converter):
    """Rounds each group of 32 weights to 4 bits as `scales` says: absmax, clipped or affine."""

    def __init__(self, scales: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._scales = scales

    def codes(self, rule: Rule, layer: int | None, shard: Tensor) -> Any:
        coded = super().codes(rule, layer, shard)
        if self._scales == "absmax":
            return coded
        values = shard if coded.smoothing is None else shard * coded.smoothing
        groups = values.unflatten(1, (-1, GROUP))
        rounded = _affine(groups) if self._scales == "affine" else _clipped(groups)
        return _Rounded(rounded.flatten(1), coded.smoothing)


def _affine(groups: Tensor) -> Tensor:
    """Round to 16 levels between the smallest and the largest of each group."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-30)
    return ((groups - low) / scale).round() * scale + low


def _clipped(groups: Tensor) -> Tensor:
    """Round to -7 to 7 times the scale that has the least squared error of each group."""
    absmax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    best, least = groups, torch.full_like(absmax, torch.inf)
    for ratio in RATIOS:
        scale = ratio * absmax / 7
        rounded = (groups / scale).round().clamp(-7, 7) * scale
        error = (rounded - groups).square().sum(-1, keepdim=True)
        best = torch.where(error < least, rounded, best)
        least = torch.minimum(error, least)
    return best


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| format | one scale for | exponent | KL |", "| --- | --- | --- | --- |"]
    for row in rows:
        arm = row["arm"]
        cells = [arm["format"], arm["scales"], f"{arm['exponent']:g}"]
        lines.append(f"| {' | '.join(cells)} | {row['kl']:.2e} ± {row['kl_error']:.0e} |")
    return "\n".join(lines)
