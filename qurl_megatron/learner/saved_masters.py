"""Read the float32 weights of a checkpoint, without a learner: for `qurl export`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from qurl_megatron.config import text
from qurl_megatron.config.schema import Config
from qurl_megatron.files import PARTIAL
from qurl_megatron.learner.checkpoint import CheckpointError
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import Progress
from qurl_megatron.model.weight_map import Rule, num_values

CONTENTS = ("megatron", "model", "config.yaml", "state.json")


def read_config(checkpoint: Path) -> Config:
    """Return the run's configuration in a checkpoint.

    Raises:
        CheckpointError: the directory is not a complete checkpoint.
    """
    missing = [name for name in CONTENTS if not (checkpoint / name).exists()]
    if missing or checkpoint.suffix == PARTIAL:
        reason = f"lacks {missing[0]}" if missing else "was left by an interrupted save"
        raise CheckpointError(
            f"{checkpoint}: not a checkpoint, it {reason}; complete ones are in "
            "RUN/checkpoints/step_NNNNNN"
        )
    return text.load(checkpoint / "config.yaml")


def read_masters(checkpoint: Path, progress: Progress) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield the float32 weights under their Hugging Face names, one layer at a time.

    For a run with adapters, yield only these.

    They are as trained: the scales of UAQ (update-aware quantization) are not undone. After each
    layer, `progress` receives the bytes read so far and the total.

    Raises:
        CheckpointError: the directory is not a complete checkpoint, or not any more.
    """
    config = read_config(checkpoint)
    architecture = dataclasses.replace(
        Architecture.from_directory(checkpoint / "model"), adapter_rank=config.adapters.rank
    )
    is_bfloat16 = config.learner.dtype == "bfloat16"
    rules = [
        rule
        for rule in weight_map.rules(architecture)
        if rule.is_adapter == (config.adapters.rank > 0)
    ]
    groups = {
        layer: [rule for rule in rules if layer in rule.layers(architecture.linear_layers)]
        for layer in (None, *range(architecture.num_layers))
    }
    sizes = {
        layer: sum(num_values(part, architecture) for rule in group for part in rule.tensors)
        for layer, group in groups.items()
    }
    done, total = 0, sum(sizes.values())  # values
    for layer, group in groups.items():
        if group:
            yield _read(checkpoint, group, layer, architecture, is_bfloat16)
        done += sizes[layer]
        progress(4 * done, 4 * total)


def _read(
    checkpoint: Path,
    rules: list[Rule],
    layer: int | None,
    architecture: Architecture,
    is_bfloat16: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `rules` in one layer; None stands for those outside the layers."""
    # Megatron stacks the tensors of all layers, except in hybrids, whose layers are of two kinds.
    is_stacked = layer is not None and not architecture.is_hybrid
    slices: dict[str, Tensor] = {}
    names = [_stored_name(rule, None if is_stacked else layer, is_bfloat16) for rule in rules]
    for rule, name in zip(rules, names, strict=True):
        if name in slices:  # the tensor of all experts
            continue
        shapes = [weight_map.full_shape(part, architecture) for part in rule.tensors]
        shape = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        if rule.of_experts:
            shape.insert(0, architecture.num_experts)
        slices[name] = torch.empty([1, *shape] if is_stacked else shape)
    try:
        torch.distributed.checkpoint.load(
            slices,
            storage_reader=FileSystemReader(checkpoint / "megatron"),
            planner=_SlicePlanner(layer if is_stacked and layer else 0),
            no_dist=True,
        )
    except CheckpointException as error:  # which is no Exception
        reasons = [" ".join(str(reason).split())[:300] for reason, _ in error.failures.values()]
        raise CheckpointError(
            f"{checkpoint}: cannot be read, if its run has not removed it: {'; '.join(reasons)}"
        ) from None
    for rule, name in zip(rules, names, strict=True):
        shard = slices[name][0] if is_stacked else slices[name]
        shard = shard if rule.expert is None else shard[rule.expert]
        for part in weight_map.split(rule, shard, architecture, layer, 0, 1):
            yield part.name, part.tensor


def _stored_name(rule: Rule, layer: int | None, is_bfloat16: bool) -> str:
    """Return the name under which Megatron stores a parameter's float32 values.

    It uses Transformer Engine's names and stacks the tensors of all experts; with `layer` None it
    stacks those of all layers too. The optimizer holds the float32 values of bfloat16 parameters.
    """
    name = rule.megatron_names[-1].replace("{layer}.", "" if layer is None else f"{layer}.")
    if rule.of_experts:
        name = name.replace("experts.", "experts.experts.").removesuffix(str(rule.expert))
    is_parameter = weight_map.sent_dtype(rule.tensors[0].name) == torch.float32
    return f"optimizer.state.fp32_param.{name}" if is_bfloat16 and not is_parameter else name


class _SlicePlanner(DefaultLoadPlanner):
    """Plans to read a slice of each stored tensor: as much as the target holds, from `first`."""

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
