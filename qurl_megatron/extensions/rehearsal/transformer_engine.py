"""Transformer Engine's Python over stand-ins for its kernels: shapes, memory and FLOPs.

The wheel's Python is real: `requirements-te.txt` installs it without its compiled parts. What
stands for what:

    matrix products, grouped products   torch's, with the FLOPs of the real ones
    norms, rotary embedding             torch's, or a copy of the same size
    Adam, norm and scale of gradients   a kernel over the same tensors
    attention                           torch's packed attention, which keeps what cuDNN's keeps
    attention with context parallelism  the same once per rank, each time with the keys and values
                                        of another rank, passed on in a ring

All other kernels are dummies that compute nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from qurl_megatron.device import extend_environment
from qurl_megatron.extensions.rehearsal.trace import Trace


def find() -> Path | None:
    """Return the directory that holds the wheel's Python; None: there is none."""
    for folder in [*sys.path, str(Path(sys.prefix) / "transformer-engine")]:
        if (Path(folder) / "transformer_engine" / "pytorch").is_dir():
            return Path(folder)
    return None


class Extension(ModuleType):
    """Stands for the compiled `transformer_engine_torch`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for own in [own for own in vars(type(self)) if not own.startswith("_")]:
            setattr(self, own, getattr(self, own))  # for `from transformer_engine_torch import *`

    def __getattr__(self, name: str) -> mock.MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        dummy = mock.MagicMock(name=name)
        setattr(self, name, dummy)
        return dummy

    def get_cudnn_version(self) -> int:
        return 91000

    def generic_gemm(
        self,
        a: Tensor,
        transa: bool,
        b: Tensor,
        transb: bool,
        out: Tensor | None,
        *rest: Any,
        **_: Any,
    ) -> tuple[Any, ...]:
        bias, grad = rest[2], rest[6]
        left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
        product = (left.t() if transb else left) @ (right.t() if transa else right)
        if out is None:
            out = product if transb else product.view(*b.shape[:-1], product.shape[-1])
        has_bias = isinstance(bias, Tensor) and bias.numel() > 0
        return out, b.new_empty(b.shape[-1]) if grad and has_bias else None, None, None

    def te_general_grouped_gemm(
        self, a: list[Tensor], _: bool, b: list[Tensor], transb: bool, out: list[Tensor], *rest: Any
    ) -> Any:
        rows = 1 if transb else 0
        flops = sum(2 * x.numel() * y.shape[rows] for x, y in zip(a, b, strict=True))
        _count("grouped products", (a, b, out), flops)
        return rest[2]

    def rmsnorm_fwd(self, x: Tensor, weight: Tensor, eps: float, *_: Any) -> Any:
        y, factor = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)
        return y, None, factor.view(-1)

    def rmsnorm_bwd(self, dy: Tensor, x: Tensor, factor: Tensor, weight: Tensor, *_: Any) -> Any:
        return dy + x, torch.empty_like(weight)

    def fused_rope_forward(self, t: Tensor, *_: Any) -> Tensor:
        return t.clone(memory_format=torch.contiguous_format)

    fused_rope_backward = fused_rope_forward

    def multi_tensor_l2norm(self, *tensors: Any) -> tuple[Tensor, Tensor]:
        _count("norm of all gradients", tensors)
        empty = torch.empty(0, dtype=torch.float32, device="cuda")
        return torch.empty(1, dtype=torch.float32, device="cuda"), empty

    def multi_tensor_scale(self, *tensors: Any) -> None:
        _count("scale all gradients", tensors)

    def multi_tensor_adam(self, *tensors: Any) -> None:
        _count("adam", tensors)


def _count(name: str, tensors: Any, flops: float = 0) -> None:
    assert Trace.active is not None
    Trace.active.note_kernel(name, tensors, flops)


class _RingAttention(torch.autograd.Function):
    """Attention in a ring: the keys and values of every rank of a group pass by.

    If all ranks are equal, each step costs as much as causal attention to a rank's own tokens.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *pack: Any) -> Tensor:
        *bounds, group = pack
        held, outputs = torch.stack([key, value]), []
        for step in range(group.size()):
            if step:
                held = _pass_on(held, group)
            attended = torch.ops.torch_attn._varlen_attn(
                query, *held.unbind(), *bounds, True, None, [-1, 0], True
            )
            outputs.append(attended)
        out, log_sum_exp, state = outputs[0]
        for other, *_ in outputs[1:]:
            out.add_(other)
        ctx.bounds, ctx.group = bounds, group
        ctx.save_for_backward(query, held, out, log_sum_exp, state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, held, out, log_sum_exp, state = ctx.saved_tensors
        total = torch.zeros_like(query)
        grad_held = torch.empty_like(held)
        for step in range(ctx.group.size()):
            if step:
                held, grad_held = _pass_on(held, ctx.group), _pass_on(grad_held, ctx.group)
            own, grad_key, grad_value = torch.ops.torch_attn._varlen_attn_backward(
                grads[0].contiguous(), query, *held.unbind(), out, log_sum_exp, *ctx.bounds, True,
                state, None, [-1, 0],
            )  # fmt: skip
            total.add_(own)
            grad_held.add_(torch.stack([grad_key, grad_value]))
        return total, *grad_held.unbind(), *[None] * (len(ctx.bounds) + 1)


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send a tensor to the next rank, and return the one of the rank before."""
    received = torch.empty_like(tensor)
    ranks, own = dist.get_process_group_ranks(group), group.rank()
    dist.isend(tensor, ranks[(own + 1) % len(ranks)], group=group)
    dist.irecv(received, ranks[own - 1], group=group)
    return received


def _attend(
    self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any
) -> Tensor:
    """Stand for Transformer Engine's attention; all are `[tokens, heads, head_dim]`."""
    from megatron.core import parallel_state

    from qurl_megatron.learner.layers import _flash_attention

    group, pack = parallel_state.get_context_parallel_group(), packed_seq_params
    if group.size() == 1:
        return _flash_attention(query, key, value, pack).flatten(1)
    bounds = pack.cu_seqlens_q // group.size()
    longest = pack.max_seqlen_q // group.size()
    arguments = (bounds, bounds, longest, longest, group)
    attended: Tensor = _RingAttention.apply(query, key, value, *arguments)
    return attended.flatten(1)


def install(folder: Path) -> None:
    """Import Transformer Engine from `folder`, after `fake_gpu.install` and before Megatron."""
    sys.path.insert(0, str(folder))
    extend_environment({"NVTE_PROJECT_BUILDING": "1"})  # there are no compiled parts to load
    extension = Extension("transformer_engine_torch")
    for source in (folder / "transformer_engine" / "pytorch").rglob("*.py"):
        for name in re.findall(r"\btex\.([a-z]\w+)", source.read_text()):
            getattr(extension, name)  # a dummy, unless it is written above
    sys.modules[extension.__name__] = extension
    # Its import needs a dependency of the wheel that exports models to ONNX.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = mock.MagicMock()
    import transformer_engine.common as common

    with mock.patch.object(common, "load_framework_extension"):
        import transformer_engine.pytorch  # noqa: F401
    from megatron.core.extensions import transformer_engine as extensions

    extensions.TEDotProductAttention.forward = _attend
