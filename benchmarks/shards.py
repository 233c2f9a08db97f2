"""The shards that a learner's rank would have, random and without an optimizer.

A 32B learner with its optimizer needs over 500 GB, but the converter reads only a learner's
architecture and shards. These have Megatron's shapes for any architecture. One layer's weights are
stored, and stand for every layer: 976 MB of a 32B model, far more than any cache.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import Rule


class Shards:
    """The BF16 shards of one tensor-parallel rank, on its device."""

    def __init__(
        self,
        architecture: Architecture,
        tensor_parallel_rank: int = 0,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Draw the weights of one layer, and of what is beside the layers."""
        self.architecture = architecture
        self.adapters = None
        self.rounding = "unbiased"
        self._shards: list[tuple[Rule, Tensor]] = []
        generator = torch.Generator(device=device.device()).manual_seed(tensor_parallel_rank)
        for rule in weight_map.rules(architecture):
            parts = []
            for part in rule.tensors:
                index = weight_map.part_index(
                    rule, part, architecture, tensor_parallel_rank, tensor_parallel_size
                )
                # Replicated tensors must be equal on all ranks, so they are all ones.
                values = torch.ones(
                    [run.stop - run.start for run in index],
                    dtype=torch.bfloat16,
                    device=device.device(),
                )
                if part.partition_dim is not None:
                    values.normal_(std=0.02, generator=generator)
                parts.append(values)
            shard = weight_map.merge(rule, parts, architecture, tensor_parallel_size)
            self._shards.append((rule, shard))

    def shards(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield what `Learner.shards` yields: rule, number of the layer, BF16 weight."""
        for rule, shard in self._shards:
            if of_experts not in (None, rule.of_experts):
                continue
            for layer in range(self.architecture.num_layers) if rule.layered else [None]:
                yield rule, layer, shard


def random_learner(
    architecture: Architecture, tensor_parallel_rank: int = 0, tensor_parallel_size: int = 1
) -> Learner:
    """Return `Shards`, which a converter and a publisher accept as a learner."""
    return cast(Learner, Shards(architecture, tensor_parallel_rank, tensor_parallel_size))
