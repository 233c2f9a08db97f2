"""Torch in place of the Triton kernels of SGLang's gated DeltaNet, on machines without a GPU.

SGLang imports these functions by name, so they are replaced where they are defined, before a module
that uses them is imported.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from qurl_megatron.model.delta_rule import chunk_plan, gated_delta_rule, step


def install() -> None:
    """Replace the kernels."""
    from sglang.kernels.ops.attention import triton_gdn_fused_proj
    from sglang.kernels.ops.attention.fla import chunk, fused_recurrent, layernorm_gated
    from sglang.kernels.ops.attention.linear import fused_gdn_gating
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.kernels.ops.mamba import causal_conv1d_triton

    _replace(triton_gdn_fused_proj, "fused_qkvzba_split_reshape_cat_contiguous", split_projections)
    _replace(chunk, "chunk_gated_delta_rule", extend)
    _replace(fused_recurrent, "fused_recurrent_gated_delta_rule_packed_decode", decode)
    _replace(layernorm_gated, "layernorm_fn", gated_norm)
    _replace(fused_gdn_gating, "fused_gdn_gating", gates)
    _replace(elementwise, "fused_sigmoid_mul", gated)
    _replace(elementwise, "fused_gate_sigmoid_mul_add", add_shared)
    _replace(causal_conv1d_triton, "causal_conv1d_fn", convolve)
    _replace(causal_conv1d_triton, "causal_conv1d_update", convolve_one)


def _replace(module: Any, name: str, function: Any) -> None:
    """Replace a function where it is defined, and where it has been imported by name."""
    original = getattr(module, name)
    for each in [module, *sys.modules.values()]:
        if getattr(each, name, None) is original:
            setattr(each, name, function)


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, ...]:
    """Return queries, keys and values, gates [tokens, heads, channels], beta and decay."""
    values = value_heads * value_dim
    qkv, z = qkvz.split([2 * key_heads * key_dim + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv, z.unflatten(-1, (value_heads, value_dim)), b, a


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return decays (logarithms) and beta [1, tokens, heads] float32."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid().to(b.dtype).float()[None]


def gated_norm(x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float, **_: Any) -> Tensor:
    """Return the RMSNorm of x times silu(z)."""
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * silu(z.float())).to(x.dtype)


def gated(x: Tensor, gate: Tensor, inplace: bool = False, **_: Any) -> Tensor:
    return (x.float() * gate.flatten(1).float().sigmoid()).to(x.dtype)


def add_shared(x: Tensor, gate: Tensor, shared: Tensor, out: Tensor) -> None:
    """Add the shared expert's output, times its gate, to that of the others."""
    out += (shared.float() * (x.float() @ gate.float()).sigmoid()[:, None]).to(out.dtype)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str = "silu",
    **_: Any,
) -> Tensor:
    """Return the causal convolution [channels, tokens] of packed sequences; update their states."""
    before = weight.shape[1] - 1
    starts = query_start_loc.long()
    lengths = starts.diff()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    tokens = torch.arange(int(starts[-1])) + (sequence + 1) * before
    first = starts[:-1, None] + torch.arange(len(lengths))[:, None] * before + torch.arange(before)
    x = x.T.float()
    padded = x.new_zeros(len(tokens) + len(lengths) * before, x.shape[1])
    padded[tokens] = x[: len(tokens)]
    slots = cache_indices.long()
    states = conv_states[slots].float() * has_initial_state[:, None, None]
    padded[first] = states.mT
    out = sum(
        padded[tokens - back] * weight[:, before - back].float() for back in range(before + 1)
    )
    conv_states[slots] = padded[first + lengths[:, None]].mT.to(conv_states.dtype)
    return silu(out).to(conv_states.dtype).T


def convolve_one(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: None,
    activation: str,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Return the causal convolution [sequences, channels] of one more token each."""
    slots = conv_state_indices.long()
    window = torch.cat([conv_state[slots], x[..., None].to(conv_state.dtype)], dim=-1)
    conv_state[slots] = window[..., 1:]
    return silu((window.float() * weight.float()).sum(-1)).to(x.dtype)


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Compute new tokens of packed sequences, and update their states [slots, heads, value, key]."""
    plan = chunk_plan(tuple(cu_seqlens.tolist()), q.device)
    slots = initial_state_indices.long()
    out, last = gated_delta_rule(q[0], k[0], v[0], g[0], beta[0], plan, initial_state[slots].mT)
    initial_state[slots] = last.mT.to(initial_state.dtype)
    return out.to(v.dtype)[None], None, None


def decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    **_: Any,
) -> None:
    """Compute one more token of each sequence into `out` [sequences, 1, heads, channels]."""
    heads, value_dim, key_dim = initial_state.shape[1:]
    keys = (mixed_qkv.shape[1] - heads * value_dim) // 2
    query, key, value = mixed_qkv.split([keys, keys, heads * value_dim], dim=-1)
    decay, beta = gates(A_log, a, b, dt_bias)
    slots = ssm_state_indices.long()
    output, state = step(
        query.unflatten(-1, (-1, key_dim)),
        key.unflatten(-1, (-1, key_dim)),
        value.unflatten(-1, (-1, value_dim)),
        decay[0],
        beta[0],
        initial_state[slots].mT,
    )
    initial_state[slots] = state.mT.to(initial_state.dtype)
    out[:, 0] = output.to(out.dtype)
