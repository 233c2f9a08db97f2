"""Memory that a sleeping server gives back, so that a learner can use it.

SGLang gives memory back by tag: `kv_cache` (keys, values and states of linear attention),
`cuda_graph`, and `weights`. On a GPU torch_memory_saver unmaps the memory, and later maps other
memory at the same addresses. Without a GPU this module does the same: the kernel takes the pages
of a tensor, and provides pages of zeros when the tensor is used again. Either way the contents are
lost.

CUDA cannot make inter-process handles of memory that torch_memory_saver maps. Weights that stay in
a sleeping server, into which the learner's ranks write, are therefore allocated outside of it.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qurl_megatron.machine.memory import trim_heap
from qurl_megatron.quantization.products import forget

MADV_REMOVE = 9  # frees pages of shared memory; Python's mmap module does not have it


def release(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Give memory back, around SGLang's `release_memory_occupation`, which refuses while busy."""
    answer = original(updater, request)
    if torch.device(updater.tp_worker.device).type == "cpu":
        forget()  # products keep converted weights
        for tensor in _memory_of(updater.tp_worker.model_runner, request.tags):
            give_back(tensor)
        trim_heap()
    return answer


def region(
    original: Callable[..., AbstractContextManager[None]],
    adapter: Any,
    tag: str,
    enable_cpu_backup: bool = False,
) -> AbstractContextManager[None]:
    """Return the context that allocates memory of a tag, around torch_memory_saver's.

    Memory that SGLang would copy to the host before a sleep stays where it is instead.
    """
    if enable_cpu_backup:
        return nullcontext()
    return original(adapter, tag, enable_cpu_backup)


def create_cache(original: Callable[..., None], pool: Any) -> None:
    """Create the tensors of keys and values, around SGLang's `_create_buffers_normal`.

    SGLang would write zeros to the whole cache, which without a GPU is as large as its requests can
    need. Here the kernel gives each page when it is first written.
    """
    with _unwritten(pool.device):
        original(pool)


def create_states(original: Callable[..., None], pool: Any, **sizes: Any) -> None:
    """Create the states of linear attention as `create_cache` does, around `MambaPool.__init__`."""
    with _unwritten(sizes["device"]):
        original(pool, **sizes)


def _unwritten(device: str) -> AbstractContextManager[Any]:
    """Return the context in which `torch.zeros` on a CPU takes no memory yet."""
    return _Unwritten() if torch.device(device).type == "cpu" else nullcontext()


class _Unwritten(TorchFunctionMode):
    """Creates tensors of zeros whose pages the kernel gives when they are first used."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not torch.zeros:
            return function(*args, **(kwargs or {}))
        zeros = torch.zeros(*args, **{**(kwargs or {}), "device": "meta"})
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, zeros.nbytes, flags=flags)
        return torch.frombuffer(pages, dtype=zeros.dtype).view(zeros.shape)


def give_back(tensor: Tensor) -> None:
    """Give the pages of a CPU tensor's storage back to the kernel; they then read as zeros.

    Pages that it fills only in part may belong to other tensors too, and stay.
    """
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size <= 0:
        return
    advice = MADV_REMOVE if storage.is_shared() else mmap.MADV_DONTNEED
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _memory_of(model_runner: Any, tags: Sequence[str]) -> Iterator[Tensor]:
    """Yield the tensors of a CPU server that these tags stand for; it has no CUDA graphs."""
    if "kv_cache" in tags:
        pool = model_runner.token_to_kv_pool
        pool = getattr(pool, "full_kv_pool", pool)  # of a hybrid: that of full attention
        yield from (*pool.k_buffer, *pool.v_buffer)
        states = getattr(model_runner.req_to_token_pool, "mamba_pool", None)
        if states is not None:  # of linear attention
            yield from (*states.mamba_cache.conv, states.mamba_cache.temporal)
    if "weights" in tags:
        yield from (parameter.detach() for parameter in model_runner.model.parameters())
