"""Buckets: full tensors in one flat buffer, as weights leave the learner, and how to announce them.

An unquantized weight is sent as one tensor, a quantized one as two: codes and scales. Each is
assembled from the parts of the tensor-parallel ranks, in one of two ways:

    partition_dim   rank_slices    the full tensor
    0 or 1          one per rank   the ranks' parts, one after another along `partition_dim`
    None            None           the same on every rank; rank 0 sends it

Scales are divided like the codes if no block of one scale crosses the boundary between two ranks.
If a block lies on several ranks (as a row of a row-parallel layer does), every rank computes all
scales from a shared absmax, and rank 0 sends them.

A bucket has two parts. A manifest lists the name, dtype and shape of each tensor. A flat uint8
buffer holds the values, one tensor after another, without gaps and each in row-major order:

    names    [q_proj.weight_scale,  q_proj.weight,     k_proj.weight   ]
    dtypes   [float32,              int8,              int8            ]
    flat     |256 x 4 bytes        |256 x 512 bytes   |64 x 512 bytes  |

The widest element types come first. So each tensor starts at a multiple of its element size, and
the reader takes views of the buffer without copying. SGLang's load format `flattened_bucket` has
the same layout.

A server has a process group with each sender (`gather.py`); see `channel_name`. One request
announces everything that arrives through them. It is a manifest in one of three forms:

    key frame        for each bucket a marker with the sender's number, then the tensors:
        names   [bucket of sender 0, q_proj.weight_scale, q_proj.weight, bucket of sender 1, ...]
        dtypes  [uint8,              float32,             int8,          uint8,              ...]
        shapes  [[bytes],            [256, 1],            [256, 512],    [bytes],            ...]
    delta            names [delta of version 7], shapes [[number of senders]]
    in place         names [written in place]: nothing is sent

The senders broadcast the buckets of a key frame in the order of the request. For a delta, each
sender broadcasts as many buckets as it needs: first the size of each, then its bytes. A size of 0
ends the delta.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qurl_megatron.config.keep import layer_of
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import TensorPart
from qurl_megatron.quantization import quantize

IN_PLACE = "written in place"
PREFIX = "delta of version "
FILE_PREFIX = "file:"  # before a file's path, in place of a process group's name
_MARKER = "bucket of sender "
_ALONE = re.compile(rf"{IN_PLACE}|{PREFIX}[0-9]{{1,18}}")  # must be the only name of its request
_MARKERS = re.compile(rf"{_MARKER}[0-9]{{1,4}}|{_ALONE.pattern}")


@dataclass(frozen=True)
class Manifest:
    """Name, dtype and shape of each tensor of a bucket, widest dtypes first."""

    names: Sequence[str]  # Hugging Face names, and scale names from `quantize.scale_name`
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Sequence[int]]

    @classmethod
    def of(cls, entries: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Manifest:
        """List tensors, given as (name, dtype, shape) in any order."""
        return cls(*zip(*sorted(entries, key=lambda entry: -entry[1].itemsize), strict=True))

    @classmethod
    def read(
        cls, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> Manifest:
        """Read the lists of a request, in which dtypes are names such as "int8"."""
        return cls(names, [getattr(torch, dtype) for dtype in dtypes], shapes)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, in bytes."""
        sizes = map(math.prod, self.shapes)
        return sum(size * dtype.itemsize for size, dtype in zip(sizes, self.dtypes, strict=True))


@dataclass(frozen=True)
class Bucket(Manifest):
    """Tensors in one flat buffer; entry i of `names`, `dtypes` and `shapes` is the i-th tensor."""

    flat: Tensor  # [bytes] uint8

    @classmethod
    def around(cls, manifest: Manifest, flat: Tensor) -> Bucket:
        """Return the bucket of these tensors whose values are `flat`."""
        return cls(manifest.names, manifest.dtypes, manifest.shapes, flat)

    @classmethod
    def empty(cls, manifest: Manifest, device: torch.device) -> Bucket:
        """Allocate these tensors, uninitialized."""
        return cls.around(
            manifest, torch.empty(manifest.num_bytes, dtype=torch.uint8, device=device)
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, which are views of the buffer."""
        start = index = 0
        for dtype, group in itertools.groupby(self.dtypes):
            shapes = self.shapes[index : index + len(list(group))]
            sizes = [math.prod(shape) for shape in shapes]
            end = start + sum(sizes) * dtype.itemsize
            views = self.flat[start:end].view(dtype).split(sizes)
            for view, shape in zip(views, shapes, strict=True):
                yield self.names[index], view.view(tuple(shape))
                index += 1
            start = end


def copy_values(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`, of the same dtype and shape."""
    # One-byte codes are copied as bytes, because not every backend copies float8.
    dtype = torch.uint8 if source.dtype.itemsize == 1 else source.dtype
    target.view(dtype).copy_(source.view(dtype))


@dataclass(frozen=True)
class SentTensor:
    """One full tensor that is sent, and how the tensor-parallel ranks share it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    partition_dim: int | None = None  # dimension that ranks share; None: rank 0 sends all
    rank_slices: list[slice] | None = None  # one per rank, along `partition_dim`

    def index_on(self, tp_rank: int) -> tuple[slice, ...]:
        """Return where a rank's part lies in the full tensor; an empty part if it sends nothing."""
        index = [slice(0, size) for size in self.shape]
        if self.partition_dim is not None and self.rank_slices is not None:
            index[self.partition_dim] = self.rank_slices[tp_rank]
        elif tp_rank != 0:
            index[0] = slice(0, 0)
        return tuple(index)

    def offset_on(self, tp_rank: int) -> tuple[int, int]:
        """Return the row and column of the full tensor at which a rank's part begins."""
        row, *columns = self.index_on(tp_rank)
        return row.start, columns[0].start if columns else 0

    def shape_on(self, tp_rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        return tuple(extent.stop - extent.start for extent in self.index_on(tp_rank))

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SentWeight:
    """A rank's part of one weight, and the tensors that carry the full weight."""

    part: TensorPart
    tensors: Sequence[SentTensor]  # the weight, or its codes and then its scales
    is_constant: bool = False  # the same in every pass
    drifts: bool = False  # its drift is measured
    scales: Tensor | None = None  # if the learner holds codes, which `part` then has

    @classmethod
    def plain(cls, part: TensorPart, dtype: torch.dtype) -> SentWeight:
        """Describe a weight that is sent as it is, in `dtype`."""
        return cls(
            part, [SentTensor(part.name, dtype, part.full_shape, part.dim, part.rank_slices)]
        )

    @classmethod
    def quantized(cls, part: TensorPart, weight_format: str) -> SentWeight:
        """Describe a weight that is sent as codes and scales of `weight_format`."""
        packing = quantize.packing(weight_format)
        dtype = quantize.code_dtype(weight_format)
        rows, *columns = part.full_shape
        held = (rows, *(size // packing for size in columns))
        slices = part.rank_slices
        if slices is not None and part.dim == 1:
            slices = [slice(run.start // packing, run.stop // packing) for run in slices]
        codes = SentTensor(part.name, dtype, held, part.dim, slices)
        name = quantize.scale_name(part.name, weight_format)
        scale_dtype = quantize.scale_dtype(weight_format)
        shape = scale_shape(part, weight_format)
        if weight_format == "fp8-tensor":
            shape = (part.full_shape[0], 1)  # the shape of `quantize.engine_scale`
        block = None if part.dim is None else quantize.block_shape(weight_format)[part.dim]
        if block is None or part.rank_slices is None or blocks_are_shared(part, weight_format):
            return cls(part, [codes, SentTensor(name, scale_dtype, shape)])
        slices = [slice(run.start // block, -(-run.stop // block)) for run in part.rank_slices]
        return cls(part, [codes, SentTensor(name, scale_dtype, shape, part.dim, slices)])

    @property
    def is_quantized(self) -> bool:
        """True if the weight is sent as codes and scales."""
        return len(self.tensors) == 2

    @property
    def num_bytes(self) -> int:
        """Size of the full tensors, in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class PlannedBucket:
    """A rank's parts of the weights of one bucket."""

    weights: Sequence[SentWeight]

    @property
    def is_constant(self) -> bool:
        """True if the bucket is the same in every pass, as all of its weights are."""
        return self.weights[0].is_constant

    @cached_property
    def tensors(self) -> list[SentTensor]:
        """The bucket's full tensors, in their order in the bucket."""
        tensors = [tensor for weight in self.weights for tensor in weight.tensors]
        return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)

    def manifest(self) -> Manifest:
        """Return the manifest of the bucket."""
        return Manifest.of((tensor.name, tensor.dtype, tensor.shape) for tensor in self.tensors)

    def manifest_on(self, tp_rank: int) -> Manifest:
        """Return the manifest of a rank's part of the bucket."""
        return Manifest.of(
            (tensor.name, tensor.dtype, tensor.shape_on(tp_rank)) for tensor in self.tensors
        )


def blocks_are_shared(part: TensorPart, weight_format: str) -> bool:
    """Return True if a block of one scale lies on more than one tensor-parallel rank."""
    if part.dim is None or part.rank_slices is None or len(part.rank_slices) == 1:
        return False
    block = quantize.block_shape(weight_format)[part.dim]
    inner_starts = [
        rows.start for rows in part.rank_slices if 0 < rows.start < part.full_shape[part.dim]
    ]
    return block is None or any(start % block for start in inner_starts)


def scale_shape(part: TensorPart, weight_format: str) -> tuple[int, ...]:
    """Return the number of blocks of the full tensor along each dimension."""
    return tuple(
        1 if block is None else -(-size // block)
        for size, block in zip(part.full_shape, quantize.block_shape(weight_format), strict=True)
    )


def scale_index(part: TensorPart, weight_format: str) -> tuple[slice, ...]:
    """Return which of the full tensor's blocks a part touches, as an index into its scales."""
    return tuple(
        slice(None) if block is None else slice(start // block, -(-(start + size) // block))
        for start, size, block in zip(
            part.offset, part.shape, quantize.block_shape(weight_format), strict=True
        )
    )


def read_file(path: str) -> Tensor:
    """Map a file's bytes, `[bytes]` uint8, which are read when they are used."""
    size = os.path.getsize(path)
    if size == 0:  # cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, size=size, dtype=torch.uint8)


def channel_name(token: str, sender: int) -> str:
    """Return the name of a server's process group with the sender of this number.

    The first sender's group has the server's token as its name. In requests this name stands for
    the groups of all senders.
    """
    return f"{token}.{sender}" if sender else token


def bucket_name(version: int) -> str:
    """Return the name of a bucket of messages that change this version."""
    return f"{PREFIX}{version}"


def changed_version(names: Sequence[str]) -> int | None:
    """Return the version that a bucket with these names changes; None: it holds whole tensors."""
    if len(names) != 1 or not names[0].startswith(PREFIX):
        return None
    return int(names[0].removeprefix(PREFIX))


def announce(senders: Sequence[Sequence[Sequence[Manifest]]]) -> Manifest:
    """Announce a key frame: for each sender, for each of its teams, the buckets.

    A server receives them in this order, so no sender may wait for one that comes later. All
    senders' buckets of the first team come before any of the second, since a rank may have to help
    gather buckets of the first team before it sends its own of the second (experts). Within a team
    the senders take turns: each gathers from ranks that no other sender needs.
    """
    names: list[str] = []
    dtypes: list[torch.dtype] = []
    shapes: list[Sequence[int]] = []
    for team in itertools.zip_longest(*senders, fillvalue=()):
        for turn in itertools.zip_longest(*team):
            for number, bucket in enumerate(turn):
                if bucket is not None:
                    names += [f"{_MARKER}{number}", *bucket.names]
                    dtypes += [torch.uint8, *bucket.dtypes]
                    shapes += [[bucket.num_bytes], *bucket.shapes]
    return Manifest(names, dtypes, shapes)


def announce_delta(since: int, num_senders: int) -> Manifest:
    """Announce a delta since this version."""
    return Manifest([bucket_name(since)], [torch.uint8], [[num_senders]])


def announce_in_place() -> Manifest:
    """Announce that the parameters hold the new weights already."""
    return Manifest([IN_PLACE], [torch.uint8], [[0]])


def is_key_frame(names: Sequence[str]) -> bool:
    """Return whether a request with these names announces a key frame."""
    return bool(names) and names[0].startswith(_MARKER)


def model_tensors(
    architecture: Architecture, weight_format: str, kept: Collection[str]
) -> dict[str, SentTensor]:
    """Return every full tensor that a server of a model takes, by name.

    Args:
        weight_format: of the quantized layers; "bf16" if no layer is quantized.
        kept: layers that stay in BF16, as `keep.layers_of` returns them.
    """
    tensors: dict[str, SentTensor] = {}
    nothing = torch.empty(0)  # only names, dtypes and shapes are needed, not a learner's shard
    for rule in weight_map.rules(architecture):
        for layer in rule.layers(architecture.linear_layers):
            for tensor, name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
                shape = weight_map.full_shape(tensor, architecture)
                part = TensorPart(name, nothing, None, None, 0, shape)
                is_plain = weight_format == "bf16" or not rule.quantized
                if is_plain or layer_of(name.removesuffix(".weight")) in kept:
                    weight = SentWeight.plain(part, weight_map.sent_dtype(name))
                else:
                    weight = SentWeight.quantized(part, weight_format)
                tensors.update({sent.name: sent for sent in weight.tensors})
    return tensors


def check_manifest(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    held: Mapping[str, SentTensor],
) -> None:
    """Check that the lists of a request announce only tensors that a server holds.

    Raises:
        ValueError: an entry is neither a marker nor one of the tensors `held`; the first is named.
    """
    if not len(names) == len(dtypes) == len(shapes) > 0:
        raise ValueError("names, dtypes and shapes are not equally long lists")
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if _MARKERS.fullmatch(name):
            if len(names) > 1 and _ALONE.fullmatch(name):
                raise ValueError(f"{name}: it must be the only name")
            if dtype != "uint8" or len(shape) != 1 or shape[0] < 0:
                raise ValueError(f"{name}: {dtype} {shape}; a marker is uint8 and has one number")
            continue
        tensor = held.get(name)
        if tensor is None:
            raise ValueError(f"{name}: the model has no such tensor")
        expected = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if (dtype, [*shape]) != expected:
            raise ValueError(f"{name}: {dtype} {shape}; the model's is {expected[0]} {expected[1]}")


def read_key_frame(request: Manifest) -> Iterator[tuple[int, Manifest]]:
    """Yield sender number and manifest of each bucket that `announce` listed, in its order."""
    starts = [index for index, name in enumerate(request.names) if name.startswith(_MARKER)]
    for start, end in itertools.pairwise([*starts, len(request.names)]):
        run = slice(start + 1, end)
        bucket = Manifest(request.names[run], request.dtypes[run], request.shapes[run])
        yield int(request.names[start].removeprefix(_MARKER)), bucket
