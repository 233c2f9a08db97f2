"""Linear layers with a frozen, quantized base, and low-rank adapters (LoRA) that are trained.

    y = x W^T + (alpha / rank) (x A^T) B^T        W = codes * scale, never changed

The base is held as the servers hold it: codes and scales. The forward pass converts them to values
of the compute dtype, and so does the backward pass; no such copy is kept. A layer that fuses
several Hugging Face projections has an adapter for each of them:

    lora_a  [projections * rank, in]   the projections' A, one behind another
    lora_b  [out, rank]                a row for each output row, in the order of the base's rows

With tensor parallelism, a column-parallel layer divides `lora_b` like the base's rows, and every
rank has all of `lora_a`; in a row-parallel layer it is the other way round. So a column-parallel
layer gathers x A^T, which is small, and a row-parallel layer adds to the sum that the base forms
anyway. The matrix that every rank has whole is used on this rank's tokens or partial sums only: it
is marked `sequence_parallel`, so that Megatron adds up its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from qurl_megatron.config.schema import Config, WeightFormat
from qurl_megatron.quantization import quantize


@dataclass(frozen=True)
class Adapters:
    """What all adapters of a learner have in common."""

    rank: int
    alpha: float
    weight_format: WeightFormat  # of the base
    targets: Sequence[str] = ()  # as in `adapters.targets`
    seed: int = 0
    init: str = ""  # a directory of adapters to begin with

    @classmethod
    def of(cls, config: Config) -> Adapters:
        """Return a run's adapters."""
        settings, weight_format = config.adapters, config.quantization.weight_format
        own = settings.rank, settings.alpha, weight_format, settings.targets
        return cls(*own, config.seed, settings.init)

    @property
    def scaling(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.alpha / self.rank


def base_values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return a matrix [out, in] and a factor for each of its rows, or None; their product is W.

    With one scale per row the matrix holds the codes, which every compute dtype represents exactly.
    The factors stay in float32: BF16 would move a whole row by up to 0.2 %.
    """
    if scale.shape[1] == 1:
        return codes.to(dtype), scale.view(-1)
    return quantize.int4_values(codes, scale).to(dtype), None


class _BaseProduct(torch.autograd.Function):
    """The product x W^T, with a gradient of x only, for which codes and scales are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        matrix, factor = base_values(codes, scale, x.dtype)
        out = x @ matrix.t()
        return out if factor is None else out.mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        codes, scale = ctx.saved_tensors
        matrix, factor = base_values(codes, scale, grad.dtype)
        if factor is not None:
            grad = torch.mul(grad, factor, out=torch.empty_like(grad))  # rounded once, as `out` is
        return grad @ matrix, None, None


class FrozenBase(torch.nn.Module):
    """The part that column- and row-parallel layers share."""

    codes: Tensor  # [out, in] int8 or float8_e4m3fn; INT4: [out, in / 2] uint8; this rank's part
    scale: Tensor  # [out, 1] float32; INT4: [out, groups] bfloat16
    owners: Tensor  # [out, projections], 1 where a row belongs to a projection with an adapter
    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    # Makes of activations what the servers' base multiplies; None: they stay as they are.
    round_inputs: Callable[[Tensor], Tensor] | None = None

    def allocate(self, out: int, width: int, settings: Adapters, dtype: torch.dtype) -> None:
        """Allocate codes and scales [out, width] of this rank; `add_adapters` comes later."""
        weight_format = settings.weight_format
        group = quantize.block_shape(weight_format)[1]
        codes = torch.empty(
            out, width // quantize.packing(weight_format), dtype=quantize.code_dtype(weight_format)
        )
        scale = torch.ones(
            out, width // group if group else 1, dtype=quantize.scale_dtype(weight_format)
        )
        # Not persistent: a checkpoint has adapters only, and the base has its own directory.
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self._settings, self._shape, self._dtype = settings, (out, width), dtype
        self.is_active = False  # whether adapters are added to the base

    def add_adapters(self, owners: Tensor, replicated: str) -> None:
        """Add adapters whose values are 0.

        Args:
            owners: [out, projections] bool, True where a row belongs to a projection with an
                adapter.
            replicated: the one of `lora_a` and `lora_b` that every tensor-parallel rank has whole.
        """
        module: Any = self
        out, width = self._shape
        rank = self._settings.rank
        self.lora_a = _parameter(owners.shape[1] * rank, width, self._dtype)
        self.lora_b = _parameter(out, rank, self._dtype)
        getattr(self, replicated).sequence_parallel = module.sequence_parallel  # type: ignore[attr-defined]
        self.register_buffer("owners", owners.to(self._dtype), persistent=False)
        self.is_active = True

    @property
    def has_adapters(self) -> bool:
        """Whether this layer has adapters at all."""
        return hasattr(self, "lora_a")

    def multiply_base(self, x: Tensor) -> Tensor:
        """Return x W^T of this rank's part, in float32 where a CPU adds adapters to it.

        Their sum is then rounded once, as by servers (`sglang_plugin/linear.py`).
        """
        x = self.round_inputs(x) if self.round_inputs else x
        x = x.float() if self.is_active and not x.is_cuda else x
        out: Tensor = _BaseProduct.apply(x, self.codes, self.scale)
        return out

    def add_b(self, out: Tensor, low: Tensor) -> Tensor:
        """Return `out` + (alpha / rank) low B^T in the dtype of `low` [..., projections * rank]."""
        wide, scaling = self._wide(self.lora_b).t().to(out.dtype), self._settings.scaling
        rows = out.flatten(0, -2), low.flatten(0, -2).to(out.dtype)
        return torch.addmm(*rows, wide, alpha=scaling).view_as(out).to(low.dtype)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return base and adapters as one weight of this rank: [out, in] float32."""
        matrix, factor = base_values(self.codes, self.scale, torch.float32)
        weight = matrix if factor is None else matrix * factor[:, None]
        if self.has_adapters:
            product = self._wide(self.lora_b.float()) @ self.lora_a.float()
            weight = weight + self._settings.scaling * product
        return weight

    def _wide(self, lora_b: Tensor) -> Tensor:
        """Return B as [out, projections * rank]: a row is 0 except at its own projection's A."""
        owners = self.owners.to(lora_b.dtype)
        return (owners[:, :, None] * lora_b[:, None]).flatten(1)

    def _sharded(self, axes: dict[str, int], prefix: str, offsets: Any, metadata: Any) -> Any:
        if not self.has_adapters:
            return {}
        module: Any = self
        return make_sharded_tensors_for_checkpoint(
            {"lora_a": self.lora_a, "lora_b": self.lora_b},
            prefix,
            axes,
            offsets,
            tp_group=module.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class FrozenColumnLinear(ColumnParallelLinear, FrozenBase):
    """A column-parallel layer: each tensor-parallel rank has rows of base and B."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, stride: int = 1, **options: Any
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            config=config,
            stride=stride,
            skip_weight_param_allocation=True,
            **options,
        )
        self._is_swiglu = stride == 2  # Megatron's mark of a layer with gate and up
        own: Any = self.output_size_per_partition  # int
        self.allocate(own, input_size, config.adapters, config.params_dtype)

    def forward(
        self, input_: Tensor, weight: None = None, runtime_gather_output: None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return this rank's output channels [tokens, ..., out], and None for the bias."""
        out = self.multiply_base(self._spread(input_))
        bias: Any = self.bias  # of q, k and v
        if bias is not None:
            out = out + bias
        if self.is_active:
            out = self.add_b(out, self._spread(input_ @ self.lora_a.t()))
        return out, None

    def _spread(self, tensor: Tensor) -> Tensor:
        """Return a tensor as all tensor-parallel ranks need it; its gradients are added up."""
        if self.explicit_expert_comm:  # the token dispatcher has done it
            return tensor
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(
                tensor, tensor_parallel_output_grad=True, group=self.tp_group
            )
        return copy_to_tensor_model_parallel_region(tensor, group=self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the adapters as Megatron's checkpoints take them."""
        state: ShardedStateDict = self._sharded({"lora_b": 0}, prefix, sharded_offsets, metadata)
        name = f"{prefix}lora_b"
        if self._is_swiglu and name in state:  # Megatron does it for `weight` and `bias` only
            state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets)
        return state


class FrozenRowLinear(RowParallelLinear, FrozenBase):
    """A row-parallel layer: each tensor-parallel rank has columns of base and A."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        del self.weight  # unlike a column-parallel layer, Megatron's always allocates it
        own: Any = self.input_size_per_partition  # int
        self.allocate(output_size, own, config.adapters, config.params_dtype)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return all output channels [tokens, ..., out], and None for the bias."""
        out = self.multiply_base(input_)
        if self.is_active:
            out = self.add_b(out, input_ @ self.lora_a.t())
        if self.sequence_parallel and not self.explicit_expert_comm:
            out = reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif not self.explicit_expert_comm:
            out = reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the adapters as Megatron's checkpoints take them."""
        state: ShardedStateDict = self._sharded({"lora_a": 1}, prefix, sharded_offsets, metadata)
        return state


def frozen_layers(model: torch.nn.Module) -> Iterator[tuple[str, FrozenBase]]:
    """Yield name and module of each layer with a frozen base."""
    for name, module in model.named_modules():
        if isinstance(module, FrozenBase):
            yield name, module


def freeze(layer: Any, norm: Any) -> None:
    """Put layers with a frozen base in place of the linear layers of Megatron's specification.

    Transformer Engine's have norms within them, so a layer gets `norm` in front of them.
    """
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = FrozenColumnLinear, FrozenRowLinear
    mlp = layer.submodules.mlp.submodules
    if hasattr(mlp, "experts"):
        mlp = mlp.experts.submodules
    mlp.linear_fc1, mlp.linear_fc2 = FrozenColumnLinear, FrozenRowLinear
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm


def _parameter(rows: int, columns: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(rows, columns, dtype=dtype))
