"""What `qurl mismatch` says of tokens, layers and activations: by hand, and of a bad layer."""

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.cli import app
from qurl_megatron.config.schema import UaqConfig
from qurl_megatron.extensions.mismatch.mismatch import (
    KeptLayers,
    MismatchOptions,
    choose,
    compare,
    gain,
    read_prompts,
    shortened,
    split,
)
from qurl_megatron.extensions.mismatch.quantized_model import (
    ActivationMeter,
    QuantizedModel,
    SwitchedLinear,
)
from qurl_megatron.memory.estimate import published_bytes
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.tokenizer import load_tokenizer
from qurl_megatron.quantization.activations import quantize_tokens
from qurl_megatron.quantization.quantize import dequantize, quantize
from tiny import EOS_TOKEN_ID, build_tiny_model

torch.set_num_threads(1)
BAD = "model.layers.1.mlp.down_proj"
OUTLIER = 5
ENGLISH = "The capital of France is Paris. It lies on the river Seine, in the north of the country."


def test_divergence_entropy_and_rank_of_two_distributions() -> None:
    exact = torch.tensor([[[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]]).log()
    quantized = torch.tensor([[[0.125, 0.625, 0.25], [0.8, 0.1, 0.1]]]).log()
    measured = compare(quantized, exact, torch.tensor([[1, 0]]))
    kl = 0.125 * math.log(0.25) + 0.625 * math.log(2.5)  # an expectation over `quantized`
    torch.testing.assert_close(measured.kl, torch.tensor([[kl, 0.0]]), atol=1e-7, rtol=1e-6)
    assert measured.entropy[0, 0].item() == pytest.approx(1.5 * math.log(2))
    assert measured.rank.tolist() == [[2, 1]] and measured.position.tolist() == [[0, 1]]


def test_tokens_are_split_by_value_and_rows_have_their_part_of_the_kl() -> None:
    rows = split(torch.tensor([1.0, 2.0, 5.0, 0.0]), torch.tensor([0, 1, 4, 5]), [0, 1, 4, 16])
    assert [tuple(row.values()) for row in rows] == [
        (0, 0.25, 1, 0.125),
        (1, 0.25, 2, 0.25),
        (4, 0.5, 2.5, 0.625),
    ]


def test_a_gain_is_per_token_and_its_error_counts_completions() -> None:
    """Completions of 1 and 3 tokens fall by 2 and 2 nats: 1 per token, off by 1 and -1."""
    before, after = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])
    mean, error = gain(before, after, torch.tensor([1, 3]))
    assert mean == 1.0
    assert error == pytest.approx(math.sqrt((1 + 1) * 2) / 4)
    assert not KeptLayers((), *gain(before[:1], after[:1], torch.tensor([1])), 1).is_significant


def test_the_best_gains_per_byte_are_chosen_within_the_budget() -> None:
    layers = [
        KeptLayers(("large",), 10.0, 1.0, 100),
        KeptLayers(("small",), 4.0, 1.0, 20),
        KeptLayers(("noisy",), 9.0, 5.0, 1),
        KeptLayers(("tiny",), 0.5, 0.1, 10),
    ]
    names = {budget: [x.names[0] for x in choose(layers, budget)] for budget in (130, 110, 20, 9)}
    assert names == {
        130: ["small", "large", "tiny"],
        110: ["small", "tiny"],
        20: ["small"],
        9: [],
    }


def test_a_layer_chosen_in_every_block_is_written_as_a_pattern() -> None:
    every = [f"model.layers.{n}.mlp.{x}_proj" for n in range(2) for x in ("up", "down")]
    assert shortened([every[1], every[2], every[3]], every) == [
        "*.down_proj",
        "model.layers.1.mlp.up_proj",
    ]


def test_experts_are_kept_together_by_the_name_of_their_module() -> None:
    every = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(2) for e in range(3)]
    assert shortened(every[:3], every) == ["model.layers.0.mlp.experts"]
    assert shortened(every, every) == ["*.experts"]


def test_an_outlier_spoils_its_tokens_scale_but_only_its_own_block_of_128_channels() -> None:
    x = torch.ones(2, 300)
    x[0, 200] = 127.0 * 50
    x[:, :3] = -1.25
    meter = ActivationMeter(torch.int8)
    meter.add(x[:1])
    meter.add(x[1:])
    row = meter.measured()
    assert (row["outlier_channel"], row["outlier_ratio"]) == (200, 6350.0)
    per_token = row["error_per_token"]
    codes, scale = quantize_tokens(x, torch.int8)
    assert per_token == pytest.approx(float((codes * scale - x).norm() / x.norm()))
    # Of 300 channels, 127 share a scale with the outlier.
    assert row["error_per_128_channels"] < 0.8 * per_token


def plant(directory: Path) -> Path:
    """Build a model that INT8 hardly changes but for one layer, whose rows have one large weight.

    That weight meets a channel that is almost always 0, so only its scale matters.
    """
    build_tiny_model(directory, num_hidden_layers=3)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            rounded = dequantize(quantize(tensor, "int8"))
            tensors[name] = rounded.bfloat16()
    tensors[f"{BAD}.weight"][:, OUTLIER] = 30.0
    tensors["model.layers.1.mlp.up_proj.weight"][OUTLIER] *= 1e-4
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def mismatch(model: Path, directory: Path, *words: str) -> dict[str, Any]:
    """Run the command on 24 questions; return what it printed and wrote, and the model."""
    data, output = directory / "questions.jsonl", directory / "mismatch.json"
    texts = [chr(97 + n % 26) * (3 + n % 4) + chr(65 + n % 25) for n in range(24)]
    data.write_text("".join(json.dumps({"question": t, "answer": "1"}) + "\n" for t in texts))
    result = CliRunner().invoke(
        app, ["mismatch", str(model), str(data), *words, "--output", str(output)]
    )
    assert result.exit_code == 0, result.output
    return {
        "printed": result.stdout,
        "told": result.stderr,
        **json.loads(output.read_text()),
        "model": model,
    }


TWENTY = ("--prompts", "20", "--max-completion", "12")
FEW = ("--prompts", "4", "--max-completion", "4")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the command on the model with a bad layer."""
    directory = tmp_path_factory.mktemp("mismatch")
    return mismatch(plant(directory / "model"), directory, *TWENTY, "--budget", "0.2")


def test_the_bad_layer_is_found_and_recommended(measured: dict[str, Any]) -> None:
    best = max(measured["by_layer"], key=lambda row: row["gain"])
    assert best["names"] == [BAD]
    assert measured["keep"][0] == BAD
    assert measured["kl_after"] < measured["kl_before"] / 3
    assert f"quantization.keep=[{BAD}" in measured["printed"].replace("\n", "")


def test_figures_of_few_completions_and_of_tokens_come_before_the_layers(
    measured: dict[str, Any],
) -> None:
    lines = measured["told"].splitlines()
    figures = [line for line in lines if "nats a token" in line]
    assert [line.split(" of ")[0] for line in figures] == ["4", "12", "20"]
    assert f"KL {measured['kl']:.3g} nats a token, over {measured['tokens']:,}" in figures[-1]
    assert lines.index(figures[-1]) < min(n for n, line in enumerate(lines) if "passes" in line)
    assert measured["printed"].index("inputs of layers") < measured["printed"].index("layers: fall")


def test_recommended_bytes_are_those_that_a_plan_counts(measured: dict[str, Any]) -> None:
    architecture = Architecture.from_directory(measured["model"])
    before = published_bytes(architecture, "int8")
    after = published_bytes(architecture, "int8", tuple(measured["keep"]))
    assert measured["server_bytes"] == before
    assert measured["added_bytes"] == after - before <= 0.2 * before


def test_tables_cover_all_tokens(measured: dict[str, Any]) -> None:
    assert measured["completions"] == 20
    for shares in measured["by_token"].values():
        assert sum(share["tokens"] for share in shares) == pytest.approx(1)
        assert sum(share["of_kl"] for share in shares) == pytest.approx(1)
        total = sum(share["tokens"] * share["kl"] for share in shares)
        assert total == pytest.approx(measured["kl"])


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def test_a_recipe_says_what_its_run_would_do(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    questions = [{"ask": f"What is {n} + 2?", "answer": f"{n + 2}"} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    recipe, output = tmp_path / "my.yaml", tmp_path / "mismatch.json"
    fields = {
        **{"model": str(model), "data": str(tmp_path / "data.jsonl")},
        "prompts": {
            **{"question_key": "ask", "system_prompt": "Be brief."},
            "chat_template": str(tmp_path / "template.jinja"),
        },
        "rollout": {"temperature": 0.6, "max_prompt_length": 100, "max_completion_length": 3},
        "quantization": {"smoothing": 0.5, "uaq": {"scale": 2}, "keep": ["*.down_proj"]},
        "evaluation": {"problems": 4},
    }
    recipe.write_text(json.dumps(fields))  # which is YAML too
    read: list[Prompt] = []

    def prompts_of(options: MismatchOptions) -> list[Prompt]:
        read.extend(read_prompts(options))
        return read

    words = ["quantization.format=fp8", "--prompts=6", f"--output={output}"]
    with patch("qurl_megatron.extensions.mismatch.mismatch.read_prompts", prompts_of):
        result = CliRunner().invoke(app, ["mismatch", str(recipe), *words])
    assert result.exit_code == 0, result.output
    texts = [load_tokenizer(model).decode(prompt.token_ids) for prompt in read]
    assert len(texts) == 6
    assert all(re.fullmatch(r"<system>Be brief\.<user>What is \d+ \+ 2\?", each) for each in texts)
    assert texts != sorted(texts, key=lambda each: int(each.split()[3]))  # drawn, not the first
    wrote = json.loads(output.read_text())
    assert wrote["tokens"] <= 6 * 3 and "fp8 with smoothing 0.5 with UAQ of 2" in result.stdout
    measured = {key: wrote[key] for key in ("format", "smoothing", "temperature", "uaq", "kept")}
    assert [*measured.values()] == ["fp8", 0.5, 0.6, 2, ["*.down_proj"]]
    layers = {module.rpartition(".")[2] for row in wrote["by_layer"] for module in row["names"]}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    assert {"error", "without"} <= {*result.stdout.split()}


def test_a_models_options_are_no_options_of_a_recipe(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["mismatch", "grpo", "--temperature", "0.6"])
    assert result.exit_code == 2 and "of a recipe, change the field" in result.output


@pytest.mark.parametrize("word", ["adapters.rank=8", "learner.quantized_forward=all"])
def test_a_recipe_whose_learner_multiplies_codes_is_refused(word: str) -> None:
    result = CliRunner().invoke(app, ["mismatch", "quickstart", word])
    assert result.exit_code == 2
    assert f"qurl: {word}: learner and servers multiply the same codes" in result.stderr


def test_uaq_of_a_power_of_two_scales_the_weights_and_changes_no_logit(tmp_path: Path) -> None:
    directory = build_tiny_model(tmp_path / "model")
    models = [
        QuantizedModel(directory, "int8", [EOS_TOKEN_ID], scaling=scaling)
        for scaling in (None, UaqConfig(2))
    ]
    plain, scaled = (model.layers["model.layers.0.self_attn.q_proj"].weight for model in models)
    assert torch.equal(scaled * 2, plain)
    sequences = [([5, 6, 7], [8, 9, 10, 11])]
    before, after = (model.logits(sequences, model.names) for model in models)
    assert torch.equal(before, after)


def test_smoothing_makes_the_error_of_a_result_smaller_where_an_input_has_an_outlier() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=draw).bfloat16()
    x = torch.randn(20, 64, generator=draw).bfloat16()
    x[:, 5] *= 512
    scales = torch.ones(64)
    scales[5] = 32
    meter = ActivationMeter(torch.int8)
    meter.add(x / scales.to(x), SwitchedLinear(weight * scales.to(weight), None, "int8"), scales)
    row = meter.measured()
    plain = ActivationMeter(torch.int8)
    plain.add(x, SwitchedLinear(weight, None, "int8"))
    assert row["result_error_unsmoothed"] == plain.measured()["result_error"]
    assert 0 < row["result_error"] < row["result_error_unsmoothed"] / 2


def check_kept_layers(directory: Path, dtype: torch.dtype) -> None:
    """Check that a model with all layers in BF16 is nearer to transformers' than with codes.

    And that smoothing changes the latter alone. Kept layers multiply in float32, so logits differ
    from transformers' by BF16's rounding.
    """
    model = QuantizedModel(directory, "int8", [EOS_TOKEN_ID])
    sequences = [([5, 6, 7], [8, 9, 10, 11])]
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    with torch.inference_mode():
        expected = plain(torch.tensor([[5, 6, 7, 8, 9, 10, 11]])).logits[:, 2:-1].float()
    kept, codes = model.logits(sequences, model.names), model.logits(sequences)
    assert (kept - expected).norm() < 0.3 * (codes - expected).norm()
    model.smooth([Prompt("0", "", "", [5, 6, 7, 8, 9, 10])], 0.5)
    assert torch.equal(model.logits(sequences, model.names), kept)
    assert not torch.equal(model.logits(sequences), codes)


def test_logits_and_samples_are_those_of_the_temperature(measured: dict[str, Any]) -> None:
    plain = QuantizedModel(measured["model"], "int8", [EOS_TOKEN_ID])
    cold = QuantizedModel(measured["model"], "int8", [EOS_TOKEN_ID], temperature=0.01)
    prompt = Prompt("0", "", "", [5, 6, 7])
    (sampled,) = cold.sample([prompt], 8, seed=0)
    logits = plain.logits([sampled])
    torch.testing.assert_close(cold.logits([sampled]), logits / 0.01)
    assert logits[0].argmax(-1).tolist() == sampled[1]
    assert plain.sample([prompt], 8, seed=0) != [sampled]


def test_the_mismatch_is_that_of_the_runs_temperature(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    """Logits over half the temperature are twice as far apart, and their KL about four times."""
    colder = mismatch(measured["model"], tmp_path, *TWENTY, "--temperature", "0.5")
    assert (measured["temperature"], colder["temperature"]) == (1.0, 0.5)
    assert "at temperature 0.5: KL" in colder["printed"]
    assert 2 < colder["kl"] / measured["kl"] < 6


def test_a_switched_model_is_the_bf16_model_if_all_layers_are_kept(
    measured: dict[str, Any],
) -> None:
    check_kept_layers(measured["model"], torch.float32)


def test_the_experts_of_a_block_are_one_layer_and_compute_what_transformers_computes(
    tmp_path: Path,
) -> None:
    directory = build_tiny_model(tmp_path / "model", "qwen3_moe")
    result = mismatch(directory, tmp_path, *FEW, "--smoothing", "0.5")
    assert "in int8 with smoothing 0.5 at temperature 1: KL" in result["printed"]
    assert "layers.1.mlp.experts" in result["printed"] and "experts.0" not in result["printed"]
    assert any(
        row["gain"] and "model.layers.1.mlp.experts.2.up_proj" in row["names"]
        for row in result["by_layer"]
    )
    check_kept_layers(directory, torch.bfloat16)


def test_the_layers_of_a_hybrid_that_a_server_holds_as_one_are_one(tmp_path: Path) -> None:
    directory = build_tiny_model(tmp_path / "model", "qwen3_5_moe_text")
    result = mismatch(directory, tmp_path, *FEW)
    assert "linear_attn.in_proj_qkv in_proj_z" in result["printed"]
    assert "in_proj_qkv:" not in result["printed"] and "in_proj_a" not in result["printed"]
    module = "model.layers.1.linear_attn"
    parts = [f"{module}.in_proj_qkv:{part}" for part in ("query", "key", "value")]
    gains = {tuple(row["names"]): row["gain"] for row in result["by_layer"]}
    assert gains[(*parts, f"{module}.in_proj_z")] and gains[f"{module}.out_proj",]
    assert any("mlp.shared_expert.down_proj" in name for names in gains for name in names)
    check_kept_layers(directory, torch.bfloat16)


def test_the_int8_copy_of_a_real_model_is_as_far_from_it_as_was_measured(smollm2_dir: Path) -> None:
    """The KL divergence in English is 4.7e-2 with weights and activations in INT8.

    Toys of random weights have a thousandth of it, so what they say of a mismatch is little.
    """
    ids = load_tokenizer(smollm2_dir).encode(ENGLISH, add_special_tokens=False)
    sampled = [(ids[:1], ids[1:])]
    quantized = QuantizedModel(smollm2_dir, "int8", stop_token_ids=[])
    exact = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = exact(torch.tensor([ids])).logits[:, :-1]
    kl = compare(quantized.logits(sampled), logits, torch.tensor([ids[1:]])).kl
    assert 1e-2 < kl.mean() < 0.2
    quantized.smooth([Prompt("0", "", "", ids)], 0.5)
    smoothed = compare(quantized.logits(sampled), logits, torch.tensor([ids[1:]])).kl
    assert smoothed.mean() < 0.6 * kl.mean()
