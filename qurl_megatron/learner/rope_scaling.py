"""Scaled rotary positions in Megatron's model."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.rope_scaling import ROPE_SCALINGS, RopeScaling, YarnRopeScaling


def channel_factors(scaling: RopeScaling) -> dict[str, Any]:
    """Return the fields of Megatron's config by which it multiplies the rotated channels."""
    if not isinstance(scaling, YarnRopeScaling):
        return {}
    return {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_mscale": scaling.mscale,
        "yarn_mscale_all_dim": scaling.mscale_all_dim,
        "apply_rope_fusion": False,  # the fused operation would leave out the factor
    }


def scaled_frequencies(architecture: Architecture, on: torch.device) -> Tensor:
    """Return the inverse rotary frequencies of a scaled model as transformers computes them.

    They are [channels of a head / 2] float32.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = architecture.rope_scaling
    assert scaling is not None
    kind = next(kind for kind, known in ROPE_SCALINGS.items() if isinstance(scaling, known))
    rope = {"rope_type": kind, "rope_theta": architecture.rope_theta, **dataclasses.asdict(scaling)}
    config: Any = LlamaConfig(  # its other fields do not matter
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters=rope,
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, on)
    return frequencies
