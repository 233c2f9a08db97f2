"""The `qurl` command: recipes start in every format; wrong input is one line and leaves nothing."""

import importlib
import os
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qurl_megatron import cli
from qurl_megatron.config.schema import ConfigError, UaqConfig
from qurl_megatron.config.text import load, with_overrides
from qurl_megatron.evaluation import evaluate
from qurl_megatron.evaluation.evaluate import EvalConfig
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.recipe import load_recipe
from qurl_megatron.launch.resume import check_as_saved, prepare_resume, warn_of_pickles
from qurl_megatron.recipes import grpo, quickstart
from qurl_megatron.rollout.server import ServerFailed
from recipe_inputs import RECIPES, good_problems, write_inputs
from tiny import EOS_TOKEN_ID, build_fp8_model, build_tiny_model

QURL = Path(sys.executable).with_name("qurl")


def grpo_words(directory: Path, problems: list[str]) -> list[str]:
    """Return a valid `grpo` command on a tiny model with these lines of data."""
    build_tiny_model(directory / "model")
    (directory / "problems.jsonl").write_text("\n".join(problems) + "\n")
    return [
        f"model={directory / 'model'}",
        f"data={directory / 'problems.jsonl'}",
        f"output_dir={directory / 'runs'}",
        "rollout.max_prompt_length=100",
        "rollout.max_completion_length=100",
    ]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return overrides that name a small model and data, by recipe."""
    return {name: write_inputs(name, tmp_path_factory.mktemp(name)) for name in RECIPES}


# Recipes of a dense model, of experts and of a hybrid, in formats that are not theirs.
IN_OTHER_FORMATS = [
    f"{name} quantization.format={weight_format}"
    for name in ("grpo", "quickstart_experts", "quickstart_hybrid")
    for weight_format in ("bf16", "fp8")
]


@pytest.mark.parametrize("case", [*RECIPES, *IN_OTHER_FORMATS])
def test_every_recipe_is_ready_to_start(
    case: str,
    inputs: dict[str, list[str]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, *chosen = case.split()
    monkeypatch.setattr(quickstart, "teach", lambda config, **_: None)
    if name != "quickstart":  # all its problems are checked once
        request.getfixturevalue("short_quickstart")
    recipe = importlib.import_module(f"qurl_megatron.recipes.{name}")
    words = [f"output_dir={tmp_path}", "name=first", *chosen, *inputs[name]]
    config, _ = prepare_new(name, words)
    assert load(tmp_path / "first" / "config.yaml") == config
    if config.model_builder and not inputs[name]:
        assert config.model == str(tmp_path / "first" / "model")
        assert (tmp_path / "first" / "model" / "model.safetensors").exists()

    given = with_overrides(recipe.recipe(), words)
    given.model, given.name = config.model, config.name
    assert given.quantization.uaq.scale >= 1
    if config.quantization.format == "bf16":
        given.quantization.uaq = UaqConfig(scale=1)
    assert config.rollout.stop_token_ids == [EOS_TOKEN_ID]
    given.rollout.stop_token_ids = [EOS_TOKEN_ID]
    given.prompts.template_date = config.prompts.template_date
    if config.rollout.placement == "colocated":  # of which `auto` is decided
        given.rollout.server.releases = config.rollout.server.releases
        given.evaluation.server.releases = config.evaluation.server.releases
    assert config == given  # no value of the recipe was changed
    check_as_saved(load_recipe(name, words), config)  # the same launch is a resume


def test_the_study_of_32b_is_ready_to_start_with_adapters(
    inputs: dict[str, list[str]], tmp_path: Path
) -> None:
    words = [f"output_dir={tmp_path}", "name=first", "adapters.rank=16", *inputs["scaling_32b"]]
    config, _ = prepare_new("scaling_32b", words, writes=False)
    assert config.adapters.rank == 16
    assert config.quantization.uaq == UaqConfig()  # there is no quantized update to scale


def test_a_recipe_takes_a_power_of_two_for_a_model_with_experts_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny_model(tmp_path / "experts", "qwen3_moe")
    words = [*grpo_words(tmp_path, good_problems()), f"model={model}"]
    assert prepare_new("grpo", [*words, "name=two"])[0].quantization.uaq.scale == 2
    assert "uaq.scale=2 for a model with experts, not 1.5\n" in capsys.readouterr().err
    hybrid = [f"model={build_tiny_model(tmp_path / 'hybrid', 'qwen3_5_moe_text')}", "name=one"]
    assert prepare_new("grpo", [*words, *hybrid])[0].quantization.uaq.scale == 1
    off = grpo.recipe()
    off.quantization.uaq = UaqConfig()
    monkeypatch.setattr(grpo, "recipe", lambda: off)
    assert prepare_new("grpo", [*words, "name=off"])[0].quantization.uaq.scale == 1
    words += ["quantization.uaq.scale=1.5"]
    with pytest.raises(ConfigError, match="scale=1.5: a model with experts needs a power of two"):
        prepare_new("grpo", [*words, "name=other"])


def test_deepscaler_stages_are_those_of_the_paper() -> None:
    config = importlib.import_module("qurl_megatron.recipes.deepscaler_grpo").recipe()
    stages = [(step, config.rollout.at(step)) for step in (1, 800, 801, 1200, 1201, config.steps)]
    assert [(step, s.max_completion_length, s.completions_per_prompt) for step, s in stages] == [
        (1, 8192, 8),
        (800, 8192, 8),
        (801, 16384, 16),
        (1200, 16384, 16),
        (1201, 24576, 16),
        (1600, 24576, 16),
    ]


def test_a_run_of_another_user_is_resumed_with_a_warning_of_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path.stat().st_uid
    warn_of_pickles(tmp_path)
    warn_of_pickles(tmp_path / "nowhere")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    os.chown(tmp_path, own or 4242, -1)
    warn_of_pickles(tmp_path)
    assert f"belongs to user {own or 4242}: its checkpoints hold pickles" in capsys.readouterr().err


def test_run_directory_keeps_the_summary_of_its_data(tmp_path: Path) -> None:
    words = grpo_words(tmp_path, [*good_problems(40), good_problems()[0]])
    words += ["rollout.prompts_per_step=8"]
    config, _ = prepare_new("grpo", [*words, "name=first"])
    kept = (config.run_dir / "data.txt").read_text()
    assert "41 entries: 37 to train on, 3 held out, 1 dropped\n" in kept
    assert "problems.jsonl line 41\n" in kept
    assert prepare_new("grpo", [*words, "name=second"], writes=False)[1] == kept
    (config.run_dir / "data.txt").unlink()
    prepare_resume(config.run_dir, ["steps=7"])
    assert (config.run_dir / "data.txt").read_text() == kept


def test_a_resumed_run_keeps_its_stop_tokens_and_its_day(tmp_path: Path) -> None:
    words = [*grpo_words(tmp_path, good_problems()), "name=first"]
    words += ["prompts.template_date=2024-02-29"]
    config, _ = prepare_new("grpo", words)
    generation = Path(config.model) / "generation_config.json"
    generation.write_text('{"eos_token_id": 7}')
    resumed, _ = prepare_resume(config.run_dir, [])
    assert resumed.rollout.stop_token_ids == [EOS_TOKEN_ID]
    assert resumed.prompts.template_date == "2024-02-29"
    given = [*words[:-2], "name=second", "rollout.stop_token_ids=[9,8]"]
    config, summary = prepare_new("grpo", given)
    assert config.rollout.stop_token_ids == [9, 8]
    assert config.prompts.template_date == date.today().isoformat()
    assert "\nan answer ends with: '(' (9), \"'\" (8)\n" in summary


def test_dry_run_prints_the_summary_and_starts_and_writes_nothing(tmp_path: Path) -> None:
    words = ["train", "grpo", *grpo_words(tmp_path, good_problems()), "name=first", "--dry-run"]
    before = sorted(tmp_path.rglob("*"))
    ended = subprocess.run(
        [QURL, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"data: {tmp_path}/problems.jsonl\n  700 entries: ")
    assert "\nchat template: none, " in ended.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_in_fp8_is_ready_to_start_like_the_same_in_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, summaries = grpo_words(tmp_path, good_problems()), []
    for model in build_fp8_model(tmp_path, "qwen2"):
        words[0] = f"model={model}"
        summaries.append(prepare_new("grpo", [*words, "name=first"], writes=False)[1])
    assert summaries[0] == summaries[1]
    assert capsys.readouterr().err.count("/fp8: its FP8 weights are read as BF16\n") == 1


def test_config_prints_yaml_that_loads_back_equal(tmp_path: Path) -> None:
    words = ["steps=7", "rollout.stages.9={max_completion_length: 12, completions_per_prompt: 4}"]
    ended = CliRunner().invoke(cli.app, ["config", "dapo_aime", *words])
    assert (ended.exit_code, ended.stderr) == (0, "")
    (tmp_path / "config.yaml").write_text(ended.stdout)
    recipe = importlib.import_module("qurl_megatron.recipes.dapo_aime").recipe()
    assert load(tmp_path / "config.yaml") == with_overrides(recipe, words)
    assert "# Number of rollout steps.\nsteps: 7\n" in ended.stdout


def test_version_is_that_of_the_distribution() -> None:
    ended = CliRunner().invoke(cli.app, ["--version"])
    assert (ended.exit_code, ended.stdout) == (0, f"qurl-megatron {version('qurl-megatron')}\n")


def test_eval_reports_a_server_that_fails_in_one_message_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: EvalConfig) -> None:
        raise ServerFailed("it died")

    monkeypatch.setattr(evaluate, "check", lambda config: None)
    monkeypatch.setattr(evaluate, "run", fail)
    with pytest.raises(SystemExit) as ended:
        cli.app(["eval", "model", "data.jsonl"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "qurl: it died\n"


def test_a_command_reads_and_writes_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", "from qurl_megatron.cli import main; main()"]
        + ["config", "grpo", "prompts.system_prompt=R\u00e9ponds en \u4e2d"],
        env=environment,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["prompts"]["system_prompt"] == "R\u00e9ponds en \u4e2d"
    assert done.stderr == b""


def test_a_user_without_a_home_gets_one_for_the_caches_of_libraries(tmp_path: Path) -> None:
    program = "import atexit, os; atexit.register(lambda: print(os.environ['HOME']))\n"
    program += "from qurl_megatron.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        env={**os.environ, "HOME": "/nonexistent", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    home = Path(ended.stdout.splitlines()[-1])
    assert home.parent == tmp_path and home.is_dir(), ended.stderr
