"""A delta turns old tensors into new ones, bit for bit, and takes no more bytes than those."""

import itertools
import math
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qurl_megatron.quantization.checksum import as_integers
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.delta import Change, compare, decode_gaps, encode_gaps, pack, unpack
from sent import as_bytes

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a tensor of any bits at all: every NaN, both zeros, infinities, subnormals."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return memory.view(dtype).view(shape)


def changed(old: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Return a copy with other bits in about this fraction of the elements."""
    new = old.clone()
    chosen = torch.rand(new.shape, generator=generator) < fraction
    as_integers(new)[chosen] ^= 1
    return new


def carried(changes: list[Change]) -> list[Change]:
    """Return the changes after a way through a buffer."""
    return list(unpack(pack(changes, CPU)))


def place(part: tuple[slice, ...]) -> tuple[int, int]:
    """Return the row and column at which a part of a tensor begins."""
    row, *columns = part
    return row.start, columns[0].start if columns else 0


@settings(max_examples=150, derandomize=True)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    fraction=st.sampled_from([0.0, 0.002, 0.05, 0.3, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
    is_vector=st.booleans(),
    is_relative=st.booleans(),
)
def test_changes_of_parts_give_the_parts_that_a_reader_holds_bit_for_bit(
    data: st.DataObject,
    dtype: torch.dtype,
    fraction: float,
    seed: int,
    is_vector: bool,
    is_relative: bool,
) -> None:
    """The writer cuts a tensor at other rows and columns than the reader does."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    shape = (rows * columns,) if is_vector else (rows, columns)
    old = random_bits(shape, dtype, generator)
    new = changed(old, fraction, generator)

    def cut() -> list[tuple[slice, ...]]:
        sides = []
        for size in shape:
            at = data.draw(st.integers(0, size))
            sides.append((slice(0, at), slice(at, size)))
        return list(itertools.product(*sides))

    changes = []
    for part in cut():
        before, after = old[part].contiguous(), new[part].contiguous()
        change = compare("w", place(part), before, after, is_relative=is_relative)
        if as_bytes(before) == as_bytes(after):
            assert change is None
        else:
            assert change is not None and change.num_bytes <= after.nbytes
            changes.append(change)
    received = carried(changes)
    for part in cut():
        held = old[part].clone()
        for _ in range(1 if is_relative else 2):  # the second time changes nothing
            for change in received:
                change.write_to(held, *place(part))
            assert as_bytes(held) == as_bytes(new[part])


@pytest.mark.parametrize(
    "positions",
    [
        [0],
        [65534],  # the largest gap without an escape
        [65535],
        [65536],
        [0, 65535, 131071, 131072],
        [2, 7 * 65535 + 2, 7 * 65535 + 3],
        [3 * 65535 - 1],
    ],
)
def test_gaps_of_65535_elements_and_more_are_escaped(positions: list[int]) -> None:
    gaps = encode_gaps(torch.tensor(positions))
    assert decode_gaps(gaps).tolist() == positions
    previous = [-1, *positions[:-1]]
    words = sum((at - last - 1) // 65535 + 1 for at, last in zip(positions, previous, strict=True))
    assert gaps.dtype == torch.int16 and len(gaps) == words


def test_changes_in_several_chunks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHUNK_ELEMENTS", 2**12)
    generator = torch.Generator().manual_seed(0)
    old = torch.zeros(300_000, dtype=torch.int8)
    new = old.clone()
    for position in (5, 4095, 4096, 20_000, 299_999):  # empty chunks lie between them
        new[position] = 1
    change = compare("w", (0, 0), old, new)
    assert change is not None and change.gaps is not None and len(change.values) == 5
    change.write_to(old, 0, 0)
    assert torch.equal(old, new)
    many = changed(new, 0.2, generator)
    dense = compare("w", (0, 0), new, many)
    assert dense is not None and dense.gaps is not None
    dense.write_to(new, 0, 0)
    assert torch.equal(new, many)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.int8, 1 / 3), (torch.bfloat16, 1 / 2), (torch.float32, 2 / 3)]
)
def test_a_part_is_sent_whole_where_its_changes_would_be_as_many_bytes(
    dtype: torch.dtype, most: float
) -> None:
    """A change takes two bytes more than its element."""
    old = torch.zeros(1200, dtype=dtype)
    for count, is_whole in ((int(1200 * most) - 1, False), (int(1200 * most), True), (1200, True)):
        new = old.clone()
        new[:count] = 1
        change = compare("w", (0, 0), old, new)
        assert change is not None and (change.gaps is None) == is_whole
        assert change.num_bytes == new.nbytes if is_whole else change.num_bytes < new.nbytes


def test_messages_of_several_ranks_are_read_one_after_another() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "scale": random_bits((3, 1), torch.float32, generator),
        "codes": random_bits((3, 7), torch.int8, generator),
        "norm": random_bits((5,), torch.bfloat16, generator),
    }
    old = {name: changed(tensor, 0.3, generator) for name, tensor in tensors.items()}
    changes: list[Any] = [compare(n, (0, 0), old[n], tensor) for n, tensor in tensors.items()]
    buffer = torch.cat([pack(changes[:2], CPU), pack([], CPU), pack(changes[2:], CPU)])
    assert len(buffer) % 8 == 0
    received = list(unpack(buffer))
    assert [change.name for change in received] == list(tensors)
    for change in received:
        change.write_to(old[change.name], 0, 0)
    assert {n: as_bytes(t) for n, t in old.items()} == {n: as_bytes(t) for n, t in tensors.items()}


def test_a_relative_change_says_by_how_much_elements_moved_and_compresses_well() -> None:
    """INT8 at a learning rate of 1e-6: 0.024 % of the codes move, each by one."""
    generator = torch.Generator().manual_seed(0)
    old = random_bits((1000, 4000), torch.int8, generator)
    chosen = torch.rand(old.shape, generator=generator) < 0.00024
    new = old + chosen * torch.tensor([1, -1], dtype=torch.int8).repeat(2000)  # some wrap around
    relative = compare("w", (0, 0), old, new, is_relative=True)
    absolute = compare("w", (0, 0), old, new)
    assert relative is not None and absolute is not None
    assert set(relative.values.tolist()) == {1, -1}
    sizes = [
        len(zlib.compress(pack([change], CPU).numpy().tobytes(), level=1))
        for change in (relative, absolute)
    ]
    assert relative.num_bytes == absolute.num_bytes
    assert sizes[0] < 0.8 * absolute.num_bytes < 0.9 * sizes[1]
