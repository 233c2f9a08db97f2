"""What a data-parallel replica trains on of a minibatch: dealt out once, scored and updated on.

Global rank 0 has the whole minibatch and decides which sequences go to which replica. The replica
lays them out in micro batches, which every pass over the minibatch uses: the proximal pass, the
reference's and the update. So scores stay on the ranks that computed them, which are those that
need them, and they are bit for bit comparable.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.learner import exchange, packing
from qurl_megatron.learner.micro_batches import MicroBatch, lay_out, plan, take
from qurl_megatron.model.architecture import Architecture


@dataclass
class Share:
    """The sequences of a minibatch that this data-parallel replica trains on.

    The methods are collective over all learner ranks.
    """

    batch: TrainBatch  # the replica's sequences, on the CPU, as global rank 0 sent them
    numbers: list[int]  # of these sequences in the minibatch
    micro_batches: list[MicroBatch]  # the same sequences, with this rank's scores
    dealt: list[list[int]]  # on global rank 0: numbers of each replica's sequences; else empty

    def scores(self, name: str) -> list[Tensor]:
        """Return a tensor of the micro batches' rows for each sequence: [its tokens] on the CPU.

        Only the last pipeline stage has scores; 0 where there is none.
        """
        flat = torch.zeros(len(self.batch.tokens), device=device.device())
        for micro in self.micro_batches:
            row = getattr(micro.rows, name)
            if row is not None:
                is_real = micro.index >= 0
                flat[micro.index[is_real]] = row[0, is_real]
        if parallel_state.get_context_parallel_world_size() > 1:
            # One rank filled each position, so the sum is exact.
            dist.all_reduce(flat, group=parallel_state.get_context_parallel_group())
        return list(flat.cpu().split(self.batch.lengths.tolist()))

    def collect(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return every sequence's tensor on global rank 0, in the minibatch's order.

        Args:
            tensors: one-dimensional, one for each sequence of this replica, on the last stage.

        Returns:
            Tensors on the CPU; none on other ranks.
        """
        by_replica = exchange.to_rank_zero(tensors)
        numbers = itertools.chain.from_iterable(self.dealt)
        found = zip(numbers, itertools.chain.from_iterable(by_replica), strict=True)
        return [tensor for _, tensor in sorted(found, key=lambda pair: pair[0])]

    def add(self, name: str, minibatch: TrainBatch) -> None:
        """Give the rows the tensor `name` of `minibatch`, which global rank 0 has."""
        parts = ([getattr(minibatch.select(numbers), name)] for numbers in self.dealt)
        (flat,) = exchange.to_replicas(parts)
        assert flat is not None
        flat = flat.to(device.device())
        for micro in self.micro_batches:
            setattr(micro.rows, name, take(flat, micro.index))


def deal(batch: TrainBatch, layout: LearnerConfig, architecture: Architecture) -> Share:
    """Send every data-parallel replica its sequences of `batch`; return this replica's.

    Collective over all learner ranks. Global rank 0 has the minibatch, the others an empty one.
    """
    by_replica: list[list[packing.MicroBatch]] = []
    if dist.get_rank() == 0:
        by_replica = plan(batch, layout, architecture)
    dealt = [list(itertools.chain.from_iterable(replica)) for replica in by_replica]
    if dealt:  # the first replica keeps the sequences that are in no micro batch
        dealt[0] += sorted(set(range(len(batch))) - set().union(*dealt))
    parts = (
        [
            torch.tensor([len(sequences) for sequences in replica]),
            torch.tensor(numbers, dtype=torch.int64),
            *_tensors(batch.select(numbers)),
        ]
        for replica, numbers in zip(by_replica, dealt, strict=True)
    )
    counts, own_numbers, *tensors = exchange.to_replicas(parts)
    assert counts is not None and own_numbers is not None
    own = TrainBatch(*tensors)  # type: ignore[arg-type]
    return Share(own, own_numbers.tolist(), lay_out(own, counts.tolist(), layout), dealt)


def _tensors(batch: TrainBatch) -> list[Tensor | None]:
    return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
