"""The resharding converter: a learner's shards -> quantized full tensors -> buckets.

The learner's weights are split over tensor-parallel ranks and pipeline stages, in Megatron's
layout. The servers want full tensors under Hugging Face names, quantized. One pass of the converter
gets from one to the other:

    shard --split--> parts --absmax (max-reduced over TP)--> codes, scales --gather--> bucket

Invariants, each with a test:
- Quantize before gather. Only codes, scales and unquantized tensors cross ranks, never a linear
  layer in full precision.
- The codes do not depend on the layout: they are those of quantizing the full tensor, byte for
  byte. If a block of one scale lies on several tensor-parallel ranks (as a row of a row-parallel
  layer does), its absmax is max-reduced over them first.
- A bucket holds at most `bucket_bytes`, or a single larger weight with its scales.
- Beside the model, a rank holds at most two buckets and one tensor: its own part of a bucket and,
  on the receiving rank, the full bucket and another rank's part. A bucket is released before the
  next is allocated, if `send` keeps no reference to it.
- Checksums are computed from the shards, before anything is sent.

A converter that keeps codes keeps this rank's parts of all buckets, a byte for each quantized and
two for each other parameter. Its next pass can then send a delta: each rank compares its parts with
the kept ones, and only what changed (`delta.py`) is gathered. A delta holds, byte for byte, what
turns the tensors of the last pass into those of this one, for any layout.

Example, on every learner rank:

    converter = Converter(learner, "int8", bucket_bytes=512 * 2**20, keeps_codes=True)
    conversion = converter.convert(send)  # global rank 0 calls send(bucket) for each bucket
    conversion.checksums                  # the servers' must be equal; complete on global rank 0
    converter.convert(send, base=1)       # what changed since the last pass, which was version 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.device import device, rank
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.checksum import Part, checksums
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket, copy_values
from qurl_megatron.weight_sync.delta import Change
from qurl_megatron.weight_sync.drift import DriftMeter, WeightDrift
from qurl_megatron.weight_sync.layout import (
    SentTensor,
    SentWeight,
    blocks_are_shared,
    scale_index,
    scale_shape,
)

Send = Callable[[Bucket], None]

# Buckets of deltas up to this part of the largest bucket are joined: a quarter holds the delta of a
# 32B model, and is little memory beside two buckets.
MERGED_PART = 4


@dataclass
class Conversion:
    """Measurements of one pass over the weights."""

    checksums: dict[str, int] = field(default_factory=dict)  # every sent tensor's, by name
    drift: dict[str, WeightDrift] = field(default_factory=dict)  # every quantized weight's, by name
    num_bytes: int = 0  # of all full tensors
    # Rank, name and place of a weight that holds NaN or infinity. What was sent is then worthless.
    non_finite: str = ""

    @contextmanager
    def noting_non_finite(self) -> Iterator[None]:
        """End this context at a weight that holds NaN or infinity, and note the first such weight.

        The pass goes on: other ranks wait for this one in its collectives.
        """
        try:
            yield
        except quantize.NonFiniteWeight as error:
            self.non_finite = self.non_finite or f"on learner rank {rank()} the weight {error}"

    @property
    def total_drift(self) -> WeightDrift:
        """Drift of all quantized weights together."""
        return WeightDrift.total(self.drift.values())


class Converter:
    """Converts a learner's weights to buckets, any number of times, in one format."""

    def __init__(
        self,
        learner: Learner,
        weight_format: WeightFormat | Literal["masters"],
        bucket_bytes: int,
        *,
        keeps_codes: bool = False,
        with_steps: bool = False,
    ) -> None:
        """Store the settings; allocate nothing.

        Args:
            weight_format: a server's format, or "masters" for the optimizer's float32 values.
            bucket_bytes: largest bucket; a single weight larger than that gets its own.
            keeps_codes: keep what a pass sends, so that the next can be a delta.
            with_steps: deltas tell steps, so that they can be coded; a byte for each change.
        """
        self.keeps_codes = keeps_codes
        self._learner = learner
        self._format = weight_format
        self._bucket_bytes = bucket_bytes
        self._with_steps = with_steps
        self._meter = DriftMeter()
        self._kept: list[Bucket] = []  # this rank's part of each bucket in the last pass

    def convert(self, send: Send, *, base: int | None = None) -> Conversion:
        """Convert the current weights, and return their checksums and drift.

        Collective: every learner rank calls it. `send` is called on global rank 0 only, with one
        bucket after another. Only its result is complete; that of another rank covers its own
        pipeline stage or less. If a quantized weight holds NaN or infinity, `non_finite` says so.

        Args:
            base: the version that the last pass was sent as; what changed since is sent, as buckets
                of `delta.py`. None: all is sent.
        """
        if not self.keeps_codes:
            self._kept.clear()
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
            if self._format == "masters":
                for _ in self._learner.masters():  # the first replica gathers this rank's part
                    pass
            return Conversion()
        first_stage = parallel_state.get_pipeline_model_parallel_rank() == 0
        if base is not None:
            merged = _MergedDeltas(send, base, self._bucket_bytes // MERGED_PART)
            send = merged.add
        conversion = self._convert_stage(send if first_stage else _send_to_first_stage, base)
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return conversion
        if first_stage:
            for stage in range(1, parallel_state.get_pipeline_model_parallel_world_size()):
                _receive_buckets(stage, send)
            if base is not None:
                merged.flush()
        else:
            _send_to_first_stage(None)
        return _merge_stages(conversion)

    def _convert_stage(self, send: Send, base: int | None) -> Conversion:
        """Convert this pipeline stage's weights; its tensor-parallel rank 0 sends the buckets."""
        conversion = Conversion()
        deltas = None
        if base is not None:
            deltas = _Deltas(send, base, self._bucket_bytes, self._with_steps)
        for index, weights in enumerate(self._plan_buckets()):
            tensors = [tensor for weight in weights for tensor in weight.tensors]
            own = self._convert_bucket(weights, tensors, conversion)
            if deltas is None:
                _gather_and_send(tensors, own, send)
            else:
                deltas.add(tensors, self._kept[index], own)
            if self.keeps_codes:
                self._kept[index : index + 1] = [own]
            conversion.num_bytes += sum(tensor.num_bytes for tensor in tensors)
            del own  # before the next is allocated
        if deltas is not None:
            deltas.flush()
        return _sum_over_tensor_parallel(conversion)

    def _plan_buckets(self) -> Iterator[list[SentWeight]]:
        bucket: list[SentWeight] = []
        num_bytes = 0
        for weight in self._weights():
            if bucket and num_bytes + weight.num_bytes > self._bucket_bytes:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(weight)
            num_bytes += weight.num_bytes
        if bucket:
            yield bucket

    def _weights(self) -> Iterator[SentWeight]:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        masters = self._format == "masters"
        learner = self._learner
        for rule, layer, shard in learner.masters() if masters else learner.shards():
            for part in weight_map.split(
                rule, shard, learner.architecture, layer, tp_rank, tp_size
            ):
                if rule.quantized and self._format not in ("bf16", "masters"):
                    yield SentWeight.quantized(part, self._format)
                else:
                    yield SentWeight.plain(part, torch.float32 if masters else torch.bfloat16)

    def _convert_bucket(
        self, weights: list[SentWeight], tensors: list[SentTensor], conversion: Conversion
    ) -> Bucket:
        """Return this rank's part of a bucket of `tensors`, and add to `conversion`."""
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        parts = [weight.part for weight in weights if weight.is_quantized]
        shared = self._share_absmax(parts, conversion)
        own = _empty_part(tensors, tp_rank)
        views = dict(own.tensors())
        for weight in weights:
            name = weight.part.name
            if weight.is_quantized:
                absmax, scale = shared.get(name, (None, None))
                conversion.drift[name] = WeightDrift()
                with conversion.noting_non_finite():
                    conversion.drift[name] = self._quantize(weight, views, absmax, scale)
            elif views[name].numel():
                views[name].copy_(weight.part.tensor)
        sums = checksums(Part(views[t.name], *_offset(t, tp_rank)) for t in tensors)
        conversion.checksums |= {t.name: value for t, value in zip(tensors, sums, strict=True)}
        return own

    def _quantize(
        self,
        weight: SentWeight,
        views: dict[str, Tensor],
        absmax: Tensor | None,
        scale: Tensor | None,
    ) -> WeightDrift:
        """Write this rank's codes and scales of a weight into `views`.

        `absmax` (of the blocks the part touches) and `scale` (of all blocks) are given for a weight
        whose blocks lie on several ranks.
        """
        codes_view, scale_view = (views[tensor.name] for tensor in weight.tensors)
        part = weight.part
        values = part.tensor
        drift = WeightDrift()
        if values.numel():
            with quantize.name_in_errors(part.name):
                quantized = quantize.quantize(
                    values, self._format, absmax, offset=part.offset, out=codes_view
                )
            drift = self._meter.measure(part.name, values, quantized)
            scale = quantized.scale if scale is None else scale
        if scale_view.numel():
            assert scale is not None
            scale_view.copy_(scale)
        return drift

    def _share_absmax(
        self, parts: list[TensorPart], conversion: Conversion
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Max-reduce the absmax of blocks that lie on several ranks, in one collective.

        Return, for each such weight by name, the absmax of the blocks that this rank's part touches
        and the scales of all blocks.
        """
        parts = [part for part in parts if blocks_are_shared(part, self._format)]
        if not parts:
            return {}
        grids = [torch.zeros(scale_shape(part, self._format), device=device()) for part in parts]
        for part, grid in zip(parts, grids, strict=True):
            if part.view.numel():
                with conversion.noting_non_finite(), quantize.name_in_errors(part.name):
                    own = quantize.block_absmax(part.tensor, self._format, part.offset)
                    grid[scale_index(part, self._format)] = own
        flat = torch.cat([grid.view(-1) for grid in grids])
        dist.all_reduce(
            flat, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group()
        )
        shared = {}
        for part, reduced in zip(parts, flat.split([grid.numel() for grid in grids]), strict=True):
            grid = reduced.view(scale_shape(part, self._format))
            scale = quantize.block_scale(grid, self._format, part.view.dtype)
            shared[part.name] = grid[scale_index(part, self._format)], scale
        return shared


def _offset(tensor: SentTensor, tp_rank: int) -> tuple[int, int]:
    """Return the row and column of the full tensor at which a rank's part begins."""
    row, *columns = tensor.index_on(tp_rank)
    return row.start, columns[0].start if columns else 0


def _sum_over_tensor_parallel(conversion: Conversion) -> Conversion:
    group = parallel_state.get_tensor_model_parallel_group()
    values = [*conversion.checksums.values(), int(conversion.non_finite != "")]
    summed = torch.tensor(values, dtype=torch.int64, device=device())
    dist.all_reduce(summed, group=group)  # int64 wraps around, as the checksum does
    *totals, num_spoilt = summed.tolist()
    total = Conversion(dict(zip(conversion.checksums, totals, strict=True)))
    total.num_bytes = conversion.num_bytes
    if num_spoilt:
        notes = [""] * dist.get_world_size(group)
        dist.all_gather_object(notes, conversion.non_finite, group=group)
        total.non_finite = next(filter(None, notes))
    if conversion.drift:
        sums = torch.tensor(list(conversion.drift.values()), dtype=torch.float64, device=device())
        dist.all_reduce(sums, group=group)
        total.drift = {
            name: WeightDrift(*values)
            for name, values in zip(conversion.drift, sums.tolist(), strict=True)
        }
    return total


def _merge_stages(conversion: Conversion) -> Conversion:
    """Return the merged conversions of all stages on the first stage, and its own on any other."""
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    if num_stages == 1:
        return conversion
    first_stage = parallel_state.get_pipeline_model_parallel_rank() == 0
    stages = [conversion] * num_stages
    dist.gather_object(
        conversion,
        stages if first_stage else None,
        dst=parallel_state.get_pipeline_model_parallel_first_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    if not first_stage:
        return conversion
    merged = Conversion()
    for stage in stages:
        merged.checksums |= stage.checksums
        merged.drift |= stage.drift
        merged.num_bytes += stage.num_bytes
        merged.non_finite = merged.non_finite or stage.non_finite
    return merged


def _empty_part(tensors: list[SentTensor], tp_rank: int) -> Bucket:
    """Allocate a rank's part of a bucket: a smaller bucket with the rank's part of each tensor."""
    entries = ((tensor.name, tensor.dtype, tensor.shape_on(tp_rank)) for tensor in tensors)
    return Bucket.empty(entries, device())


def _gather_and_send(tensors: list[SentTensor], own: Bucket, send: Send) -> None:
    """Gather a full bucket on tensor-parallel rank 0, and send it."""
    bucket = _gather(tensors, own)
    if bucket is not None:
        send(bucket)


def _gather(tensors: list[SentTensor], own: Bucket) -> Bucket | None:
    """Return the full bucket on tensor-parallel rank 0, None elsewhere."""
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        dist.send(own.flat, dst=ranks[0], group=group)
        return None
    if len(ranks) == 1:
        return own
    entries = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    bucket = Bucket.empty(entries, device())
    full = dict(bucket.tensors())
    _place(tensors, own, 0, full)
    for tp_rank, source in enumerate(ranks[1:], start=1):
        _receive_part(tensors, tp_rank, source, full)
    return bucket


def _receive_part(
    tensors: list[SentTensor], tp_rank: int, source: int, full: dict[str, Tensor]
) -> None:
    """Receive a rank's part and place it; it is released before the next one is received."""
    part = _empty_part(tensors, tp_rank)
    dist.recv(part.flat, src=source, group=parallel_state.get_tensor_model_parallel_group())
    _place(tensors, part, tp_rank, full)


def _place(tensors: list[SentTensor], part: Bucket, tp_rank: int, full: dict[str, Tensor]) -> None:
    """Copy a rank's part of a bucket to its places in the full tensors."""
    views = dict(part.tensors())
    for tensor in tensors:
        copy_values(full[tensor.name][tensor.index_on(tp_rank)], views[tensor.name])


class _Deltas:
    """Gathers what changed in the ranks' parts of buckets, and sends it in as few buckets."""

    def __init__(self, send: Send, base: int, bucket_bytes: int, with_steps: bool) -> None:
        self._send = send
        self._base = base
        self._bucket_bytes = bucket_bytes
        self._with_steps = with_steps
        self._changes: list[Change] = []  # of this rank
        self._num_bytes = 0  # of all ranks

    def add(self, tensors: list[SentTensor], old: Bucket, new: Bucket) -> None:
        """Collect the changes in this rank's part of a bucket."""
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        before, after = dict(old.tensors()), dict(new.tensors())
        changes = []
        for tensor in tensors:
            if after[tensor.name].numel():
                offset = _offset(tensor, tp_rank)
                old_part, new_part = before[tensor.name], after[tensor.name]
                change = delta.compare(
                    tensor.name, offset, old_part, new_part, with_steps=self._with_steps
                )
                changes += [change] if change else []
        total = torch.tensor(sum(change.num_bytes for change in changes), device=device())
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        num_bytes = int(total)
        if self._num_bytes and self._num_bytes + num_bytes > self._bucket_bytes:
            self.flush()
        self._changes += changes
        self._num_bytes += num_bytes

    def flush(self) -> None:
        """Send what was collected, on tensor-parallel rank 0; a bucket may be empty."""
        own = delta.pack(self._changes, device())
        self._changes, self._num_bytes = [], 0
        flat = _gather_flat(own)
        if flat is not None:
            self._send(_delta_bucket(self._base, flat))


class _MergedDeltas:
    """Joins small buckets of the stages' deltas: each costs the servers a request."""

    def __init__(self, send: Send, base: int, most_bytes: int) -> None:
        self._send = send
        self._base = base
        self._most_bytes = most_bytes
        self._messages: list[Tensor] = []

    def add(self, bucket: Bucket) -> None:
        """Take a bucket of a delta."""
        if self._num_bytes + len(bucket.flat) > self._most_bytes:
            self.flush()
        self._messages.append(bucket.flat)
        if self._num_bytes > self._most_bytes:
            self.flush()

    def flush(self) -> None:
        """Send what was taken."""
        if self._messages:
            messages, self._messages = self._messages, []
            flat = messages[0] if len(messages) == 1 else torch.cat(messages)
            self._send(_delta_bucket(self._base, flat))

    @property
    def _num_bytes(self) -> int:
        return sum(len(message) for message in self._messages)


def _delta_bucket(base: int, flat: Tensor) -> Bucket:
    """Return the bucket of messages that change version `base`."""
    return Bucket([delta.bucket_name(base)], [flat.dtype], [tuple(flat.shape)], flat)


def _gather_flat(own: Tensor) -> Tensor | None:
    """Return the ranks' flat tensors, one after another, on tensor-parallel rank 0."""
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return own
    sizes = [torch.zeros(1, dtype=torch.int64, device=device()) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device()), group=group)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        dist.send(own, dst=ranks[0], group=group)
        return None
    flat = torch.empty(int(sum(sizes)), dtype=own.dtype, device=device())
    parts = flat.split([int(size) for size in sizes])
    parts[0].copy_(own)
    for part, source in zip(parts[1:], ranks[1:], strict=True):
        dist.recv(part, src=source, group=group)
    return flat


def _send_to_first_stage(bucket: Bucket | None) -> None:
    """Send a bucket to global rank 0; None marks the end of this stage's buckets."""
    first = parallel_state.get_pipeline_model_parallel_first_rank()
    header = None if bucket is None else (bucket.names, bucket.dtypes, bucket.shapes)
    dist.send_object_list([header], dst=first, device=device())
    if bucket is not None:
        dist.send(bucket.flat, dst=first)


def _receive_buckets(stage: int, send: Send) -> None:
    """Receive the buckets of another pipeline stage and pass each to `send`."""
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    while True:
        header = [None]
        dist.recv_object_list(header, src=ranks[stage], device=device())
        if header[0] is None:
            return
        bucket = Bucket.empty(zip(*header[0], strict=True), device())
        dist.recv(bucket.flat, src=ranks[stage])
        send(bucket)
        del bucket  # before the next is allocated
