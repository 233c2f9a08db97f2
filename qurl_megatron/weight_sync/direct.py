"""Write weights straight into the parameters of servers on the learner's machine.

A server hands out its parameters once (`shared_memory.py`): each of its processes names the parts
of tensors that it holds, and where their memory is. From then on every learner rank quantizes its
own parts into that memory. No bucket is made, nothing is gathered, and nothing is copied, unless
several servers, or several ranks of one, hold the same codes.

A part is cut into tiles wherever a server's rank divides it:

    learner, 1 rank       q_proj [0:256]
    server, 2 ranks       [0:128] | [128:256]        two tiles

The servers must not sample meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from qurl_megatron.quantization import quantize
from qurl_megatron.quantization.checksum import Part, part_of_key
from qurl_megatron.weight_sync.bucket import copy_values
from qurl_megatron.weight_sync.conversion import Measures
from qurl_megatron.weight_sync.layout import PlannedBucket, SentTensor, SentWeight
from qurl_megatron.weight_sync.shared_memory import attach_tensor

Runs = tuple[tuple[int, int], ...]  # begin and end, in each dimension


class Tile(NamedTuple):
    """A rectangle of a rank's part of a tensor, and where servers hold it."""

    where: tuple[slice, ...]  # within the part
    views: list[Tensor]  # of the shape of the rectangle


class Places:
    """Where servers hold which part of which tensor."""

    def __init__(self) -> None:
        self._servers: dict[str, dict[str, list[Part]]] = {}  # parts by tensor name
        self._paused: set[str] = set()
        self._tiles: dict[tuple[str, tuple[int, int]], list[Tile]] = {}

    def attach(self, servers: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
        """Attach to the parameters of servers, each under a name of its own.

        A server has a mapping for each of its ranks, from `checksum.part_key` to
        `shared_memory.describe_tensor`.
        """
        self._servers |= {name: _attach(ranks) for name, ranks in servers.items()}

    def keep(self, names: Iterable[str], paused: Iterable[str]) -> None:
        """Detach from all servers but these, and write to the `paused` ones only."""
        self._servers = {name: self._servers[name] for name in names}
        if set(paused) != self._paused or not self._paused <= self._servers.keys():
            self._paused = set(paused)
            self._tiles.clear()

    def tiles(self, name: str, offset: tuple[int, int], shape: Sequence[int]) -> list[Tile]:
        """Return the tiles of the part of a tensor that begins at `offset`, of this shape."""
        key = name, offset
        if key not in self._tiles:
            overlaps = [
                _overlap(held, offset, shape)
                for server in sorted(self._paused)
                for held in self._servers[server].get(name, ())
            ]
            self._tiles[key] = _cut([(runs, view) for runs, view in overlaps if view.numel()])
        return self._tiles[key]


def _attach(ranks: Sequence[Mapping[str, str]]) -> dict[str, list[Part]]:
    parts: dict[str, list[Part]] = {}
    for rank in ranks:
        for key, description in rank.items():
            name, row, column = part_of_key(key)
            parts.setdefault(name, []).append(Part(attach_tensor(description), row, column))
    return parts


def _overlap(held: Part, offset: tuple[int, int], shape: Sequence[int]) -> tuple[Runs, Tensor]:
    """Return where a held part lies within a part that begins at `offset`, and a view of that."""
    runs, view = [], held.values
    for dim, (start, size, first) in enumerate(
        zip((held.row, held.column), held.values.shape, offset, strict=False)
    ):
        begin, end = max(start, first), min(start + size, first + shape[dim])
        view = view.narrow(dim, begin - start if end > begin else 0, max(end - begin, 0))
        runs.append((begin - first, end - first))
    return tuple(runs), view


def _cut(overlaps: Sequence[tuple[Runs, Tensor]]) -> list[Tile]:
    """Cut a part at all borders of the views that overlap it; return what they hold of it."""
    if not overlaps:
        return []
    along = zip(*(runs for runs, _ in overlaps), strict=True)  # for each dimension
    borders = [sorted({end for run in runs for end in run}) for runs in along]
    tiles = []
    for cell in itertools.product(*(itertools.pairwise(ends) for ends in borders)):
        covering = [(view, _within(cell, runs)) for runs, view in overlaps]
        views = [view[index] for view, index in covering if index is not None]
        if views:
            tiles.append(Tile(tuple(slice(*run) for run in cell), views))
    return tiles


def _within(cell: Runs, runs: Runs) -> tuple[slice, ...] | None:
    """Return where a cell lies within a view that covers `runs`; None if it does not."""
    pairs = list(zip(cell, runs, strict=True))
    if any(first < begin or last > end for (first, last), (begin, end) in pairs):
        return None
    return tuple(slice(first - begin, last - begin) for (first, last), (begin, _) in pairs)


def write(
    planned: PlannedBucket,
    places: Places,
    rank: int,
    weight_format: str,
    shared: Mapping[str, tuple[Tensor, Tensor]],
    measures: Measures,
) -> None:
    """Write a rank's parts of weights to their places, and measure them.

    `shared` has, for each weight whose blocks lie on several ranks, the absmax of the blocks that
    the part touches and the scales of all blocks.
    """
    written: list[tuple[str, Part]] = []
    for weight in planned.weights:
        if weight.is_quantized:
            absmax, scale = shared.get(weight.part.name, (None, None))
            if weight.part.view.numel():
                own, codes = _write_codes(weight, places, weight_format, absmax, measures)
                scale = own if scale is None else scale
                written += codes
            written += _write_tensor(weight.tensors[1], scale, places, rank)
        else:
            written += _write_tensor(weight.tensors[0], weight.part.tensor, places, rank)
    measures.add_parts([name for name, _ in written], [part for _, part in written])
    measures.meter.add_up()


def _write_codes(
    weight: SentWeight,
    places: Places,
    weight_format: str,
    absmax: Tensor | None,
    measures: Measures,
) -> tuple[Tensor, list[tuple[str, Part]]]:
    """Quantize a part into its places.

    Return the scales of the blocks that it touches, and the codes whose checksums are not measured.
    """
    part, values, shared = weight.part, weight.part.tensor, absmax
    tiles = places.tiles(part.name, part.offset, part.shape)
    if absmax is None and len(tiles) != 1:
        absmax = quantize.block_absmax(values, weight_format, part.offset, refuses=False)
    scale, codes = None, list[tuple[str, Part]]()
    if absmax is not None:
        scale = quantize.block_scale(absmax, weight_format, values.dtype)
    for index, (first, *others) in tiles:
        quantized = quantize.quantize(
            values[index],
            weight_format,
            None if absmax is None else absmax[_blocks(index, part.offset, weight_format)],
            offset=_begin(index, part.offset),
            out=first,
            with_checksum=quantize.takes_checksum(values),
            refuses=False,
        )
        for other in others:
            copy_values(other, first)
        if quantized.checksum is not None:
            measures.add_sum(part.name, quantized.checksum)
        else:
            codes.append((part.name, Part(first, *quantized.offset)))
        measures.meter.measure(part.name, values[index], quantized)
        if absmax is None:
            absmax, scale = quantized.absmax, quantized.scale
    assert absmax is not None and scale is not None
    if shared is None:
        measures.add_absmax(part, absmax)
    return scale, codes


def _write_tensor(
    tensor: SentTensor, values: Tensor | None, places: Places, rank: int
) -> list[tuple[str, Part]]:
    """Copy a rank's part of a tensor to its places; return its name and the part, if it has one."""
    offset, shape = tensor.offset_on(rank), tensor.shape_on(rank)
    if values is None or not all(shape):
        return []
    sent = values.to(tensor.dtype).expand(shape)
    for index, views in places.tiles(tensor.name, offset, shape):
        for view in views:
            view.copy_(sent[index])
    return [(tensor.name, Part(sent, *offset))]


def _begin(index: tuple[slice, ...], offset: tuple[int, int]) -> tuple[int, int]:
    """Return where a tile begins in the full tensor."""
    rows, columns = index
    return offset[0] + rows.start, offset[1] + columns.start


def _blocks(
    index: tuple[slice, ...], offset: tuple[int, int], weight_format: str
) -> tuple[slice, ...]:
    """Return which of the blocks that a part touches are those of a tile."""
    return tuple(
        slice(None)
        if block is None
        else slice(
            (first + run.start) // block - first // block,
            -(-(first + run.stop) // block) - first // block,
        )
        for run, first, block in zip(
            index, offset, quantize.block_shape(weight_format), strict=True
        )
    )
