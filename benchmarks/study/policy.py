"""Many small policies in one tensor program, and the quantized copies that sample for them.

A policy is a language model without attention: two embedded symbols in, a distribution over the
next symbol out, by way of SwiGLU blocks. All parameters have a leading dimension of seeds, so one
product serves them all and no seed sees another. The parameters have their Hugging Face names, so
the project's own `uaq.transform` applies to them.

There are so few pairs of symbols that a policy is computed for all of them at once. A rollout of
any length then reads a table, and an expectation over rollouts can be exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qurl_megatron.quantization import quantize

SYMBOLS = 12
STATES = SYMBOLS * SYMBOLS  # pairs (current symbol, symbol of the prompt): current * SYMBOLS + it
HIDDEN, INTERMEDIATE, LAYERS = 24, 48, 2

Parameters = dict[str, Tensor]
"""Parameters by Hugging Face name, each `[seeds, ...]` float32."""


@dataclass(frozen=True)
class Engine:
    """How a quantized copy of a policy computes: with codes of weights and activations."""

    weight_format: str  # int8, fp8, or int4: INT8's codes from -7 to 7, with a scale per channel
    error: float = 1.0  # factor on the rounding error of the weights

    def weights(self, weight: Tensor) -> Tensor:
        """Return the values `[seeds, out, in]` that the engine multiplies by."""
        rows = weight.flatten(0, 1)
        absmax = quantize.block_absmax(rows, self._eight_bits)
        if self.weight_format == "int4":
            absmax *= 127 / 7  # keeps INT8's codes within -7 to 7
        codes = quantize.quantize(rows, self._eight_bits, absmax)
        rounded = quantize.dequantize(codes).view_as(weight)
        return rounded if self.error == 1 else weight + self.error * (rounded - weight)

    def activations(self, inputs: Tensor) -> Tensor:
        """Return `inputs` `[seeds, rows, in]`, rounded with one scale per row, as SGLang does."""
        rows = inputs.flatten(0, 1)
        return quantize.dequantize(quantize.quantize(rows, self._eight_bits)).view_as(inputs)

    @property
    def _eight_bits(self) -> str:
        return "fp8" if self.weight_format == "fp8" else "int8"


def new_parameters(seeds: int, generator: torch.Generator) -> Parameters:
    """Return random parameters for this many seeds."""

    def normal(*shape: int, deviation: float) -> Tensor:
        return torch.randn(seeds, *shape, generator=generator) * deviation

    parameters = {
        "model.embed_tokens.weight": normal(2 * SYMBOLS, HIDDEN, deviation=1.0),
        "model.norm.weight": torch.ones(seeds, HIDDEN),
        "lm_head.weight": normal(SYMBOLS, HIDDEN, deviation=HIDDEN**-0.5),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        parameters |= {
            f"{prefix}.post_attention_layernorm.weight": torch.ones(seeds, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN, deviation=HIDDEN**-0.5),
            f"{prefix}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN, deviation=HIDDEN**-0.5),
            f"{prefix}.mlp.down_proj.weight": normal(
                HIDDEN, INTERMEDIATE, deviation=INTERMEDIATE**-0.5
            ),
        }
    return parameters


def logprob_table(parameters: Parameters, engine: Engine | None = None) -> Tensor:
    """Return the log-probs of every next symbol in every state: `[seeds, STATES, SYMBOLS]`.

    Args:
        engine: computes the blocks' linear layers; None: full precision.
    """
    embedding = parameters["model.embed_tokens.weight"]
    hidden = (embedding[:, :SYMBOLS, None] + embedding[:, None, SYMBOLS:]).flatten(1, 2)

    def linear(inputs: Tensor, name: str) -> Tensor:
        weight = parameters[name]
        if engine is None:
            return inputs @ weight.mT
        return engine.activations(inputs.detach()) @ engine.weights(weight.detach()).mT

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        norm = parameters[f"{prefix}.post_attention_layernorm.weight"]
        inputs = _rms_norm(hidden, norm)
        gate = linear(inputs, f"{prefix}.mlp.gate_proj.weight")
        up = linear(inputs, f"{prefix}.mlp.up_proj.weight")
        hidden = hidden + linear(functional.silu(gate) * up, f"{prefix}.mlp.down_proj.weight")
    outputs = _rms_norm(hidden, parameters["model.norm.weight"])
    return torch.log_softmax(outputs @ parameters["lm_head.weight"].mT, dim=-1)


def _rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:]) * weight[:, None]
