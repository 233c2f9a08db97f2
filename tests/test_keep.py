"""Layers that stay in BF16: how they are named, and what each part of a run makes of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from typer.testing import CliRunner

from qurl_megatron.cli import app
from qurl_megatron.config.keep import fused_layers, kept_layers, layers_of
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.servers import server_specs
from qurl_megatron.config.text import with_overrides
from qurl_megatron.memory import estimate as memory
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.recipes.scaling_32b import study
from qurl_megatron.sglang_plugin.formats import Int8Config
from qurl_megatron.sglang_plugin.linear import Int8LinearMethod
from tiny import build_tiny_model, quantized

QWEN2 = KNOWN_MODELS["Qwen2.5-32B"]
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["model.layers.3.mlp.down_proj"], ["model.layers.3.mlp.down_proj"]),
        (["model.layers.1"], [f"model.layers.1.{name}" for name in ATTENTION + MLP]),
        (["model.layers.1.*"], [f"model.layers.1.{name}" for name in ATTENTION + MLP]),
        (["*.down_proj"], [f"model.layers.{n}.mlp.down_proj" for n in range(64)]),
        (["layers.[02].*.o_proj"], [f"model.layers.{n}.self_attn.o_proj" for n in (0, 2)]),
    ],
)
def test_a_name_means_all_layers_in_the_module(patterns: list[str], expected: list[str]) -> None:
    assert kept_layers(patterns, QWEN2) == expected


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["lm_head"], "quantization.keep=lm_head: matches no quantized layer (embeddings, norms"),
        (["model.layers.64"], "quantization.keep=model.layers.64: matches no quantized layer"),
        (["own_proj"], "quantization.keep=own_proj: matches no quantized layer"),
        (["layers.6?.o_proj"], "quantization.keep=layers.6?.o_proj: matches no quantized layer"),
        (
            ["model.layers.0.self_attn.k_proj"],
            "has model.layers.0.self_attn.k_proj without model.layers.0.self_attn.q_proj, "
            "model.layers.0.self_attn.v_proj; a server holds them as one layer, so keep all or",
        ),
        (["*.gate_proj"], "has model.layers.0.mlp.gate_proj without model.layers.0.mlp.up_proj"),
    ],
)
def test_a_name_that_fits_no_layer_of_a_server_is_refused(
    patterns: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        kept_layers(patterns, QWEN2)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_list_needs_no_quotes() -> None:
    config = with_overrides(Config(), ["quantization.keep=[*.down_proj, model.layers.0]"])
    assert config.quantization.keep == ["*.down_proj", "model.layers.0"]
    assert with_overrides(config, ["quantization.keep=[]"]) == Config()


def test_rollout_servers_keep_the_layers_and_evaluation_servers_if_quantized() -> None:
    words = ["quantization.keep=[down_proj]", "evaluation.problems=8", "evaluation.data.a=FILE"]
    rollout, evaluation = server_specs(with_overrides(Config(), words))
    assert (rollout.keep, evaluation.keep) == (("down_proj",), ())
    assert (rollout.weight_format, evaluation.weight_format) == ("int8", "bf16")
    words.append("evaluation.quantized=true")
    rollout, evaluation = server_specs(with_overrides(Config(), words))
    assert (evaluation.keep, evaluation.weight_format) == (rollout.keep, "int8")


def test_an_unquantized_method_serves_the_kept_layers_also_where_parts_are_fused() -> None:
    kept = kept_layers(["model.layers.1.self_attn", "*.2.mlp.down_proj"], QWEN2)
    config = Int8Config.from_config({"quant_method": "qurl_int8", "modules_to_not_convert": kept})
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    kinds = {
        path: type(config.get_quant_method(layer, f"model.layers.{path}"))
        for path in ("1.self_attn.qkv_proj", "1.self_attn.o_proj", "2.mlp.down_proj")
        + ("1.mlp.gate_up_proj", "11.self_attn.qkv_proj", "12.mlp.down_proj")
    }
    assert list(kinds.values()) == [UnquantizedLinearMethod] * 3 + [Int8LinearMethod] * 3
    assert config.get_quant_method(torch.nn.Embedding(1, 1), "model.embed_tokens") is None


def test_of_a_hybrid_the_two_layers_that_a_server_holds_as_one_are_kept_together(
    tmp_path: Path,
) -> None:
    hybrid = Architecture.from_directory(build_tiny_model(tmp_path, "qwen3_5_text"))
    module = "model.layers.1.linear_attn"
    parts = [f"{module}.in_proj_qkv:{part}" for part in ("query", "key", "value")]
    assert (*parts, f"{module}.in_proj_z") in fused_layers(hybrid)
    kept = kept_layers(["layers.1.linear_attn"], hybrid)
    assert kept == [*parts, f"{module}.in_proj_z", f"{module}.out_proj"]
    names = layers_of(kept)
    assert names == [f"{module}.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")]
    assert kept_layers(names, hybrid) == kept
    with pytest.raises(ConfigError, match=f"has {module}.in_proj_qkv without {module}.in_proj_z;"):
        kept_layers([f"{module}.in_proj_qkv"], hybrid)
    for gate in ("in_proj_a", "in_proj_b", "conv1d", "linear_attn.norm"):
        with pytest.raises(ConfigError, match=f"keep={gate}: matches no quantized layer"):
            kept_layers([gate], hybrid)

    config = Int8Config(names)
    layer = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(layer)
    kinds = {
        path: type(config.get_quant_method(layer, f"model.layers.{path}"))
        for path in ("1.linear_attn.in_proj_qkvz", "1.linear_attn.out_proj")
        + ("0.linear_attn.in_proj_ba", "0.linear_attn.in_proj_qkvz", "0.linear_attn.out_proj")
    }
    assert list(kinds.values()) == [UnquantizedLinearMethod] * 3 + [Int8LinearMethod] * 2


@pytest.mark.parametrize("weight_format", ["int8", "fp8-block"])
def test_a_quantized_directory_has_the_kept_layers_in_bf16_and_names_them(
    weight_format: str, tmp_path: Path
) -> None:
    source = build_tiny_model(
        tmp_path / "model", hidden_size=128, intermediate_size=256, head_dim=64
    )
    words = ["quantize", str(source), str(tmp_path / "to"), "--format", weight_format]
    result = CliRunner().invoke(app, [*words, "--keep", "*.down_proj", "--keep", "layers.1.mlp"])
    assert result.exit_code == 0, result.output
    kept = kept_layers(["down_proj", "layers.1.mlp"], Architecture.from_directory(source))
    assert len(kept) == 4
    written = load_file(tmp_path / "to" / "model.safetensors")
    expected = quantized(source, weight_format, kept=kept)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    described = json.loads((tmp_path / "to" / "config.json").read_text())["quantization_config"]
    assert described["modules_to_not_convert"] == kept
    if weight_format == "fp8-block":  # SGLang's own layers serve it
        ignored = Fp8Config.from_config(described).ignored_layers
        assert is_layer_skipped("model.layers.1.mlp.gate_up_proj", ignored)
        assert not is_layer_skipped("model.layers.0.mlp.gate_up_proj", ignored)

    result = CliRunner().invoke(app, [*words[:2], str(tmp_path / "no"), "--keep", "lm_head"])
    assert result.exit_code == 2 and not list(tmp_path.glob("no*"))


def test_a_kept_weight_takes_two_bytes_and_no_scales_wherever_it_is() -> None:
    """down_proj of Qwen2.5-32B: 64 layers of 27648 x 5120, one scale for each of 5120 rows."""
    words = ["quantization.keep=[*.down_proj]", "quantization.publish=delta"]
    plain = with_overrides(study("", 64, "int8"), words[1:])
    config = with_overrides(plain, words)
    keep = tuple(config.quantization.keep)
    numel = 27648 * 5120
    added = 64 * (numel - 4 * 5120)
    published = [memory.published_bytes(QWEN2, "int8", names) for names in ((), keep)]
    assert published[1] - published[0] == added
    server = [memory.server_weight_bytes(QWEN2, "int8", 4, names) for names in ((), keep)]
    assert server[1]["linear"] - server[0]["linear"] == 64 * (numel // 4 - 4 * 5120)
    assert server[1]["unquantized"] == server[0]["unquantized"]
    learner = [memory.learner_memory(QWEN2, c, 0)["converter"] for c in (plain, config)]
    assert learner[1] - learner[0] == 13 * (numel - 4 * 5120) // 8
    everything = tuple(name for group in fused_layers(QWEN2) for name in group)
    in_bf16 = memory.published_bytes(QWEN2, "bf16")
    assert memory.published_bytes(QWEN2, "int8", everything) == in_bf16
