"""Checksums of shards add up, and a tensor that arrived wrong has another checksum."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qurl_megatron.quantization.checksum import (
    Part,
    checksum,
    checksums,
    combine,
    part_key,
    small_sums,
)

DTYPES = [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]
SIZES = st.integers(1, 17)


def random_tensor(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 50).to(dtype)


@given(SIZES, SIZES, st.sampled_from(DTYPES), st.data())
def test_shards_of_rows_and_of_columns_add_up_to_the_whole(
    rows: int, columns: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = random_tensor(rows, columns, dtype)
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    by_rows = {
        part_key("w", 0, 0): checksum(tensor[:row]),
        part_key("w", rows, 0): checksum(tensor[row:], row_offset=row),
    }
    by_columns = {
        part_key("w", 0, 0): checksum(tensor[:, :column]),
        part_key("w", 0, columns): checksum(tensor[:, column:], column_offset=column),
    }
    assert combine([by_rows]) == combine([by_columns]) == {"w": checksum(tensor)}


@given(SIZES, SIZES, st.sampled_from(DTYPES), st.data())
def test_one_flipped_bit_changes_the_checksum(
    rows: int, columns: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = random_tensor(rows, columns, dtype)
    spoilt = tensor.clone()
    memory = spoilt.view(-1).view(torch.uint8)
    memory[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(spoilt) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_misplaced_elements_change_the_checksum(dtype: torch.dtype) -> None:
    exact = random_tensor(6, 6, torch.float32)
    tensor = exact.to(dtype)
    expected = checksum(tensor)
    for moved in (exact.t(), exact.flip(0), exact.flip(1), exact.roll(1, 0), exact[:5]):
        assert checksum(moved.to(dtype)) != expected
    assert checksum(tensor, row_offset=1) != expected
    assert checksum(tensor, column_offset=1) != expected


def test_strides_and_chunk_size_do_not_change_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(9, 7, torch.float32)
    expected = checksum(tensor)
    assert checksum(tensor.t().contiguous().t()) == expected
    monkeypatch.setattr("qurl_megatron.quantization.checksum.CHUNK_ELEMENTS", 10)
    assert checksum(tensor) == expected


def test_a_vector_has_the_checksum_of_a_column() -> None:
    vector = random_tensor(8, 1, torch.bfloat16)
    assert checksum(vector.squeeze(1)) == checksum(vector)


def test_parts_keep_their_order_whatever_their_shapes() -> None:
    tensors = [random_tensor(rows, 3, torch.float32) for rows in (2, 3, 3, 2)]
    assert checksums(map(Part, tensors)) == list(map(checksum, tensors))


def test_parts_add_up_and_different_copies_of_a_part_are_an_error() -> None:
    first = {part_key("norm", 0, 0): 5, part_key("w", 0, 0): 1}
    second = {part_key("norm", 0, 0): 5, part_key("w", 8, 0): 2}
    assert combine([first, second]) == {"norm": 5, "w": 3}
    second[part_key("norm", 0, 0)] = 6
    with pytest.raises(ValueError, match="different copies of norm"):
        combine([first, second])


def test_small_parts_of_several_shapes_and_sizes_are_summed_together() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = []
    for dtype, shapes in (
        (torch.bfloat16, [(7,), (5, 3)]),
        (torch.float32, [(9, 1), (4,), (2, 6)]),
    ):
        for number, shape in enumerate(shapes):
            parts.append(
                Part(torch.randn(shape, generator=generator).to(dtype), number, 3 * number)
            )
    expected = [checksum(v, row_offset=row, column_offset=column) for v, row, column in parts]
    assert small_sums(parts).tolist() == expected
