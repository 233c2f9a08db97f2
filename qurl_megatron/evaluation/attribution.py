"""What causes the difference between a quantized and the full-precision model.

The difference is KL(quantized || exact) of the next token, in nats, over tokens that the quantized
model sampled. Its mean is what `mismatch.json` of a run estimates. This file splits it three ways:

    tokens        by entropy, position and rank of the sampled token: `split`
    layers        by how far it falls if one layer stays in BF16: `gain`
    activations   by how coarse the codes of a layer's input are: `quantized_model.ActivationMeter`

`choose` picks the layers to keep in BF16. It must see other completions than those that its effect
is measured on: the largest of many noisy gains is larger than it will be again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SIGNIFICANT = 2.0  # standard errors above 0 from which a gain counts

EDGES: dict[str, Sequence[float]] = {  # lowest value in each row of a table
    "entropy": [0, 0.01, 0.1, 0.5, 1.0, 2.0],
    "position": [0, 1, 4, 16, 64, 256],
    "rank": [1, 2, 3, 11, 101],
}


class TokenMismatch(NamedTuple):
    """What is measured of each token; all tensors are `[responses, length]`."""

    kl: Tensor  # KL(quantized || exact) where the token was sampled: float32, nats
    entropy: Tensor  # of the exact distribution there: float32, nats
    position: Tensor  # in the response: int64, 0 for its first token
    rank: Tensor  # of the sampled token in the exact distribution: int64, 1 for the likeliest


def compare(quantized_logits: Tensor, exact_logits: Tensor, sampled: Tensor) -> TokenMismatch:
    """Compare two models where tokens were sampled.

    Args:
        quantized_logits, exact_logits: [responses, length, vocabulary] float32.
        sampled: [responses, length] int64.
    """
    exact = exact_logits.log_softmax(-1)
    chosen = exact.gather(2, sampled[:, :, None])
    return TokenMismatch(
        divergence(quantized_logits, exact_logits),
        -(exact.exp() * exact).sum(-1),
        torch.arange(sampled.shape[1]).expand(sampled.shape),
        (exact > chosen).sum(-1) + 1,
    )


def divergence(quantized_logits: Tensor, exact_logits: Tensor) -> Tensor:
    """Return KL(quantized || exact) of `[..., vocabulary]` float32 logits, in nats."""
    quantized = quantized_logits.log_softmax(-1)
    return (quantized.exp() * (quantized - exact_logits.log_softmax(-1))).sum(-1)


@dataclass(frozen=True)
class TokenRow:
    """The tokens whose value is from `first` up to the next row's, and their part of the KL."""

    first: float
    tokens: float  # fraction of all tokens
    kl: float  # mean over these tokens, in nats
    of_kl: float  # fraction of the KL of all tokens


def split(kl: Tensor, values: Tensor, edges: Sequence[float]) -> list[TokenRow]:
    """Split tokens by `values` [tokens] at `edges`; rows without a token are left out."""
    row = torch.bucketize(values.double(), torch.tensor(edges, dtype=torch.float64), right=True)
    rows = []
    for index, first in enumerate(edges, start=1):
        chosen = kl[row == index].double()
        if len(chosen):
            of_kl = float(chosen.sum() / kl.double().sum().clamp(min=1e-300))
            rows.append(TokenRow(first, len(chosen) / len(kl), float(chosen.mean()), of_kl))
    return rows


@dataclass(frozen=True)
class KeptLayers:
    """What it brings to keep layers of a server in BF16."""

    names: Sequence[str]  # in a Hugging Face checkpoint
    gain: float  # how far the KL falls, in nats per token
    standard_error: float  # of the gain
    added_bytes: int  # of a server's weights

    @property
    def is_significant(self) -> bool:
        """True if the gain is above 0 by more than `SIGNIFICANT` standard errors."""
        return self.gain > SIGNIFICANT * self.standard_error


def gain(before: Tensor, after: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Return how far the mean KL falls from `before` to `after`, and the standard error of that.

    Args:
        before, after: KL summed over each completion, in nats: [completions].
        tokens: number of tokens of each completion.
    """
    fallen, tokens = (before - after).double(), tokens.double()
    mean = float(fallen.sum() / tokens.sum())
    count = len(fallen)
    if count < 2:
        return mean, math.inf
    # Tokens of one completion are not independent of each other, so completions are counted.
    variance = float((fallen - mean * tokens).square().sum()) * count / (count - 1)
    return mean, math.sqrt(variance) / float(tokens.sum())


def choose(layers: Sequence[KeptLayers], budget_bytes: float) -> list[KeptLayers]:
    """Return the layers to keep: the largest gains per byte, as long as they fit the budget.

    Layers whose gain is not significant are never chosen.
    """
    chosen: list[KeptLayers] = []
    for layer in sorted(layers, key=lambda layer: layer.gain / layer.added_bytes, reverse=True):
        fits = sum(other.added_bytes for other in [*chosen, layer]) <= budget_bytes
        if layer.is_significant and fits:
            chosen.append(layer)
    return chosen


def module_of(name: str) -> str:
    """Return by which name a layer is kept: that of all experts of its block if it is of one."""
    block, is_of_expert, _ = name.partition(".experts.")
    return f"{block}.experts" if is_of_expert else name


def shortened(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Return `quantization.keep` for layers of these names.

    A layer that is chosen in every block is written `*.down_proj`, the others are written out.
    """
    patterns = []
    names, all_names = [list(map(module_of, each)) for each in (names, all_names)]
    for name in names:
        last = name.rpartition(".")[2]
        everywhere = {other for other in all_names if other.endswith(f".{last}")}
        patterns.append(f"*.{last}" if len(everywhere) > 1 and everywhere <= {*names} else name)
    return list(dict.fromkeys(patterns))
