"""Log-probs of given tokens, computed from hidden states over a vocabulary sharded among ranks.

Output layer and softmax are one operation that handles a few tokens at a time, both forward and
backward, so no rank ever holds the logits of all tokens. Tensor-parallel ranks share the tokens of
the hidden states (sequence parallelism) as well as the vocabulary: the hidden states of a few
tokens are gathered at a time, and their gradients are summed and scattered.

Each tensor-parallel rank computes four numbers per token over its rows of the vocabulary: the
largest logit m, the sum of exp(logit - m), the same sum weighted by logit - m, and the target's
logit. One gather of these gives every rank

    log p(target) = logit_target - M - log S        entropy = log S - E[logit - M]

where M and S are the maximum and sum over the whole vocabulary.

A token that was drawn from some tokens only has the same numbers over these: `_kept` takes their
logits out of the rank's rows. No other logit has a part in its log-prob, or a gradient of it.
"""

from collections.abc import Iterator
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
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return the natural log-prob of each target and the entropy of each distribution.

    Args:
        hidden: [tokens / ranks, hidden], the tokens of this rank of `group`; rank 0 has the first.
        weight: [rows, hidden], this rank's rows of the output layer, without padding rows.
        targets: [tokens] int64, row numbers in the whole vocabulary, the same on every rank.
        scored: [scored tokens] int64 on the CPU, ascending: the tokens to compute, the same on
            every rank. That they are known there saves waiting for a GPU.
        masks: [tokens, largest mask] int32, the rows of the whole vocabulary that each distribution
            is over, and -1; the same on every rank. Those of a scored token include its target.
            None: all rows.
        temperature: divides the logits.
        first_row: row number in the whole vocabulary of the first row of `weight`.
        group: the ranks that share the vocabulary.
        chunk_tokens: maximum number of tokens to hold the logits of at once, but at least one of
            every rank; the same on every rank.

    Returns:
        Two float32 tensors [tokens], the same on every rank; 0 for other tokens. Gradients
        flow through the log-probs only, to `hidden` and `weight`.
    """
    return _LogProbs.apply(
        hidden, weight, targets, scored, masks, temperature, first_row, group, chunk_tokens
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


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return [tokens, rows] float32; on a GPU they are never rounded to the weight's dtype."""
    if weight.is_cuda and weight.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = (hidden @ weight.t()).float()
    return logits.div_(temperature)


def _kept(logits: Tensor, masks: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
    """Return the logits [tokens, largest mask] of the masks, and their places in a rank's rows.

    What a mask has on another rank, or does not have, is `NOT_KEPT`, and its place is 0.
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
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        ranks, rows = group.size(), weight.shape[0]
        local = targets - first_row
        is_local = (local >= 0) & (local < rows)
        local = torch.where(is_local, local, 0)

        own = hidden.new_zeros((4, len(targets)), dtype=torch.float32)
        chunks = list(_chunks(len(hidden), scored, ranks, chunk_tokens, hidden.device))
        for chunk, positions in chunks:
            states = _gather(hidden, chunk, group)[_within(chunk, positions, len(hidden))]
            logits = _logits(states, weight, temperature)
            target = logits.gather(1, local[positions, None]).squeeze(1).mul_(is_local[positions])
            if masks is not None:
                logits, _ = _kept(logits, masks[positions], first_row)
            maximum = logits.amax(1)
            logits.sub_(maximum[:, None])
            exp = logits.exp()
            sum_exp = exp.sum(1)
            weighted = exp.mul_(logits).sum(1)
            own[:, positions] = torch.stack([maximum, sum_exp, weighted, target])

        gathered = own
        if ranks > 1:
            gathered = own.new_empty((4 * ranks, len(targets)))
            dist.all_gather_into_tensor(gathered, own, group=group)
        index = scored.to(hidden.device, non_blocking=True)
        gathered = gathered.view(ranks, *own.shape)[:, :, index]
        maxima, sums, weighted_sums, target_logits = gathered.unbind(1)  # each [ranks, tokens]
        maximum = maxima.amax(0)
        difference = maxima - maximum  # <= 0
        scale = difference.exp()
        sum_exp = (sums * scale).sum(0)
        log_sum = sum_exp.log()
        mean_logit = ((weighted_sums + sums * difference) * scale).sum(0) / sum_exp  # E[logit - M]
        zeros = own.new_zeros(len(targets))
        logprobs = zeros.index_copy(0, index, target_logits.sum(0) - maximum - log_sum)
        entropy = zeros.index_copy(0, index, log_sum - mean_logit)
        log_partition = zeros.index_copy(0, index, maximum + log_sum)

        ctx.save_for_backward(hidden, weight, local, is_local, log_partition, masks)
        ctx.temperature, ctx.group, ctx.chunks = temperature, group, chunks
        ctx.first_row = first_row
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, is_local, log_partition, masks = ctx.saved_tensors
        ranks = ctx.group.size()
        scale = grad_logprobs / ctx.temperature
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for chunk, positions in ctx.chunks:
            within = _within(chunk, positions, len(hidden))
            gathered = _gather(hidden, chunk, ctx.group)
            states = gathered[within]
            # d log p(target) / d logit = [is target] - p
            grad = logits = _logits(states, weight, ctx.temperature)
            if masks is not None:
                grad, places = _kept(logits, masks[positions], ctx.first_row)
            grad.sub_(log_partition[positions, None]).exp_().mul_(-scale[positions, None])
            if masks is not None:
                grad = logits.zero_().scatter_add_(1, places, grad)
            on_target = (scale[positions] * is_local[positions])[:, None]
            grad.scatter_add_(1, local[positions, None], on_target)
            grad = grad.to(hidden.dtype)
            if grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.t(), states)
            else:
                grad_weight += grad.t() @ states
            grad_gathered = torch.zeros_like(gathered)
            grad_gathered[within] = grad @ weight
            if ranks == 1:
                grad_hidden[chunk] = grad_gathered
            else:
                own = torch.empty_like(hidden[chunk])
                dist.reduce_scatter_tensor(own, grad_gathered, group=ctx.group)
                grad_hidden[chunk] = own
        return grad_hidden, grad_weight.to(weight.dtype), *[None] * 7


def _within(chunk: slice, positions: Tensor, tokens: int) -> Tensor:
    """Return where `positions` are among the gathered tokens of `chunk`; a rank has `tokens`."""
    length = chunk.stop - chunk.start
    return positions // tokens * length + positions % tokens - chunk.start
