"""The devices, backends and ranks of this process.

In this process, only this module asks torch which devices there are; in a server's processes
`sglang_plugin` does. Some files ask this module, and code that has a tensor looks at the tensor's
device instead: `tests/test_rooms.py` lists every file that branches on CPU or GPU. With `cli`,
`launch` and `rollout/toolkit`, this is also the only module that reads environment variables.
"""

import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.machine.gpus import installed_gpus
from qurl_megatron.machine.memory import keep_heap, memory_limits, trim_heap
from qurl_megatron.machine.stores import Store

T = TypeVar("T")

LOGIT_CHUNK_ELEMENTS = 2**26  # logits that a GPU computes at once, 256 MiB in float32

# The other ranks wait in a collective while rank 0 samples, which can take hours. It is the
# launcher that notices a dead rank.
COLLECTIVE_TIMEOUT_S = 48 * 3600.0


class SharedError(Exception):
    """An error of rank 0 that `from_rank_zero` raises unchanged on every rank."""


@functools.cache
def accelerator() -> Literal["cpu", "cuda"]:
    """Return the type of device this process computes on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device() -> torch.device:
    """Return the device of this process: the GPU of its local rank, or the CPU."""
    if accelerator() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def num_gpus() -> int:
    """Return the number of GPUs this process sees."""
    return torch.cuda.device_count() if accelerator() == "cuda" else 0


def unusable_gpus() -> str:
    """Return a message if the machine has GPUs and torch sees none; else an empty string.

    Such a run would silently compute on the CPU. It is no error if CUDA_VISIBLE_DEVICES hides the
    GPUs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if accelerator() == "cuda" or hidden or not (number := installed_gpus()):
        return ""
    return (
        f"torch sees none of this machine's {number} GPUs: install a driver that is new enough for "
        f"its CUDA {torch.version.cuda}, or compute on the CPU: export CUDA_VISIBLE_DEVICES=-1"
    )


def memory_bytes() -> int:
    """Return the memory that this process has taken.

    On a GPU this is the most that torch's allocator has reserved, else the resident set of the
    process.
    """
    if accelerator() == "cuda":
        return torch.cuda.max_memory_reserved()
    return int(psutil.Process().memory_info().rss)


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or the limit of its container."""
    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for limit, _ in memory_limits())])


def free_memory_bytes() -> int:
    """Return the memory that processes can still take on this machine, or in its container."""
    available = int(psutil.virtual_memory().available)
    return min([available, *(free for _, free in memory_limits())])


def pinned(num_bytes: int) -> Tensor:
    """Return host memory `[num_bytes]` uint8, which a GPU can read and write by itself."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if accelerator() == "cuda" and num_bytes:
        # torch's allocator of pinned memory would round the size up to a power of two.
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory


def release_memory() -> None:
    """Give memory that this process has freed to other processes."""
    if accelerator() == "cuda":
        torch.cuda.empty_cache()
    trim_heap()


def backend_to(gpus: Collection[int] = ()) -> Literal["gloo", "nccl"]:
    """Return the backend that sends tensors from this rank to processes on `gpus` of this machine.

    Without `gpus` it is that of the learner's process groups, whose ranks have a GPU each.
    NCCL refuses two ranks on one GPU ("Duplicate GPU detected"). gloo accepts GPU tensors too and
    copies them through host memory.
    """
    return "gloo" if accelerator() == "cpu" or device().index in gpus else "nccl"


def can_attach(stays: bool) -> bool:
    """Return whether other processes can write into the memory of a server's weights.

    `stays` says that they stay in place while the server sleeps. On a GPU torch_memory_saver maps
    all others, and no process can attach to those.
    """
    return stays or accelerator() == "cpu"


def logit_tile(rows: int, whole: bool) -> tuple[int, int]:
    """Return how many tokens, and how many rows of the vocabulary, a tile of logits covers.

    On a CPU a tile fits in a core's cache. If it must cover the `whole` vocabulary, of which a rank
    holds `rows`, it has at least 64 tokens, because each tile reads all of the weight. On a GPU a
    tile has all rows, and at most `LOGIT_CHUNK_ELEMENTS` logits.
    """
    if accelerator() == "cuda":
        return LOGIT_CHUNK_ELEMENTS // rows, rows
    height = rows if whole else min(rows, 512)
    return max(2**18 // height, 64), height


def rank() -> int:
    """Return the rank of this process among all learner ranks, from torchrun's variable."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of learner ranks."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Return the rank of this process among the learner ranks on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def variables(prefixes: tuple[str, ...]) -> set[str]:
    """Return the names of this process's variables that begin with one of the prefixes."""
    return {name for name in os.environ if name.startswith(prefixes)}


def child_environment(
    additions: Mapping[str, str], without: Collection[str] = ()
) -> dict[str, str]:
    """Return this process's environment for a child: `without` some names, with `additions`."""
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    return {**inherited, **additions}


def extend_environment(additions: Mapping[str, str], without: Collection[str] = ()) -> None:
    """Remove the variables `without` from this process's environment, and add others."""
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(additions)


def initialize_distributed() -> None:
    """Create the default process group of all learner ranks.

    Several ranks meet at MASTER_ADDR:MASTER_PORT, which their launcher sets; a single rank needs no
    address. A collective that waits longer than `COLLECTIVE_TIMEOUT_S` ends the process.
    """
    if accelerator() == "cuda":
        # Megatron starts an exchange before the product that it overlaps with, and relies on one
        # queue to keep that order. CUDA reads this when it begins.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(device())
    else:
        keep_heap()
    # SGLang sets this in its servers. If the two sides differ, NCCL's weight transfers fail.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        # Without these, gloo resolves the hostname, which may not be reachable, and gloo and NCCL
        # listen on an address that other machines reach. What a cluster's shell says of its network
        # is no matter here.
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store: dist.Store = dist.HashStore()
    if world_size() > 1:
        # torchrun's agent has opened a store at this address.
        hosts = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = Store(address, port, world_size(), hosts, timeout=timeout)
    dist.init_process_group(
        backend_to(), rank=rank(), world_size=world_size(), timeout=timeout, store=store
    )


_creating_group = threading.Lock()  # the environment belongs to all threads


@contextmanager
def surviving_errors() -> Iterator[None]:
    """Let NCCL groups that are created in this context fail without ending the process.

    By default torch's watchdog ends it when an operation of a group fails or takes too long, or
    when aborting one takes long. A group reads these settings when it is created. Its user must
    limit the time of operations, and abort the group after a failure.
    """
    settings = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    with _creating_group:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(dict.fromkeys(settings, "0"))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def from_rank_zero(work: Callable[[], T]) -> T:
    """Run `work()` on global rank 0 and return its result on every rank; collective.

    Raises:
        SharedError: `work()` raised it.
        RuntimeError: `work()` failed otherwise; rank 0 raises the original exception.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            told = RuntimeError(f"rank 0 failed: {type(error).__name__}: {error}")
            # The other ranks wait in the broadcast below.
            dist.broadcast_object_list([None, error if isinstance(error, SharedError) else told])
            raise
    dist.broadcast_object_list(outcome)
    result, failure = outcome
    if failure is not None:
        raise failure
    return result


def capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each GPU."""
    return [(gpu.major, gpu.minor) for gpu in gpu_properties()]


def gpu_properties() -> list[Any]:
    """Return torch's properties of each GPU: `name`, `major`, `minor`, `total_memory` in bytes."""
    return [torch.cuda.get_device_properties(index) for index in range(num_gpus())]
