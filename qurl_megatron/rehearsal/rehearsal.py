"""What to rehearse, and what was seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.config.schema import Config
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.planning.gpus import Node


@dataclass(frozen=True)
class Rehearsal:
    """The ranks of a learner that are to be played, each in a process of its own."""

    architecture: Architecture
    config: Config
    node: Node
    ranks: list[int]
    transformer_engine: Path | None  # the directory of its Python; None: without it
    changed_part: float  # of the elements, that a delta is taken to find changed
