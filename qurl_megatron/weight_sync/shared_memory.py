"""A buffer that another process of this machine reads where it lies, told in a few bytes.

On a GPU this is CUDA's inter-process memory, through PyTorch's own sharing of tensors; without one,
a file in the machine's shared memory. Nothing is copied. The owner keeps the buffer until its
reader has said that it is done.
"""

from __future__ import annotations

import pickle

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

HEADER_BYTES = 4096
SHARED = "@shared_memory"  # ends the name of a process group whose buckets travel so


def describe(buffer: Tensor) -> Tensor:
    """What `attach` needs of a flat uint8 `buffer` whose values are complete: [HEADER_BYTES] uint8.

    On a CPU its storage moves to shared memory.
    """
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
        _, told = reduce_tensor(buffer)
    else:
        told = buffer.untyped_storage()._share_filename_cpu_()
    packed = pickle.dumps((buffer.is_cuda, told))
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    header[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return header


def attach(header: Tensor) -> Tensor:
    """The buffer itself, in a process that trusts the header's sender."""
    on_gpu, told = pickle.loads(header.numpy().tobytes())  # what follows its end is not read
    if on_gpu:
        return rebuild_cuda_tensor(*told)
    storage = torch.UntypedStorage._new_shared_filename_cpu(*told)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
