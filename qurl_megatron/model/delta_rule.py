"""The gated delta rule of packed sequences, in chunks, in plain torch: Qwen3.5's linear attention.

A head's state S [key channels, value channels] starts at 0 with each sequence. For each token

    S = exp(g) S                     decay, g <= 0
    S = S + k (beta (v - S^T k))^T   delta rule: only what the state does not predict is written
    o = S^T q                        after the write

Chunks of 64 tokens turn this into matrix products (WY form): within a chunk all tokens at once, by
one triangular solve, and one step from chunk to chunk. Sequences are laid out in whole chunks, all
first chunks, then all second chunks, so one step computes all sequences that continue.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from qurl_megatron.model.delta_net import CHUNK

_EPS = 1e-6  # of the L2 norm of queries and keys, as in flash-linear-attention


@dataclass(frozen=True)
class ChunkPlan:
    """The places of packed tokens in whole chunks, which the layers of a pass share."""

    # [chunks, size] int64, the token at each place; padding is the number of tokens. All first
    # chunks come first, then all second ones, each in the order of `order`.
    tokens: Tensor
    places: Tensor  # [tokens] int64, the place of each token in the flat chunks
    active: tuple[int, ...]  # how many sequences have a first chunk, a second one, ...
    since: Tensor  # [tokens] int64, tokens of the sequence before each
    order: Tensor  # [sequences] int64, those with most chunks first


@functools.lru_cache(maxsize=1)  # all layers of a pass ask for the same
def chunk_plan(bounds: tuple[int, ...], device: torch.device) -> ChunkPlan:
    """Plan packed sequences between `bounds`; some may be empty."""
    starts = torch.tensor(bounds[:-1])
    lengths = torch.tensor(bounds).diff()
    since = torch.arange(bounds[-1]) - torch.repeat_interleave(starts, lengths)
    # If the longest sequence is short, chunks have its length: less padding, and no more chunks.
    size = min(CHUNK, -(-max(bounds[-1] and int(lengths.max()), 1) // 16) * 16)
    counts = -(-lengths // size)
    order = counts.argsort(descending=True, stable=True)
    starts, lengths, counts = starts[order], lengths[order], counts[order]
    active = tuple(int((counts > step).sum()) for step in range(int(counts.max())))
    tokens = []
    for step, number in enumerate(active):
        offset = step * size + torch.arange(size)
        own = starts[:number, None] + offset
        tokens.append(torch.where(offset < lengths[:number, None], own, bounds[-1]))
    flat = torch.cat(tokens)
    places = torch.empty(bounds[-1] + 1, dtype=torch.int64)
    places[flat.flatten()] = torch.arange(flat.numel())
    return ChunkPlan(
        flat.to(device), places[:-1].to(device), active, since.to(device), order.to(device)
    )


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    plan: ChunkPlan,
    state: Tensor | None = None,
    before: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return outputs [tokens, value heads, value channels] and the last state of each sequence.

    Both are in float32, or in float64 if `query` is. `value` may have a multiple of the key heads.

    Args:
        query, key: [tokens, key heads, key channels], not normalized.
        value: [tokens, value heads, value channels].
        decay: [tokens, value heads], g above, <= 0.
        beta: [tokens, value heads], 0 to 1.
        state: [sequences, value heads, key channels, value channels] before; None: zeros.
        before: with a `state`, receives the states before each chunk, in the order of the plan.
    """
    dtype = torch.promote_types(torch.float32, query.dtype)
    query, key = (_l2norm(t.to(dtype)) for t in (query, key))
    query = query * query.shape[-1] ** -0.5
    repeats = value.shape[1] // key.shape[1]
    if repeats > 1:
        query, key = (t.repeat_interleave(repeats, dim=1) for t in (query, key))

    def chunks(t: Tensor) -> Tensor:  # [tokens, heads, ...] -> [chunks, heads, size, ...]
        padded = torch.cat([t.to(dtype), t.new_zeros(1, *t.shape[1:], dtype=dtype)])
        return padded[plan.tokens].transpose(1, 2)

    query, key, value, beta = (chunks(t) for t in (query, key, value, beta))
    total = chunks(decay).cumsum(-1)  # [chunks, heads, size], since the start of the chunk
    beta = beta[..., None]
    between = total[..., :, None] - total[..., None, :]
    later = torch.ones_like(total[0, 0].diag(), dtype=torch.bool).triu(1)
    # Masked before exp, which could overflow for later tokens.
    between = between.masked_fill(later, -torch.inf).exp()
    grown = total.exp()[..., None]
    system = (key * beta) @ key.mT * between  # the diagonal is not read
    solved = torch.linalg.solve_triangular(
        system, torch.cat([value * beta, key * beta * grown], -1), upper=False, unitriangular=True
    )
    written, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    inside = query @ key.mT * between
    query = query * grown
    key = key * (total[..., -1:] - total).exp()[..., None]
    whole = total[..., -1].exp()[..., None, None]
    outputs, ended, first = [], [], 0
    held = None if state is None else state.to(dtype)[plan.order]
    for number in plan.active:
        now = slice(first, first + number)
        first += number
        new = written[now]
        if held is None:
            outputs.append(inside[now] @ new)
            held = key[now].mT @ new
            ended.append(held.new_zeros(len(plan.order) - number, *held.shape[1:]))
            continue
        ended.append(held[number:])
        held = held[:number]
        if before is not None:
            before.append(held)
        new = new - read[now] @ held
        outputs.append(query[now] @ held + inside[now] @ new)
        held = held * whole[now] + key[now].mT @ new
    assert held is not None
    last = torch.cat([held, *reversed(ended)])[plan.order.argsort()]
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[plan.places], last


def step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `gated_delta_rule` returns for one token of each sequence, in float32."""
    query, key = (_l2norm(t.float()) for t in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key = (t.repeat_interleave(value.shape[1] // t.shape[1], dim=1) for t in (query, key))
    state = state.float() * decay.float().exp()[..., None, None]
    known = (key[..., None, :] @ state).squeeze(-2)
    new = (value.float() - known) * beta.float()[..., None]
    state = state + key[..., None] * new[..., None, :]
    return (query[..., None, :] @ state).squeeze(-2), state


def _l2norm(t: Tensor) -> Tensor:
    return t * torch.rsqrt((t * t).sum(-1, keepdim=True) + _EPS)


def causal_conv(tokens: Tensor, weight: Tensor, since: Tensor) -> Tensor:
    """Return the depthwise causal convolution of packed [tokens, channels], within sequences.

    It adds up in float32, and returns the dtype of `tokens`.

    Args:
        weight: [channels, width]; the last column is the token's own.
        since: [tokens] int64, tokens of the sequence before each.
    """
    dtype = torch.promote_types(torch.float32, tokens.dtype)
    values, weight = tokens.to(dtype), weight.to(dtype)
    out = values * weight[:, -1]
    for back in range(1, min(weight.shape[-1], len(tokens))):
        earlier = values[:-back].masked_fill((since[back:] < back)[:, None], 0)
        out = out + torch.nn.functional.pad(earlier * weight[:, -1 - back], (0, 0, back, 0))
    return out.to(tokens.dtype)
