"""The part of a layer of gated DeltaNet that torch or FLA computes, and what it is given."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 64, 32  # kernels take powers of two
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
BOUNDS = torch.tensor([0, 70, 71, 71, 199, 300], dtype=torch.int32)  # one sequence is empty


def build_mixer(weight: Tensor) -> Any:
    """Return what `GatedDeltaNet`'s methods ask of it, with a convolution's weight."""
    from qurl_megatron.learner.delta_net import GatedDeltaNet

    values = VALUE_HEADS * VALUE_DIM
    widths = [KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, values, values]
    mixer = SimpleNamespace(conv_weight=weight, _key_dim=KEY_DIM, _value_dim=VALUE_DIM)
    mixer._widths = widths
    for name in ("_heads", "_mix", "_mix_with_fla"):
        setattr(mixer, name, partial(getattr(GatedDeltaNet, name), mixer))
    return mixer


def inputs() -> list[Tensor]:
    """Return [tokens, ...] queries, keys and values, decays and betas, and a weight, in BF16."""
    generator = torch.Generator().manual_seed(0)
    tokens = int(BOUNDS[-1])
    shapes = [(tokens, CHANNELS), (tokens, VALUE_HEADS), (tokens, VALUE_HEADS), (CHANNELS, 4)]
    qkv, decay, beta, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    given = [qkv, -decay.exp(), beta.sigmoid(), weight]
    return [tensor.bfloat16() for tensor in given]
