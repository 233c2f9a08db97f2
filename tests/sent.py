"""Tensors in a bucket, the tensors of a publish read back from its buckets, and their bytes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from qurl_megatron.weight_sync.bucket import Bucket, Manifest, copy_values


def packed(tensors: Mapping[str, Tensor]) -> Bucket:
    manifest = Manifest.of((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    bucket = Bucket.empty(manifest, torch.device("cpu"))
    for name, view in bucket.tensors():
        copy_values(view, tensors[name])
    return bucket


def tensors_in(buckets: list[Bucket]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for bucket in buckets:
        for name, tensor in bucket.tensors():
            assert name not in tensors, f"{name} was sent twice"
            tensors[name] = tensor
        assert sum(tensor.nbytes for _, tensor in bucket.tensors()) == bucket.flat.numel()
    return tensors


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
