"""A tensor's checksum, which is the sum of its shards' checksums.

The learner and the servers split tensors differently, and neither holds a full tensor. Both must
still be able to tell whether the servers hold what the learner sent. So the checksum is a sum over
elements, each weighted by its position in the full tensor:

    checksum = sum over i, j of bits[i, j] * row_weight(i) * column_weight(j)    modulo 2^64

`bits` is an element's memory as a signed integer, i and j are its row and column in the full
tensor, and the weights are odd 64-bit hashes of i and j.

Codes of one byte are summed four at a time, as words: their `bits` is unsigned, and their column
weight is the hash of j // 4, times 256 to the power of j % 4.

Invariants:
- The checksums of a tensor's shards add up to the tensor's checksum, for any layout.
- It changes if one bit flips, and if a tensor is transposed, permuted, shifted or partly lost.
- CPU and GPU compute the same number. On a GPU it is one pass of `kernels.py`.

Example:

    top, bottom = checksum(w[:8]), checksum(w[8:], row_offset=8)
    combine([{part_key("w", 0, 0): top}, {part_key("w", 8, 0): bottom}]) == {"w": checksum(w)}
"""

import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**18  # converted to int64 at once: 2 MiB, within a core's cache

SMALL_ELEMENTS = 2**15  # up to which weights are kept for the next pass: 16 bytes an element

ROWS, COLUMNS = 0x1B873593CC9E2D51, 0x2545F4914F6CDD1D  # odd factors of their hashes

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes of an element


class Part(NamedTuple):
    """A part of a tensor."""

    values: Tensor  # [rows, columns] or [rows], with 1, 2 or 4 bytes per element
    row: int = 0  # of the full tensor, at which the part begins
    column: int = 0


def checksum(tensor: Tensor, *, row_offset: int = 0, column_offset: int = 0) -> int:
    """Return the checksum of a tensor, or of the part of one that begins at the offsets.

    It is a signed 64-bit integer.
    """
    return checksums([Part(tensor, row_offset, column_offset)])[0]


def checksums(parts: Iterable[Part]) -> list[int]:
    """Return the checksum of each part, and wait for a GPU once."""
    return checksum_tensor(list(parts)).tolist()


def checksum_tensor(parts: Sequence[Part]) -> Tensor:
    """Return the checksum of each part, [parts] int64, on their device, without waiting for it.

    Small parts of one shape and place, such as the norms of all layers, are summed together.
    """
    if not parts:
        return torch.zeros(0, dtype=torch.int64)
    alike: dict[tuple[object, ...], list[int]] = {}
    small: list[int] = []
    for number, (values, row, column) in enumerate(parts):
        # Not for codes: they are many elements, and their words have weights of their own.
        if values.is_cuda and values.element_size() > 1 and values.numel() <= SMALL_ELEMENTS:
            small.append(number)
        else:
            alike.setdefault((values.shape, values.element_size(), row, column), []).append(number)
    small.sort(key=lambda number: parts[number].values.element_size())
    sums, order = [], list(small)
    if small:
        sums.append(small_sums([parts[number] for number in small]))
    for numbers in alike.values():
        first = parts[numbers[0]]
        size = max(1, CHUNK_ELEMENTS // max(1, first.values.numel()))
        for start in range(0, len(numbers), size):
            batch = [parts[number].values for number in numbers[start : start + size]]
            values = batch[0].unsqueeze(0) if len(batch) == 1 else stack(batch)
            sums.append(_weighted_sums(values, first.row, first.column))
        order += numbers
    if order == sorted(order):
        return torch.cat(sums)
    places = torch.tensor(order).argsort().to(sums[0].device, non_blocking=True)
    return torch.cat(sums)[places]


def small_sums(parts: Sequence[Part]) -> Tensor:
    """Return `checksum_tensor` of parts such as scales and norms, in a few kernels of a GPU.

    The elements have 2 or 4 bytes; parts with one size of element are neighbours.
    """
    places = tuple((tuple(values.shape), row, column) for values, row, column in parts)
    weights, owners = _small_weights(places, parts[0].values.device)
    flat = [as_integers(values).reshape(-1) for values, _, _ in parts]
    of_size = [list(group) for _, group in itertools.groupby(flat, lambda bits: bits.dtype)]
    bits = torch.cat([torch.cat(group).long() for group in of_size])
    sums = torch.zeros(len(parts), dtype=torch.int64, device=bits.device)
    return sums.index_add_(0, owners, bits * weights)


@functools.lru_cache(maxsize=64)  # the buckets of a model hold the same places
def _small_weights(
    places: tuple[tuple[tuple[int, ...], int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the weight of each element of parts at these places, and the number of its part."""
    weights, owners = [], []
    for number, (shape, row, column) in enumerate(places):
        rows, columns = shape if len(shape) == 2 else (*shape, 1)
        of_rows, of_columns = (
            _hashes(row, rows, ROWS, device),
            _hashes(column, columns, COLUMNS, device),
        )
        weights.append((of_rows[:, None] * of_columns).view(-1))
        owners.append(torch.full((rows * columns,), number, dtype=torch.int64, device=device))
    return torch.cat(weights), torch.cat(owners)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return `torch.stack` of tensors; of one-byte elements, as int8."""
    if tensors[0].element_size() == 1:  # not every backend copies float8
        tensors = [as_integers(tensor) for tensor in tensors]
    return torch.stack(list(tensors))


def _weighted_sums(values: Tensor, row: int, column: int) -> Tensor:
    """Return the checksums [parts] int64 of parts [parts, rows, columns] or [parts, rows].

    All of them begin at `row` and `column` of their tensors.
    """
    bits = as_integers(values)
    bits = bits.unsqueeze(2) if bits.dim() == 2 else bits
    if bits.is_cuda or bits.stride(2) != 1:
        bits = bits.contiguous()
    number, rows, columns = bits.shape
    lengths = (columns, column, bits.stride(0), bits.stride(1), bits.data_ptr())
    row_weights = _hashes(row, rows, ROWS, bits.device)
    if bits.dtype != torch.int8:
        column_weights = _hashes(column, columns, COLUMNS, bits.device)
    elif columns and not any(length % 4 for length in lengths):
        column_weights = _hashes(column // 4, columns // 4, COLUMNS, bits.device)
        bits = bits.view(torch.uint32)
    else:
        column_weights = _byte_weights(column, columns, bits.device)
        bits = bits.view(torch.uint8)
    if bits.is_cuda and bits.numel():
        from qurl_megatron.quantization.kernels import weighted_sum

        sums = [weighted_sum(part, row_weights, column_weights) for part in bits]
        return torch.stack(sums)
    if bits.numel() <= CHUNK_ELEMENTS:
        return (bits.to(torch.int64) @ column_weights) @ row_weights
    total = torch.zeros(number, dtype=torch.int64, device=bits.device)
    step = max(1, CHUNK_ELEMENTS // max(1, number * columns))
    # One buffer for all chunks: the pages of a new one would be cleared for each.
    buffer = torch.empty((number, min(step, rows), bits.shape[2]), dtype=torch.int64)
    for start in range(0, rows, step):
        chunk = bits[:, start : start + step]
        integers = buffer[:, : chunk.shape[1]].copy_(chunk)
        total += (integers @ column_weights) @ row_weights[start : start + step]
    return total


def as_integers(tensor: Tensor) -> Tensor:
    """Return a view of a tensor, with 1, 2 or 4 bytes per element, as signed integers."""
    integers = INTEGERS[tensor.element_size()]
    return tensor if tensor.dtype == integers else tensor.view(integers)


def part_key(name: str, row_offset: int, column_offset: int) -> str:
    """Return the key with which `combine` identifies the part that begins at these offsets."""
    return f"{name}@{row_offset},{column_offset}"


def part_of_key(key: str) -> tuple[str, int, int]:
    """Return the name and the offsets that `part_key` was given."""
    name, _, offsets = key.rpartition("@")
    row, column = offsets.split(",")
    return name, int(row), int(column)


def combine(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up checksums of parts, keyed by `part_key`, to checksums of full tensors, keyed by name.

    `ranks` has one mapping per rank. A part that several ranks hold is counted once.

    Raises:
        ValueError: ranks hold different copies of a part; the message names it.
    """
    parts: dict[str, int] = {}
    for held in ranks:
        for key, value in held.items():
            if parts.setdefault(key, value) != value:
                raise ValueError(f"ranks hold different copies of {key}")
    totals: dict[str, int] = {}
    for key, value in parts.items():
        name, _, _ = part_of_key(key)
        totals[name] = _wrap(totals.get(name, 0) + value)
    return totals


def digest(sums: Mapping[str, int]) -> str:
    """Return a short hash of tensors' checksums by name; empty without tensors."""
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16] if sums else ""


def hash_codes(codes: Tensor, row_offset: int, column_offset: int) -> tuple[Tensor, Tensor]:
    """Return the weights of the rows [rows] and of the words [columns / 4] of codes, int64.

    The codes `[rows, columns]` begin at the offsets; columns and their offset are multiples of 4.
    """
    rows, columns = codes.shape
    words = _hashes(column_offset // 4, columns // 4, COLUMNS, codes.device)
    return _hashes(row_offset, rows, ROWS, codes.device), words


def _byte_weights(start: int, count: int, device: torch.device) -> Tensor:
    """Return the weights of codes that are not whole words: [count] int64."""
    columns = torch.arange(start, start + count, device=device)
    hashes = _hashes(start // 4, (start + count + 3) // 4 - start // 4, COLUMNS, device)
    return hashes[columns // 4 - start // 4] << columns % 4 * 8


@functools.lru_cache(maxsize=1024)  # layers have the same shapes, in this pass and the next
def _hashes(start: int, count: int, factor: int, device: torch.device) -> Tensor:
    """Return odd hashes of start, start + 1, ...: the weights of these rows or columns."""
    hashed = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    for shift in (29, 31):
        hashed = hashed * _wrap(factor)
        hashed = hashed ^ (hashed >> shift)
    return hashed | 1


def _wrap(value: int) -> int:
    """Return `value` modulo 2^64 as a signed integer, as int64 arithmetic does."""
    return (value + 2**63) % 2**64 - 2**63
