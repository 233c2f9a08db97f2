"""Rotary positions that a model scales for longer sequences, as its config.json describes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qurl_megatron.model.config_json import (
    ArchitectureError,
    read_flag,
    read_positive,
    read_size,
)


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by a factor, with the field of `config.json`."""

    factor: float

    def longest(self, positions: int) -> int:
        """Return the tokens of the longest sequence, of the `max_position_embeddings` given."""
        return int(positions * self.factor)


@dataclass(frozen=True)
class Llama3RopeScaling:
    """The rotary frequency scaling of Llama 3.1 and later, with the fields of `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def longest(self, positions: int) -> int:
        """Return the tokens of the longest sequence, of the `max_position_embeddings` given."""
        return positions


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (arXiv 2309.00071), with those fields of `config.json` that every engine reads."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # With both, the rotated channels are multiplied by another number than `factor` alone gives.
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def longest(self, positions: int) -> int:
        """Return the tokens of the longest sequence, whatever `max_position_embeddings` is."""
        return int(self.original_max_position_embeddings * self.factor)


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling
ROPE_SCALINGS: dict[str, type[RopeScaling]] = {  # by `rope_type`; others are refused
    "linear": LinearRopeScaling,
    "llama3": Llama3RopeScaling,
    "yarn": YarnRopeScaling,
}


def read_scaling(fields: dict[str, Any], file: Path) -> RopeScaling | None:
    """Return the scaling that one object of config.json describes; None: plain rotary positions.

    Raises:
        ArchitectureError: it describes another kind, or has fields that not every engine reads,
            such as those of another kind.
    """
    kinds = {str(fields[name]) for name in ("rope_type", "type") if fields.get(name)} or {"default"}
    known = ["default", *ROPE_SCALINGS]
    if other := sorted(kinds.difference(known)):
        raise ArchitectureError(
            f"{file}: rope scaling '{other[0]}' is not supported; known are {', '.join(known)}"
        )
    if len(kinds) > 1:
        raise ArchitectureError(
            f"{file}: rope scaling is both {' and '.join(map(repr, sorted(kinds)))}; give one"
        )
    kind = kinds.pop()
    scaling = ROPE_SCALINGS.get(kind)
    of_kind = dataclasses.fields(scaling) if scaling else ()
    allowed = {"rope_type", "type", "rope_theta", *(field.name for field in of_kind)}
    unknown = sorted(
        name
        for name, value in fields.items()
        if name not in allowed
        and value is not None
        and not (name in ("factor", "partial_rotary_factor") and value == 1)  # changes nothing
    )
    if unknown:
        raise ArchitectureError(
            f"{file}: rope scaling '{kind}' has no field '{unknown[0]}'; it would be ignored, and "
            "the model's positions would be wrong"
        )
    if scaling is None:
        return None
    values: dict[str, Any] = {}
    readers: dict[str, Callable[..., Any]] = {"int": read_size, "bool": read_flag}
    for field in of_kind:
        name = field.name
        if field.default is dataclasses.MISSING and fields.get(name) is None:
            raise ArchitectureError(f"{file}: {kind} rope scaling has no '{name}'")
        if name in fields:
            values[name] = readers.get(str(field.type), read_positive)(fields, name, file)
    if kind == "linear" and isinstance(fields["factor"], int):
        raise ArchitectureError(
            f"{file}: linear rope scaling's 'factor' must be written {values['factor']}; SGLang "
            "cannot read an integer there"
        )
    described = scaling(**values)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if getattr(described, low, 0.0) >= getattr(described, high, 1.0):
            raise ArchitectureError(f"{file}: {low} must be less than {high}")
    return described
