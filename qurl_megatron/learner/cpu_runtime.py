"""Run Megatron-core without a GPU, and without Transformer Engine.

On a machine without a GPU its few unconditional CUDA calls are replaced, and its collectives go
over gloo. Without Transformer Engine it lacks names that it uses to recompute norms and to route
tokens to experts. Its sources stay unedited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings, random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from qurl_megatron.device import accelerator
from qurl_megatron.quantization.products import multiplies_bfloat16

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class _CudaMeansCpu(TorchFunctionMode):
    """Treats the CUDA device literals in Megatron's sources as the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1:  # optimizers compare with torch.cuda.FloatTensor
            return func(*args).replace("torch.", "torch.cuda.")
        if not kwargs:
            return func(*args)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


@contextmanager
def megatron_runtime() -> Iterator[None]:
    """Let Megatron run on this machine; enter this around code that builds, runs or saves a model.

    On a CPU it costs about a microsecond per operation, in the entering thread only. On a GPU with
    Transformer Engine it does nothing.
    """
    with ExitStack() as patches:

        def replace(module: Any, **values: Any) -> None:
            """Set attributes of `module`, which may lack them, until this context ends."""
            patches.enter_context(patch.multiple(module, create=True, **values))

        if not random.HAVE_TE:
            replace(
                random,
                # What Megatron asks of Transformer Engine when it recomputes a norm.
                FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False),
                activation_recompute_forward=lambda **_: nullcontext(),
                fp8_autocast=lambda **_: nullcontext(),
            )
            replace(moe_utils, te_general_gemm=None)
        if accelerator() == "cpu":
            no_state = torch.empty(0)  # without dropout, recomputation needs no random state
            stream = _NoStream()
            replace(
                random,
                _get_cuda_rng_state=lambda **_: no_state,
                _set_cuda_rng_state=lambda *_, **__: None,
            )
            replace(
                torch.cuda,
                current_device=lambda: torch.device("cpu"),
                synchronize=lambda device=None: None,
                Stream=lambda: stream,
                current_stream=lambda: stream,
                stream=lambda _: nullcontext(),
            )
            replace(
                mappings,
                _gather_along_first_dim=_gather,
                _reduce_scatter_along_first_dim=_reduce_scatter,
            )
            replace(token_dispatcher, maybe_move_tensor_to_cpu=_as_splits)
            patches.enter_context(_CudaMeansCpu())
        yield


def bfloat16_products() -> AbstractContextManager[Any]:
    """Multiply BF16 matrices as float32 within this, on a CPU without instructions for them.

    Sums are float32 and are rounded once, as by such instructions. torch's own products would take
    ten times as long. Both passes of autograd are covered.
    """
    is_slow = accelerator() == "cpu" and not multiplies_bfloat16()
    return _Float32Products() if is_slow else nullcontext()


class _Float32Products(TorchDispatchMode):
    """Multiplies BF16 matrices as float32."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        if function in _PRODUCTS and args[-1].dtype == torch.bfloat16:
            return function(*(each.float() for each in args), **(kwargs or {})).bfloat16()
        return function(*args, **(kwargs or {}))


class _NoStream:
    """What Megatron asks of a CUDA stream, and of an event, when it hands tokens to experts."""

    def wait_stream(self, stream: _NoStream) -> None: ...

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None: ...


def _as_splits(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return a CPU tensor as `maybe_move_tensor_to_cpu` returns one from a GPU: as numbers.

    Megatron's own function leaves a CPU tensor as it is, but an all-to-all takes numbers as sizes.
    """
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


# Megatron's own, before `megatron_runtime` replaces them.
_gather_equal = mappings._gather_along_first_dim
_reduce_scatter_equal = mappings._reduce_scatter_along_first_dim


def _gather(
    own: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *arguments: Any
) -> Tensor:
    """Gather parts along the first dimension; gloo gathers only parts of one size."""
    if sizes is None or len(sizes) == 1:
        return _gather_equal(own, group, sizes, *arguments)
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter(
    parts: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *arguments: Any
) -> Tensor:
    """Return this rank's part of a sum; gloo scatters only parts of one size."""
    if sizes is None or len(sizes) == 1:
        return _reduce_scatter_equal(parts, group, sizes, *arguments)
    total = parts.clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()]
