"""The resharding converter: learner shards -> quantised full tensors -> byte-bounded buckets.

    shard --split--> parts --absmax (max-reduced over TP)--> codes, scales --gather--> bucket

Invariants, each a test:
- Quantise before gather: only codes, scales and unquantised tensors cross ranks, never a linear
  layer in full precision.
- A row-parallel layer's row is spread over the tensor-parallel ranks, so its absmax is max-reduced
  first; the codes are those of quantising the full tensor, byte for byte, whatever the layout.
- A bucket holds at most `bucket_bytes`, or one tensor larger than that; the model is never in
  memory at once.
- Checksums are taken of the shards, before they travel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron import quantize, weight_map
from qurl_megatron.checksum import checksum
from qurl_megatron.config import WeightFormat
from qurl_megatron.device import device
from qurl_megatron.learner import Learner

_TINY = 1e-300  # keeps 0 / 0 at 0


@dataclass(frozen=True)
class Bucket:
    """Full tensors in one flat buffer, in the order of `names`, the widest types first."""

    names: list[str]  # as in a Hugging Face checkpoint; scales are `<weight>_scale`
    dtypes: list[torch.dtype]
    shapes: list[tuple[int, ...]]
    flat: Tensor  # [bytes] uint8


class WeightSums(NamedTuple):
    """Sums over quantised weights; those of a change are 0 in a converter's first pass."""

    num_codes: float = 0
    code_flips: float = 0  # codes that changed since the last pass
    error_squares: float = 0  # |Q(w) - w|^2
    weight_squares: float = 0  # |w|^2
    update_squares: float = 0  # |w - w at the last pass|^2
    previous_squares: float = 0  # |w at the last pass|^2

    @classmethod
    def total(cls, parts: Iterable[WeightSums]) -> WeightSums:
        return cls(*map(sum, zip(cls(), *parts, strict=True)))


@dataclass
class Conversion:
    """What one pass over the weights showed; complete on global rank 0 when the pass is over."""

    checksums: dict[str, int]  # of every tensor sent, by name
    sums: WeightSums

    @property
    def weight_quant_error(self) -> float:
        """QuRL Eq. 14."""
        return self.sums.error_squares / max(self.sums.weight_squares, _TINY)

    @property
    def weight_update_norm(self) -> float:
        """QuRL Eq. 13, since the last pass."""
        return self.sums.update_squares / max(self.sums.previous_squares, _TINY)

    @property
    def code_flip_fraction(self) -> float:
        return self.sums.code_flips / max(self.sums.num_codes, 1)


@dataclass(frozen=True)
class _Piece:
    """This rank's part of one tensor to send."""

    name: str
    tensor: Tensor
    dim: int | None  # along which the ranks' parts are concatenated
    offset: int
    full_shape: tuple[int, ...]

    @property
    def full_bytes(self) -> int:
        return math.prod(self.full_shape) * self.tensor.element_size()

    def shape_on(self, tp_rank: int, tp_size: int) -> tuple[int, ...]:
        """Shape of the part another tensor-parallel rank holds."""
        shape = list(self.full_shape)
        if self.dim is not None:
            run = weight_map.run(shape[self.dim], tp_rank, tp_size)
            shape[self.dim] = run.stop - run.start
        return tuple(shape)


class Converter:
    """Turns a learner's weights into buckets, over and over, in one format.

    Collective: every learner rank runs `buckets` to its end; only global rank 0 is given buckets.
    """

    def __init__(self, learner: Learner, weight_format: WeightFormat, bucket_bytes: int) -> None:
        self._learner = learner
        self._format = weight_format
        self._bucket_bytes = bucket_bytes
        self._previous: dict[str, tuple[Tensor, Tensor]] = {}  # name -> weight, codes
        self.conversion = Conversion({}, WeightSums())

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
        names: list[str] = []
        checksums: list[int] = []
        sums: list[WeightSums] = []
        pieces: list[_Piece] = []
        size_bytes = 0
        for piece in self._pieces(sums):
            names.append(piece.name)
            checksums.append(_contribution(piece))
            if pieces and size_bytes + piece.full_bytes > self._bucket_bytes:
                yield from _gather(pieces)
                pieces, size_bytes = [], 0
            pieces.append(piece)
            size_bytes += piece.full_bytes
        yield from _gather(pieces)
        self._reduce_over_tensor_parallel(names, checksums, WeightSums.total(sums))

    def _pieces(self, sums: list[WeightSums]) -> Iterator[_Piece]:
        """This rank's part of every tensor to send; appends what it measures to `sums`."""
        absmax = self._row_parallel_absmax()
        for rule, part in self._parts():
            if not rule.quantised or self._format == "bf16":
                tensor = part.tensor.to(torch.bfloat16)
                yield _Piece(part.name, tensor, part.dim, part.offset, part.full_shape)
                continue
            rows_max = absmax.get(part.name)
            try:
                quantised = quantize.quantise(part.tensor, self._format, rows_max)
            except quantize.NonFiniteWeight as error:
                raise quantize.NonFiniteWeight(f"{part.name}: {error}") from None
            sums.append(self._measure(part, quantised))
            scale_dim, scale_offset = (0, part.offset) if part.dim == 0 else (None, 0)
            yield _Piece(part.name, quantised.codes, part.dim, part.offset, part.full_shape)
            yield _Piece(
                f"{part.name}_scale",
                quantised.scale,
                scale_dim,
                scale_offset,
                (part.full_shape[0], 1),
            )

    def _parts(self) -> Iterator[tuple[weight_map.Rule, weight_map.Part]]:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        for rule, layer, shard in self._learner.shards():
            for part in weight_map.split(
                rule, shard, self._learner.architecture, layer, tp_rank, tp_size
            ):
                yield rule, part

    def _row_parallel_absmax(self) -> dict[str, Tensor]:
        """Name -> [out, 1] float32 absmax over all ranks' columns, in one collective."""
        if self._format == "bf16":
            return {}
        local = {
            part.name: quantize.row_absmax(part.tensor)
            for rule, part in self._parts()
            if rule.quantised and part.dim == 1
        }
        if not local:
            return {}
        flat = torch.cat(list(local.values()))
        dist.all_reduce(
            flat, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group()
        )
        rows = [absmax.shape[0] for absmax in local.values()]
        return dict(zip(local, flat.split(rows), strict=True))

    def _measure(self, part: weight_map.Part, quantised: quantize.QuantisedTensor) -> WeightSums:
        error, weight = quantize.quantisation_error_squares(part.tensor, quantised)
        sums = WeightSums(quantised.codes.numel(), 0, float(error), float(weight))
        if part.name in self._previous:
            weight_before, codes_before = self._previous[part.name]
            update = (part.tensor.float() - weight_before.float()).square()
            sums = sums._replace(
                code_flips=quantize.code_flips(codes_before, quantised.codes),
                update_squares=float(update.sum(dtype=torch.float64)),
                previous_squares=float(weight_before.float().square().sum(dtype=torch.float64)),
            )
        self._previous[part.name] = (part.tensor.clone(), quantised.codes)
        return sums

    def _reduce_over_tensor_parallel(
        self, names: list[str], checksums: list[int], sums: WeightSums
    ) -> None:
        group = parallel_state.get_tensor_model_parallel_group()
        all_checksums = torch.tensor(checksums, dtype=torch.int64, device=device())
        dist.all_reduce(all_checksums, group=group)  # int64 wraps around, as the checksum does
        all_sums = torch.tensor(sums, dtype=torch.float64, device=device())
        dist.all_reduce(all_sums, group=group)
        self.conversion = Conversion(
            dict(zip(names, all_checksums.tolist(), strict=True)), WeightSums(*all_sums.tolist())
        )

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
            self.conversion = Conversion(
                {name: value for stage in stages for name, value in stage.checksums.items()},
                WeightSums.total(stage.sums for stage in stages),
            )


def _contribution(piece: _Piece) -> int:
    """What this rank adds to the tensor's checksum; a replicated tensor counts once."""
    if piece.dim is None and parallel_state.get_tensor_model_parallel_rank() != 0:
        return 0
    return checksum(
        piece.tensor,
        row_offset=piece.offset if piece.dim == 0 else 0,
        column_offset=piece.offset if piece.dim == 1 else 0,
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _gather(pieces: list[_Piece]) -> Iterator[Bucket]:
    """One bucket of the pieces' full tensors, on tensor-parallel rank 0; nothing elsewhere."""
    if not pieces:
        return
    # Widest first, so that every tensor starts at a multiple of its element size.
    pieces = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    shared = [piece for piece in pieces if piece.dim is not None]
    # Rank 0 holds the longest runs; the others pad to its length.
    length = sum(
        math.prod(piece.shape_on(0, tp_size)) * piece.tensor.element_size() for piece in shared
    )
    received = [torch.empty(0, dtype=torch.uint8)] * tp_size
    if tp_size > 1 and shared:
        local = torch.empty(length, dtype=torch.uint8, device=device())
        filled = torch.cat([_bytes(piece.tensor) for piece in shared])
        local[: len(filled)] = filled
        if tp_rank == 0:
            received = [torch.empty_like(local) for _ in range(tp_size)]
        dist.gather(
            local,
            received if tp_rank == 0 else None,
            dst=parallel_state.get_tensor_model_parallel_src_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
    if tp_rank != 0:
        return
    flat = torch.empty(
        sum(piece.full_bytes for piece in pieces), dtype=torch.uint8, device=device()
    )
    start = 0
    read = [0] * tp_size  # bytes taken from each rank's buffer
    for piece in pieces:
        # One-byte codes are copied as bytes: not every backend copies float8.
        dtype = torch.uint8 if piece.tensor.element_size() == 1 else piece.tensor.dtype
        full = flat[start : start + piece.full_bytes].view(dtype).view(piece.full_shape)
        start += piece.full_bytes
        if piece.dim is None or tp_size == 1:
            full.copy_(piece.tensor.view(dtype))
            continue
        for rank in range(tp_size):
            shape = piece.shape_on(rank, tp_size)
            end = read[rank] + math.prod(shape) * piece.tensor.element_size()
            part = received[rank][read[rank] : end].view(dtype).view(shape)
            read[rank] = end
            offset = weight_map.run(piece.full_shape[piece.dim], rank, tp_size).start
            full.narrow(piece.dim, offset, shape[piece.dim]).copy_(part)
    yield Bucket(
        [piece.name for piece in pieces],
        [piece.tensor.dtype for piece in pieces],
        [piece.full_shape for piece in pieces],
        flat,
    )


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
