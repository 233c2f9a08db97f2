"""Memory that another process on the same machine reads or writes in place.

The owner describes a buffer in a header of `HEADER_BYTES`, and sends the header instead of the
buffer. The reader attaches to the memory; nothing is copied. On a GPU this is CUDA's inter-process
memory, through PyTorch's own sharing of tensors. Without a GPU it is a file in shared memory.

The owner must keep the buffer until the reader has confirmed that it is done.

A tensor is described likewise, by a text (`describe_tensor`). What the other process writes into it
is there for the owner.
"""

from __future__ import annotations

import base64
import pickle

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

HEADER_BYTES = 4096
GROUP_SUFFIX = "@shared_memory"  # marks a process group that broadcasts headers, not buckets


def describe(buffer: Tensor) -> Tensor:
    """Return the header of a flat uint8 `buffer`, [HEADER_BYTES] uint8, for `attach`.

    The buffer's values must be complete. On a CPU its storage moves to shared memory.
    """
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
        _, handle = reduce_tensor(buffer)
    else:
        handle = buffer.untyped_storage()._share_filename_cpu_()
    packed = pickle.dumps((buffer.is_cuda, handle))
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    header[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    return header


def attach(header: Tensor) -> Tensor:
    """Return the buffer that `describe` was given, in another process of this machine.

    The header is unpickled, so its sender must be trusted.
    """
    on_gpu, handle = pickle.loads(header.numpy().tobytes())  # stops before the trailing zeros
    if on_gpu:
        return rebuild_cuda_tensor(*handle)
    storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def describe_tensor(tensor: Tensor) -> str:
    """Return a text with which another process of this machine can `attach_tensor`.

    On a CPU the tensor's storage moves to shared memory; tensors that share it move along.
    """
    if tensor.is_cuda:
        described: object = reduce_tensor(tensor)[1]
    else:
        handle = tensor.untyped_storage()._share_filename_cpu_()
        layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        described = handle, layout
    return base64.b64encode(pickle.dumps((tensor.is_cuda, described))).decode()


def attach_tensor(text: str) -> Tensor:
    """Return the tensor that `describe_tensor` was given, in another process of this machine.

    The text is unpickled, so its sender must be trusted.
    """
    on_gpu, described = pickle.loads(base64.b64decode(text))
    if on_gpu:
        return rebuild_cuda_tensor(*described)
    handle, (dtype, offset, shape, stride) = described
    storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
