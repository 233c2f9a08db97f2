"""Where each Megatron tensor lives in a Hugging Face checkpoint, and how ranks share it.

`RULES` is the whole map. A rule says which Hugging Face tensors one Megatron parameter is made of,
the symbolic size of each of their dimensions, and how they are merged. Tensor parallelism follows
from the sizes: a dimension that counts vocabulary rows, heads or intermediate channels is shared
among the ranks in runs (`part_runs`), one that counts hidden channels is not.

Three shapes of the same weight, and the only ways between them:

    full tensor  --part_index-->  part (this rank's run)  --merge-->  shard (Megatron's parameter)
                 <--concat-----                           <--split--

Invariants: `split(merge(parts)) == parts`, and the parts of all ranks concatenated along
`TensorPart.dim` are the full tensor, bit for bit. Vocabulary padding exists in shards only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from qurl_megatron.model.architecture import Architecture

# Sizes that tensor parallelism divides; any other size is whole on every rank.
_SHARED_SIZES = frozenset({"vocabulary", "query", "key_value", "intermediate"})


class Merge(Enum):
    """How a shard is made of its parts."""

    ALONE = "one part is the shard"
    STACKED = "parts one below the other: gate rows, then up rows"
    GROUPED_QKV = "for each key-value head: its query heads, the key head, the value head"


@dataclass(frozen=True)
class HuggingFaceTensor:
    """One tensor of a Hugging Face checkpoint."""

    name: str  # `{layer}` stands for the layer number
    sizes: tuple[str, ...]  # symbolic size of each dimension, see `_size`

    @property
    def shared_dim(self) -> int | None:
        """The dimension tensor-parallel ranks share, None if every rank has all of it."""
        return next((d for d, size in enumerate(self.sizes) if size in _SHARED_SIZES), None)


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    megatron: tuple[str, ...]  # spellings; the second is Transformer Engine's fused norm
    parts: tuple[HuggingFaceTensor, ...]
    merge: Merge = Merge.ALONE
    quantized: bool = False  # a linear layer inside a block
    fed_by: str | None = None  # Hugging Face name of the norm whose output this layer reads

    @property
    def norm_fed(self) -> bool:
        """True for q, k, v, gate and up: the layers UAQ scales (QuRL Eq. 11)."""
        return self.fed_by is not None

    @property
    def layered(self) -> bool:
        """True of a parameter that every layer has its own of."""
        return "{layer}" in self.megatron[0]

    def hugging_face_names(self, layer: int | None) -> tuple[str, ...]:
        return tuple(part.name.format(layer=layer) for part in self.parts)


@dataclass(frozen=True)
class TensorPart:
    """This rank's run of one Hugging Face tensor."""

    name: str  # in the Hugging Face checkpoint
    view: Tensor  # of the shard's memory; [groups, rows of a group, ...] where groups interleave
    dim: int | None  # ranks are concatenated along it; None: every rank has the same tensor
    runs: list[slice] | None  # of every rank, along `dim`
    tp_rank: int
    full_shape: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        """Its values, in the tensor's own shape; a copy where the shard interleaves them."""
        interleaved = self.view.dim() > len(self.full_shape)
        return self.view.flatten(0, 1) if interleaved else self.view

    @property
    def shape(self) -> tuple[int, ...]:
        """Of `tensor`, without making it."""
        shape = list(self.full_shape)
        if self.dim is not None and self.runs is not None:
            shape[self.dim] = _length(self.runs[self.tp_rank])
        return tuple(shape)

    @property
    def offset(self) -> tuple[int, int]:
        """Row and column of the full tensor at which this part begins."""
        start = 0 if self.runs is None else self.runs[self.tp_rank].start
        return (start, 0) if self.dim == 0 else (0, start)


def _rule(
    megatron: str | tuple[str, ...],
    *parts: tuple[str, tuple[str, ...]],
    merge: Merge = Merge.ALONE,
    quantized: bool = False,
    fed_by: str | None = None,
) -> Rule:
    names = (megatron,) if isinstance(megatron, str) else megatron
    return Rule(names, tuple(HuggingFaceTensor(*p) for p in parts), merge, quantized, fed_by)


_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."

RULES: tuple[Rule, ...] = (
    _rule(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight", ("vocabulary", "hidden")),
    ),
    _rule(
        (_M + "input_layernorm.weight", _M + "self_attention.linear_qkv.layer_norm_weight"),
        (_H + "input_layernorm.weight", ("hidden",)),
    ),
    _rule(
        _M + "self_attention.linear_qkv.weight",
        (_H + "self_attn.q_proj.weight", ("query", "hidden")),
        (_H + "self_attn.k_proj.weight", ("key_value", "hidden")),
        (_H + "self_attn.v_proj.weight", ("key_value", "hidden")),
        merge=Merge.GROUPED_QKV,
        quantized=True,
        fed_by=_H + "input_layernorm.weight",
    ),
    _rule(
        _M + "self_attention.linear_qkv.bias",
        (_H + "self_attn.q_proj.bias", ("query",)),
        (_H + "self_attn.k_proj.bias", ("key_value",)),
        (_H + "self_attn.v_proj.bias", ("key_value",)),
        merge=Merge.GROUPED_QKV,
    ),
    _rule(
        _M + "self_attention.q_layernorm.weight",
        (_H + "self_attn.q_norm.weight", ("head",)),
    ),
    _rule(
        _M + "self_attention.k_layernorm.weight",
        (_H + "self_attn.k_norm.weight", ("head",)),
    ),
    _rule(
        _M + "self_attention.linear_proj.weight",
        (_H + "self_attn.o_proj.weight", ("hidden", "query")),
        quantized=True,
    ),
    _rule(
        (_M + "pre_mlp_layernorm.weight", _M + "mlp.linear_fc1.layer_norm_weight"),
        (_H + "post_attention_layernorm.weight", ("hidden",)),
    ),
    _rule(
        _M + "mlp.linear_fc1.weight",
        (_H + "mlp.gate_proj.weight", ("intermediate", "hidden")),
        (_H + "mlp.up_proj.weight", ("intermediate", "hidden")),
        merge=Merge.STACKED,
        quantized=True,
        fed_by=_H + "post_attention_layernorm.weight",
    ),
    _rule(
        _M + "mlp.linear_fc2.weight",
        (_H + "mlp.down_proj.weight", ("hidden", "intermediate")),
        quantized=True,
    ),
    _rule("decoder.final_layernorm.weight", ("model.norm.weight", ("hidden",))),
    _rule("output_layer.weight", ("lm_head.weight", ("vocabulary", "hidden"))),
)


def rules(architecture: Architecture) -> list[Rule]:
    """The rules whose tensors a checkpoint of this architecture has."""
    absent = set()
    if not architecture.qkv_bias:
        absent.add("decoder.layers.{layer}.self_attention.linear_qkv.bias")
    if not architecture.qk_norm:
        absent |= {f"decoder.layers.{{layer}}.self_attention.{x}_layernorm.weight" for x in "qk"}
    if architecture.tie_word_embeddings:
        absent.add("output_layer.weight")
    return [rule for rule in RULES if rule.megatron[0] not in absent]


def hugging_face_names(architecture: Architecture) -> set[str]:
    """Every tensor name a checkpoint of this architecture has."""
    names: set[str] = set()
    for rule in rules(architecture):
        for layer in range(architecture.num_layers) if rule.layered else [None]:
            names.update(rule.hugging_face_names(layer))
    return names


_LAYER_NUMBER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")
_BY_MEGATRON = {name: rule for rule in RULES for name in rule.megatron}
_BY_HUGGING_FACE = {part.name: rule for rule in RULES for part in rule.parts}


def find_megatron(name: str) -> tuple[Rule, int | None]:
    """The rule of a Megatron parameter and its layer number (as spelled; None outside layers)."""
    return _find(name, _BY_MEGATRON, "Megatron parameter")


def find_hugging_face(name: str) -> tuple[Rule, int | None]:
    """The rule a Hugging Face tensor belongs to and its layer number (None outside layers)."""
    return _find(name, _BY_HUGGING_FACE, "Hugging Face tensor")


def _find(name: str, table: dict[str, Rule], kind: str) -> tuple[Rule, int | None]:
    number = _LAYER_NUMBER.search(name)
    template = _LAYER_NUMBER.sub("{layer}", name)
    if template not in table:
        raise KeyError(f"no rule for {kind} '{name}'; model.weight_map.RULES has the table")
    return table[template], int(number.group()) if number else None


def _size(symbol: str, architecture: Architecture) -> int:
    match symbol:
        case "vocabulary":
            return architecture.vocab_size
        case "query":
            return architecture.num_attention_heads * architecture.head_dim
        case "key_value":
            return architecture.num_key_value_heads * architecture.head_dim
        case "intermediate":
            return architecture.intermediate_size
        case "hidden":
            return architecture.hidden_size
        case "head":
            return architecture.head_dim
    raise KeyError(f"no size is called '{symbol}'")


def full_shape(part: HuggingFaceTensor, architecture: Architecture) -> tuple[int, ...]:
    """The shape the tensor has in the checkpoint."""
    return tuple(_size(symbol, architecture) for symbol in part.sizes)


def part_runs(
    rule: Rule, part: HuggingFaceTensor, architecture: Architecture, tp_size: int
) -> list[slice] | None:
    """The run of the part's shared dimension that each tensor-parallel rank holds, in order.

    None where every rank holds the whole tensor. Runs are equal but for the vocabulary's last
    ones, which are shorter, and for a fused QKV with fewer key-value heads than ranks, whose
    groups are cut wherever a rank's equal share of rows ends: there some are empty.
    """
    dim = part.shared_dim
    if dim is None:
        return None
    size = full_shape(part, architecture)[dim]
    if rule.merge is Merge.GROUPED_QKV:
        return _grouped_runs(rule, part, architecture, tp_size)
    length = -(-size // tp_size)
    ends = [min(rank * length, size) for rank in range(tp_size + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _grouped_runs(
    rule: Rule, part: HuggingFaceTensor, architecture: Architecture, tp_size: int
) -> list[slice]:
    """As `part_runs`: Megatron deals the rows of the fused tensor out evenly, group after group."""
    groups = architecture.num_key_value_heads
    rows = [full_shape(p, architecture)[0] // groups for p in rule.parts]  # of one group
    before = sum(rows[: rule.parts.index(part)])
    own = rows[rule.parts.index(part)]
    per_rank = groups * sum(rows) // tp_size

    def rows_of_part_before(fused_row: int) -> int:
        group, within = divmod(fused_row, sum(rows))
        return group * own + min(max(within - before, 0), own)

    ends = [rows_of_part_before(rank * per_rank) for rank in range(tp_size + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def part_index(
    rule: Rule, part: HuggingFaceTensor, architecture: Architecture, tp_rank: int, tp_size: int
) -> tuple[slice, ...]:
    """Index of this rank's run in the full tensor; `full[part_index(...)]` is the part."""
    index = [slice(0, size) for size in full_shape(part, architecture)]
    runs = part_runs(rule, part, architecture, tp_size)
    if runs is not None and part.shared_dim is not None:
        index[part.shared_dim] = runs[tp_rank]
    return tuple(index)


def merge(rule: Rule, parts: Sequence[Tensor], architecture: Architecture, tp_size: int) -> Tensor:
    """This rank's parts -> its shard; missing vocabulary rows are zero. Inverse of `split`."""
    if rule.merge is Merge.STACKED:
        return torch.cat(list(parts))
    if rule.merge is Merge.GROUPED_QKV:
        groups = _groups_on_rank(architecture, tp_size)
        rest = parts[0].shape[1:]
        grouped = [part.reshape(groups, part.shape[0] // groups, *rest) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *rest)
    (part,) = parts
    if rule.parts[0].sizes[0] == "vocabulary":
        rows = architecture.padded_vocab_size(tp_size) // tp_size
        padding = part.new_zeros(rows - part.shape[0], *part.shape[1:])
        return torch.cat([part, padding]) if len(padding) else part
    return part


def split(
    rule: Rule,
    shard: Tensor,
    architecture: Architecture,
    layer: int | None,
    tp_rank: int,
    tp_size: int,
) -> list[TensorPart]:
    """This rank's shard -> its parts under their Hugging Face names. Inverse of `merge`."""
    shares = [part_runs(rule, part, architecture, tp_size) for part in rule.parts]
    tensors: Sequence[Tensor]
    if rule.merge is Merge.STACKED:
        tensors = shard.chunk(len(rule.parts))
    elif rule.merge is Merge.GROUPED_QKV:
        groups = _groups_on_rank(architecture, tp_size)
        rows = [_length(runs[tp_rank]) // groups for runs in shares if runs is not None]
        tensors = shard.view(groups, -1, *shard.shape[1:]).split(rows, dim=1)
    else:
        tensors = [shard]
    parts = []
    for part, name, tensor, runs in zip(
        rule.parts, rule.hugging_face_names(layer), tensors, shares, strict=True
    ):
        dim = part.shared_dim
        if runs is not None and dim is not None and part.sizes[0] == "vocabulary":
            tensor = tensor.narrow(dim, 0, _length(runs[tp_rank]))  # drops padding
        parts.append(TensorPart(name, tensor, dim, runs, tp_rank, full_shape(part, architecture)))
    return parts


def _groups_on_rank(architecture: Architecture, tp_size: int) -> int:
    """Key-value groups that one rank's shard of a fused QKV has rows of."""
    return max(1, architecture.num_key_value_heads // tp_size)


def _length(run: slice) -> int:
    return run.stop - run.start
