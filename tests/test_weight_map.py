"""Check the weight map: each operation is exact and has an inverse, on every rank of a layout.

All sizes differ, so that a transposed or misplaced tensor cannot fit by accident.
"""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.delta_net import DeltaNet
from qurl_megatron.model.weight_map import Rule

# The 12 query heads per 4 key-value heads give an odd ratio. 2 and 4 do not divide the vocabulary.
QWEN2 = Architecture(
    family="qwen2",
    num_layers=3,
    hidden_size=40,
    intermediate_size=56,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=6,
    vocab_size=131,
    tie_word_embeddings=False,
    qkv_bias=True,
    qk_norm=False,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
    eos_token_ids=(0,),
)
QWEN3 = dataclasses.replace(
    QWEN2, family="qwen3", qkv_bias=False, qk_norm=True, tie_word_embeddings=True
)
LLAMA = dataclasses.replace(QWEN2, family="llama", qkv_bias=False)
QWEN3_MOE = dataclasses.replace(
    QWEN3,
    family="qwen3_moe",
    num_experts=6,
    experts_per_token=2,
    moe_intermediate_size=24,
    normalize_topk=True,
    tie_word_embeddings=False,
)
# Three value heads to a key head of linear attention. Layer 2 is of linear attention, layer 1 not.
QWEN3_5 = dataclasses.replace(
    QWEN3,
    family="qwen3_5_text",
    delta_net=DeltaNet((True, False, True), 8, 24, 5, 7, conv_width=4, rotary_factor=0.5),
)
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_MOE,
    family="qwen3_5_moe_text",
    delta_net=QWEN3_5.delta_net,
    shared_intermediate_size=16,
)
LAYER = 2


def full_tensors(rule: Rule, architecture: Architecture) -> list[Tensor]:
    """Return the full tensors of a rule; no two of their elements are equal."""
    shapes = [weight_map.full_shape(hf_tensor, architecture) for hf_tensor in rule.tensors]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    values = torch.arange(sum(sizes), dtype=torch.float64).split(sizes)
    return [flat.view(shape) for flat, shape in zip(values, shapes, strict=True)]


def shards(rule: Rule, architecture: Architecture, tp_size: int) -> list[Tensor]:
    """Return the shard of every rank, merged from the parts of the full tensors."""
    tensors = full_tensors(rule, architecture)
    return [
        weight_map.merge(
            rule,
            [
                full[weight_map.part_index(rule, hf_tensor, architecture, rank, tp_size)]
                for hf_tensor, full in zip(rule.tensors, tensors, strict=True)
            ],
            architecture,
            tp_size,
        )
        for rank in range(tp_size)
    ]


# With 4 or 8 ranks, several share a key-value head: Megatron divides its group of rows over them.
FEW_GROUPS = dataclasses.replace(QWEN2, num_attention_heads=24, num_key_value_heads=2, head_dim=4)


@given(
    ratio=st.integers(1, 7),
    key_value_heads=st.sampled_from([1, 2, 4, 8]),
    intermediate_per_rank=st.integers(1, 9),
    sizes=st.fixed_dictionaries(
        {
            "head_dim": st.integers(1, 8).map(lambda half: 2 * half),
            "hidden_size": st.integers(3, 41),
            "vocab_size": st.integers(60, 140),
        }
    ),
    tp_size=st.sampled_from([1, 2, 4, 8]),
    family=st.sampled_from([QWEN2, QWEN3, QWEN3_MOE, LLAMA, QWEN3_5, QWEN3_5_MOE]),
)
@settings(max_examples=200)
def test_split_shards_of_any_divisible_model_equal_the_checkpoint_bit_for_bit(
    ratio: int,
    key_value_heads: int,
    intermediate_per_rank: int,
    sizes: dict[str, Any],
    tp_size: int,
    family: Architecture,
) -> None:
    """Parts split from the shards of all ranks tile every full tensor in order."""
    architecture = dataclasses.replace(
        family,
        num_attention_heads=ratio * key_value_heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=intermediate_per_rank * tp_size,
        **sizes,
    )
    try:
        architecture.check_layout(tp_size, 1)
    except ArchitectureError:
        reject()
    for rule in weight_map.rules(architecture):
        by_rank = [
            weight_map.split(rule, shard, architecture, LAYER, rank, tp_size)
            for rank, shard in enumerate(shards(rule, architecture, tp_size))
        ]
        for full, *parts in zip(full_tensors(rule, architecture), *by_rank, strict=True):
            dim = parts[0].dim
            if dim is None:
                assert all(torch.equal(part.tensor, full) for part in parts)
            else:
                assert torch.equal(torch.cat([part.tensor for part in parts], dim), full)
                starts = [part.offset[dim] for part in parts]
                ends = [part.offset[dim] + part.tensor.shape[dim] for part in parts]
                assert starts == [0, *ends[:-1]]
            assert all(part.full_shape == full.shape for part in parts)


def test_fused_qkv_rows_are_grouped_by_key_value_head_with_queries_first() -> None:
    rule, _ = weight_map.find_megatron("decoder.layers.0.self_attention.linear_qkv.bias")
    query, key, value = full_tensors(rule, QWEN2)
    shard = shards(rule, QWEN2, 4)[1]  # rank 1 of 4 has key-value head 1 and query heads 3 to 5
    expected = torch.cat([query[3 * 6 : 6 * 6], key[6:12], value[6:12]])
    assert torch.equal(shard, expected)


def test_ranks_that_share_a_key_value_head_have_equal_numbers_of_rows_of_its_group() -> None:
    rule, _ = weight_map.find_megatron("decoder.layers.0.self_attention.linear_qkv.bias")
    query, key, value = full_tensors(rule, FEW_GROUPS)
    # The second group has 12 query heads, a key head and a value head. Ranks 4 to 7 divide it.
    group = torch.cat([query[48:], key[4:], value[4:]])
    for rank, rows in enumerate(group.chunk(4), start=4):
        assert torch.equal(shards(rule, FEW_GROUPS, 8)[rank], rows)


def test_vocabulary_padding_is_zero_rows_at_the_end_of_the_last_shard() -> None:
    rule, _ = weight_map.find_megatron("embedding.word_embeddings.weight")
    (full,) = full_tensors(rule, QWEN2)
    last = shards(rule, QWEN2, 4)[3]
    assert last.shape[0] == 33
    assert torch.equal(last[:32], full[99:])
    assert not last[32:].any()


def test_split_parts_are_views_of_the_shard() -> None:
    for rule in weight_map.rules(QWEN2):
        shard = shards(rule, QWEN2, 2)[0]
        for part in weight_map.split(rule, shard, QWEN2, LAYER, 0, 2):
            storage = part.view.untyped_storage().data_ptr()
            assert storage == shard.untyped_storage().data_ptr()


def test_hugging_face_names_are_those_of_the_checkpoint_and_of_every_expert() -> None:
    names = weight_map.hugging_face_names(QWEN2)
    assert len(names) == 3 + 3 * 12
    assert "model.layers.2.self_attn.k_proj.bias" in names and "lm_head.weight" in names
    names = weight_map.hugging_face_names(QWEN3)
    assert len(names) == 2 + 3 * 11
    assert "model.layers.0.self_attn.q_norm.weight" in names and "lm_head.weight" not in names
    assert not any("experts" in name for name in names)
    names = weight_map.hugging_face_names(QWEN3_MOE)
    assert len(names) == 3 + 3 * (9 + 6 * 3)
    assert "model.layers.2.mlp.experts.5.up_proj.weight" in names
    assert "model.layers.2.mlp.gate.weight" in names
    assert not any(".mlp.up_proj" in name for name in names)


def test_layers_of_a_hybrid_have_the_tensors_of_their_kind() -> None:
    names = weight_map.hugging_face_names(QWEN3_5)
    assert len(names) == 2 + 2 * 18 + 11
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "model.layers.0.linear_attn.in_proj_qkv:key.weight" in names
    assert not any(f"layers.{layer}.self_attn" in name for name in names for layer in (0, 2))
    assert not any("layers.1.linear_attn" in name or "shared_expert" in name for name in names)
    names = weight_map.hugging_face_names(QWEN3_5_MOE)
    assert len(names) == 3 + 2 * (13 + 7 + 6 * 3) + 6 + 7 + 6 * 3
    for rule in weight_map.rules(QWEN3_5):  # no norm is part of another layer
        assert not any("layer_norm_weight" in name for name in rule.megatron_names)


@pytest.mark.parametrize("architecture", [QWEN2, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE])
@pytest.mark.parametrize("joins_experts", [False, True])
def test_full_tensors_fill_the_tensors_of_files_without_gap_or_overlap(
    architecture: Architecture, joins_experts: bool
) -> None:
    stored: dict[str, Tensor] = {}
    for name in weight_map.hugging_face_names(architecture):
        place = weight_map.in_file(name, architecture, joins_experts=joins_experts)
        target = stored.setdefault(place.name, torch.zeros(place.shape))
        target[place.where] += 1
        if not joins_experts and ":" not in name:
            assert place.name == name
    assert all(torch.equal(each, torch.ones_like(each)) for each in stored.values())
    assert not any(":" in name for name in stored)


def test_parts_of_joined_tensors_are_found_in_files() -> None:
    key = "model.layers.2.linear_attn.conv1d:key.weight"
    place = weight_map.in_file(key, QWEN3_5)
    assert (place.name, place.shape) == ("model.layers.2.linear_attn.conv1d.weight", (248, 1, 4))
    assert place.of_part((slice(10, 20), slice(None))) == (slice(50, 60), 0, slice(0, 4))
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    place = weight_map.in_file(up, QWEN3_5_MOE, joins_experts=True)
    assert (place.name, place.shape) == ("model.layers.1.mlp.experts.gate_up_proj", (6, 48, 40))
    assert place.of_part((slice(0, 12), slice(0, 40))) == (3, slice(24, 36), slice(0, 40))


def test_an_expert_is_numbered_in_the_whole_model_whatever_the_layers_call_it() -> None:
    local = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    grouped = "decoder.layers.1.mlp.experts.linear_fc1.weight2"
    rule, layer = weight_map.find_megatron(local, first_expert=3)
    assert (rule, layer) == weight_map.find_megatron(grouped, first_expert=3)
    assert rule.expert == 5 and rule.of_experts
    names = [f"model.layers.1.mlp.experts.5.{x}_proj.weight" for x in ("gate", "up")]
    assert list(rule.hugging_face_names(layer)) == names
    assert all(weight_map.find_hugging_face(name) == (rule, 1) for name in names)
    assert rule in weight_map.rules(QWEN3_MOE)


def test_both_megatron_names_of_a_norm_find_one_rule() -> None:
    local = weight_map.find_megatron("decoder.layers.1.input_layernorm.weight")
    fused = weight_map.find_megatron("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight")
    assert local == fused
    assert local[0].hugging_face_names(1) == ("model.layers.1.input_layernorm.weight",)


def test_rules_mark_quantized_layers_and_the_norm_that_feeds_them() -> None:
    def last_word(name: str) -> str:
        return name.removesuffix(".weight").split(".")[-1]

    quantized = {last_word(t.name) for r in weight_map.RULES if r.quantized for t in r.tensors}
    assert quantized == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkv:query", "in_proj_qkv:key", "in_proj_qkv:value", "in_proj_z", "out_proj"),
    }
    feeds = {
        last_word(part.name): last_word(rule.fed_by)
        for rule in weight_map.RULES
        if rule.fed_by
        for part in rule.tensors
    }
    assert feeds == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm"),
        **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm"),
        "gate": "post_attention_layernorm",  # the router
        "shared_expert_gate": "post_attention_layernorm",
        **dict.fromkeys(("in_proj_qkv:query", "in_proj_qkv:key"), "input_layernorm"),
        **dict.fromkeys(("in_proj_qkv:value", "in_proj_z"), "input_layernorm"),
        **dict.fromkeys(("in_proj_b", "in_proj_a"), "input_layernorm"),
    }


def test_an_unknown_name_is_in_the_error() -> None:
    with pytest.raises(KeyError, match=r"decoder\.layers\.0\.mlp\.router\.bias"):
        weight_map.find_megatron("decoder.layers.0.mlp.router.bias")
    with pytest.raises(KeyError, match=r"model\.vision\.weight"):
        weight_map.find_hugging_face("model.vision.weight")
