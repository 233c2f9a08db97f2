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
    ais            weight = 1 - l + l * rho: l mixes the gradient that ignores the engine with the
                   corrected one, batch by batch (AIS, arXiv 2605.13907). l is from three
                   diagnostics: the effective sample size, the KL and the coefficient of variation
                   of rho. Only words were at hand, so how they make l is this project's reading;
                   see `ais_coefficient`. Whatever l is, the rule lies between `on_policy` and
                   `decoupled`.
    ctpo           R = the product of current / behaviour up to and including the token, t of them,
                   clipped within [exp(-0.025 sqrt(t)), exp(0.05 sqrt(t))], weight 1. Only the
                   token's own factor has a gradient (CTPO, arXiv 2605.07331). The formula is that
                   of a summary of the paper, bounds and gradient those of its repository
                   (horizon-llm/CTPO), whose bound for negative advantages is left out.
    ctpo_sequence  the same with current / proximal, and `sequence_tis`'s weight: how the
                   repository's script corrects for the engine (with C = 5)
    mipu_step_1    weight = min((product of the sequence's rho)^(1 / T), C): step 1 of MIPU
                   (arXiv 2606.29526), which constructs an update
    mipu           the same, and step 2: `benchmarks/study/train.py` takes an update back after
                   which the quantized copy is estimated to be under the learner (`gap_estimate`
                   there). Both steps are read from summaries of the paper, which give the weight
                   as TRUNC(proximal / behaviour), by sequence and normalised by length.

and this project's own, to find a weight that is better than `sequence_tis`'s, which is
min(product of the sequence's rho, C):

    prefix_tis     weight = min(product of rho up to and including the token, C): corrects for how
                   the token came to be sampled, and not for what was sampled after it
    suffix_tis     weight = min(product of rho from the token on, C): the reverse
    mixed_tis      weight = min(square root of rho * product of the sequence's rho, C)
    root_tis       weight = min((product of the sequence's rho)^(1 / sqrt(T)), C): its spread does
                   not grow with T
    tempered_tis   weight = min((product of the sequence's rho)^a, C), where a is at most 1 and such
                   that the logarithms in the minibatch have a standard deviation of at most 1

All but `cispo`, `gspo`, `tbpo` and CTPO have J = weight * min(R * A, clip(R, 1 - eps_low,
1 + eps_high) * A).

They are no choice of `objective.objective`: docs/findings/objectives.md#rivals says why.
"""

import torch
from torch import Tensor

ICEPOP_RANGE = 0.5, 5.0
GSPO_LOW, GSPO_HIGH = 3e-4, 4e-4
TBPO_LARGEST_FALLING = 1 + 7e-4
CTPO_LOW, CTPO_HIGH = 0.025, 0.05  # of log R, times the square root of the position
AIS_KL = 0.01  # the KL, in nats, at which half of the correction is made
RIVALS = ("icepop", "mis", "sequence_mis", "cispo", "gspo", "tbpo")
NEWEST = ("ais", "ctpo", "ctpo_sequence", "mipu_step_1", "mipu")
OWN = ("prefix_tis", "suffix_tis", "mixed_tis", "root_tis", "tempered_tis")


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

    All tensors are `[seeds, rows, time]` float32, without padding: log-probs, advantages, weights.
    """
    log_rho = proximal - behaviour
    rho = log_rho.exp()
    whole = log_rho.sum(-1, keepdim=True).expand_as(rho)
    sequence_rho = whole.clamp(max=20.0).exp()
    position = torch.arange(1.0, rho.shape[-1] + 1)
    low, high = torch.tensor(1 - eps_low), torch.tensor(1 + eps_high)
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
        low, high = torch.tensor(1 - GSPO_LOW), torch.tensor(1 + GSPO_HIGH)
    elif objective == "tbpo":
        weight = log_rho.mean(-1, keepdim=True).exp().clamp(max=ratio_cap).expand_as(rho)
        ratio = (current - proximal).mean(-1, keepdim=True).exp().expand_as(rho)
        low, high = torch.tensor(1 - GSPO_LOW), torch.tensor(1 + GSPO_HIGH)
        outside = (advantages < 0) & (ratio > TBPO_LARGEST_FALLING)
        ratio = ratio.where(~outside, ratio.detach())
    elif objective == "ais":
        mix = ais_coefficient(log_rho)
        weight = 1 - mix + mix * rho
    elif objective in ("ctpo", "ctpo_sequence"):
        weight = torch.ones_like(rho) if objective == "ctpo" else sequence_rho.clamp(max=ratio_cap)
        moved = current - (behaviour if objective == "ctpo" else proximal)
        ratio = (moved.cumsum(-1).detach() + current - current.detach()).clamp(max=20.0).exp()
        low, high = (-CTPO_LOW * position.sqrt()).exp(), (CTPO_HIGH * position.sqrt()).exp()
    else:
        log_weight = {
            "mipu_step_1": whole / rho.shape[-1],
            "mipu": whole / rho.shape[-1],
            "prefix_tis": log_rho.cumsum(-1),
            "suffix_tis": whole - log_rho.cumsum(-1) + log_rho,
            "mixed_tis": (log_rho + whole) / 2,
            "root_tis": whole / rho.shape[-1] ** 0.5,
            "tempered_tis": whole / whole.std(-2, correction=0, keepdim=True).clamp(min=1),
        }[objective]
        weight = log_weight.clamp(max=20.0).exp().clamp(max=ratio_cap)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    if objective == "tbpo":
        clipped |= outside
    return -(loss_weights * weight * surrogate).sum(), _stats(clipped, rho)


def ais_coefficient(log_rho: Tensor) -> Tensor:
    """Return AIS's share of the corrected gradient, `[seeds, 1, 1]` of `[seeds, rows, time]`.

    It is the product of three numbers from 0 to 1, each over all tokens of a seed:

    - reliability, the effective sample size (sum of rho)^2 / (sum of rho^2), as a share of tokens;
    - severity, KL / (KL + `AIS_KL`), where KL is the mean k3 estimate;
    - steadiness, 1 / (1 + standard deviation of rho / mean of rho).
    """
    rho = log_rho.exp()
    mean, square = (of.mean((-2, -1), keepdim=True) for of in (rho, rho.square()))
    divergence = (rho - 1 - log_rho).mean((-2, -1), keepdim=True).clamp(min=0)
    variation = (square - mean.square()).clamp(min=0).sqrt() / mean
    return mean.square() / square * divergence / (divergence + AIS_KL) / (1 + variation)


def _stats(clipped: Tensor, rho: Tensor) -> dict[str, Tensor]:
    tokens = torch.tensor(float(rho.numel()))
    return {"tokens": tokens, "clipped": clipped.sum(), "acr_widened": torch.zeros(())}
