"""Log-probs of given tokens, computed from hidden states over a vocabulary sharded among ranks.

Output layer and softmax are one operation that handles a few tokens at a time, both forward and
backward, so no rank ever holds the logits of all tokens. Each tensor-parallel rank computes four
numbers per token over its rows of the vocabulary: the largest logit m, the sum of exp(logit - m),
the same sum weighted by logit - m, and the target's logit. One gather of these gives every rank

    log p(target) = logit_target - M - log S        entropy = log S - E[logit - M]

where M and S are the maximum and sum over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    first_row: int,
    group: dist.ProcessGroup,
    chunk_elements: int,
) -> tuple[Tensor, Tensor]:
    """Return the natural log-prob of each target and the entropy of each distribution.

    Args:
        hidden: [tokens, hidden], the same on every rank of `group`.
        weight: [rows, hidden], this rank's rows of the output layer, without padding rows.
        targets: [tokens] int64, row numbers in the whole vocabulary.
        temperature: divides the logits.
        first_row: row number in the whole vocabulary of the first row of `weight`.
        group: the ranks that share the vocabulary.
        chunk_elements: maximum number of logits to hold at once, but at least those of one token.

    Returns:
        Two float32 tensors [tokens], the same on every rank. Gradients flow through the log-probs
        only, to `hidden` (summed over `group`) and `weight`.
    """
    return _LogProbs.apply(hidden, weight, targets, temperature, first_row, group, chunk_elements)


def _chunks(tokens: int, rows: int, chunk_elements: int) -> Iterator[slice]:
    step = max(1, chunk_elements // rows)
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.t()).float().div_(temperature)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        first_row: int,
        group: dist.ProcessGroup,
        chunk_elements: int,
    ) -> tuple[Tensor, Tensor]:
        rows = weight.shape[0]
        local = targets - first_row
        is_local = (local >= 0) & (local < rows)
        local = torch.where(is_local, local, 0)

        own = hidden.new_zeros((4, len(targets)), dtype=torch.float32)
        for chunk in _chunks(len(targets), rows, chunk_elements):
            logits = _logits(hidden[chunk], weight, temperature)
            maximum, sum_exp, weighted, target = own[:, chunk]
            torch.amax(logits, dim=1, out=maximum)
            target.copy_(logits.gather(1, local[chunk, None]).squeeze(1)).mul_(is_local[chunk])
            logits.sub_(maximum[:, None])
            exp = logits.exp()
            torch.sum(exp, dim=1, out=sum_exp)
            torch.sum(exp.mul_(logits), dim=1, out=weighted)

        gathered = own
        if group.size() > 1:
            gathered = own.new_empty((4 * group.size(), len(targets)))
            dist.all_gather_into_tensor(gathered, own, group=group)
        gathered = gathered.view(group.size(), *own.shape)
        maxima, sums, weighted_sums, target_logits = gathered.unbind(1)  # each [ranks, tokens]
        maximum = maxima.amax(0)
        difference = maxima - maximum  # <= 0
        scale = difference.exp()
        sum_exp = (sums * scale).sum(0)
        log_sum = sum_exp.log()
        mean_logit = ((weighted_sums + sums * difference) * scale).sum(0) / sum_exp  # E[logit - M]
        logprobs = target_logits.sum(0) - maximum - log_sum
        entropy = log_sum - mean_logit

        ctx.save_for_backward(hidden, weight, local, is_local, maximum + log_sum)
        ctx.temperature, ctx.group, ctx.chunk_elements = temperature, group, chunk_elements
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local, is_local, log_partition = ctx.saved_tensors
        scale = grad_logprobs / ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for chunk in _chunks(len(local), weight.shape[0], ctx.chunk_elements):
            # d log p(target) / d logit = [is target] - p
            grad = _logits(hidden[chunk], weight, ctx.temperature)
            grad.sub_(log_partition[chunk, None]).exp_().mul_(-scale[chunk, None])
            grad.scatter_add_(1, local[chunk, None], (scale[chunk] * is_local[chunk])[:, None])
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight.dtype == grad.dtype:
                grad_weight.addmm_(grad.t(), hidden[chunk])
            else:
                grad_weight += grad.t() @ hidden[chunk]
        if ctx.group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None
