"""Log-probs of given tokens, computed from hidden states over a vocabulary sharded among ranks.

Output layer and softmax are one operation that handles a tile of logits at a time, of some tokens
and some rows of the vocabulary, both forward and backward. So no rank ever holds the logits of all
tokens, and on a CPU those of a tile stay in a core's cache. Tensor-parallel ranks share the tokens
of the hidden states (sequence parallelism) as well as the vocabulary: the hidden states of a few
tokens are gathered at a time, and their gradients are summed and scattered.

A tile gives four numbers per token: the largest logit m, the sum of exp(logit - m), the same sum
weighted by logit - m, and the target's logit. `_merge` combines those of a rank's tiles and, after
one gather, those of all ranks. With M and S of the whole vocabulary:

    log p(target) = logit_target - M - log S        entropy H = log S - E[logit - M]

The backward pass makes a tile of logits again. With log p and H known, each gives its gradient:

    d log p(target) / d logit = [is target] - p     d H / d logit = -p (log p + H)

On a CPU, BF16 values are multiplied as float32, so that sums are not rounded. Where the processor
can, oneDNN multiplies them as BF16, which gives the same and is faster.

With a sampling mask, a token's four numbers are over its candidates only: `_kept` takes their
logits from the rank's rows. No other logit affects its log-prob, or has a gradient from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NOT_KEPT = -1e30  # a logit whose exp is 0; infinity would make NaN where a rank has no other


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scored: Tensor,
    masks: Tensor | None = None,
    *,
    temperature: float,
    first_row: int,
    group: dist.ProcessGroup,
    tile: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return the natural log-prob of each target and the entropy of each distribution.

    Args:
        hidden: [tokens / ranks, hidden], the tokens of this rank of `group`; rank 0 has the first.
        weight: [rows, hidden], this rank's rows of the output layer, without padding rows.
        targets: [tokens] int64, row numbers in the whole vocabulary, the same on every rank.
        scored: [scored tokens] int64, ascending: the tokens to compute, the same on every rank. On
            the CPU, which saves waiting for a GPU.
        masks: [tokens, largest mask] int32, each token's candidates as rows of the whole
            vocabulary, padded with -1; the same on every rank. The candidates of a scored token
            include its target. None: all rows.
        temperature: divides the logits.
        first_row: row number in the whole vocabulary of the first row of `weight`.
        group: the ranks that share the vocabulary.
        tile: how many tokens and how many rows to take at once, at least one token of every rank.
            The first number is the same on every rank; with masks the second is all rows.

    Returns:
        Two float32 tensors [tokens], the same on every rank; 0 for other tokens. Gradients
        flow through both, to `hidden` and `weight`; an entropy that is not used costs nothing.
    """
    return _LogProbs.apply(
        hidden, weight, targets, scored, masks, temperature, first_row, group, tile
    )


def _chunks(
    tokens: int, scored: Tensor, ranks: int, chunk_tokens: int, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Yield a slice of every rank's `tokens`, and the positions of the scored ones, on the device.

    Positions count through the tokens of all ranks. Slices without a scored token are left out, on
    every rank alike.
    """
    step = max(1, chunk_tokens // ranks)
    number = scored % tokens // step
    for start in range(0, tokens, step):
        chosen = scored[number == start // step]
        if len(chosen):
            chunk = slice(start, min(start + step, tokens))
            yield chunk, chosen.to(device, non_blocking=True)


def _gather(hidden: Tensor, chunk: slice, group: dist.ProcessGroup) -> Tensor:
    """Return the hidden states of a slice of every rank's tokens, rank after rank."""
    own = hidden[chunk]
    if group.size() == 1:
        return own
    gathered = own.new_empty((group.size() * len(own), own.shape[1]))
    dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
    return gathered


@contextmanager
def _products(dtype: torch.dtype) -> Iterator[None]:
    """Let a CPU multiply float32 copies of `dtype` in that precision; sums are float32."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if dtype == torch.bfloat16:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _factor(tensor: Tensor) -> Tensor:
    """Return what is multiplied in place of `tensor`: on a CPU its values in float32."""
    return tensor if tensor.is_cuda else tensor.float()


def _logits(states: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """Return [tokens, rows] float32 of factors; they are never rounded to the weight's dtype."""
    if rows.dtype == torch.float32:
        logits = states @ rows.t()
    else:
        logits = torch.mm(states, rows.t(), out_dtype=torch.float32)
    return logits if temperature == 1 else logits.div_(temperature)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add `first @ second` to `total`, which may be float32 where the factors are BF16."""
    if first.dtype == total.dtype:
        total.addmm_(first, second)
    else:
        total += first @ second


def _columns(places: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the columns [tokens, 1] of targets in a tile of `rows`, and which of them are there.

    The column of a target that is elsewhere is 0. `places` and `rows` count a rank's own rows.
    """
    is_there = (places >= rows.start) & (places < rows.stop)
    return torch.where(is_there, places - rows.start, 0)[:, None], is_there


def _merge(parts: Tensor) -> Tensor:
    """Return the four numbers [4, tokens] of all rows, from those of parts [parts, 4, tokens]."""
    maxima, sums, weighted_sums, target_logits = parts.unbind(1)  # each [parts, tokens]
    maximum = maxima.amax(0)
    difference = maxima - maximum  # <= 0
    scale = difference.exp()
    weighted = ((weighted_sums + sums * difference) * scale).sum(0)
    return torch.stack([maximum, (sums * scale).sum(0), weighted, target_logits.sum(0)])


def _kept(logits: Tensor, masks: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
    """Return the logits [tokens, largest mask] of the masks, and their places in a rank's rows.

    A candidate on another rank and padding have the logit `NOT_KEPT` and the place 0.
    """
    places = masks.long() - first_row
    is_elsewhere = (masks < 0) | (places < 0) | (places >= logits.shape[1])
    places.masked_fill_(is_elsewhere, 0)
    return logits.gather(1, places).masked_fill_(is_elsewhere, NOT_KEPT), places


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scored: Tensor,
        masks: Tensor | None,
        temperature: float,
        first_row: int,
        group: dist.ProcessGroup,
        tile: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        ranks = group.size()
        tokens, height = tile
        tiles = [slice(r, min(r + height, len(weight))) for r in range(0, len(weight), height)]
        own = hidden.new_zeros((4, len(targets)), dtype=torch.float32)
        chunks = list(_chunks(len(hidden), scored, ranks, tokens, hidden.device))
        for chunk, positions in chunks:
            within = _within(chunk, positions, len(hidden))
            states = _factor(_gather(hidden, chunk, group)[within])
            places = targets[positions] - first_row
            parts = []
            for rows in tiles:
                with _products(weight.dtype):
                    logits = _logits(states, _factor(weight[rows]), temperature)
                columns, is_there = _columns(places, rows)
                target = logits.gather(1, columns).squeeze(1).mul_(is_there)
                if masks is not None:
                    logits, _ = _kept(logits, masks[positions], first_row)
                maximum = logits.amax(1)
                logits.sub_(maximum[:, None])
                exp = logits.exp()
                sum_exp = exp.sum(1)
                weighted = exp.mul_(logits).sum(1)
                parts.append(torch.stack([maximum, sum_exp, weighted, target]))
            own[:, positions] = _merge(torch.stack(parts))

        if ranks > 1:
            by_rank = own.new_empty((ranks, *own.shape))
            dist.all_gather_into_tensor(by_rank.view(-1, len(targets)), own, group=group)
            own = _merge(by_rank)
        index = scored.to(hidden.device, non_blocking=True)
        maximum, sum_exp, weighted, target = own[:, index]
        log_sum = sum_exp.log()
        zeros = own.new_zeros(len(targets))
        logprobs = zeros.index_copy(0, index, target - maximum - log_sum)
        entropy = zeros.index_copy(0, index, log_sum - weighted / sum_exp)
        log_partition = zeros.index_copy(0, index, maximum + log_sum)

        ctx.save_for_backward(hidden, weight, targets, log_partition, entropy, masks)
        ctx.temperature, ctx.group, ctx.chunks, ctx.tiles = temperature, group, chunks, tiles
        ctx.first_row = first_row
        ctx.set_materialize_grads(False)  # None is the gradient of what is not used
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_partition, entropy, masks = ctx.saved_tensors
        ranks = ctx.group.size()
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_partition)
        scale = grad_logprobs / ctx.temperature
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = None  # of a frozen output layer
        if ctx.needs_input_grad[1]:
            # In float32, because every chunk adds to it.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for chunk, positions in ctx.chunks:
            within = _within(chunk, positions, len(hidden))
            states = _factor(_gather(hidden, chunk, ctx.group)[within])
            places = targets[positions] - ctx.first_row
            grad_states = torch.zeros_like(states)
            for rows in ctx.tiles:
                tile_weight = _factor(weight[rows])
                with _products(weight.dtype):
                    grad = logits = _logits(states, tile_weight, ctx.temperature)
                if masks is not None:
                    grad, kept = _kept(logits, masks[positions], ctx.first_row)
                grad.sub_(log_partition[positions, None])  # log p
                factor = -scale[positions, None]
                if grad_entropy is not None:
                    of_entropy = grad_entropy[positions, None] / ctx.temperature
                    factor = (grad + entropy[positions, None]).mul_(-of_entropy).add_(factor)
                grad.exp_().mul_(factor)
                if masks is not None:
                    grad = logits.zero_().scatter_add_(1, kept, grad)
                columns, is_there = _columns(places, rows)
                grad.scatter_add_(1, columns, (scale[positions] * is_there)[:, None])
                grad = grad.to(states.dtype)
                with _products(weight.dtype):
                    _add_product(grad_states, grad, tile_weight)
                    if grad_weight is not None:
                        _add_product(grad_weight[rows], grad.t(), states)
            own = hidden[chunk]
            grad_gathered = own.new_zeros((ranks * len(own), own.shape[1]))
            grad_gathered[within] = grad_states.to(hidden.dtype)
            if ranks == 1:
                grad_hidden[chunk] = grad_gathered
            else:
                own = torch.empty_like(own)
                dist.reduce_scatter_tensor(own, grad_gathered, group=ctx.group)
                grad_hidden[chunk] = own
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 7


def _within(chunk: slice, positions: Tensor, tokens: int) -> Tensor:
    """Return where `positions` are among the gathered tokens of `chunk`; a rank has `tokens`."""
    length = chunk.stop - chunk.start
    return positions // tokens * length + positions % tokens - chunk.start
