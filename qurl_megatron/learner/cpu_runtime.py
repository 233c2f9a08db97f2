"""Run Megatron-core without a GPU, and without Transformer Engine.

On a machine without a GPU its few unconditional CUDA calls are replaced, and its collectives go
over gloo. Without Transformer Engine it lacks names that it uses to compute norms again. Its
sources stay unedited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qurl_megatron.device import accelerator


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
        if not random.HAVE_TE:
            _replace(patches, random, "FP8GlobalStateManager", _NoFp8)
            _replace(patches, random, "activation_recompute_forward", lambda **_: nullcontext())
            _replace(patches, random, "fp8_autocast", lambda **_: nullcontext())
        if accelerator() == "cpu":
            no_state = torch.empty(0)  # without dropout, recomputation needs no random state
            _replace(patches, torch.cuda, "current_device", lambda: torch.device("cpu"))
            _replace(patches, torch.cuda, "synchronize", lambda device=None: None)
            _replace(patches, random, "_get_cuda_rng_state", lambda **_: no_state)
            _replace(patches, random, "_set_cuda_rng_state", lambda *_, **__: None)
            patches.enter_context(_CudaMeansCpu())
        yield


class _NoFp8:
    """What Megatron asks of Transformer Engine when it computes a norm again."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _replace(patches: ExitStack, module: Any, name: str, value: Any) -> None:
    """Set an attribute of `module`, which may lack it, until `patches` are closed."""
    if hasattr(module, name):
        patches.callback(setattr, module, name, getattr(module, name))
    else:
        patches.callback(delattr, module, name)
    setattr(module, name, value)
