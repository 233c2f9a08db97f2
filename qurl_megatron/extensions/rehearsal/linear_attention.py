"""Stand-ins for flash-linear-attention's kernels: what they keep, allocate and multiply.

They allocate what the Python of `fla.ops.gated_delta_rule.chunk` and `fla.modules.conv.triton.ops`
does in version 0.6, in BF16 unless another type is named. The rule keeps normalized queries and
keys, values, sums of the decays in float32, and the inverse of a triangular matrix for each chunk.
It computes the states again. The convolution keeps its input.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.extensions.rehearsal.trace import Trace
from qurl_megatron.model.delta_net import CHUNK


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        chunks: int,
    ) -> Tensor:
        query, key, value = (t.contiguous() for t in (query, key, value))
        query, key = torch.empty_like(query), torch.empty_like(key)  # normalized
        lengths = [t.new_empty(t.shape[:3], dtype=torch.float32) for t in (query, key)]
        decay = torch.empty_like(decay)  # summed from the start of its chunk
        inverse = key.new_zeros(*beta.shape, CHUNK)
        _states(key, value, chunks)
        out = torch.empty_like(value)
        ctx.save_for_backward(query, key, value, decay, beta, inverse, *lengths)
        ctx.chunks = chunks
        _count("gated delta rule", (query, key, value, out), key, value)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, decay, beta, *_ = ctx.saved_tensors
        held = _states(key, value, ctx.chunks)
        grad_states = torch.empty_like(held[-1])
        grad_value, grad_written = torch.empty_like(value), torch.empty_like(value)
        # Each value head has gradients of the queries and keys that it shares with others.
        by_head = [key.new_empty(*value.shape[:3], key.shape[-1]) for _ in range(4)]
        _count("gradients of the gated delta rule", (*held, grad_states, *by_head), key, value, 3)
        del held, grad_states, by_head, grad_written
        grad_query, grad_key = torch.empty_like(query), torch.empty_like(key)
        grad_decay, grad_beta = torch.empty_like(decay), torch.empty_like(beta)
        return grad_query, grad_key, grad_value, grad_decay, grad_beta, None


def _states(key: Tensor, value: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """Return what a pass allocates: what is read and written, new values, states of chunks."""
    heads, channels = value.shape[2:]
    read = key.new_empty(*value.shape[:3], key.shape[-1])
    states = key.new_empty(1, chunks, heads, key.shape[-1], channels)
    return read, torch.empty_like(value), torch.empty_like(value), states


def _count(name: str, tensors: Any, key: Tensor, value: Tensor, times: int = 1) -> None:
    tokens, heads, channels = value.shape[1:]
    inside = CHUNK * (5 * key.shape[-1] + 3 * channels)
    assert Trace.active is not None
    flops = times * tokens * heads * (inside + 6 * key.shape[-1] * channels)
    Trace.active.note_kernel(name, tensors, flops)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens_cpu: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Stand for FLA's function; tensors are [1, tokens, heads, channels]."""
    chunks = int((-(-cu_seqlens_cpu.diff() // CHUNK)).sum())
    return _Rule.apply(q, k, v, g, beta, chunks), None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        assert Trace.active is not None
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        Trace.active.note_kernel("causal convolution", (x, out))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        again = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad = torch.empty_like(x)
        by_chunk = weight.new_empty(-(-x.shape[1] // CHUNK), *weight.shape, dtype=torch.float32)
        assert Trace.active is not None
        Trace.active.note_kernel("gradient of the causal convolution", (x, again, grad, by_chunk))
        return grad, by_chunk.sum(0).to(weight.dtype)


def causal_conv1d(x: Tensor, weight: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Stand for FLA's function; `x` is [1, tokens, channels]."""
    return _Convolution.apply(x, weight), None


def install() -> None:
    """Put the stand-ins in the place of FLA's modules, before the learner is imported."""
    names = (
        "fla",
        "fla.modules",
        "fla.modules.causal_conv1d",
        "fla.ops",
        "fla.ops.gated_delta_rule",
    )
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)  # `find_spec` needs one
    for name, function in zip(names[2::2], (causal_conv1d, chunk_gated_delta_rule), strict=True):
        setattr(sys.modules[name], function.__name__, function)
