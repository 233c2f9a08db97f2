"""A coded delta gives what the plain messages give, bit for bit, in far fewer bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bits import CPU, DTYPES, as_bytes, changed, random_bits
from qurl_megatron.quantization.checksum import as_integers
from qurl_megatron.weight_sync import coding
from qurl_megatron.weight_sync.delta import Change, compare, pack, unpack


def through_code(changes: list[Change]) -> list[Change]:
    return list(coding.decode(coding.encode(pack(changes, CPU)), CPU))


def stepped(old: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Return a copy of which about this fraction of the elements moved by one step, or wrapped."""
    new = old.clone()
    chosen = torch.rand(new.shape, generator=generator) < fraction
    steps = torch.randint(0, 2, new.shape, generator=generator) * 2 - 1
    as_integers(new)[chosen] += steps[chosen].to(as_integers(new).dtype)
    return new


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    step_fraction=st.sampled_from([0.0, 0.002, 0.05, 0.3, 1.0]),
    other_fraction=st.sampled_from([0.0, 0.01, 0.3]),
    with_steps=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_coded_delta_gives_the_new_tensor_bit_for_bit(
    dtype: torch.dtype,
    rows: int,
    columns: int,
    step_fraction: float,
    other_fraction: float,
    with_steps: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = random_bits((rows, columns), dtype, generator)
    new = changed(stepped(old, step_fraction, generator), other_fraction, generator)
    change = compare("w", (3, 0), old, new, with_steps=with_steps)
    plain = [] if change is None else [change]
    received = through_code(plain)
    assert len(received) == len(plain)
    for coded in received:
        coded.write_to(old, 3, 0)
    assert as_bytes(old) == as_bytes(new)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_a_reader_that_holds_a_part_takes_its_share_of_a_coded_delta(
    data: st.DataObject, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    old = random_bits((rows, columns), torch.int8, generator)
    new = changed(stepped(old, 0.2, generator), 0.05, generator)
    change = compare("w", (0, 0), old, new, with_steps=True)
    received = through_code([] if change is None else [change])
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    for down in (slice(0, row), slice(row, rows)):
        for across in (slice(0, column), slice(column, columns)):
            held = old[down, across].clone()
            for coded in received:
                coded.write_to(held, down.start, across.start)
            assert as_bytes(held) == as_bytes(new[down, across])


def test_messages_of_several_ranks_become_one_coded_buffer() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "whole": random_bits((3, 5), torch.float32, generator),
        "codes": random_bits((3, 700), torch.int8, generator),
        "norm": random_bits((50,), torch.bfloat16, generator),
    }
    fractions = {"whole": 1.0, "codes": 0.01, "norm": 0.1}
    old = {name: stepped(tensor, fractions[name], generator) for name, tensor in tensors.items()}
    changes = [compare(n, (0, 0), old[n], t, with_steps=True) for n, t in tensors.items()]
    sent = [change for change in changes if change is not None]
    assert len(sent) == 3
    buffer = torch.cat([pack(sent[:2], CPU), pack([], CPU), pack(sent[2:], CPU)])
    received = list(coding.decode(coding.encode(buffer), CPU))
    assert [change.name for change in received] == list(tensors)
    for change in received:
        change.write_to(old[change.name], 0, 0)
    assert {n: as_bytes(t) for n, t in old.items()} == {n: as_bytes(t) for n, t in tensors.items()}


@pytest.mark.parametrize("k", [0, 1, 3, 8, 13, 21])
def test_low_bits_come_back_also_over_several_chunks(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coding, "_CHUNK", 16)
    generator = np.random.default_rng(0)
    for count in (0, 1, 7, 8, 16, 17, 50):
        integers = generator.integers(0, 2**40, count)
        packed = coding._pack_low_bits(integers, k)
        assert len(packed) == math.ceil(count * k / 8)
        assert (coding._unpack_low_bits(packed, count, k) == integers % 2**k).all()


def test_sparse_steps_take_a_sign_and_the_entropy_of_their_gaps() -> None:
    """INT8 at a learning rate of 1e-6: 0.0255 % of the codes move, each by one."""
    generator = torch.Generator().manual_seed(0)
    old = torch.zeros(4_000_000, dtype=torch.int8)
    new = stepped(old, 0.000255, generator)
    change = compare("w", (0, 0), old, new, with_steps=True)
    assert change is not None and change.steps is not None
    number, rate = len(change.steps), len(change.steps) / len(old)
    gap_bits = -math.log2(rate) - (1 - rate) / rate * math.log2(1 - rate)
    plain = pack([change], CPU)
    coded = coding.encode(plain)
    bits = 8 * (len(coded) - coding.header_bytes(coded)) / number
    assert gap_bits + 0.9 < bits < gap_bits + 1.1
    assert len(coded) < 0.65 * 3 * number  # a plain change takes three bytes


def test_steps_are_told_only_if_they_are_asked_for() -> None:
    old = torch.tensor([5, -128, 127, 0, 9], dtype=torch.int8).repeat(20, 1)
    new = old.clone()
    new[0] = torch.tensor([6, 127, -128, 3, 9], dtype=torch.int8)
    silent, told = (compare("w", (0, 0), old, new, with_steps=steps) for steps in (False, True))
    assert silent is not None and told is not None
    assert silent.steps is None
    assert told.steps is not None and told.steps.tolist() == [1, -1, 1, 0]  # they wrap around
    assert told.num_bytes == silent.num_bytes + 4
    (carried,) = unpack(pack([told], CPU))
    held = old.clone()
    for _ in range(2):  # a plain change says all values, and may be written twice
        carried.write_to(held, 0, 0)
        assert torch.equal(held, new)
