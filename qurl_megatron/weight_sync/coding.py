"""Entropy coding of deltas, for servers behind a slow link.

A delta (`delta.py`) spends two bytes on a gap and one or two on a value. Few elements change, and
mostly by one step, so most of that says nothing. Coded, a change is three things:

- Its gap, in a Rice code. The lowest `k` bits of all gaps stand one behind another. What is left of
  each gap is a run of zeros with a one behind it. `k` is chosen for each part of a tensor, and the
  gaps of n changes in N elements then take at most n * (2 + log2(N / n)) bits.
- A sign, one bit: the element's bits, as an integer, moved by 1 or -1.
- For the others, the value itself. Which these are is coded as gaps between them.

A part that is sent whole stays as it is. The reader needs the elements of the base version to make
values of signs, so a coded delta must be written once. All work is done on whole arrays.

    | bytes of the header: int64
    | header: zlib of JSON, a list for each change
    | for each change: low bits, runs, signs, low bits and runs of the others, values of the others

Example:

    coded = encode(flat)        # flat: messages of delta.pack, with steps
    for change in decode(coded):
        change.write_to(held, row=0, column=0)
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qurl_megatron.weight_sync.delta import Change, decode_gaps, encode_gaps, unpack

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_PREFIX_BYTES = 8
_CHUNK = 2**20  # integers whose bits are taken apart at once; a multiple of eight


def encode(flat: Tensor) -> Tensor:
    """Return a delta's messages, a buffer `[bytes]` uint8 on the CPU, as a coded buffer."""
    entries: list[Any] = []
    parts: list[Bytes] = []
    for change in unpack(flat):
        entry, streams = _encode_change(change)
        entries.append(entry)
        parts += streams
    header = zlib.compress(json.dumps(entries).encode())
    prefix = np.array([len(header)], np.int64).view(np.uint8)
    parts = [prefix, np.frombuffer(header, np.uint8), *parts]
    return torch.from_numpy(np.concatenate(parts))


def decode(coded: Tensor, device: torch.device) -> Iterator[Change]:
    """Yield the changes of a coded buffer `[bytes]` uint8 on the CPU, with tensors on `device`."""
    reader = _Reader(coded.numpy())
    header_bytes = int(reader.take(_PREFIX_BYTES).view(np.int64)[0])
    for entry in json.loads(zlib.decompress(reader.take(header_bytes).tobytes())):
        change = _decode_change(entry, reader)
        yield Change(
            change.name,
            change.offset,
            change.shape,
            None if change.gaps is None else change.gaps.to(device),
            change.values.to(device),
            None if change.steps is None else change.steps.to(device),
        )


def header_bytes(coded: Tensor) -> int:
    """Return the size of a coded buffer's header, which grows with the number of tensors only."""
    return _PREFIX_BYTES + int(coded[:_PREFIX_BYTES].view(torch.int64))


def _encode_change(change: Change) -> tuple[list[Any], list[Bytes]]:
    """Return the header entry of a change, and its streams."""
    width = change.values.element_size()
    place = [change.name, change.offset, change.shape, width]
    if change.gaps is None:
        return place, [_bytes_of(change.values)]
    if change.steps is None:
        steps = np.zeros(len(change.values), np.int8)
    else:
        steps = change.steps.numpy()
    others = np.flatnonzero(steps == 0)
    rice, gap_streams = _encode_positions(decode_gaps(change.gaps).numpy())
    other_rice, other_streams = _encode_positions(others)
    signs = np.packbits(steps[steps != 0] > 0)
    values = _bytes_of(change.values[torch.from_numpy(others)])
    counts = [len(steps), len(others)]
    return [*place, counts, rice, other_rice], [*gap_streams, signs, *other_streams, values]


def _decode_change(entry: list[Any], reader: _Reader) -> Change:
    name, offset, shape, width, *sparse = entry
    place = name, tuple(offset), tuple(shape)
    if not sparse:
        return Change(*place, None, reader.integers(math.prod(shape), width))
    (count, num_others), rice, other_rice = sparse
    positions = _decode_positions(count, rice, reader)
    signs = reader.bits(count - num_others).astype(np.int8)
    others = _decode_positions(num_others, other_rice, reader)
    steps = np.zeros(count, np.int8)
    is_step = np.ones(count, bool)
    is_step[others] = False
    steps[is_step] = 2 * signs - 1
    gaps = encode_gaps(torch.from_numpy(positions))
    return Change(*place, gaps, reader.integers(num_others, width), torch.from_numpy(steps))


def _encode_positions(positions: Integers) -> tuple[list[int], list[Bytes]]:
    """Return `k` and the length of the runs in bits, and the streams of ascending positions."""
    if not len(positions):
        return [0, 0], []
    gaps = np.diff(positions, prepend=-1) - 1
    k = _rice_parameter(gaps)
    ends = np.cumsum((gaps >> k) + 1) - 1
    runs = np.zeros(int(ends[-1]) + 1, np.uint8)
    runs[ends] = 1
    return [k, len(runs)], [_pack_low_bits(gaps, k), np.packbits(runs)]


def _decode_positions(count: int, rice: list[int], reader: _Reader) -> Integers:
    k, run_bits = rice
    if not count:
        return np.zeros(0, np.int64)
    low = _unpack_low_bits(reader.take(-(-count * k // 8)), count, k)
    high = np.diff(np.flatnonzero(reader.bits(run_bits)), prepend=-1) - 1
    return np.cumsum((high << k) + low + 1) - 1


def _rice_parameter(gaps: Integers) -> int:
    """Return the number of low bits with which the gaps take the fewest bits in all."""
    near = int(math.log2(gaps.mean() + 1))
    candidates = range(max(near - 1, 0), near + 2)
    return min(candidates, key=lambda k: k * len(gaps) + int((gaps >> k).sum()))


def _pack_low_bits(integers: Integers, k: int) -> Bytes:
    """Return the lowest `k` bits of each integer, one behind another."""
    parts = [np.zeros(0, np.uint8)]
    for start in range(0, len(integers) if k else 0, _CHUNK):
        words = np.ascontiguousarray(integers[start : start + _CHUNK], dtype="<i8")
        octets = words.view(np.uint8).reshape(-1, 8)[:, : -(-k // 8)]
        bits = np.unpackbits(octets, axis=1, bitorder="little")[:, :k]
        parts.append(np.packbits(bits))
    return np.concatenate(parts)


def _unpack_low_bits(packed: Bytes, count: int, k: int) -> Integers:
    """Return the integers whose lowest `k` bits `_pack_low_bits` was given."""
    integers = np.zeros(count, np.int64)
    for start in range(0, count if k else 0, _CHUNK):
        number = min(_CHUNK, count - start)
        octets = packed[start * k // 8 : start * k // 8 + -(-number * k // 8)]
        bits = np.unpackbits(octets, count=number * k).reshape(number, k)
        words = np.zeros((number, 8), np.uint8)
        low = np.packbits(bits, axis=1, bitorder="little")
        words[:, : low.shape[1]] = low
        integers[start : start + number] = words.view("<i8")[:, 0]
    return integers


def _bytes_of(values: Tensor) -> Bytes:
    return values.contiguous().view(torch.uint8).numpy()


class _Reader:
    """Takes one stream after another from a buffer."""

    def __init__(self, octets: Bytes) -> None:
        self._octets = octets
        self._start = 0

    def take(self, num_bytes: int) -> Bytes:
        """Return the next bytes."""
        self._start += num_bytes
        return self._octets[self._start - num_bytes : self._start].copy()  # copied: aligned

    def bits(self, count: int) -> Bytes:
        """Return the next bits, each as 0 or 1."""
        return np.unpackbits(self.take(-(-count // 8)), count=count)

    def integers(self, count: int, width: int) -> Tensor:
        """Return the next integers of `width` bytes."""
        return torch.from_numpy(self.take(count * width).view(f"<i{width}"))
