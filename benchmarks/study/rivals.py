"""Objectives of others, on the same three log-probs: what QuRL's are compared with.

rho = proximal / behaviour and R = current / proximal are those of `algorithm/objective.py`, A is
the advantage, T the number of tokens of a sequence. Each objective maximizes J token by token:

    icepop         weight = rho if 0.5 <= rho <= 5, else 0 (Ring-1T, arXiv 2510.18855)
    mis            weight = rho if rho <= C, else 0: masked importance sampling, by token
    sequence_mis   weight = product of the sequence's rho if it is at most C, else 0
    cispo          J = min(current / behaviour, C) * A * log current, with no gradient through the
                   factor (MiniMax-M1, arXiv 2506.13585, Eq. 4)
    gspo           R = (product over the sequence of current / behaviour)^(1 / T), clipped within
                   [1 - 3e-4, 1 + 4e-4], weight 1 (arXiv 2507.18071, Eq. 5 and 7)
    tbpo           R = (product over the sequence of current / proximal)^(1 / T), weight =
                   min((product of the sequence's rho)^(1 / T), C). A positive advantage clips R at
                   1 + 4e-4, and a negative one has a gradient only while R is within
                   [1 - 3e-4, 1 + 7e-4] (QaRL, arXiv 2604.07853). This is what summaries of the
                   paper say in words, with the ranges of its appendix; the equation itself was
                   not at hand.

`icepop`, `mis` and `sequence_mis` have J = weight * min(R * A, clip(R, 1 - eps_low,
1 + eps_high) * A).

They are no choice of `objective.objective`: docs/findings/objectives.md#rivals says why.
"""

import torch
from torch import Tensor

ICEPOP_RANGE = 0.5, 5.0
GSPO_LOW, GSPO_HIGH = 3e-4, 4e-4
TBPO_LARGEST_FALLING = 1 + 7e-4
RIVALS = ("icepop", "mis", "sequence_mis", "cispo", "gspo", "tbpo")


def rival_loss(
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

    All tensors are `[batch, time]` float32, without padding: log-probs, advantages, weights.
    """
    log_rho = proximal - behaviour
    rho = log_rho.exp()
    sequence_rho = log_rho.sum(-1, keepdim=True).clamp(max=20.0).exp().expand_as(rho)
    low, high = 1 - eps_low, 1 + eps_high
    ratio = (current - proximal).exp()
    zero = torch.zeros_like(rho)
    if objective == "icepop":
        smallest, largest = ICEPOP_RANGE
        weight = rho.where((rho >= smallest) & (rho <= largest), zero)
    elif objective == "mis":
        weight = rho.where(rho <= ratio_cap, zero)
    elif objective == "sequence_mis":
        weight = sequence_rho.where(sequence_rho <= ratio_cap, zero)
    elif objective == "cispo":
        weight = (current - behaviour).detach().exp().clamp(max=ratio_cap)
        loss = -(loss_weights * weight * advantages * current).sum()
        return loss, _stats(zero > 0, rho)
    elif objective == "gspo":
        weight = torch.ones_like(rho)
        ratio = (current - behaviour).mean(-1, keepdim=True).exp().expand_as(rho)
        low, high = 1 - GSPO_LOW, 1 + GSPO_HIGH
    elif objective == "tbpo":
        weight = log_rho.mean(-1, keepdim=True).exp().clamp(max=ratio_cap).expand_as(rho)
        ratio = (current - proximal).mean(-1, keepdim=True).exp().expand_as(rho)
        low, high = 1 - GSPO_LOW, 1 + GSPO_HIGH
        outside = (advantages < 0) & (ratio > TBPO_LARGEST_FALLING)
        ratio = ratio.where(~outside, ratio.detach())
    else:
        raise ValueError(f"unknown objective {objective!r}; valid are {', '.join(RIVALS)}")
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    if objective == "tbpo":
        clipped |= outside
    return -(loss_weights * weight * surrogate).sum(), _stats(clipped, rho)


def _stats(clipped: Tensor, rho: Tensor) -> dict[str, Tensor]:
    tokens = torch.tensor(float(rho.numel()))
    return {"tokens": tokens, "clipped": clipped.sum(), "acr_widened": torch.zeros(())}
