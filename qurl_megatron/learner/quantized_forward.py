"""A forward pass that computes as the servers do: with quantized weights and activations.

Within `computing_as_served` a quantized linear layer multiplies what a server's layer multiplies:

    weights      codes * scale of this rank's shard, as the next publish would send them
    activations  codes * scale of each token, with as many scales as a server has for them

Every other parameter has the value that is sent, which may be rounded to BF16. The products, and
all between them, are the learner's, in its compute dtype. So the log-probs differ from a server's
by rounding alone. That still moves single tokens as far as quantization does, because a value near
the boundary of two codes tips either way. Means over tokens agree.

With `quantization.smoothing` the servers have W s and x / s. The learner quantizes these
and takes s back. Powers of two round nothing, so all else may stay as it is.

The gradient passes straight through: it is that of the quantized weights and activations, and goes
to the parameters and to what was rounded as if rounding were the identity.

A rank holds the codes of its shards for a pass over a minibatch, so weights are quantized once, and
only then do ranks share the absmax of a block. The values of one layer are made when it is called,
and again in its backward pass; so is its rounded input, of the input that the learner keeps anyway.
In a row-parallel layer tensor-parallel ranks have parts of a token's channels. They exchange its
absmax as far as the ranks of a server would share it, and keep that.

Transformer Engine fuses a norm into the layer behind it, so what that layer multiplies cannot be
replaced from outside. `fused_norm` and `_multiply` stand in for it, and ran on fake tensors alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import linear_with_grad_accumulation_and_async_allreduce
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import rms_norm

from qurl_megatron.config.schema import QuantizedForward, ServerConfig
from qurl_megatron.learner.model import PolicyModel, parameters_of
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import Rule
from qurl_megatron.quantization.activations import (
    BLOCK,
    activation_dtype,
    in_groups,
    quantize_tokens,
)
from qurl_megatron.quantization.quantize import CodedWeight


class Served(Protocol):
    """The copy of a learner's weights that its servers hold."""

    @property
    def weight_format(self) -> str:
        """The format of the quantized weights."""

    def is_quantized(self, rule: Rule, layer: int | None) -> bool:
        """Return whether servers hold these weights as codes."""

    def values(self, rule: Rule, layer: int | None, shard: Tensor) -> Tensor:
        """Return the values that servers have of an unquantized shard, in its shape and dtype."""

    def codes(self, rule: Rule, layer: int | None, shard: Tensor) -> CodedWeight:
        """Return the codes that servers have of a quantized shard, in its layout.

        Collective over the tensor-parallel ranks of the shard.
        """


@contextmanager
def computing_as_served(
    chunks: Sequence[PolicyModel],
    architecture: Architecture,
    served: Served,
    server: ServerConfig,
    what: QuantizedForward,
) -> Iterator[None]:
    """Let a rank's chunks compute as servers do within this context: forward and backward passes.

    Parameters must not change within it. Collective over tensor-parallel ranks, and so is each
    forward pass. `server` says how many ranks of a server divide a token's channels.
    """
    with ExitStack() as stack:
        for chunk in chunks:
            layers: dict[torch.nn.Module, QuantizedLayer] = {}
            for name, rule, layer, parameter in parameters_of([chunk], architecture):
                if served.is_quantized(rule, layer):
                    module = chunk.get_submodule(name.rpartition(".")[0])
                    quantized = layers.setdefault(
                        module, QuantizedLayer(rule, served.weight_format, server, what)
                    )
                    codes = served.codes(rule, layer, parameter.data)
                    quantized.weights.append((parameter, codes))
                else:
                    stack.callback(setattr, parameter, "data", parameter.data)
                    parameter.data = served.values(rule, layer, parameter.data)
            for module, quantized in layers.items():
                quantized.attach(module, stack)
        yield


class QuantizedLayer:
    """One linear layer: its weights are quantized while it is called, and so is its input."""

    def __init__(
        self, rule: Rule, weight_format: str, server: ServerConfig, what: QuantizedForward
    ) -> None:
        self.weights: list[tuple[torch.nn.Parameter, CodedWeight]] = []
        self._weight_format = weight_format
        self._code_dtype = activation_dtype(weight_format) if what == "all" else None
        group = parallel_state.get_tensor_model_parallel_group()
        self._ranks_of_server = server.tensor_parallel_size
        if rule.of_experts:
            group = parallel_state.get_expert_tensor_parallel_group()
            self._ranks_of_server //= server.expert_parallel_size
        # Ranks of the group divide the channels of a row-parallel layer's input.
        self._group = group if rule.tensors[0].partition_dim == 1 else None

    def attach(self, layer: Any, stack: ExitStack) -> None:
        """Let `layer` multiply quantized values until the stack is closed."""
        norm, multiply = None, layer.forward
        if hasattr(layer, "layer_norm_weight"):
            norm, multiply = partial(fused_norm, layer), partial(_multiply, layer)
        layer.forward = partial(self._forward, norm, multiply)
        stack.callback(delattr, layer, "forward")
        if hasattr(layer, "fuse_wgrad_accumulation"):
            # Transformer Engine looks for Megatron's gradient at the weight that was kept.
            stack.callback(setattr, layer, "fuse_wgrad_accumulation", layer.fuse_wgrad_accumulation)
            layer.fuse_wgrad_accumulation = False

    def _forward(
        self,
        norm: Callable[[Tensor], Tensor] | None,
        multiply: Callable[..., Any],
        x: Tensor,
        *others: Any,
    ) -> Any:
        x = norm(x) if norm else x
        made: dict[tuple[Any, ...], Callable[[], Tensor]] = {}  # what is made, and not kept
        if self._code_dtype:
            again = self._rounding(x, self._smoothing(*others))
            x = _StraightThrough.apply(x, again)
            made[_place(x)] = again
        with ExitStack() as stack:
            for parameter, codes in self.weights:
                stack.callback(setattr, parameter, "data", parameter.data)
                again = partial(codes.values, parameter.dtype)
                parameter.data = again()
                made[_place(parameter)] = again
            stack.enter_context(
                saved_tensors_hooks(lambda tensor: made.get(_place(tensor), tensor), _make)
            )
            return multiply(x, *others)

    def round_inputs(self, x: Tensor) -> Tensor:
        """Return activations [..., in] as a server's codes and scales give them, in their dtype.

        Their gradient is that of the result.
        """
        if self._code_dtype is None:
            return x
        rounded: Tensor = _StraightThrough.apply(x, self._rounding(x))
        return rounded

    def _smoothing(self, *others: Any) -> Tensor | None:
        """Return what divides the layer's input: [in] or, in a layer of experts, [tokens, in]."""
        of_weights = [codes.smoothing for _, codes in self.weights]
        known = [scales for scales in of_weights if scales is not None]
        if len(known) < 2:
            return of_weights[0]
        tokens = torch.tensor(others[0], device=known[0].device)  # of each expert
        return torch.stack(known).repeat_interleave(tokens, dim=0)

    def _rounding(self, x: Tensor, smoothing: Tensor | None = None) -> Callable[[], Tensor]:
        """Return a function that rounds `x`, without collectives. Collective itself."""
        columns, absmax = self._scales(_divided(x.detach(), smoothing))
        return partial(self._round, x.detach(), smoothing, columns, absmax)

    def _round(
        self, x: Tensor, smoothing: Tensor | None, columns: int, absmax: Tensor | None
    ) -> Tensor:
        assert self._code_dtype
        tokens = _divided(x, smoothing)
        width = tokens.shape[1]
        codes, scale = quantize_tokens(in_groups(tokens, columns), self._code_dtype, absmax)
        padded = width + -width % columns  # an expert may have no token, so -1 does not do
        values = codes.mul_(scale).view(len(tokens), padded)[:, :width]
        values = values if smoothing is None else values.mul_(smoothing)
        return values.to(x.dtype).view_as(x)

    def _scales(self, tokens: Tensor) -> tuple[int, Tensor | None]:
        """Return how many columns of `tokens` share a scale, and each scale's absmax.

        The absmax is None if no other rank has columns of that scale.
        """
        width = tokens.shape[1]
        if self._weight_format == "fp8-block":
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


class _StraightThrough(torch.autograd.Function):
    """The result of a function, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[], Tensor]) -> Tensor:
        return rounding()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _divided(x: Tensor, smoothing: Tensor | None) -> Tensor:
    """Return activations as servers have them: [tokens, in]."""
    tokens = x.flatten(0, -2)
    return tokens if smoothing is None else tokens / smoothing


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells a tensor from others that exist at the same time."""
    return tensor.data_ptr(), tensor.shape


def _make(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def fused_norm(layer: Any, x: Tensor) -> Tensor:
    """Compute the norm that Transformer Engine fuses into a column-parallel layer."""
    return rms_norm(x, x.shape[-1:], layer.layer_norm_weight, layer.eps)


def _multiply(layer: Any, x: Tensor) -> tuple[Tensor, None]:
    """Compute what such a layer computes of its norm's output."""
    out = linear_with_grad_accumulation_and_async_allreduce(
        x,
        layer.weight,
        layer.bias if layer.use_bias else None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        sequence_parallel=layer.sequence_parallel,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    return out, None
