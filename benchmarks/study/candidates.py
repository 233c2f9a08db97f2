"""Objectives that are no choice of `objective.objective`: candidates for a better one.

rho = proximal / behaviour and R = current / proximal are those of `algorithm/objective.py`, A is
the advantage, T the number of tokens of a sequence. All maximize
J = weight * min(R * A, clip(R, 1 - eps_low, 1 + eps_high) * A), token by token, as `sequence_tis`
does, whose weight is min(product of the sequence's rho, C):

    root_tis       weight = min((product of the sequence's rho)^(1 / sqrt(T)), C): its spread does
                   not grow with T
    tempered_tis   weight = min((product of the sequence's rho)^a, C), where a is at most 1 and such
                   that the logarithms in the minibatch have a standard deviation of at most 1

docs/findings/objectives.md has what they gain, and what objectives of others did.
"""

import torch
from torch import Tensor

CANDIDATES = ("root_tis", "tempered_tis")


def candidate_loss(
    current: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    *,
    objective: str,
    eps_low: float,
    eps_high: float,
    ratio_cap: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of `objective` and its stats, as `policy_objective` does.

    All tensors are `[seeds, rows, time]` float32, without padding: log-probs, advantages, weights.
    """
    log_rho = proximal - behaviour
    whole = log_rho.sum(-1, keepdim=True).expand_as(log_rho)
    log_weight = {
        "root_tis": whole / log_rho.shape[-1] ** 0.5,
        "tempered_tis": whole / whole.std(-2, correction=0, keepdim=True).clamp(min=1),
    }[objective]
    weight = log_weight.clamp(max=20.0).exp().clamp(max=ratio_cap)
    low, high = 1 - eps_low, 1 + eps_high
    ratio = (current - proximal).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    tokens = torch.tensor(float(ratio.numel()))
    stats = {"tokens": tokens, "clipped": clipped.sum(), "acr_widened": torch.zeros(())}
    return -(loss_weights * weight * surrogate).sum(), stats
