"""What to rehearse, what was seen of each rank, and what the plan says about it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qurl_megatron.config.gpus import Node
from qurl_megatron.config.schema import Config, LearnerConfig
from qurl_megatron.device import child_environment
from qurl_megatron.memory.estimate import RUNTIME_BYTES, learner_memory, peaks
from qurl_megatron.model.architecture import Architecture

WORKER = "qurl_megatron.extensions.rehearsal.worker"


@dataclass(frozen=True)
class Rehearsal:
    """The ranks of a learner that are to be played, each in a process of its own."""

    architecture: Architecture
    config: Config
    node: Node
    ranks: list[int]
    transformer_engine: Path | None  # the directory of its Python; None: without it
    changed_part: float = 0.02  # fraction of elements that a delta is assumed to find changed


@dataclass(frozen=True)
class Played:
    """What was seen of one rank."""

    rehearsal: Rehearsal
    rank: int
    phases: dict[str, dict[str, Any]]  # the fields of `trace.Phase`, by name
    error: str | None = None  # the first, in one line
    cpu_s: float = 0.0  # processor time that it took
    host_bytes: int = 0  # peak memory of its process

    @property
    def stage(self) -> int:
        """The rank's pipeline stage."""
        learner = self.rehearsal.config.learner
        return self.rank * learner.pipeline_parallel_size // learner.world_size

    @property
    def traced(self) -> dict[str, int]:
        """Bytes between steps and at the peaks of a step, as `memory.peaks` has them."""
        if self.error:
            return {}
        return {
            "kept": self.phases["publish"]["end_bytes"],
            "score": self._peak("score"),
            "update": self._peak("update"),
            "publish": self._peak("publish", "delta"),
        }

    def _peak(self, *names: str) -> int:
        return max(self.phases[name]["peak_bytes"] for name in names if name in self.phases)

    @cached_property
    def planned(self) -> dict[str, int]:
        """What a plan says of the same peaks, without the CUDA runtime; nothing with a critic."""
        if self.rehearsal.config.objective.advantage_estimator == "gae":
            return {}  # plans do not know critics
        of = self.rehearsal.architecture, self.rehearsal.config
        return peaks(learner_memory(*of, self.stage) | {"runtime": 0})

    @property
    def fits(self) -> bool:
        """Whether the memory of a GPU is enough, with what the CUDA runtime is assumed to need."""
        room = self.rehearsal.node.gpu.memory_bytes - RUNTIME_BYTES
        return max(self.traced.values(), default=0) <= room

    def report(self) -> dict[str, Any]:
        """Return what was seen and planned as values of JSON."""
        names = ("rank", "stage", "error", "fits", "traced", "planned", "phases", "cpu_s")
        return {name: getattr(self, name) for name in names}


def play(rehearsals: Sequence[Rehearsal]) -> Iterator[Played]:
    """Yield what was seen of each rank of each rehearsal, in their order.

    All rehearsals are for one kind of GPU, and all with Transformer Engine or all without.
    """
    missing = [(each, rank) for each in rehearsals for rank in each.ranks]
    with tempfile.TemporaryFile() as said:
        worker = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env=child_environment({"OMP_NUM_THREADS": "1"}),
        )
        with worker:
            assert worker.stdin and worker.stdout
            pickle.dump(rehearsals, worker.stdin)
            worker.stdin.close()
            for line in worker.stdout:
                rehearsal, _ = missing.pop(0)
                yield Played(rehearsal, **json.loads(line))
        said.seek(0)
        last = [line for line in said.read().decode().splitlines() if line.strip()][-1:]
    for rehearsal, rank in missing:
        error = f"the worker ended with {worker.returncode}: {''.join(last)}"
        yield Played(rehearsal, rank, {}, error)


def ranks_that_differ(learner: LearnerConfig) -> list[int]:
    """Return the first rank of the first replica, and the last of the last, of each stage."""
    of_stage = learner.world_size // learner.pipeline_parallel_size
    firsts = range(0, learner.world_size, of_stage)
    return sorted({rank for first in firsts for rank in (first, first + of_stage - 1)})
