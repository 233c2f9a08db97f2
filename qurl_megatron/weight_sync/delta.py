"""Deltas: the changes of tensors since an earlier version, as bytes.

A rank compares its part of each tensor with the part it sent before. For a part it sends either
the elements that changed or, if that takes no more bytes, all of it:

    position   0  1  2  3  4  5  6  7
    before     7  7  7  7  7  7  7  7
    after      7  7  9  7  7  7  5  7      gaps [2, 3], values [9, 5]

A gap counts the elements between two changes and takes two bytes. A gap of 65,535 or more is
written as one escape word for each 65,535 elements, and then the rest. Values are absolute, and
elements are compared and copied as bits. So a delta can be applied twice with the same result, and
-0.0 and NaN need no care.

A change can also be relative: a value is then the difference of the element's bits, taken as an
integer. It is mostly 1 or -1, and compresses well. A relative delta must not be applied twice.

A message holds the changes of one rank. A buffer holds messages one after another:

    | bytes of the header, and bytes of the payload after it: two int64
    | header: JSON, name, place and counts of each change
    | values of 4 bytes | gaps and values of 2 bytes | values of 1 byte

Every part of a message begins at a multiple of its element's size.

Example:

    change = compare("w", (0, 0), old, new)   # None: nothing changed
    flat = pack([change])
    for change in unpack(flat):
        change.write_to(held, row=0, column=0)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import pydantic
import torch
from torch import Tensor

from qurl_megatron.quantization.checksum import INTEGERS, as_integers

ESCAPE = 65535  # a gap word for 65,535 elements without a change after them
CHUNK_ELEMENTS = 2**23  # compared at once, to bound the memory of positions
_ALIGNMENT = 8
_WIDTHS = (4, 2, 1)  # bytes of the values, in their order in a message
_Place = tuple[int, int]
# Name, offset, shape, bytes of a value, gap words, values, and whether they are relative.
_ENTRIES = pydantic.TypeAdapter(
    list[tuple[str, _Place, _Place, Literal[4, 2, 1], int | None, int, bool]]
)


@dataclass(frozen=True)
class Change:
    """The changes of one rectangular part of a tensor."""

    name: str  # of the tensor
    offset: tuple[int, int]  # row and column of the full tensor at which the part begins
    shape: tuple[int, int]  # rows and columns of the part
    gaps: Tensor | None  # [words] int16, the bits of unsigned words; None: all elements are sent
    values: Tensor  # [changes] or [elements], the elements' bits as integers
    is_relative: bool = False  # values are added to the elements' bits

    @classmethod
    def whole(cls, name: str, offset: tuple[int, int], part: Tensor) -> Change:
        """Return the change that sends all elements of a part, `[rows, columns]` or `[rows]`."""
        shape = (len(part), math.prod(part.shape[1:]))
        return cls(name, offset, shape, None, as_integers(part).reshape(-1))

    @property
    def num_bytes(self) -> int:
        """Size of gaps and values, in bytes."""
        return self.values.nbytes + (0 if self.gaps is None else self.gaps.nbytes)

    def write_to(self, held: Tensor, row: int, column: int) -> None:
        """Write the change into `held`, the part of the same tensor that begins at `row, column`.

        Changes outside of `held` are skipped.
        """
        target = as_integers(held)
        target = target.unsqueeze(1) if target.dim() == 1 else target
        (height, width), (num_rows, num_columns) = self.shape, target.shape
        top, left = self.offset[0] - row, self.offset[1] - column
        rows = slice(max(top, 0), min(top + height, num_rows))
        columns = slice(max(left, 0), min(left + width, num_columns))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return
        if self.gaps is None:
            part = self.values.view(self.shape)
            target[rows, columns] = part[
                rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
            ]
            return
        positions = decode_gaps(self.gaps)
        at_row, at_column = positions // width + top, positions % width + left
        inside = (at_row >= rows.start) & (at_row < rows.stop)
        inside &= (at_column >= columns.start) & (at_column < columns.stop)
        at = at_row[inside], at_column[inside]
        values = self.values[inside]
        if self.is_relative:
            values = target[at] + values  # wraps around, as the sender's difference did
        target[at] = values


def compare(
    name: str, offset: tuple[int, int], old: Tensor, new: Tensor, *, is_relative: bool = False
) -> Change | None:
    """Return the change from `old` to `new`; None if no bit changed.

    Args:
        name: the name of the tensor.
        offset: row and column of the full tensor at which `old` and `new` begin.
        old, new: contiguous, of one dtype and shape, `[rows, columns]` or `[rows]`.
        is_relative: values say by how much each element moved, unless all of the part is sent.
    """
    before, after = as_integers(old).view(-1), as_integers(new).view(-1)
    gaps: list[Tensor] = []
    values: list[Tensor] = []
    whole = Change.whole(name, offset, new)
    left_bytes = whole.num_bytes  # until the changes take as much as the whole part
    last = -1
    for start in range(0, len(after), CHUNK_ELEMENTS):
        chunk = after[start : start + CHUNK_ELEMENTS]
        chunk_before = before[start : start + CHUNK_ELEMENTS]
        changed = _changed(chunk_before, chunk)
        if not len(changed):
            continue
        sent = chunk[changed]
        if is_relative:
            sent = sent - chunk_before[changed]
        values.append(sent)
        gaps.append(encode_gaps(changed + start, last))
        last = start + int(changed[-1])
        left_bytes -= values[-1].nbytes + gaps[-1].nbytes
        if left_bytes <= 0:
            return whole
    if not values:
        return None
    return Change(name, offset, whole.shape, torch.cat(gaps), torch.cat(values), is_relative)


def _changed(old: Tensor, new: Tensor) -> Tensor:
    """Return the positions `[changes]` int64 at which flat tensors of integers differ."""
    per_word = 8 // old.element_size()
    # Views of int64 need whole and aligned words.
    if len(old) % per_word or (old.data_ptr() | new.data_ptr()) % 8:
        return torch.nonzero(old != new).view(-1)
    # Few words of eight bytes hold a change, so comparing words first is five times as fast.
    words = torch.nonzero(old.view(torch.int64) != new.view(torch.int64)).view(-1)
    within = torch.nonzero(old.view(-1, per_word)[words] != new.view(-1, per_word)[words])
    return words[within[:, 0]] * per_word + within[:, 1]


def encode_gaps(positions: Tensor, last: int = -1) -> Tensor:
    """Return the gaps `[words]` int16 of ascending `positions` after a change at `last`."""
    gaps = positions.diff(prepend=positions.new_tensor([last])) - 1
    escapes = gaps // ESCAPE
    words = gaps.new_full((len(gaps) + int(escapes.sum()),), ESCAPE)
    words[(escapes + 1).cumsum(0) - 1] = gaps % ESCAPE
    return words.to(torch.int16)


def decode_gaps(gaps: Tensor) -> Tensor:
    """Return the positions `[changes]` int64 from the gaps of `encode_gaps`."""
    words = gaps.to(torch.int64) & ESCAPE
    is_change = words != ESCAPE
    return ((words + is_change).cumsum(0) - 1)[is_change]


def pack(changes: Sequence[Change], device: torch.device) -> Tensor:
    """Return the message with these changes, `[bytes]` uint8, a multiple of eight."""
    entries = []
    streams: dict[int, list[Tensor]] = {width: [] for width in _WIDTHS}
    for change in changes:
        width, words = change.values.element_size(), None
        if change.gaps is not None:
            words = len(change.gaps)
            streams[2].append(change.gaps)
        streams[width].append(change.values)
        place = (change.name, change.offset, change.shape)
        entries.append([*place, width, words, len(change.values), change.is_relative])
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    num_bytes = sum(change.num_bytes for change in changes)
    padding = torch.zeros(-num_bytes % _ALIGNMENT, dtype=torch.uint8)
    sizes = torch.tensor([len(header), num_bytes + len(padding)])
    parts = [sizes, torch.frombuffer(bytearray(header), dtype=torch.uint8)]
    parts += [tensor for width in _WIDTHS for tensor in streams[width]]
    parts.append(padding)
    return torch.cat([part.view(torch.uint8).to(device) for part in parts])


def unpack(flat: Tensor) -> Iterator[Change]:
    """Yield the changes of all messages in a buffer `[bytes]` uint8; they are views of it.

    Raises:
        ValueError, RuntimeError: the buffer holds something else.
    """
    while len(flat):
        header_bytes, num_bytes = flat[: 2 * _ALIGNMENT].view(torch.int64).tolist()
        header, payload, flat = flat[2 * _ALIGNMENT :].split(
            [header_bytes, num_bytes, len(flat) - 2 * _ALIGNMENT - header_bytes - num_bytes]
        )
        entries = _ENTRIES.validate_json(header.cpu().numpy().tobytes())
        counts: dict[int, list[int]] = {width: [] for width in _WIDTHS}
        for *_, size, words, count, _ in entries:
            if words is not None:
                counts[2].append(words)
            counts[size].append(count)
        streams = {}
        for width in _WIDTHS:
            stream, payload = payload.tensor_split([width * sum(counts[width])])
            streams[width] = iter(stream.view(INTEGERS[width]).split(counts[width]))
        for name, offset, shape, size, words, _, is_relative in entries:
            gaps = None if words is None else next(streams[2])
            values = next(streams[size])
            yield Change(name, offset, shape, gaps, values, is_relative)
