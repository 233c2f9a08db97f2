"""Checkpoints: all that a run goes on from, written beside training and seen only when whole.

    RUN/checkpoints/step_000020/
        megatron/     weights, optimizers and schedules, of PPO's critic too, in Megatron's
                      layout-free format
        model/        config.json and tokenizer, for `qurl export`
        config.yaml   of the run when it was saved
        state.json    RunState

Invariants:
- A directory called `step_*` is whole: it is made under another name, synced, and renamed once
  every rank has written its part. What a killed save leaves is removed by the next one.
- The state is that of the moment `save` was called, whatever training does while it is written.
- Any tensor, pipeline and data parallel layout can go on from any other's checkpoint.

RUN/checkpoints.jsonl has a line for each that came about: its step, and how long it was written.

The learner has no dropout, so it has no random state; the order of prompts is in the RunState.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import shutil
from collections.abc import Iterator
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from qurl_megatron import device
from qurl_megatron.config import overrides as configs
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.files import PARTIAL, partial_of, rename_whole, sync
from qurl_megatron.learner.critic import Critic
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import Progress, copy_beside_weights
from qurl_megatron.model.weight_map import Rule
from qurl_megatron.process import die_with_parent

CONTENTS = ("megatron", "model", "config.yaml", "state.json")


class CheckpointError(ConfigError):
    """A directory that is not a whole checkpoint, or not to be written; the text says why."""


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where a run stood after a step, beside its learner."""

    step: int  # the last one done
    weight_version: int  # published after it
    time_s: float  # of RL so far
    evaluation_before: dict[str, Any]  # `Evaluation`, before the first RL step
    prompts: dict[str, Any]  # `PromptStream.state`


class Checkpoints:
    """Saves one run's checkpoints while it trains. Every learner rank makes the same calls."""

    def __init__(self, config: Config, learner: Learner, critic: Critic | None = None) -> None:
        self._config = config
        self._learner = learner
        self._critic = critic
        self._directory = config.run_dir / "checkpoints"
        self._queue = AsyncCallsQueue(persistent=False)
        # Megatron would spawn this manager, which outlives a rank that is killed.
        self._manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        self._manager.start(die_with_parent)
        filesystem_async._results_queue = self._manager.Queue()

    def newest(self) -> Path | None:
        return max(list_checkpoints(self._config.run_dir), default=None)

    def is_due(self, step: int) -> bool:
        every = self._config.checkpoint.every_steps
        return every > 0 and (step % every == 0 or step == self._config.steps)

    def save(self, state: RunState) -> None:
        """Begin to save; processes of their own write while the caller goes on.

        A save still under way is waited for. `state` is used on global rank 0 only.
        """
        self.poll(wait=True)
        whole = self._directory / f"step_{state.step:06}"
        partial = partial_of(whole)
        device.from_rank_zero(lambda: self._begin(partial, state))
        with device.megatron_runtime():
            request = dist_checkpointing.save(
                self._sharded_state(),
                str(partial / "megatron"),
                async_sharded_save=True,
            )
            request.add_finalize_fn(
                lambda: device.from_rank_zero(lambda: self._end(partial, whole))
            )
            self._queue.schedule_async_request(request)

    def restore(self, checkpoint: Path) -> None:
        """Give learner and critic the checkpoint's weights, optimizer and schedule."""
        with device.megatron_runtime():
            state = dist_checkpointing.load(
                self._sharded_state(loading=True), str(checkpoint / "megatron")
            )
            self._learner.restore(state)
            if self._critic:
                self._critic.restore(state["critic"])

    def poll(self, *, wait: bool = False) -> None:
        """Make visible what every rank has written; `wait` for what is still being written.

        Raises:
            megatron.core.dist_checkpointing.core.CheckpointingException: writing failed.
        """
        with device.megatron_runtime():
            self._queue.maybe_finalize_async_calls(blocking=wait)

    def close(self) -> None:
        """Give up a save that is still under way; nothing whole is touched."""
        for call in self._queue.async_calls:
            call.async_caller.close(abort=True)
        filesystem_async._results_queue = None
        self._manager.shutdown()

    def _sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        state = self._learner.sharded_state(loading=loading)
        if self._critic:
            state["critic"] = self._critic.sharded_state(loading=loading)
        return state

    def _begin(self, partial: Path, state: RunState) -> None:
        for leftover in self._directory.glob("*" + PARTIAL):
            shutil.rmtree(leftover)
        (partial / "megatron").mkdir(parents=True)
        (partial / "model").mkdir()
        copy_beside_weights(Path(self._config.model), partial / "model")
        configs.save(self._config, partial / "config.yaml")
        (partial / "state.json").write_text(json.dumps(dataclasses.asdict(state), indent=2) + "\n")

    def _end(self, partial: Path, whole: Path) -> None:
        sync(partial / "megatron")
        rename_whole(partial, whole)
        with (self._config.run_dir / "checkpoints.jsonl").open("a") as file:
            line = {"step": read_state(whole).step, "time_write_s": _time_write_s(whole)}
            file.write(json.dumps(line) + "\n")
        for old in list_checkpoints(self._config.run_dir)[: -self._config.checkpoint.keep_last]:
            # Renamed first: a removal that is cut short must not leave what looks whole.
            leaving = old.rename(partial_of(old))
            shutil.rmtree(leaving)


def _time_write_s(checkpoint: Path) -> float:
    """Seconds from the beginning of a save to its last file, by the file system's own clock."""
    begun = (checkpoint / "state.json").stat().st_mtime
    return max(path.stat().st_mtime for path in (checkpoint / "megatron").iterdir()) - begun


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The run's whole checkpoints, oldest first."""
    return sorted(
        path for path in (run_dir / "checkpoints").glob("step_*") if path.suffix != PARTIAL
    )


def read_state(checkpoint: Path) -> RunState:
    return RunState(**json.loads((checkpoint / "state.json").read_text()))


def read_config(checkpoint: Path) -> Config:
    """The configuration a checkpoint was saved under.

    Raises:
        CheckpointError: the directory is not a whole checkpoint.
    """
    missing = [name for name in CONTENTS if not (checkpoint / name).exists()]
    if missing or checkpoint.suffix == PARTIAL:
        lacks = f"lacks {missing[0]}" if missing else "is of a save that was cut short"
        raise CheckpointError(
            f"{checkpoint}: not a checkpoint, it {lacks}; a run has whole ones in "
            "checkpoints/step_NNNNNN"
        )
    return configs.load(checkpoint / "config.yaml")


def read_masters(checkpoint: Path, progress: Progress) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The float32 weights under their Hugging Face names, layer by layer, as they were trained.

    UAQ's scales are still in them. `progress` is told the bytes read and those to be read.
    """
    architecture = Architecture.from_directory(checkpoint / "model")
    # A BF16 learner steps float32 copies, which are part of its optimizer.
    masters = read_config(checkpoint).learner.dtype == "bfloat16"
    prefix = "optimizer.state.fp32_param." if masters else ""
    every = weight_map.rules(architecture)
    layered = [rule for rule in every if rule.layered]
    groups: list[tuple[int | None, list[Rule]]] = [(None, [r for r in every if not r.layered])]
    groups += [(layer, layered) for layer in range(architecture.num_layers)]
    sizes = [sum(_bytes(rule, architecture) for rule in rules) for _, rules in groups]
    total, done = sum(sizes), 0
    for (layer, rules), num_bytes in zip(groups, sizes, strict=True):
        yield _read(checkpoint, rules, layer, architecture, prefix)
        done += num_bytes
        progress(done, total)


def _read(
    checkpoint: Path, rules: list[Rule], layer: int | None, architecture: Architecture, prefix: str
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `rules` make of one layer, or of what is outside the layers."""
    slices = {}
    for rule in rules:
        shapes = [weight_map.full_shape(part, architecture) for part in rule.tensors]
        shard = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:])
        # Megatron stores under Transformer Engine's names, and a layer's tensors stacked.
        name = prefix + rule.megatron_names[-1].replace("{layer}.", "")
        slices[name] = shard if layer is None else shard[None]
    torch.distributed.checkpoint.load(
        slices,
        storage_reader=FileSystemReader(checkpoint / "megatron"),
        planner=_SlicePlanner(layer or 0),
        no_dist=True,
    )
    for rule, shard in zip(rules, slices.values(), strict=True):
        shard = shard if layer is None else shard[0]
        for part in weight_map.split(rule, shard, architecture, layer, 0, 1):
            yield part.name, part.tensor


class _SlicePlanner(DefaultLoadPlanner):
    """Reads what its tensors have room for, from index `first` of the stored ones on."""

    def __init__(self, first: int) -> None:
        super().__init__(flatten_state_dict=False)
        self._first = first

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, tensor in self.state_dict.items():
            offsets = torch.Size([self._first] + [0] * (tensor.dim() - 1))
            chunk = ChunkStorageMetadata(offsets, tensor.shape)
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


def _bytes(rule: Rule, architecture: Architecture) -> int:
    return sum(4 * math.prod(weight_map.full_shape(part, architecture)) for part in rule.tensors)
