"""The largest inputs and weights of each channel, from which smoothing takes its scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from qurl_megatron.learner.model import PolicyModel, parameters_of, tensor_parallel_place
from qurl_megatron.learner.quantized_forward import fused_norm
from qurl_megatron.learner.shares import MicroBatch
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.quantization.smoothing import Maxima


@contextmanager
def watching(
    chunks: Sequence[PolicyModel],
    micro_batches: Sequence[MicroBatch],
    architecture: Architecture,
    maxima: Maxima,
) -> Iterator[None]:
    """Let `maxima` see this rank's weights, and what they multiply within this context.

    That is the tokens of `micro_batches`. Padding depends on the layout, so attention and MLPs read
    0 in its place, and then so do experts.
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

    padding = {id(micro.sequences): micro.index < 0 for micro in micro_batches}
    of_pass = torch.empty(0)  # [tokens] bool, of the micro batch that a chunk computes

    def begin(_: Any, __: Any, words: dict[str, Any]) -> None:
        nonlocal of_pass
        of_pass = padding[id(words["packed_seq_params"])]

    def blank(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        ranks = len(of_pass) // len(x)  # among which sequence parallelism divides the tokens
        own = of_pass.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank() % ranks]
        return (x.masked_fill(own[:, None, None], 0), *others)

    with ExitStack() as stack:
        for module in watched:
            stack.callback(module.register_forward_pre_hook(look).remove)
        for chunk in chunks:
            stack.callback(chunk.register_forward_pre_hook(begin, with_kwargs=True).remove)
            for layer in chunk.decoder.layers:
                for module in (layer.self_attention, layer.mlp):
                    stack.callback(module.register_forward_pre_hook(blank).remove)
        yield
