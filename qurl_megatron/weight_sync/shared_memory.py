"""Memory that another process on the same machine reads and writes in place.

The owner of a tensor describes it in a text, and the other process attaches to it; nothing is
copied. On a GPU this is CUDA's inter-process memory, through PyTorch's own sharing of tensors.
Without a GPU it is a file in shared memory. The owner must keep the tensor meanwhile.
"""

from __future__ import annotations

import base64
import pickle

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor


def describe(tensor: Tensor) -> str:
    """Return a text with which another process of this machine can `attach` to a tensor.

    On a CPU the tensor's storage moves to shared memory; tensors that share it move along.
    """
    if tensor.is_cuda:
        described: object = reduce_tensor(tensor)[1]
    else:
        handle = tensor.untyped_storage()._share_filename_cpu_()
        layout = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        described = handle, layout
    return base64.b64encode(pickle.dumps((tensor.is_cuda, described))).decode()


def attach(text: str) -> Tensor:
    """Return the tensor that `describe` was given, in another process of this machine.

    The text is unpickled, so its sender must be trusted.
    """
    on_gpu, described = pickle.loads(base64.b64decode(text))
    if on_gpu:
        return rebuild_cuda_tensor(*described)
    handle, (dtype, offset, shape, stride) = described
    storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
