"""Let torch, Triton and Megatron run where there is no GPU, as if there were one.

This file has all patches that a rehearsal makes to libraries. They are global and cannot be undone,
so a process of its own makes them, before it imports Megatron:

    fake_gpu.install(node)
    with Trace(node) as trace:  # `cuda` tensors are fake from here on
        ...

They fit the torch that requirements.txt pins. `check` tests whether they still do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from qurl_megatron.config.gpus import Node
from qurl_megatron.extensions.rehearsal.trace import Trace, is_on_gpu


class PatchFailed(RuntimeError):
    """A patch does not fit the installed libraries; one line."""


class _Stream:
    """A stream, an event, and the context that makes a stream the current one."""

    cuda_stream, device = 0, torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = wait = record = __exit__ = _nothing

    def _itself(self, *_: Any) -> _Stream:
        return self

    record_event = __enter__ = _itself

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        _note_wait("synchronize")


def _note_wait(kind: str) -> None:
    if Trace.active:
        Trace.active.note_wait(kind)


def install(node: Node) -> None:
    """Make all patches, for GPUs of this kind.

    Raises:
        PatchFailed: Megatron is imported already, or a patch does not fit the installed torch.
    """
    if "megatron.core" in sys.modules:
        raise PatchFailed("Megatron is imported before a rehearsal's patches")
    _allow_backward()
    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing takes the place of CUDA's
    # It would allocate on the claimed GPU.
    fake_tensor.init_gpu_context = lambda _: None  # type: ignore[assignment]
    _claim_gpus(node)
    _patch_tensors()
    _count_triton_kernels()
    _run_fused_functions()
    _share_objects()


def _allow_backward() -> None:
    """Let autograd run: replace `CUDAHooks::hasPrimaryContext` by a function that says no.

    autograd calls it for every device, and it throws where there is no GPU. It is a virtual
    function, so its entry in the virtual table is replaced. The installed header tells which entry
    that is. (A preloaded library that exports `c10::cuda::hasPrimaryContext` does not help: the
    hooks call a private function.)
    """
    root = Path(torch.__file__).parent
    header = root / "include" / "ATen" / "detail" / "AcceleratorHooksInterface.h"
    functions = re.findall(r"^  virtual [^(;]*?(~?\w+)\(", header.read_text(), re.MULTILINE)
    if functions[:1] != ["~AcceleratorHooksInterface"] or "hasPrimaryContext" not in functions:
        raise PatchFailed(f"torch {torch.__version__}: {header.name} has other virtual functions")
    entry = functions.index("hasPrimaryContext") + 1  # a destructor takes two entries
    library = ctypes.CDLL(str(root / "lib" / "libtorch_cpu.so"))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    original, before, entries = hooks[0], 2, 96  # two words stand before the first entry
    assert original is not None
    start = original - before * ctypes.sizeof(ctypes.c_void_p)
    table = (ctypes.c_void_p * entries).from_buffer_copy(
        ctypes.string_at(start, entries * ctypes.sizeof(ctypes.c_void_p))
    )
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *_: False)
    table[before + entry] = ctypes.cast(answer, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(table) + before * ctypes.sizeof(ctypes.c_void_p)

    # The default value keeps the table and its function alive until then.
    def restore(_keep: Any = (table, answer)) -> None:
        hooks[0] = original

    atexit.register(restore)


def check() -> None:
    """Run a forward and a backward pass after `install`.

    Raises:
        PatchFailed: they do not behave as on a GPU.
    """
    try:
        with Trace(Node()) as trace:
            weight = torch.ones(512, 512, device="cuda", requires_grad=True)
            product = weight @ weight
            product.sum().backward()
            found = is_on_gpu(product) and is_on_gpu(weight.grad)
            trace.start("end")
        phase = trace.phases["build"]
        # One product forward and two backward; weight, product and gradient in float32.
        found &= phase.flops == 3 * 2 * 512**3 and phase.end_bytes == 3 * 4 * 512**2
    except RuntimeError as error:
        raise PatchFailed(f"torch {torch.__version__}: {error}") from error
    if not found:
        raise PatchFailed(f"torch {torch.__version__}: a product on a fake GPU gives {phase}")


def _claim_gpus(node: Node) -> None:
    """Let `torch.cuda` say what it says on a node."""
    gpu = node.gpu
    properties = types.SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=132,
        total_memory=gpu.memory_bytes,
        warp_size=32,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
    )
    stream, state = _Stream(), torch.zeros(16, dtype=torch.uint8)
    generator = types.SimpleNamespace(get_state=lambda: state, set_state=lambda _: None)
    generator.graphsafe_get_state = generator.clone_state = lambda: generator
    generator.graphsafe_set_state = lambda _: None
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": node.gpus,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "current_stream": stream,
        "default_stream": stream,
        "stream": contextlib.nullcontext(),
        "get_rng_state": state,
        "cudart": types.SimpleNamespace(
            cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
        ),
        "mem_get_info": (gpu.memory_bytes, gpu.memory_bytes),
        **dict.fromkeys(["_lazy_init", "init", "set_device", "empty_cache"]),
        **dict.fromkeys(["manual_seed", "set_rng_state"]),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, functools.partial(lambda answer, *_, **__: answer, answer))
    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[assignment, misc]
    torch.cuda.default_generators = (generator,) * node.gpus  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: _note_wait("synchronize")
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_: Trace.active.peak_bytes if Trace.active else 0)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    nvtx: Any = types.SimpleNamespace(range_push=lambda _: 0, range_pop=lambda: 0)
    torch.cuda.nvtx = nvtx


def _patch_tensors() -> None:
    """Replace what torch does to tensors beneath its Python modes."""
    torch.tensor = functools.partial(_tensor, torch.tensor)
    torch.nn.Module.to = functools.partialmethod(_move, torch.nn.Module.to)  # type: ignore[assignment]
    torch.UntypedStorage.resize_ = functools.partialmethod(_resize, torch.UntypedStorage.resize_)  # type: ignore[assignment, method-assign]
    FakeTensor.data_ptr = _address  # type: ignore[assignment, method-assign]
    FakeTensor.tolist = _tolist  # type: ignore[method-assign]
    FakeTensor.record_stream = lambda *_: None  # type: ignore[method-assign]


def _tensor(original: Callable[..., Tensor], data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Read a list of GPU tensors one by one, as torch does."""

    def read(each: Any) -> Any:
        if isinstance(each, (list, tuple)) and each and not isinstance(each[0], (int, float)):
            return [read(inner) for inner in each]
        return each.item() if isinstance(each, FakeTensor) and each.dim() == 0 else each

    return original(read(data), *args, **kwargs)


def _move(self: torch.nn.Module, original: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Move only what is not there yet: torch cannot swap fake parameters that others refer to."""
    target = args[0] if args else None
    if not isinstance(target, torch.device) or target.type != "cuda":
        return original(self, *args, **kwargs)
    for module in self.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else buffer.to(target)
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_on_gpu(parameter):  # such as a router's
                moved = torch.nn.Parameter(parameter.detach().to(target))
                vars(moved).update(vars(parameter))
                module._parameters[name] = moved
    return self


def _resize(self: torch.UntypedStorage, original: Any, size: int) -> Any:
    result = original(self, size)
    if Trace.active:
        Trace.active.note_resize(self)
    return result


def _address(self: FakeTensor) -> int:
    """Return an address as aligned as those of torch's allocator."""
    return (self.untyped_storage()._cdata << 9) + self.storage_offset() * self.element_size()


def _tolist(self: FakeTensor) -> Any:
    """Read a whole tensor with one wait, and not one for each element."""
    assert Trace.active is not None
    return Trace.active.read(self, "tolist").tolist()


def _count_triton_kernels() -> None:
    """Let Triton kernels be launched without being compiled."""
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if callable(grid):  # it must be computable
            grid(dict(zip(self.arg_names, args, strict=False)) | kwargs)
        if Trace.active:
            Trace.active.note_triton(self.fn.__name__, [*args, *kwargs.values()])

    JITFunction.run = run


def _run_fused_functions() -> None:
    """Let what Megatron compiles run operation by operation, but count as one kernel.

    Importing any part of Megatron decorates these functions, so a module takes the place of the
    one with the decorator.
    """

    def fused(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            trace = Trace.active
            return trace.fused(function, args, kwargs) if trace else function(*args, **kwargs)

        return wrapped

    jit: Any = types.ModuleType("megatron.core.jit")
    jit.jit_fuser = fused
    jit.enable_jit_fuser = jit.disable_jit_fuser = lambda: None
    jit.noop_decorator = lambda function: function
    sys.modules[jit.__name__] = jit


def _share_objects() -> None:
    """Let every rank have the Python objects of this one."""

    def all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * len(found)

    dist.all_gather_object = all_gather_object  # type: ignore[assignment]
    for name in ("broadcast_object_list", "send_object_list", "recv_object_list", "gather_object"):
        setattr(dist, name, lambda *_, **__: None)
