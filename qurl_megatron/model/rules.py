"""Rules of the weight map: one for each Megatron parameter, of whichever family of models.

Invariant: a rule knows no architecture. Sizes are symbols, which `weight_map.full_shape` looks up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

LAYER = "decoder.layers.{layer}."
BEFORE_MIXER = LAYER + "input_layernorm.weight"
BEFORE_MLP = LAYER + "pre_mlp_layernorm.weight"
HF_LAYER = "model.layers.{layer}."

# Tensor parallelism divides these sizes. Every rank has all of any other size.
_PARTITIONED_SIZES = frozenset(
    {
        *("vocabulary", "query_rows", "query", "key_value"),
        *("linear_keys", "linear_values", "linear_heads"),
        *("intermediate", "moe_intermediate", "shared_intermediate"),
    }
)


class Merge(Enum):
    """The way parts are merged into a shard."""

    SINGLE = "the only part is the shard"
    STACKED = "the rows of all parts in order: gate rows, then up rows"
    GROUPED_QKV = "for each key-value head: its query heads, its key head, its value head"


@dataclass(frozen=True)
class HuggingFaceTensor:
    """Name and symbolic shape of a full tensor in a Hugging Face checkpoint."""

    name: str  # with `{layer}` in place of the layer number; `{expert}` before `Rule.of_expert`
    sizes: tuple[str, ...]  # symbolic size of each dimension, see `full_shape`

    @property
    def partition_dim(self) -> int | None:
        """The dimension divided over tensor-parallel ranks; None if every rank has all of it."""
        return next((d for d, size in enumerate(self.sizes) if size in _PARTITIONED_SIZES), None)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    megatron_names: tuple[str, ...]  # a norm has two: its own, and Transformer Engine's fused one
    tensors: tuple[HuggingFaceTensor, ...]
    merge: Merge = Merge.SINGLE
    quantized: bool = False  # True for the linear layers inside transformer blocks
    # Hugging Face name of the norm whose output this layer reads, such as that of q, k, v, gate, up
    # and a router, which UAQ scales (QuRL Eq. 11). None for all others.
    fed_by: str | None = None
    expert: int | None = None  # number of the expert; None: not an expert's, or every expert's
    is_adapter: bool = False  # A or B of an adapter, see `extensions/adapters`
    of_linear: bool | None = None  # True: of layers of linear attention only; False: of others

    def layers(self, linear_layers: Sequence[bool]) -> list[int | None]:
        """Return the layers that have such a parameter; [None] for one outside the layers.

        `linear_layers` is `Architecture.linear_layers`.
        """
        if not self.layered:
            return [None]
        return [n for n, linear in enumerate(linear_layers) if self.of_linear in (None, linear)]

    @property
    def of_experts(self) -> bool:
        """True if every expert has its own such parameter."""
        return "moe_intermediate" in self.tensors[0].sizes

    @functools.cache  # noqa: B019  rules are constants
    def of_expert(self, expert: int) -> Rule:
        """Return this rule for one expert, numbered in the whole model; names have its number.

        Megatron's names are those on a single expert-parallel rank.
        """

        def named(name: str) -> str:
            return name.replace("{expert}", str(expert))

        return replace(
            self,
            megatron_names=tuple(map(named, self.megatron_names)),
            tensors=tuple(replace(tensor, name=named(tensor.name)) for tensor in self.tensors),
            expert=expert,
        )

    @property
    def layered(self) -> bool:
        """True if every transformer layer has its own such parameter."""
        return "{layer}" in self.megatron_names[0]

    def hugging_face_names(self, layer: int | None) -> tuple[str, ...]:
        """Return the names of `tensors` in one layer; None for tensors outside the layers."""
        return tuple(tensor.name.format(layer=layer) for tensor in self.tensors)


def rule_of(
    megatron_names: str | tuple[str, ...],
    *tensors: tuple[str, tuple[str, ...]],
    merge: Merge = Merge.SINGLE,
    quantized: bool = False,
    fed_by: str | None = None,
    of_linear: bool | None = None,
) -> Rule:
    """Return a rule; each tensor is a name and its sizes."""
    names = (megatron_names,) if isinstance(megatron_names, str) else megatron_names
    parts = tuple(HuggingFaceTensor(*tensor) for tensor in tensors)
    return Rule(names, parts, merge, quantized, fed_by, of_linear=of_linear)
