"""Run Megatron-core on a machine without a GPU: replace its few unconditional CUDA calls.

Megatron's sources stay unedited; its collectives go over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    """Let Megatron run on the CPU; enter this around code that builds, runs or checkpoints a model.

    It applies to the entering thread only and costs about a microsecond per operation on the CPU.
    On a GPU it does nothing.
    """
    if accelerator() == "cuda":
        yield
        return
    no_state = torch.empty(0)  # there is no dropout, so recomputed layers need no random state
    with ExitStack() as patches:
        for module, name, value in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", lambda device=None: None),
            (random, "_get_cuda_rng_state", lambda **_: no_state),
            (random, "_set_cuda_rng_state", lambda *_, **__: None),
        ):
            patches.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        with _CudaMeansCpu():
            yield
