"""Map Megatron parameters to Hugging Face tensors, and divide both over tensor-parallel ranks.

Three forms of a weight:

    full tensor  one tensor of a Hugging Face checkpoint, such as `q_proj.weight`
    part         the slice of one full tensor that belongs to one tensor-parallel rank
    shard        the Megatron parameter on one rank, made of one part or several

    full tensor  --part_index-->  part  --merge-->  shard
                 <---concat-----        <--split---

Example: `linear_qkv.weight` of a model with 4 query heads (q0 to q3) and 2 key-value heads (k0, k1
and v0, v1), each head standing for `head_dim` rows:

    full tensors           q_proj: q0 q1 q2 q3     k_proj: k0 k1    v_proj: v0 v1
    2 ranks, rank 1        parts q2 q3, k1, v1     shard q2 q3 k1 v1
    1 rank                 parts are full          shard q0 q1 k0 v0 q2 q3 k1 v1

Megatron orders the rows of the shard by group: the query heads of a key-value head, then its key
head, then its value head. With one rank, a part is therefore not contiguous in the shard.

`RULES` is the whole map. A `Rule` names one Megatron parameter, the full tensors it is made of, the
symbolic size of each of their dimensions and the way their parts are merged. A dimension that
counts vocabulary rows, query or key-value channels or intermediate channels is divided over the
ranks and is called the partition dimension. One that counts hidden or head channels is not divided.

An expert's parameters have a rule of their own, made by `Rule.of_expert`. Expert-parallel ranks
have different experts; the ranks that share one are its tensor-parallel ranks.

`in_file` says where a full tensor lies in a checkpoint. In a hybrid's attention, `q_proj` has the
rows of each query head followed by those of its gate. A file of a hybrid has the queries, keys and
values of a linear attention in one tensor, which ranks divide as three. Here they are three full
tensors, `in_proj_qkv:query.weight`, `:key` and `:value`; so are the rows of the convolution behind
them.

Invariants: `split(merge(parts)) == parts`, and the parts of all ranks, concatenated along the
partition dimension, are the full tensor, bit for bit. Only shards have vocabulary padding.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.rules import (
    BEFORE_MIXER,
    BEFORE_MLP,
    HF_LAYER,
    LAYER,
    HuggingFaceTensor,
    Merge,
    Rule,
    rule_of,
)


@dataclass(frozen=True)
class TensorPart:
    """The part of one full tensor that a tensor-parallel rank has."""

    name: str  # the full tensor's name, with its layer number
    view: Tensor  # view of the shard, [groups, rows per group, ...]; one group unless grouped QKV
    dim: int | None  # the partition dimension; None: every rank has the full tensor
    rank_slices: list[slice] | None  # slices of the full tensor along `dim`, one per rank
    tp_rank: int
    full_shape: tuple[int, ...]

    @property
    def tensor(self) -> Tensor:
        """Values of the part, in `shape`; a copy if the part is not contiguous in the shard."""
        return self.view.flatten(0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `tensor`, without copying it."""
        shape = list(self.full_shape)
        if self.dim is not None and self.rank_slices is not None:
            shape[self.dim] = _length(self.rank_slices[self.tp_rank])
        return tuple(shape)

    @property
    def offset(self) -> tuple[int, int]:
        """The row and column of the full tensor at which this part begins."""
        start = 0 if self.rank_slices is None else self.rank_slices[self.tp_rank].start
        return (start, 0) if self.dim == 0 else (0, start)


_L = HF_LAYER + "linear_attn."

RULES: tuple[Rule, ...] = (
    rule_of(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight", ("vocabulary", "hidden")),
    ),
    rule_of(
        (BEFORE_MIXER, LAYER + "self_attention.linear_qkv.layer_norm_weight"),
        (HF_LAYER + "input_layernorm.weight", ("hidden",)),
    ),
    rule_of(
        LAYER + "self_attention.linear_qkv.weight",
        (HF_LAYER + "self_attn.q_proj.weight", ("query_rows", "hidden")),
        (HF_LAYER + "self_attn.k_proj.weight", ("key_value", "hidden")),
        (HF_LAYER + "self_attn.v_proj.weight", ("key_value", "hidden")),
        merge=Merge.GROUPED_QKV,
        quantized=True,
        fed_by=HF_LAYER + "input_layernorm.weight",
        of_linear=False,
    ),
    rule_of(
        LAYER + "self_attention.linear_qkv.bias",
        (HF_LAYER + "self_attn.q_proj.bias", ("query_rows",)),
        (HF_LAYER + "self_attn.k_proj.bias", ("key_value",)),
        (HF_LAYER + "self_attn.v_proj.bias", ("key_value",)),
        merge=Merge.GROUPED_QKV,
        of_linear=False,
    ),
    rule_of(
        LAYER + "self_attention.q_layernorm.weight",
        (HF_LAYER + "self_attn.q_norm.weight", ("head",)),
        of_linear=False,
    ),
    rule_of(
        LAYER + "self_attention.k_layernorm.weight",
        (HF_LAYER + "self_attn.k_norm.weight", ("head",)),
        of_linear=False,
    ),
    rule_of(
        LAYER + "self_attention.linear_proj.weight",
        (HF_LAYER + "self_attn.o_proj.weight", ("hidden", "query")),
        quantized=True,
        of_linear=False,
    ),
    rule_of(
        LAYER + "self_attention.in_proj.weight",
        (_L + "in_proj_qkv:query.weight", ("linear_keys", "hidden")),
        (_L + "in_proj_qkv:key.weight", ("linear_keys", "hidden")),
        (_L + "in_proj_qkv:value.weight", ("linear_values", "hidden")),
        (_L + "in_proj_z.weight", ("linear_values", "hidden")),
        merge=Merge.STACKED,
        quantized=True,
        fed_by=HF_LAYER + "input_layernorm.weight",
        of_linear=True,
    ),
    rule_of(
        LAYER + "self_attention.gates.weight",
        (_L + "in_proj_b.weight", ("linear_heads", "hidden")),
        (_L + "in_proj_a.weight", ("linear_heads", "hidden")),
        merge=Merge.STACKED,
        fed_by=HF_LAYER + "input_layernorm.weight",
        of_linear=True,
    ),
    rule_of(
        LAYER + "self_attention.conv_weight",
        (_L + "conv1d:query.weight", ("linear_keys", "conv")),
        (_L + "conv1d:key.weight", ("linear_keys", "conv")),
        (_L + "conv1d:value.weight", ("linear_values", "conv")),
        merge=Merge.STACKED,
        of_linear=True,
    ),
    rule_of(LAYER + "self_attention.A_log", (_L + "A_log", ("linear_heads",)), of_linear=True),
    rule_of(LAYER + "self_attention.dt_bias", (_L + "dt_bias", ("linear_heads",)), of_linear=True),
    rule_of(
        LAYER + "self_attention.out_norm.weight",
        (_L + "norm.weight", ("linear_head",)),
        of_linear=True,
    ),
    rule_of(
        LAYER + "self_attention.out_proj.weight",
        (_L + "out_proj.weight", ("hidden", "linear_values")),
        quantized=True,
        of_linear=True,
    ),
    rule_of(
        (BEFORE_MLP, LAYER + "mlp.linear_fc1.layer_norm_weight"),
        (HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),
    ),
    rule_of(
        LAYER + "mlp.linear_fc1.weight",
        (HF_LAYER + "mlp.gate_proj.weight", ("intermediate", "hidden")),
        (HF_LAYER + "mlp.up_proj.weight", ("intermediate", "hidden")),
        merge=Merge.STACKED,
        quantized=True,
        fed_by=HF_LAYER + "post_attention_layernorm.weight",
    ),
    rule_of(
        LAYER + "mlp.linear_fc2.weight",
        (HF_LAYER + "mlp.down_proj.weight", ("hidden", "intermediate")),
        quantized=True,
    ),
    rule_of(
        LAYER + "mlp.router.weight",
        (HF_LAYER + "mlp.gate.weight", ("experts", "hidden")),
        fed_by=HF_LAYER + "post_attention_layernorm.weight",
    ),
    rule_of(
        (
            LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
            LAYER + "mlp.experts.linear_fc1.weight{expert}",
        ),
        (HF_LAYER + "mlp.experts.{expert}.gate_proj.weight", ("moe_intermediate", "hidden")),
        (HF_LAYER + "mlp.experts.{expert}.up_proj.weight", ("moe_intermediate", "hidden")),
        merge=Merge.STACKED,
        quantized=True,
        fed_by=HF_LAYER + "post_attention_layernorm.weight",
    ),
    rule_of(
        (
            LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
            LAYER + "mlp.experts.linear_fc2.weight{expert}",
        ),
        (HF_LAYER + "mlp.experts.{expert}.down_proj.weight", ("hidden", "moe_intermediate")),
        quantized=True,
    ),
    rule_of(
        LAYER + "mlp.shared_experts.linear_fc1.weight",
        (HF_LAYER + "mlp.shared_expert.gate_proj.weight", ("shared_intermediate", "hidden")),
        (HF_LAYER + "mlp.shared_expert.up_proj.weight", ("shared_intermediate", "hidden")),
        merge=Merge.STACKED,
        quantized=True,
        fed_by=HF_LAYER + "post_attention_layernorm.weight",
    ),
    rule_of(
        LAYER + "mlp.shared_experts.linear_fc2.weight",
        (HF_LAYER + "mlp.shared_expert.down_proj.weight", ("hidden", "shared_intermediate")),
        quantized=True,
    ),
    rule_of(
        LAYER + "mlp.shared_experts.gate_weight",
        (HF_LAYER + "mlp.shared_expert_gate.weight", ("one", "hidden")),
        fed_by=HF_LAYER + "post_attention_layernorm.weight",
    ),
    rule_of("decoder.final_layernorm.weight", ("model.norm.weight", ("hidden",))),
    rule_of("output_layer.weight", ("lm_head.weight", ("vocabulary", "hidden"))),
)


def _adapter_rules(rule: Rule) -> tuple[Rule, Rule]:
    """Return the rules of the A's and B's over a quantized layer; the names are peft's."""
    layer = rule.megatron_names[0].removesuffix("weight")
    a, b = [], []
    for tensor in rule.tensors:
        projection = tensor.name.removesuffix("weight")
        rows, columns = tensor.sizes
        a.append(HuggingFaceTensor(f"{projection}lora_A.weight", ("rank", columns)))
        b.append(HuggingFaceTensor(f"{projection}lora_B.weight", (rows, "rank")))
    stacked = Merge.STACKED if len(a) > 1 else Merge.SINGLE
    return (
        Rule((f"{layer}lora_a",), tuple(a), stacked, is_adapter=True),
        Rule((f"{layer}lora_b",), tuple(b), rule.merge, is_adapter=True),
    )


ADAPTER_RULES = tuple(
    adapter
    for rule in RULES
    if rule.quantized and not rule.of_experts
    for adapter in _adapter_rules(rule)
)


def rules(architecture: Architecture) -> list[Rule]:
    """Return the rules that apply to a checkpoint of this architecture, one for each expert."""
    absent = set()
    if not architecture.qkv_bias:
        absent.add("decoder.layers.{layer}.self_attention.linear_qkv.bias")
    if not architecture.qk_norm:
        absent |= {f"decoder.layers.{{layer}}.self_attention.{x}_layernorm.weight" for x in "qk"}
    if architecture.tie_word_embeddings:
        absent.add("output_layer.weight")
    if architecture.num_experts:
        absent |= {f"decoder.layers.{{layer}}.mlp.linear_{x}.weight" for x in ("fc1", "fc2")}
    else:
        absent.add("decoder.layers.{layer}.mlp.router.weight")
    if not architecture.shared_intermediate_size:
        shared = ("linear_fc1.weight", "linear_fc2.weight", "gate_weight")
        absent |= {f"decoder.layers.{{layer}}.mlp.shared_experts.{x}" for x in shared}
    # Transformer Engine does not fuse these: a router reads the norm too, and a hybrid's layers are
    # Megatron's own.
    unfused = [BEFORE_MLP] if architecture.num_experts else []
    if architecture.delta_net:
        unfused = [BEFORE_MIXER, BEFORE_MLP]
    applicable: list[Rule] = []
    for rule in RULES:
        if rule.megatron_names[0] in unfused:
            applicable.append(replace(rule, megatron_names=rule.megatron_names[:1]))
        elif rule.of_experts:
            applicable += map(rule.of_expert, range(architecture.num_experts))
        elif rule.megatron_names[0] not in absent and rule.layers(architecture.linear_layers):
            applicable.append(rule)
    if architecture.adapter_rank:
        layers = {rule.megatron_names[0].removesuffix("weight") for rule in applicable}
        applicable += [
            rule for rule in ADAPTER_RULES if rule.megatron_names[0][: -len("lora_a")] in layers
        ]
    return applicable


def hugging_face_names(architecture: Architecture) -> set[str]:
    """Return the names of all tensors in a checkpoint of this architecture."""
    names: set[str] = set()
    for rule in rules(architecture):
        for layer in rule.layers(architecture.linear_layers):
            names.update(rule.hugging_face_names(layer))
    return names


_LAYER_NUMBER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")
# The second form is Transformer Engine's.
_EXPERT_NUMBER = re.compile(r"(?<=experts\.)\d+(?=\.)|(?<=\.weight)\d+$")
_ALL = RULES + ADAPTER_RULES
_BY_MEGATRON = {name: rule for rule in _ALL for name in rule.megatron_names}
_BY_HUGGING_FACE = {tensor.name: rule for rule in _ALL for tensor in rule.tensors}


def find_megatron(name: str, first_expert: int = 0) -> tuple[Rule, int | None]:
    """Return the rule of a Megatron parameter and its layer number; None outside layers.

    The layer number is the one in `name`, which Megatron counts from 0 in each pipeline stage. It
    counts experts from 0 on each expert-parallel rank, whose first one is `first_expert`.

    Raises:
        KeyError: no rule has a parameter of this name.
    """
    return _find(name, _BY_MEGATRON, "Megatron parameter", first_expert)


def find_hugging_face(name: str) -> tuple[Rule, int | None]:
    """Return the rule of a Hugging Face tensor and its layer number; None outside layers.

    Raises:
        KeyError: no rule has a tensor of this name.
    """
    return _find(name, _BY_HUGGING_FACE, "Hugging Face tensor")


def _find(
    name: str, table: dict[str, Rule], kind: str, first_expert: int = 0
) -> tuple[Rule, int | None]:
    number = _LAYER_NUMBER.search(name)
    expert = _EXPERT_NUMBER.search(name)
    template = _EXPERT_NUMBER.sub("{expert}", _LAYER_NUMBER.sub("{layer}", name))
    if template not in table:
        raise KeyError(
            f"no rule for {kind} '{name}'; the rules are qurl_megatron.model.weight_map.RULES"
        )
    rule = table[template]
    if expert is not None:
        rule = rule.of_expert(first_expert + int(expert.group()))
    return rule, int(number.group()) if number else None


def full_shape(hf_tensor: HuggingFaceTensor, architecture: Architecture) -> tuple[int, ...]:
    """Return the shape of a full tensor."""
    query = architecture.num_attention_heads * architecture.head_dim
    sizes = {
        "vocabulary": architecture.vocab_size,
        "query_rows": query,
        "query": query,
        "key_value": architecture.num_key_value_heads * architecture.head_dim,
        "intermediate": architecture.intermediate_size,
        "moe_intermediate": architecture.moe_intermediate_size,
        "shared_intermediate": architecture.shared_intermediate_size,
        "experts": architecture.num_experts,
        "hidden": architecture.hidden_size,
        "head": architecture.head_dim,
        "rank": architecture.adapter_rank,
        "one": 1,
    }
    if hybrid := architecture.delta_net:
        sizes |= {"query_rows": 2 * query, **hybrid.sizes}  # each query head has a gate
    return tuple(sizes[symbol] for symbol in hf_tensor.sizes)


class Place(NamedTuple):
    """Where a full tensor lies in a file: `stored[where]`, in its shape."""

    name: str  # of the stored tensor, which may hold other full tensors too
    where: tuple[int | slice, ...]
    shape: tuple[int, ...]  # of the stored tensor

    def of_part(self, part: tuple[slice, ...]) -> tuple[int | slice, ...]:
        """Return where the part at index `part` of the full tensor lies; (): all of it."""
        if not part:
            return self.where
        parts = iter(part)
        return tuple(at if isinstance(at, int) else _part_of(at, next(parts)) for at in self.where)


def in_file(name: str, architecture: Architecture, *, joins_experts: bool = False) -> Place:
    """Return the place of a full tensor in the files of a checkpoint.

    Args:
        joins_experts: the experts of a layer are in two tensors, as Qwen3.5's are published, and
            not in three for each expert.
    """
    rule, layer = find_hugging_face(name)
    position = rule.hugging_face_names(layer).index(name)
    shape = full_shape(rule.tensors[position], architecture)
    where: list[int | slice] = [slice(0, size) for size in shape]
    module, _, part = name.removesuffix(".weight").partition(":")
    if part:
        hybrid = architecture.delta_net
        assert hybrid is not None
        first = ("query", "key", "value").index(part) * hybrid.keys
        where[0] = slice(first, first + shape[0])
        shape = (2 * hybrid.keys + hybrid.values, shape[1])
        name = f"{module}.weight"
        if module.endswith("conv1d"):  # stored in the shape of torch's Conv1d
            where.insert(1, 0)
            shape = (shape[0], 1, shape[1])
    elif joins_experts and rule.expert is not None:
        kind = "gate_up_proj" if len(rule.tensors) > 1 else "down_proj"
        name = f"{name.partition('.experts.')[0]}.experts.{kind}"
        first = position * shape[0]
        where = [rule.expert, slice(first, first + shape[0]), where[1]]
        shape = (architecture.num_experts, len(rule.tensors) * shape[0], shape[1])
    return Place(name, tuple(where), shape)


def sent_dtype(name: str) -> torch.dtype:
    """Return the dtype in which a server holds a tensor that is not quantized."""
    return torch.float32 if name.endswith(".A_log") else torch.bfloat16


def num_values(hf_tensor: HuggingFaceTensor, architecture: Architecture) -> int:
    """Return the number of values in a full tensor."""
    return math.prod(full_shape(hf_tensor, architecture))


def num_parameters(architecture: Architecture) -> int:
    """Return the number of values in a checkpoint."""
    return sum(
        num_values(hf_tensor, architecture) * len(rule.layers(architecture.linear_layers))
        for rule in rules(architecture)
        for hf_tensor in rule.tensors
    )


def rank_slices(
    rule: Rule, hf_tensor: HuggingFaceTensor, architecture: Architecture, tp_size: int
) -> list[slice] | None:
    """Return the slice of the partition dimension that each tensor-parallel rank has, in order.

    None if every rank has the whole tensor. All slices have the same length, except:

    - The last slices of a vocabulary that `tp_size` does not divide are shorter.
    - With fewer key-value heads than ranks, Megatron gives each rank an equal number of rows of
      the fused QKV, even if that cuts a group. Some of these slices are empty.
    """
    dim = hf_tensor.partition_dim
    if dim is None:
        return None
    size = full_shape(hf_tensor, architecture)[dim]
    length = -(-size // tp_size)
    ends = [min(rank * length, size) for rank in range(tp_size + 1)]
    if rule.merge is Merge.GROUPED_QKV:
        # Ranks divide the fused rows equally: count this tensor's rows in front of each rank's.
        groups = architecture.num_key_value_heads
        rows_per_group = [full_shape(t, architecture)[0] // groups for t in rule.tensors]
        position = rule.tensors.index(hf_tensor)
        before, own = sum(rows_per_group[:position]), rows_per_group[position]
        for rank in range(tp_size + 1):
            fused_row = rank * (groups * sum(rows_per_group) // tp_size)
            group, row_in_group = divmod(fused_row, sum(rows_per_group))
            ends[rank] = group * own + min(max(row_in_group - before, 0), own)
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def part_index(
    rule: Rule,
    hf_tensor: HuggingFaceTensor,
    architecture: Architecture,
    tp_rank: int,
    tp_size: int,
) -> tuple[slice, ...]:
    """Return the index of a rank's part: `full_tensor[part_index(...)]` is the part."""
    index = [slice(0, size) for size in full_shape(hf_tensor, architecture)]
    slices = rank_slices(rule, hf_tensor, architecture, tp_size)
    if slices is not None and hf_tensor.partition_dim is not None:
        index[hf_tensor.partition_dim] = slices[tp_rank]
    return tuple(index)


def _num_groups(rule: Rule, architecture: Architecture, tp_size: int) -> int:
    """Return the number of groups in a rank's shard; each has rows of every part in turn."""
    if rule.merge is Merge.GROUPED_QKV:
        return architecture.key_value_heads_on_rank(tp_size)
    return 1


def merge(rule: Rule, parts: Sequence[Tensor], architecture: Architecture, tp_size: int) -> Tensor:
    """Return the shard made of a rank's parts, with zero rows as vocabulary padding.

    This is the inverse of `split`.
    """
    if rule.merge is not Merge.SINGLE:
        groups = _num_groups(rule, architecture, tp_size)
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
    (part,) = parts
    if rule.tensors[0].sizes[0] == "vocabulary":
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
    """Return the parts that a rank's shard is made of, without vocabulary padding.

    This is the inverse of `merge`. The parts are views of the shard.
    """
    groups = _num_groups(rule, architecture, tp_size)
    rest = shard.unflatten(0, (groups, -1))  # the rows of the parts that follow
    parts = []
    for hf_tensor, name in zip(rule.tensors, rule.hugging_face_names(layer), strict=True):
        slices = rank_slices(rule, hf_tensor, architecture, tp_size)
        shape, dim = full_shape(hf_tensor, architecture), hf_tensor.partition_dim
        num_rows = _length(slices[tp_rank]) if slices is not None and dim == 0 else shape[0]
        view, rest = rest.tensor_split([num_rows // groups], dim=1)
        parts.append(TensorPart(name, view, dim, slices, tp_rank, shape))
    return parts


def _part_of(interval: slice, part: slice) -> slice:
    within = range(interval.start, interval.stop)[part]
    return slice(within.start, within.stop)


def _length(interval: slice) -> int:
    return interval.stop - interval.start
