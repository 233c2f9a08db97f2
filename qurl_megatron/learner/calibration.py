"""The largest inputs and weights of each channel, from which smoothing takes its scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.learner.model import PolicyModel, parameters_of, tensor_parallel_place
from qurl_megatron.learner.quantized_forward import fused_norm
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.smoothing import Maxima


@contextmanager
def watching(
    chunks: Sequence[PolicyModel], architecture: Architecture, maxima: Maxima
) -> Iterator[None]:
    """Let `maxima` see this rank's weights, and what they multiply within this context.

    Padding is seen too: it is one more sequence.
    """
    watched: dict[torch.nn.Module, list[tuple[str, int]]] = {}  # name, first column
    for chunk in chunks:
        for name, rule, layer, parameter in parameters_of([chunk], architecture):
            if not rule.quantized:
                continue
            place = tensor_parallel_place(rule)
            parts = weight_map.split(rule, parameter.detach(), architecture, layer, *place)
            for part in parts:
                maxima.add_weight(part.name, part.tensor, part.offset[1])
            module = chunk.get_submodule(name.rpartition(".")[0])
            watched.setdefault(module, []).append((parts[0].name, parts[0].offset[1]))

    def look(module: Any, inputs: tuple[Any, ...]) -> None:
        x: Tensor = inputs[0].flatten(0, -2)
        if hasattr(module, "layer_norm_weight"):  # Transformer Engine's, which has never run
            x = fused_norm(module, x)
        layers = watched[module]
        # A grouped layer has several experts, and takes the number of each one's tokens.
        of_layers = x.split(inputs[1]) if len(layers) > 1 else [x]
        for (name, first_column), own in zip(layers, of_layers, strict=True):
            maxima.add_input(name, own, first_column)

    with ExitStack() as stack:
        for module in watched:
            stack.callback(module.register_forward_pre_hook(look).remove)
        yield
