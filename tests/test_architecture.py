"""Check what is read from config.json, and which models and layouts are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from qurl_megatron.model.architecture import (
    SUPPORTED_ARCHITECTURES,
    Architecture,
    ArchitectureError,
)
from qurl_megatron.model.rope_scaling import LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling

OLD_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def read(directory: Path, **changes: Any) -> Architecture:
    """Read OLD_LLAMA from a directory, with some fields changed, or left out if 'absent'."""
    return Architecture.from_directory(write_config(directory, {**OLD_LLAMA, **changes}))


def write_config(directory: Path, fields: dict[str, Any]) -> Path:
    given = {name: value for name, value in fields.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(given))
    return directory


def test_a_config_with_the_old_field_names_is_read(tmp_path: Path) -> None:
    assert read(tmp_path) == Architecture(
        family="llama",
        num_layers=6,
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=4,
        vocab_size=131,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        max_position_embeddings=256,
        eos_token_ids=(7,),
    )


def test_the_field_names_of_transformers_5_give_the_same_architecture(tmp_path: Path) -> None:
    old = read(tmp_path)
    new = read(
        tmp_path,
        rope_theta="absent",
        torch_dtype="absent",
        dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        layer_types=["full_attention"] * 6,
    )
    assert new == old


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_config_that_transformers_writes_is_read(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        family, num_attention_heads=12, num_key_value_heads=4, head_dim=20, hidden_size=96
    )
    config.architectures = [f"{family.capitalize()}ForCausalLM"]
    config.save_pretrained(tmp_path)
    architecture = Architecture.from_directory(tmp_path)
    assert architecture.family == family
    assert architecture.head_dim == 20
    assert architecture.qkv_bias == (family == "qwen2")
    assert architecture.qk_norm == (family == "qwen3")
    assert architecture.rope_theta == config.rope_parameters["rope_theta"]
    assert architecture.rms_norm_eps == config.rms_norm_eps
    assert architecture.tie_word_embeddings == config.tie_word_embeddings
    written = json.loads((tmp_path / "config.json").read_text())
    del written["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assumed = getattr(AutoConfig.from_pretrained(tmp_path), "head_dim", 96 // 12)
    assert Architecture.from_directory(tmp_path).head_dim == assumed


FIELDS = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings")


@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
@pytest.mark.parametrize("field", [*FIELDS, "norm_topk_prob"])
def test_a_missing_or_null_field_is_what_transformers_takes_it_for(
    tmp_path: Path, name: str, field: str
) -> None:
    from transformers import AutoConfig

    traits = SUPPORTED_ARCHITECTURES[name]
    experts = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), 8)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": traits.family,
        "norm_topk_prob": True,
    }
    config |= {"hidden_size": 512, "num_attention_heads": 32, **(experts if "Moe" in name else {})}
    for changes in ({field: "absent"}, {field: None}):
        given = {**OLD_LLAMA, **config, "tie_word_embeddings": False, **changes}
        try:
            expected = AutoConfig.from_pretrained(write_config(tmp_path, given))
            head_dim = getattr(expected, "head_dim", 512 // 32)
            numbers = [head_dim, *expected.rope_parameters.values()]
            is_null = traits.is_hybrid and given.get("norm_topk_prob", True) is None
            if None in numbers or is_null:  # transformers builds no model of it, or SGLang another
                raise ValueError
        except Exception:
            with pytest.raises(ArchitectureError, match=f"'{field}'"):
                read(tmp_path, **given)
            continue
        architecture = read(tmp_path, **given)
        assert architecture.num_key_value_heads == expected.num_key_value_heads
        assert architecture.head_dim == head_dim
        assert architecture.rms_norm_eps == expected.rms_norm_eps
        assert architecture.rope_theta == expected.rope_parameters["rope_theta"]
        assert architecture.tie_word_embeddings == expected.tie_word_embeddings
        if architecture.num_experts:
            assert architecture.normalize_topk == getattr(expected, "norm_topk_prob", True)


MOE = {
    "tie_word_embeddings": False,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}


def test_experts_are_read_under_the_names_of_transformers_5_and_before(tmp_path: Path) -> None:
    architecture = read(tmp_path, **MOE)
    assert architecture.family == "qwen3_moe" and architecture.qk_norm
    assert (architecture.num_experts, architecture.experts_per_token) == (12, 3)
    assert architecture.moe_intermediate_size == 20 and architecture.normalize_topk
    assert architecture.active_intermediate_size == 60
    new = {**MOE, "num_experts": "absent", "num_local_experts": 12}
    assert read(tmp_path, **new) == architecture
    silent = {**MOE, "norm_topk_prob": "absent"}
    assert not read(tmp_path, **silent).normalize_topk
    dense = read(tmp_path)
    assert dense.num_experts == 0 and dense.active_intermediate_size == 80


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ((5, 1, 20), "12 experts .* expert_parallel_size=5; .* 1, 2, 3, 4, 6, 12$"),
        ((1, 3, 12), "20 channels of an expert .* expert_tensor_parallel_size=3; .* 1, 2, 4, 5"),
        ((4, 2, 12), "=4 x expert_tensor_parallel_size=2 must divide the 12 ranks .* 1, 2, 3, 4"),
    ],
)
def test_experts_that_do_not_divide_over_ranks_are_refused_with_the_sizes_that_do(
    tmp_path: Path, layout: tuple[int, int, int], words: str
) -> None:
    architecture = read(tmp_path, **MOE)
    architecture.check_expert_layout(4, 1, 12)
    with pytest.raises(ArchitectureError, match=words):
        architecture.check_expert_layout(*layout)
    dense = read(tmp_path)
    dense.check_expert_layout(1, 1, 12)
    with pytest.raises(ArchitectureError, match="the model has none"):
        dense.check_expert_layout(2, 1, 12)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": LLAMA3_SCALING},
        {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}, "rope_theta": "absent"},
    ],
    ids=["old", "transformers 5"],
)
def test_llama3_rope_scaling_is_read(tmp_path: Path, spelling: dict[str, Any]) -> None:
    architecture = read(tmp_path, **spelling)
    assert architecture.rope_theta == 500000.0
    assert architecture.rope_scaling == Llama3RopeScaling(32.0, 1.0, 4.0, 8192)


def test_scaling_makes_the_longest_sequence_longer(tmp_path: Path) -> None:
    """SGLang takes `max_position_embeddings` of linear scaling for the length before it.

    Of YaRN, Qwen2.5's instructions leave it at the length before scaling, and Qwen3's at one
    between the two; other files have the length after it.
    """
    for given in (64, 80, 256):
        architecture = read(tmp_path, rope_scaling=YARN, max_position_embeddings=given)
        assert architecture.rope_scaling == YarnRopeScaling(4.0, 64)
        assert architecture.max_position_embeddings == 256
    architecture = read(tmp_path, rope_scaling={"type": "linear", "factor": 2.5})
    assert architecture.rope_scaling == LinearRopeScaling(2.5)
    assert architecture.max_position_embeddings == 640


def test_end_of_sequence_tokens_are_those_of_both_configs(tmp_path: Path) -> None:
    read(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    assert Architecture.from_directory(tmp_path).eos_token_ids == (3, 9, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM'.*Qwen2ForCausalLM"),
        ({"architectures": None}, r"\(none\)"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic' is not supported; known"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn .* no 'original_max_position_emb"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, "'yarn' has no .*'attention_factor'"),
        ({"rope_scaling": {**YARN, "mscale": 0}}, "'mscale' must be a positive number, not 0"),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_slow must be less than beta_fast"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "'truncate' must be true or false"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 8},
            "original_max_position_embeddings is 8 beside the rope scaling, which says 64",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "must be written 4.0; SGLang cannot"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "low_freq_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": "absent"}, "'hidden_size'"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "sliding window"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5}, "sliding"),
        ({**MOE, "shared_expert_intermediate_size": 16}, "shared experts"),
        ({**MOE, "decoder_sparse_step": 2}, "decoder_sparse_step 1"),
        ({**MOE, "mlp_only_layers": [0]}, "mlp_only_layers empty"),
        ({**MOE, "tie_word_embeddings": True}, "tie_word_embeddings is true; with experts"),
        ({**MOE, "num_experts": "absent"}, "no 'num_experts'"),
        ({**MOE, "num_experts_per_tok": 13}, "num_experts_per_tok is 13, but num_experts 12"),
        ({**MOE, "num_experts_per_tok": 1}, "the router no gradient"),
        ({**MOE, "moe_intermediate_size": 0}, "'moe_intermediate_size' must be a positive integer"),
    ],
)
def test_a_model_the_learner_does_not_support_is_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArchitectureError, match=words) as refusal:
        read(tmp_path, **changes)
    assert "\n" not in str(refusal.value)


def test_a_sliding_window_that_no_layer_uses_is_accepted(tmp_path: Path) -> None:
    for uses, first_layer_with in ((False, 5), (True, 6)):
        window = {"sliding_window": 8, "max_window_layers": first_layer_with}
        read(tmp_path, use_sliding_window=uses, **window)


def test_a_missing_directory_or_broken_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match="nowhere' does not exist"):
        Architecture.from_directory(tmp_path / "nowhere")
    with pytest.raises(ArchitectureError, match="no config.json"):
        Architecture.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArchitectureError, match="not JSON"):
        Architecture.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({}, (5, 1), "12 attention heads .* tensor_parallel_size=5; .* 1, 2, 3, 4, 6, 12"),
        ({}, (3, 1), "4 key-value heads .* tensor_parallel_size=3; .* 1, 2, 4$"),
        ({}, (0, 1), "tensor_parallel_size=0"),
        ({}, (1, 4), "6 layers .* pipeline_parallel_size=4; .* 1, 2, 3, 6; or set"),
        ({}, (1, 2, 2), "=2 does not divide a stage's 3 layers; .* 1, 3$"),
        ({}, (1, 1, 2), "pipeline_parallel_size=1 has none"),
        ({"intermediate_size": 82}, (4, 1), "82 intermediate channels"),
        ({"vocab_size": 5, "eos_token_id": 1}, (4, 1), "vocabulary of 5"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_the_sizes_that_do(
    tmp_path: Path, changes: dict[str, Any], layout: tuple[int, ...], words: str
) -> None:
    read(tmp_path).check_layout(1, 2, 3)  # the last are virtual stages
    with pytest.raises(ArchitectureError, match=words):
        read(tmp_path, **changes).check_layout(*layout)


def test_several_ranks_may_share_a_key_value_head(tmp_path: Path) -> None:
    """12 query heads and 4 key-value heads: 12 ranks are 3 for each key-value head, 6 are not."""
    architecture = read(tmp_path, intermediate_size=96, vocab_size=1310)
    architecture.check_layout(12, 1)
    with pytest.raises(ArchitectureError, match="4 key-value heads"):
        architecture.check_layout(6, 1)
    assert [architecture.key_value_heads_on_rank(size) for size in (1, 2, 4, 12)] == [4, 2, 1, 1]


def test_layers_divide_over_pipeline_stages_with_a_shorter_last_one(tmp_path: Path) -> None:
    """64 layers on 5 stages: 64 / 5 rounded up is 13, and 64 - 4 x 13 is 12."""
    architecture = read(tmp_path, num_hidden_layers=64)
    assert architecture.stage_layers(4) == [16, 16, 16, 16]
    assert architecture.shorter_last_stage(5) == 12
    assert architecture.stage_layers(5, 12) == [13, 13, 13, 13, 12]
    assert architecture.shorter_last_stage(4) is None  # the stages are equal
    assert architecture.shorter_last_stage(9) is None  # 8 stages of 8 layers leave none
    with pytest.raises(ArchitectureError, match="leaves 53 layers, .* over the other 4 of"):
        architecture.stage_layers(5, 11)


def test_the_vocabulary_is_padded_to_equal_rows_per_rank(tmp_path: Path) -> None:
    architecture = read(tmp_path)
    assert [architecture.padded_vocab_size(n) for n in (1, 2, 4)] == [131, 132, 132]


def test_blocks_that_a_server_cannot_hold_are_refused(tmp_path: Path) -> None:
    sizes = {"head_dim": 64, "num_key_value_heads": 4, "intermediate_size": 512}
    fits = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, **sizes}
    read(tmp_path, **fits).check_blocks("fp8-block", 2)
    for size, changes, words in (
        (4, {}, "one of 4 server ranks has 192 query channels"),
        (2, {"hidden_size": 192}, "has 192 hidden channels"),
        (2, {"architectures": ["LlamaForCausalLM"]}, "SGLang's Llama"),
    ):
        with pytest.raises(ArchitectureError, match=words):
            read(tmp_path, **{**fits, **changes}).check_blocks("fp8-block", size)
    wide = {"hidden_size": 512, "head_dim": 128, "moe_intermediate_size": 384}
    with_experts = read(tmp_path, **{**MOE, **wide})
    with_experts.check_blocks("fp8-block", 1)
    with_experts.check_blocks("fp8-block", 2, 2)  # each rank has half of the experts, whole
    with pytest.raises(ArchitectureError, match="has 192 intermediate channels"):
        with_experts.check_blocks("fp8-block", 2)


def test_groups_that_a_server_cannot_hold_are_refused_with_what_would_do(tmp_path: Path) -> None:
    """Key-value channels are outputs only: 32 of them on each of two ranks are no matter."""
    sizes = {"head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 512}
    fits = {"hidden_size": 384, "num_attention_heads": 12, **sizes}
    read(tmp_path, **fits).check_blocks("int4")
    read(tmp_path, **fits).check_blocks("int4-g32", 2)
    read(tmp_path, **fits).check_blocks("int8", 12)
    for weight_format, size, words in (
        ("int4", 2, "128 wide, but one of 2 server ranks has 192 query .*; use groups of 32, or"),
        ("int4", 12, "32 query channels; use format int8"),  # 512 / 12 is 42
        ("int4-g32", 12, "32 wide, .* of 12 server ranks has 42 intermediate .*; use format int8"),
    ):
        with pytest.raises(ArchitectureError, match=words):
            read(tmp_path, **fits).check_blocks(weight_format, size)


def test_a_server_divides_experts_over_groups_of_its_ranks(tmp_path: Path) -> None:
    """12 experts of 20 channels; a group's ranks share the channels of each of its experts."""
    architecture = read(tmp_path, **MOE)
    for size, groups in ((1, 1), (4, 1), (4, 4), (12, 3), (12, 6)):
        architecture.check_server_layout(size, groups)
    for size, groups, words in (
        (12, 1, "12 server ranks share each expert, and its 20 channels"),
        (4, 3, "expert_parallel_size=3 must divide tensor_parallel_size=4"),
        (5, 5, "12 attention heads .*=5; .* 1, 2, 3, 4, 6, 12$"),
        (12, 24, "expert_parallel_size=24 must divide"),
    ):
        with pytest.raises(ArchitectureError, match=words):
            architecture.check_server_layout(size, groups)
    dense = read(tmp_path)
    dense.check_server_layout(6)
    with pytest.raises(ArchitectureError, match="this model has none; leave it at 1"):
        dense.check_server_layout(2, 2)
