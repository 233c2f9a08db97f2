"""SGLang's gated DeltaNet: the parts of its parameters, and torch in place of its GPU kernels.

Without a GPU, SGLang's backend for hybrid models stays as it is, with its pools of states, its
prefix cache and its bookkeeping. Only its Triton functions are replaced, one by one and with the
same arguments (`platform.KERNELS`). A sequence has a slot in two pools of each DeltaNet layer:

    convolution   [slots, channels, width - 1]                       inputs of its last tokens
    state         [slots, value heads, value channels, key channels] float32

The slots of new sequences are 0. Extending computes whole prompts and updates their slots, decoding
one token of each sequence. With `mamba_radix_cache_strategy=extra_buffer`, SGLang keeps copies of
slots: of prompts at the last multiple of 64 tokens, so completions of one prompt share its state.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from qurl_megatron.model.delta_rule import chunk_plan, gated_delta_rule, step
from qurl_megatron.quantization.checksum import Part


def cut_delta_net(layer: Any, path: str) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a DeltaNet layer's heads, and of its convolution.

    The convolution's weight is cut as the layer multiplies with it, [channels, width]. Ranks divide
    each of its three parts: the rows of queries, of keys and of values.
    """
    mixer, parts = layer.attn, ("query", "key", "value")  # of the convolution's inputs
    rows = [mixer.q_dim, mixer.k_dim, mixer.v_dim]
    tensors = {
        "A_log": layer.A_log.detach(),
        "dt_bias": layer.dt_bias.detach(),
        **{
            f"conv1d:{part}.weight": values
            for part, values in zip(parts, mixer.conv_weights.detach().split(rows), strict=True)
        },
    }
    for name, values in tensors.items():
        yield f"{path}.{name}", Part(values, layer.attn_tp_rank * len(values), 0)


def split_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, ...]:
    """Split the outputs of two fused projections: mixed [tokens, channels], gate, beta and decay.

    The gate is [tokens, value heads, value channels], beta and decay are [tokens, value heads].
    """
    values = value_heads * value_dim
    mixed, gate = qkvz.split([2 * key_heads * key_dim + values, values], dim=-1)
    beta, decay = ba.chunk(2, dim=-1)
    return mixed, gate.unflatten(-1, (value_heads, value_dim)), beta, decay


def gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the decays' logarithms, and beta, both [1, tokens, heads] float32."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.sigmoid().float()[None]


def gated_norm(x: Tensor, weight: Tensor, bias: None, z: Tensor, eps: float, **_: Any) -> Tensor:
    """Return the RMSNorm of x times silu(z), [tokens x heads, channels] in the dtype of x."""
    normed = rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * silu(z.float())).to(x.dtype)


def gated_attention(x: Tensor, gate: Tensor, **_: Any) -> Tensor:
    """Return the output of attention [tokens, channels] times the sigmoid of its gate."""
    return (x.float() * gate.flatten(1).float().sigmoid()).to(x.dtype)


def add_shared_expert(x: Tensor, gate: Tensor, shared: Tensor, out: Tensor) -> None:
    """Add the shared expert's output, times its gate, to the other experts' output in `out`.

    All are [tokens, hidden], but `gate` [hidden] is the weight that computes each token's gate.
    """
    share = (x.float() @ gate.float()).sigmoid()
    out.copy_(out.float() + share[:, None] * shared.float())


def convolve_prompts(
    x: Tensor,
    weight: Tensor,
    bias: None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    **_: Any,
) -> Tensor:
    """Return silu of the causal convolution [channels, tokens] of packed sequences.

    Args:
        x: [channels, tokens].
        weight: [channels, width]; the last column is the token's own.
        conv_states: the pool; each sequence's last inputs are written into its slot.
        query_start_loc: [sequences + 1], where each sequence begins.
        cache_indices: [sequences], the slot of each.
        has_initial_state: [sequences] bool; others begin with zeros.
    """
    before = weight.shape[1] - 1
    starts, slots = query_start_loc.long(), cache_indices.long()
    lengths, sequences = starts.diff(), torch.arange(len(slots))
    # In `padded`, each sequence follows the `before` inputs from its slot.
    tokens = torch.arange(x.shape[1])
    tokens += before * (1 + torch.repeat_interleave(sequences, lengths))
    heads = (starts[:-1] + before * sequences)[:, None] + torch.arange(before)
    padded = x.new_empty(x.shape[1] + before * len(slots), len(x), dtype=torch.float32)
    padded[tokens] = x.T.float()
    states = conv_states[slots].masked_fill(~has_initial_state[:, None, None], 0)
    padded[heads] = states.mT.float()
    out = torch.zeros(x.shape[::-1])
    for back in range(before + 1):
        out += padded[tokens - back] * weight[:, before - back].float()
    conv_states[slots] = padded[heads + lengths[:, None]].mT.to(conv_states.dtype)
    return silu(out).to(x.dtype).T


def convolve_tokens(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: None,
    activation: str,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Return silu of the causal convolution [sequences, channels] for one new token of each."""
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
) -> tuple[Tensor, None, Tensor]:
    """Compute the delta rule of packed sequences [1, tokens, heads, ...], and update their slots.

    Returns:
        Outputs [1, tokens, value heads, value channels], None, and the state before each chunk of
        64 tokens, [1, chunks, value heads, value channels, key channels], one sequence after
        another.
    """
    plan = chunk_plan(tuple(cu_seqlens.tolist()), q.device)
    slots = initial_state_indices.long()
    before: list[Tensor] = []
    out, last = gated_delta_rule(
        q[0], k[0], v[0], g[0], beta[0], plan, initial_state[slots].mT, before
    )
    initial_state[slots] = last.mT.to(initial_state.dtype)
    in_order = plan.tokens[:, 0].argsort()  # by the first token of each chunk
    return out.to(v.dtype)[None], None, torch.cat(before)[in_order].mT[None]


def decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    **_: Any,
) -> None:
    """Write the output of one new token per sequence to `out` [sequences, 1, heads, channels]."""
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
    out[:, 0] = output


def keep_states(
    conv_states: Tensor,
    states: Tensor,
    cache_indices: Tensor,
    mask: Tensor,
    track_indices: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Copy the slots of the sequences in `mask`, in the pools [layers, slots, ...].

    SGLang keeps the copies for prompts that go on from there.
    """
    source, target = cache_indices[mask].long(), track_indices[mask].long()
    for pool in (conv_states, states):
        pool[:, target] = pool[:, source]
