"""The resharding converter: learner shards -> quantized full tensors -> byte-bounded buckets.

    shard --split--> parts --absmax (max-reduced over TP)--> codes, scales --gather--> bucket

Invariants, each a test:
- Quantize before gather: only codes, scales and unquantized tensors cross ranks, never a linear
  layer in full precision.
- Where a block of one scale is spread over tensor-parallel ranks (a row-parallel layer's rows are),
  its absmax is max-reduced first; the codes are those of quantizing the full tensor, byte for byte,
  whatever the layout.
- A bucket holds at most `bucket_bytes`, or one weight larger than that with its scales. What a rank
  holds at once, beside the model, is at most two buckets and one tensor: its own part of a bucket,
  written where it is sent from, and on the receiving rank the bucket and one other rank's part.
- Checksums are taken of the shards, before they travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.device import device
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.checksum import checksum
from qurl_megatron.quantization.quantize import QuantizedTensor

MEASURED_ROWS = 128  # of each part of a weight, at most; see `_Measure`
_TINY = 1e-300  # keeps 0 / 0 at 0


@dataclass(frozen=True)
class Bucket:
    """Full tensors in one flat buffer, in the order of `names`, the widest types first."""

    names: list[str]  # as in a Hugging Face checkpoint; scales are `<weight>_scale` or `_scale_inv`
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    flat: Tensor  # [bytes] uint8

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, views of the buffer."""
        start = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            end = start + math.prod(shape) * dtype.itemsize
            yield name, self.flat[start:end].view(dtype).view(shape)
            start = end


class WeightSums(NamedTuple):
    """Sums over quantized weights; those of a change are 0 in a converter's first pass."""

    num_codes: float = 0
    code_flips: float = 0  # codes that changed since the last pass
    error_squares: float = 0  # |Q(w) - w|^2
    weight_squares: float = 0  # |w|^2
    update_squares: float = 0  # |w - w at the last pass|^2
    previous_squares: float = 0  # |w at the last pass|^2

    @classmethod
    def total(cls, parts: Iterable[WeightSums]) -> WeightSums:
        return cls(*map(sum, zip(cls(), *parts, strict=True)))

    @property
    def quant_error(self) -> float:
        """QuRL Eq. 14."""
        return self.error_squares / max(self.weight_squares, _TINY)

    @property
    def update_norm(self) -> float:
        """QuRL Eq. 13, since the last pass."""
        return self.update_squares / max(self.previous_squares, _TINY)

    @property
    def code_flip_fraction(self) -> float:
        return self.code_flips / max(self.num_codes, 1)


@dataclass
class Conversion:
    """What one pass over the weights showed; complete on global rank 0 when the pass is over."""

    checksums: dict[str, int] = field(default_factory=dict)  # of every tensor sent, by name
    sums: dict[str, WeightSums] = field(default_factory=dict)  # of every quantized weight, by name

    @property
    def total(self) -> WeightSums:
        return WeightSums.total(self.sums.values())


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a bucket and how the ranks share it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int | None = None  # along which the ranks' parts are concatenated
    runs: list[slice] | None = None  # of every rank, along `dim`; None: rank 0 sends all of it

    def index_on(self, tp_rank: int) -> tuple[slice, ...]:
        """Where a rank's part lies in the full tensor; empty where it has none to send."""
        index = [slice(0, size) for size in self.shape]
        if self.dim is not None and self.runs is not None:
            index[self.dim] = self.runs[tp_rank]
        elif tp_rank != 0:
            index[0] = slice(0, 0)
        return tuple(index)

    def shape_on(self, tp_rank: int) -> tuple[int, ...]:
        return tuple(run.stop - run.start for run in self.index_on(tp_rank))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Weight:
    """What one part of a shard becomes: itself in BF16, or codes and scales."""

    part: TensorPart
    quantized: bool
    tensors: list[_Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


class Converter:
    """Turns a learner's weights into buckets, over and over, in one format.

    Collective: every learner rank runs `buckets` to its end; only global rank 0 is given buckets.
    """

    def __init__(
        self,
        learner: Learner,
        weight_format: WeightFormat | Literal["masters"],
        bucket_bytes: int,
    ) -> None:
        """`masters` are the optimizer's float32 values, to be kept; the rest are a server's."""
        self._learner = learner
        self._format = weight_format
        self._bucket_bytes = bucket_bytes
        self._measure = _Measure()
        self.conversion = Conversion()

    def buckets(self) -> Iterator[Bucket]:
        """Yield the policy's weights, tensor by tensor, then complete `conversion`.

        Raises:
            quantize.NonFiniteWeight: a weight holds NaN or infinity; the message names it.
        """
        if parallel_state.get_data_parallel_rank() != 0:
            return
        stage = parallel_state.get_pipeline_model_parallel_rank()
        leader = parallel_state.get_tensor_model_parallel_rank() == 0
        if stage == 0:
            yield from self._stage_buckets()
            if leader:
                for sender in range(1, parallel_state.get_pipeline_model_parallel_world_size()):
                    yield from _receive_buckets(sender)
        else:
            for bucket in self._stage_buckets():
                _send(bucket)
            if leader:
                _send(None)
        if leader:
            self._collect_stages()

    def _stage_buckets(self) -> Iterator[Bucket]:
        """The buckets of this pipeline stage, on its tensor-parallel rank 0."""
        checksums: dict[str, int] = {}
        sums: dict[str, WeightSums] = {}
        for weights in self._planned_buckets():
            yield from self._convert(weights, checksums, sums)
        self._reduce_over_tensor_parallel(checksums, sums)

    def _planned_buckets(self) -> Iterator[list[_Weight]]:
        bucket: list[_Weight] = []
        size_bytes = 0
        for weight in self._weights():
            if bucket and size_bytes + weight.num_bytes > self._bucket_bytes:
                yield bucket
                bucket, size_bytes = [], 0
            bucket.append(weight)
            size_bytes += weight.num_bytes
        if bucket:
            yield bucket

    def _weights(self) -> Iterator[_Weight]:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        masters = self._format == "masters"
        learner = self._learner
        for rule, layer, shard in learner.masters() if masters else learner.shards():
            for part in weight_map.split(
                rule, shard, learner.architecture, layer, tp_rank, tp_size
            ):
                if rule.quantized and self._format not in ("bf16", "masters"):
                    yield _Weight(part, True, _quantized_tensors(part, self._format))
                else:
                    dtype = torch.float32 if masters else torch.bfloat16
                    tensor = _Tensor(part.name, dtype, part.full_shape, part.dim, part.rank_slices)
                    yield _Weight(part, False, [tensor])

    def _convert(
        self, weights: list[_Weight], checksums: dict[str, int], sums: dict[str, WeightSums]
    ) -> Iterator[Bucket]:
        """One bucket on tensor-parallel rank 0, nothing elsewhere; adds to what was measured."""
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        shared = self._shared_absmax([weight.part for weight in weights if weight.quantized])
        layout = _Layout([tensor for weight in weights for tensor in weight.tensors])
        own = layout.buffer(tp_rank)
        views = layout.views(own, tp_rank)
        for weight in weights:
            name, *scale_name = (tensor.name for tensor in weight.tensors)
            values = weight.part.tensor
            if not weight.quantized:
                if views[name].numel():
                    views[name].copy_(values)
                continue
            sums[name] = WeightSums()
            touched, scale = shared.get(name, (None, None))
            if values.numel():
                with quantize.naming(name):
                    quantized = quantize.quantize(
                        values, self._format, touched, offset=weight.part.offset, out=views[name]
                    )
                sums[name] = self._measure(name, values, quantized)
                scale = quantized.scale if scale is None else scale
            if views[scale_name[0]].numel():
                assert scale is not None
                views[scale_name[0]].copy_(scale)
        for tensor in layout.tensors:
            row, column = (tensor.index_on(tp_rank) + (slice(0, 0),))[:2]
            checksums[tensor.name] = (
                checksum(views[tensor.name], row_offset=row.start, column_offset=column.start)
                if views[tensor.name].numel()
                else 0
            )
        yield from _gather(layout, own)

    def _shared_absmax(self, parts: list[TensorPart]) -> dict[str, tuple[Tensor, Tensor]]:
        """Of weights that share blocks among ranks: absmax where they touch them, and all scales.

        Reduced over the ranks in one collective.
        """
        parts = [part for part in parts if _blocks_are_shared(part, self._format)]
        if not parts:
            return {}
        grids = [torch.zeros(_grid_shape(p, self._format), device=device()) for p in parts]
        for part, grid in zip(parts, grids, strict=True):
            if part.view.numel():
                with quantize.naming(part.name):
                    own = quantize.block_absmax(part.tensor, self._format, part.offset)
                grid[_grid_index(part, self._format)] = own
        flat = torch.cat([grid.view(-1) for grid in grids])
        dist.all_reduce(
            flat, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group()
        )
        shared = {}
        for part, reduced in zip(parts, flat.split([g.numel() for g in grids]), strict=True):
            grid = reduced.view(_grid_shape(part, self._format))
            scale = quantize.block_scale(grid, self._format, part.view.dtype)
            shared[part.name] = grid[_grid_index(part, self._format)], scale
        return shared

    def _reduce_over_tensor_parallel(
        self, checksums: dict[str, int], sums: dict[str, WeightSums]
    ) -> None:
        group = parallel_state.get_tensor_model_parallel_group()
        all_checksums = torch.tensor(list(checksums.values()), dtype=torch.int64, device=device())
        dist.all_reduce(all_checksums, group=group)  # int64 wraps around, as the checksum does
        self.conversion = Conversion(dict(zip(checksums, all_checksums.tolist(), strict=True)))
        if sums:
            all_sums = torch.tensor(list(sums.values()), dtype=torch.float64, device=device())
            dist.all_reduce(all_sums, group=group)
            self.conversion.sums = {
                name: WeightSums(*values)
                for name, values in zip(sums, all_sums.tolist(), strict=True)
            }

    def _collect_stages(self) -> None:
        """Add the other pipeline stages' conversions to the first stage's."""
        first = parallel_state.get_pipeline_model_parallel_rank() == 0
        stages = [self.conversion] * parallel_state.get_pipeline_model_parallel_world_size()
        if len(stages) == 1:
            return
        dist.gather_object(
            self.conversion,
            stages if first else None,
            dst=parallel_state.get_pipeline_model_parallel_first_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        if first:
            self.conversion = Conversion()
            for stage in stages:
                self.conversion.checksums |= stage.checksums
                self.conversion.sums |= stage.sums


class _Measure:
    """Eq. 13, Eq. 14 and code flips of every weight, from some of its rows.

    All rows would need the last pass's weights and codes again: one and a half models in memory.
    Evenly spaced rows speak for the rest; weights of few rows are measured whole.
    """

    def __init__(self) -> None:
        self._previous: dict[str, tuple[Tensor, Tensor]] = {}  # name -> rows of weight and codes

    def __call__(self, name: str, values: Tensor, quantized: QuantizedTensor) -> WeightSums:
        num_rows = values.shape[0]
        step = -(-num_rows // MEASURED_ROWS)
        first = step // 2
        weight = values[first::step].clone()
        codes = quantized.codes[first::step].clone()
        exact = weight.float()
        error = quantize.dequantize(quantized, slice(first, None, step)) - exact
        sums = [
            float(codes.numel()),
            0.0,
            _square_sum(error),
            _square_sum(exact),
        ]
        if name in self._previous:
            weight_before, codes_before = self._previous[name]
            before = weight_before.float()
            sums[1] = float(quantize.code_flips(codes_before, codes))
            sums += [_square_sum(exact - before), _square_sum(before)]
        self._previous[name] = weight, codes
        return WeightSums(*(value * num_rows / weight.shape[0] for value in sums))


def _square_sum(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


def _quantized_tensors(part: TensorPart, weight_format: str) -> list[_Tensor]:
    """The codes and the scales of one weight, and how ranks share them."""
    codes = _Tensor(
        part.name, quantize.code_dtype(weight_format), part.full_shape, part.dim, part.rank_slices
    )
    shape = _grid_shape(part, weight_format)
    name = quantize.scale_name(part.name, weight_format)
    if weight_format == "fp8-tensor":
        shape = (part.full_shape[0], 1)  # as `quantize.engine_scale`
    block = None if part.dim is None else quantize.block_shape(weight_format)[part.dim]
    if block is None or part.rank_slices is None or _blocks_are_shared(part, weight_format):
        return [codes, _Tensor(name, torch.float32, shape)]
    runs = [slice(run.start // block, -(-run.stop // block)) for run in part.rank_slices]
    return [codes, _Tensor(name, torch.float32, shape, part.dim, runs)]


def _blocks_are_shared(part: TensorPart, weight_format: str) -> bool:
    """True if some block of one scale lies on more than one rank."""
    if part.dim is None or part.rank_slices is None or len(part.rank_slices) == 1:
        return False
    block = quantize.block_shape(weight_format)[part.dim]
    inner = [run.start for run in part.rank_slices if 0 < run.start < part.full_shape[part.dim]]
    return block is None or any(start % block for start in inner)


def _grid_shape(part: TensorPart, weight_format: str) -> tuple[int, ...]:
    """Shape of the scales of the full tensor."""
    return tuple(
        1 if block is None else -(-size // block)
        for size, block in zip(part.full_shape, quantize.block_shape(weight_format), strict=True)
    )


def _grid_index(part: TensorPart, weight_format: str) -> tuple[slice, ...]:
    """Where the blocks a part touches lie among those of the full tensor."""
    blocks = quantize.block_shape(weight_format)
    return tuple(
        slice(None) if block is None else slice(start // block, -(-(start + size) // block))
        for start, size, block in zip(part.offset, part.shape, blocks, strict=True)
    )


class _Layout:
    """How a bucket's tensors lie in memory: the full ones one after another, and each rank's parts.

    The widest types come first, so that every tensor starts at a multiple of its element size.
    """

    def __init__(self, tensors: list[_Tensor]) -> None:
        self.tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)

    def num_bytes(self, tp_rank: int) -> int:
        """Of a rank's part of the bucket."""
        return sum(
            math.prod(tensor.shape_on(tp_rank)) * tensor.dtype.itemsize for tensor in self.tensors
        )

    def buffer(self, tp_rank: int) -> Tensor:
        return torch.empty(self.num_bytes(tp_rank), dtype=torch.uint8, device=device())

    def views(self, buffer: Tensor, tp_rank: int) -> dict[str, Tensor]:
        """A rank's part of every tensor by name, in the buffer."""
        views = {}
        start = 0
        for tensor in self.tensors:
            shape = tensor.shape_on(tp_rank)
            end = start + math.prod(shape) * tensor.dtype.itemsize
            views[tensor.name] = buffer[start:end].view(tensor.dtype).view(shape)
            start = end
        return views

    def bucket(self, flat: Tensor) -> Bucket:
        return Bucket(
            [tensor.name for tensor in self.tensors],
            [tensor.dtype for tensor in self.tensors],
            [tensor.shape for tensor in self.tensors],
            flat,
        )


def _gather(layout: _Layout, own: Tensor) -> Iterator[Bucket]:
    """The bucket of every rank's part, on tensor-parallel rank 0; nothing elsewhere.

    Rank 0 takes the other ranks' parts one after another, so that it never holds two of them.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        dist.send(own, dst=ranks[0], group=group)
        return
    if len(ranks) == 1:
        yield layout.bucket(own)
        return
    flat = torch.empty(
        sum(tensor.num_bytes for tensor in layout.tensors), dtype=torch.uint8, device=device()
    )
    bucket = layout.bucket(flat)
    full = dict(bucket.tensors())
    _place(layout, own, 0, full)
    del own
    for tp_rank, source in enumerate(ranks[1:], start=1):
        received = layout.buffer(tp_rank)
        dist.recv(received, src=source, group=group)
        _place(layout, received, tp_rank, full)
    yield bucket


def _place(layout: _Layout, buffer: Tensor, tp_rank: int, full: dict[str, Tensor]) -> None:
    """Copy a rank's part of a bucket to where it belongs in the full tensors."""
    parts = layout.views(buffer, tp_rank)
    for tensor in layout.tensors:
        # One-byte codes are copied as bytes: not every backend copies float8.
        dtype = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
        target = full[tensor.name].view(dtype)[tensor.index_on(tp_rank)]
        target.copy_(parts[tensor.name].view(dtype))


def _send(bucket: Bucket | None) -> None:
    """Send a bucket, or the end of them, to the first pipeline stage's leader."""
    first = parallel_state.get_pipeline_model_parallel_first_rank()
    header = None if bucket is None else (bucket.names, bucket.dtypes, bucket.shapes)
    dist.send_object_list([header], dst=first, device=device())
    if bucket is not None:
        dist.send(bucket.flat, dst=first)


def _receive_buckets(stage: int) -> Iterator[Bucket]:
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    while True:
        header = [None]
        dist.recv_object_list(header, src=ranks[stage], device=device())
        if header[0] is None:
            return
        names, dtypes, shapes = header[0]
        size_bytes = sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        flat = torch.empty(size_bytes, dtype=torch.uint8, device=device())
        dist.recv(flat, src=ranks[stage])
        yield Bucket(names, dtypes, shapes, flat)
