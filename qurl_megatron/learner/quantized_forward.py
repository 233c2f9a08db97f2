"""A forward pass that computes as the servers do: with quantized weights and activations.

Within `computing_as_served` a quantized linear layer multiplies what a server's layer multiplies:

    weights      codes * scale of this rank's shard, as the next publish would send them
    activations  codes * scale of each token, with as many scales as a server has for them

Every other parameter has the value that is sent, which may be rounded to BF16. The products, and
all between them, are the learner's, in its compute dtype. So the log-probs differ from a server's
by rounding alone. That still moves single tokens as far as quantization does, because a value near
the boundary of two codes tips either way. Means over tokens agree.

A layer's values are made when it is called and dropped when it returns: a rank holds those of one
layer at a time. In a row-parallel layer tensor-parallel ranks have parts of a token's channels.
They exchange its absmax as far as the ranks of a server would share it.

Transformer Engine fuses a norm into the layer behind it, so what that layer multiplies cannot be
replaced from outside. `_norm_and_multiply` stands in for it, and has never run.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from qurl_megatron.config.schema import ServerConfig
from qurl_megatron.learner.adapters import frozen_layers
from qurl_megatron.learner.model import PolicyModel, parameters_of
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import Rule
from qurl_megatron.quantization.activations import (
    BLOCK,
    activation_dtype,
    in_groups,
    quantize_tokens,
)


class Served(Protocol):
    """The copy of a learner's weights that its servers hold."""

    @property
    def weight_format(self) -> str:
        """The format of the quantized weights."""

    def is_quantized(self, rule: Rule, layer: int | None) -> bool:
        """Return whether servers hold these weights as codes."""

    def values(self, rule: Rule, layer: int | None, shard: Tensor) -> Tensor:
        """Return the values that servers have in place of a shard, in its shape and dtype.

        Collective over the tensor-parallel ranks of the shard.
        """


@contextmanager
def computing_as_served(
    chunks: Sequence[PolicyModel], architecture: Architecture, served: Served, server: ServerConfig
) -> Iterator[None]:
    """Let a rank's chunks compute as servers do within this context, without gradients.

    Collective over tensor-parallel ranks, and so is each forward pass within it. `server` says how
    many ranks of a server divide a token's channels.
    """
    with ExitStack() as stack:
        for chunk in chunks:
            layers: dict[torch.nn.Module, _QuantizedLayer] = {}
            for name, rule, layer, parameter in parameters_of([chunk], architecture):
                stack.callback(setattr, parameter, "data", parameter.data)
                if served.is_quantized(rule, layer):
                    module = chunk.get_submodule(name.rpartition(".")[0])
                    quantized = layers.setdefault(module, _QuantizedLayer(rule, served, server))
                    quantized.weights.append(_Weight(rule, layer, parameter, parameter.data))
                else:
                    parameter.data = served.values(rule, layer, parameter.data)
            for module, quantized in layers.items():
                quantized.attach(module, stack)
            for name, base in frozen_layers(chunk):
                rule, _ = weight_map.find_megatron(f"{name}.weight")
                base.round_inputs = _QuantizedLayer(rule, served, server).round_inputs
                stack.callback(setattr, base, "round_inputs", None)
        yield


class _Weight(NamedTuple):
    """A quantized parameter, and the data that it has outside of a call."""

    rule: Rule
    layer: int | None
    parameter: torch.nn.Parameter
    data: Tensor


class _QuantizedLayer:
    """One linear layer: its weights are quantized while it is called, and so is its input."""

    def __init__(self, rule: Rule, served: Served, server: ServerConfig) -> None:
        self.weights: list[_Weight] = []
        self._served = served
        self._code_dtype = activation_dtype(served.weight_format)
        group = parallel_state.get_tensor_model_parallel_group()
        self._ranks_of_server = server.tensor_parallel_size
        if rule.of_experts:
            group = parallel_state.get_expert_tensor_parallel_group()
            self._ranks_of_server //= server.expert_parallel_size
        # Ranks of the group divide the channels of a row-parallel layer's input.
        self._group = group if rule.tensors[0].partition_dim == 1 else None

    def attach(self, layer: Any, stack: ExitStack) -> None:
        """Let `layer` multiply quantized values until the stack is closed."""
        stack.callback(layer.register_forward_pre_hook(self._before).remove)
        stack.callback(layer.register_forward_hook(self._after).remove)
        self._has_norm = hasattr(layer, "layer_norm_weight")
        if self._has_norm:
            layer.forward = partial(self._norm_and_multiply, layer)
            stack.callback(delattr, layer, "forward")

    def _before(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for each in self.weights:
            each.parameter.data = self._served.values(each.rule, each.layer, each.data)
        x, *others = inputs
        return inputs if self._has_norm else (self.round_inputs(x), *others)

    def _after(self, *_: Any) -> None:
        for each in self.weights:
            each.parameter.data = each.data

    def _norm_and_multiply(self, layer: Any, x: Tensor) -> tuple[Tensor, None]:
        """Compute what Transformer Engine's column-parallel layer with a norm computes."""
        normed = rms_norm(x, x.shape[-1:], layer.layer_norm_weight, layer.eps)
        rounded = self.round_inputs(normed)
        if layer.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            rounded = gather_from_sequence_parallel_region(rounded, group=group)
        return linear(rounded, layer.weight, layer.bias if layer.use_bias else None), None

    def round_inputs(self, x: Tensor) -> Tensor:
        """Return activations [..., in] as a server's codes and scales give them, in their dtype."""
        if self._code_dtype is None:
            return x
        tokens = x.flatten(0, -2)
        width = tokens.shape[1]
        columns, absmax = self._scales(tokens)
        codes, scale = quantize_tokens(in_groups(tokens, columns), self._code_dtype, absmax)
        padded = width + -width % columns  # an expert may have no token, so -1 does not do
        values = (codes * scale).view(len(tokens), padded)[:, :width]
        return values.to(x.dtype).view_as(x)

    def _scales(self, tokens: Tensor) -> tuple[int, Tensor | None]:
        """Return how many columns of `tokens` share a scale, and each scale's absmax.

        The absmax is None if no other rank has columns of that scale.
        """
        width = tokens.shape[1]
        if self._served.weight_format == "fp8-block":
            return BLOCK, None
        if self._group is None:
            return width, None
        ranks, of_server = self._group.size(), self._ranks_of_server
        if of_server % ranks == 0:
            return width // (of_server // ranks), None
        absmax = tokens.abs().amax(1, keepdim=True).float()
        by_rank = [torch.empty_like(absmax) for _ in range(ranks)]
        dist.all_gather(by_rank, absmax, group=self._group)
        sharing = max(1, ranks // of_server)  # ranks of the learner to one of a server
        first = self._group.rank() // sharing * sharing
        return width, torch.stack(by_rank[first : first + sharing]).amax(0)
