"""Packed tensors are read back from a bucket's buffer and description alone."""

from __future__ import annotations

import torch

from qurl_megatron.weight_sync.bucket import Bucket

TENSORS = {
    "codes": torch.arange(-3, 4, dtype=torch.int8),  # 7 bytes, after which nothing wider fits
    "fp8 codes": torch.tensor([[1.5, -448.0, 0.0]]).to(torch.float8_e4m3fn),
    "norm": torch.tensor([0.1, -2.0, 3.0]).bfloat16(),
    "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
    "scale": torch.tensor([[0.5], [0.25]]),
    "transposed": torch.arange(6.0).view(2, 3).t(),
}


def test_tensors_are_read_back_bit_for_bit() -> None:
    sent = Bucket.pack(TENSORS)
    received = Bucket(sent.names, sent.dtypes, [list(shape) for shape in sent.shapes], sent.flat)
    tensors = dict(received.tensors())
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape), name
        expected = tensor.contiguous().view(torch.uint8)
        assert torch.equal(tensors[name].view(torch.uint8), expected), name


def test_the_widest_types_come_first_in_the_order_given_and_leave_no_gap() -> None:
    bucket = Bucket.pack(TENSORS)
    assert list(bucket.names) == ["scale", "transposed", "norm", "empty", "codes", "fp8 codes"]
    assert bucket.flat.numel() == sum(tensor.nbytes for tensor in TENSORS.values())


def test_tensors_are_views_of_the_buffer() -> None:
    entries = [("a", torch.int8, (2, 3)), ("b", torch.uint8, (4,))]
    bucket = Bucket.empty(entries, torch.device("cpu"))
    for number, (_, tensor) in enumerate(bucket.tensors()):
        tensor.fill_(number)
    assert bucket.flat.tolist() == [0] * 6 + [1] * 4
