"""What a layer computes again in the backward pass instead of keeping it.

    selective  The outputs of norms and of SwiGLU, whose operations only read and write memory. The
               attention kernels keep no scores and compute them again in every mode. Transformer
               Engine's norms are part of the linear layers behind them, and stay.
    full       Whole layers, of which only the input is kept. Results are bit for bit the same.

With selective, torch's RMSNorm on a CPU adds up the gradient of its input in another order, so
results are equal up to float32 rounding.
"""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer import TransformerLayer
from torch import Tensor

from qurl_megatron.config.schema import LearnerConfig
from qurl_megatron.model.architecture import Architecture


def recompute_fields(
    learner: LearnerConfig, architecture: Architecture, *, fused: bool
) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig; `fused` for Transformer Engine's layers.

    Megatron computes the SwiGLU of experts again only where one operation computes all of them.
    """
    if learner.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": learner.recompute_layers or architecture.num_layers,
        }
    if learner.recompute == "selective":
        modules = ["layernorm", "moe_act"] if architecture.num_experts and fused else ["layernorm"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


class SelectiveLayer(TransformerLayer):
    """A dense layer that also computes SwiGLU's output again."""

    def _forward_mlp(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        gate_and_up, _ = self.mlp.linear_fc1(self._forward_pre_mlp_layernorm(hidden_states))
        checkpoint = CheckpointWithoutOutput()
        output, bias = self.mlp.linear_fc2(checkpoint.checkpoint(self._swiglu, gate_and_up))
        checkpoint.discard_output_and_register_recompute(output)
        return self._forward_post_mlp((output, bias), residual=hidden_states)

    def _swiglu(self, gate_and_up: Tensor) -> Tensor:
        if self.config.bias_activation_fusion:
            return bias_swiglu_impl(gate_and_up, None)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return self.config.activation_func(gate) * up
