"""A recipe may be a file of the user's own: what it says is what runs, also without it."""

import dataclasses
import hashlib
import io
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from qurl_megatron import cli
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import load, with_overrides
from qurl_megatron.launch import experiment
from qurl_megatron.launch.experiment import JobOptions, launch
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.recipe import default_name, load_recipe, recipe_names
from qurl_megatron.launch.resume import prepare_resume
from qurl_megatron.recipes import grpo, quickstart
from recipe_inputs import RECIPES

pytestmark = pytest.mark.usefixtures("short_quickstart")

OWN = """\
# An experiment
recipe: quickstart
name: own
steps: 7
objective.objective: tis
rollout:
  temperature: 0.7    # below the section's name
  server.threads: 2   # or with a dotted one
evaluation:
"""
CHANGES = ["name=own", "steps=7", "objective.objective=tis", "rollout.temperature=0.7"]
CHANGES += ["rollout.server.threads=2"]
SHOWN = r"shown answers, step 4: loss \d\.\d+, 0\.0% right\n"


@pytest.fixture(autouse=True)
def in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(*words: str) -> str:
    """Return what `qurl config` prints."""
    ended = CliRunner().invoke(cli.app, ["config", *words])
    assert (ended.exit_code, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


def written(content: str | bytes, name: str = "my.yaml") -> str:
    """Write a file and return its name."""
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_of_a_recipe_is_a_file_of_that_recipe(name: str) -> None:
    page = shown(name)
    file = written(page)
    assert load_recipe(file).config == load_recipe(name).config
    assert (load_recipe(file).package, load_recipe(file).given) == (name, frozenset())
    assert shown(file) == page
    assert shown(file, "steps=7", "seed=3") == shown(name, "steps=7", "seed=3")


def test_a_file_holds_what_differs_from_its_recipe_or_from_the_defaults() -> None:
    expected = with_overrides(load_recipe("quickstart").config, CHANGES)
    assert load_recipe(written(OWN)).config == expected
    file = written(OWN.replace("recipe: quickstart\n", ""), "other.yml")
    assert load_recipe(file).config == with_overrides(Config(), CHANGES)
    config = load_recipe(written(load_recipe(file).as_file())).config
    config.recipe_file = {}
    assert config == with_overrides(Config(), CHANGES)


@pytest.mark.parametrize(
    ("content", "field", "value"),
    [
        ("optimizer: {learning_rate: 2e-6}", "optimizer.learning_rate", 2e-6),
        ("optimizer.learning_rate: 2E-06", "optimizer.learning_rate", 2e-6),
        ("seed: 010", "seed", 10),
        ("steps: 1_000", "steps", 1000),
        ("checkpoint: {keep_best: off}", "checkpoint.keep_best", False),
        ("checkpoint: {keep_best: No}", "checkpoint.keep_best", False),
        ("wandb_project: no", "wandb_project", "no"),
        ("wandb_project: 1e3", "wandb_project", "1e3"),
        ("name: 007", "name", "007"),
        ("data: a.jsonl", "data", "a.jsonl"),
        ("data: [a.jsonl, 'b/*.csv']", "data", "a.jsonl,b/*.csv"),
        ("data: a.jsonl, b.jsonl", "data", "a.jsonl, b.jsonl"),
        ("data: [~/a.jsonl, ~/b.jsonl]", "data", f"{Path.home()}/a.jsonl,{Path.home()}/b.jsonl"),
        ("evaluation: {data: {x: [a, b]}}", "evaluation.data", {"x": "a,b"}),
        ("name: 2026-11-26", "name", "2026-11-26"),
        ("name: ''", "name", ""),
        ("time_limit_s: ~", "time_limit_s", None),
        ("time_limit_s: null", "time_limit_s", None),
        ("learner: {recompute: None}", "learner.recompute", None),
        ("prompts.system_prompt: 'a: b # c'", "prompts.system_prompt", "a: b # c"),
        ("prompts:\n system_prompt: >-\n  Dis\n  en 中", "prompts.system_prompt", "Dis en 中"),
        ("system_prompt: |\n  Think.\n\n  Answer.", "prompts.system_prompt", "Think.\n\nAnswer."),
        ("quantization.keep: '*.down_proj'", "quantization.keep", ["*.down_proj"]),
        ("quantization: {keep: [a, '*.b']}", "quantization.keep", ["a", "*.b"]),
        ("quantization: {keep: []}", "quantization.keep", []),
        ("quantization: {keep: ['[q,k]', b]}", "quantization.keep", ["[q,k]", "b"]),
        ("quantization:\n  uaq.layer_scales: {3: 2}", "quantization.uaq.layer_scales", {3: 2.0}),
        ("prompts.options: {b: 1e-6, c: 1:30}", "prompts.options", {"b": 1e-6, "c": "1:30"}),
        ("data_options.a: '010'\nprompts.options.b: 010", "prompts.options", {"a": "010", "b": 10}),
        ("prompts.options: {b: 2026-11-26}", "prompts.options", {"b": "2026-11-26"}),
        ("evaluation:\n  data:\n    amc: a.jsonl", "evaluation.data", {"amc": "a.jsonl"}),
        ("rollout:\n  # servers: 3\nsteps: 3", "rollout.servers", 1),
    ],
)  # fmt: skip
def test_a_value_is_what_its_writer_meant(content: str, field: str, value: object) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        found: Any = load_recipe(written(content.encode(encoding))).config
        for name in field.split("."):
            found = getattr(found, name)
        assert found == value and type(found) is type(value)


def test_a_file_begins_with_another_beside_it_and_the_later_of_two_values_wins() -> None:
    Path("configs").mkdir()
    written("recipe: quickstart\nsteps: 7\nseed: 1\nprompts.options: {size: 90}\n", "base.yaml")
    written("steps: 8\nrecipe: ../base.yaml\nrollout.temperature: 0.7\n", "configs/my.yaml")
    written("rollout: {temperature: 0.8}\nquantization.keep: [down_proj]\n", "more.yaml")
    read = load_recipe("configs/my.yaml", ["seed=2", "more.yaml", "steps=9"])
    changed = ["prompts.options={size: 90}", "seed=2", "rollout.temperature=0.8", "steps=9"]
    changed += ["quantization.keep=[down_proj]"]
    assert read.config == with_overrides(load_recipe("quickstart").config, changed)
    assert read.package == "quickstart"
    assert read.given == {word.partition("=")[0] for word in changed}
    digests = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in read.files]
    assert [Path(file).name for file in read.files] == ["base.yaml", "my.yaml", "more.yaml"]
    assert list(read.files.values()) == digests
    # From left to right, and after a recipe of the package too.
    assert load_recipe("configs/my.yaml", ["rollout.temperature=1", "more.yaml"]).config == (
        with_overrides(read.config, ["steps=8", "seed=1"])
    )
    assert load_recipe("grpo", ["more.yaml"]).config.rollout.temperature == 0.8
    assert shown("grpo", "more.yaml", "seed=3") == shown(
        "grpo", "seed=3", *changed[2:3], changed[4]
    )
    written("def recipe():\n    from qurl_megatron.recipes import grpo\n"
            "    return grpo.recipe()\n", "own.py")  # fmt: skip
    written("recipe: ../own.py:recipe\n", "configs/python.yaml")
    assert load_recipe("configs/python.yaml").config == grpo.recipe()
    assert [Path(file).name for file in load_recipe("configs/python.yaml").files] == [
        "own.py:recipe",
        "python.yaml",
    ]


def test_messages_name_the_file_and_the_line_that_is_wrong() -> None:
    def refused(*words: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_recipe(words[0], words[1:])
        return str(error.value)

    written("recipe: base.yaml\nseed: 1\n")
    assert refused("my.yaml").startswith("my.yaml, line 1: base.yaml: no such file")
    written("steps: 7\n\nrollout:\n  temperature: warm\n", "base.yaml")
    assert refused("my.yaml").startswith("base.yaml, line 4: rollout.temperature=warm: input")
    assert refused("grpo", "seed=1", "base.yaml").startswith("base.yaml, line 4: ")
    written("steps: 7\nstepz: 8\n", "base.yaml")
    assert refused("my.yaml").startswith("base.yaml, line 2: stepz: no such field; did you mean s")
    written("steps: 7\nrecipe: my.yaml\n", "base.yaml")
    assert refused("my.yaml") == "base.yaml, line 2: recipe: my.yaml would begin with itself"
    assert refused("grpo", "my.yaml") == "my.yaml, line 1: recipe: only the first file may have one"
    assert refused("grpo", "nowhere.yaml").startswith("nowhere.yaml: no such file")
    assert refused("grpo", "my.py:f") == "my.py:f: only the first recipe may be a function"
    written("recipe: grpo\nsteps: 0\n")
    assert refused("my.yaml", "steps=3").startswith("my.yaml, line 2: steps=0: input should be")


def test_words_of_the_command_line_read_numbers_as_files_do(tmp_path: Path) -> None:
    words = ["prompts.options.seed=010", "prompts.options.rate=1e-6", "prompts.options.text='1e-6'"]
    words += ["quantization.keep=['[q,k]', *.b, \"c\"]"]
    config = with_overrides(Config(), [*words, "name=1e-6"])
    assert config.prompts.options == {"seed": 10, "rate": 1e-6, "text": "1e-6"}
    assert config.quantization.keep == ["[q,k]", "*.b", "c"]
    assert load_recipe(written(shown("grpo", *words), "my.yaml")).config == with_overrides(
        grpo.recipe(), words
    )


def test_a_stage_is_a_mapping_in_a_file() -> None:
    stage = {"max_completion_length": 12, "completions_per_prompt": 4}
    for content in (f"rollout: {{stages: {{9: {stage}}}}}", f"rollout.stages.9: {stage}"):
        stages = load_recipe(written(content)).config.rollout.stages
        assert {step: dataclasses.asdict(each) for step, each in stages.items()} == {9: stage}


PYTHON = """\
from qurl_megatron.recipes import quickstart
from neighbour import STEPS


def recipe():
    config = quickstart.recipe()
    config.steps = STEPS
    config.name = "own"
    return config
"""


@pytest.mark.parametrize("name", ["my.yaml", "my.py:recipe"])
def test_a_run_keeps_where_it_is_from_and_resumes_without_its_file(name: str) -> None:
    written("STEPS = 7\n", "neighbour.py")
    path = Path(written(OWN if name == "my.yaml" else PYTHON, name.partition(":")[0]))
    config, _ = prepare_new(name, ["seed=3"])
    assert (config.name, config.steps, config.seed) == ("own", 7, 3)
    assert (config.run_dir / "model" / "model.safetensors").exists()  # the quickstart's, built
    kept = yaml.safe_load((config.run_dir / "config.yaml").read_text())["recipe_file"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert kept == {str(Path(name).absolute()): digest}
    path.unlink()
    resumed, _ = prepare_resume(config.run_dir, ["steps=9"])
    assert (resumed.steps, resumed.recipe_file) == (9, kept)
    assert load(config.run_dir / "config.yaml") == resumed


def test_the_configuration_of_a_run_is_a_recipe_of_another_one() -> None:
    first, _ = prepare_new(written(OWN), [])
    file = str(first.run_dir / "config.yaml")
    second, _ = prepare_new(file, ["name=second"])
    assert list(second.recipe_file) == [str(Path(file).absolute())]
    second.name, second.recipe_file = first.name, first.recipe_file
    assert second == first


def test_a_file_may_have_the_name_of_a_module_that_is_imported_later() -> None:
    for name in ("datasets.py", "json.py"):
        written("def recipe():\n    from qurl_megatron.recipes import grpo\n"
                "    return grpo.recipe()\n", name)  # fmt: skip
    program = "from qurl_megatron.launch.recipe import load_recipe\n"
    program += "load_recipe('json.py:recipe')\nimport datasets, json\njson.dumps(datasets.__path__)"
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_runs_are_named_after_the_file() -> None:
    assert default_name("my exp.yaml").startswith("my_exp-")
    assert default_name("configs/my.py:recipe").startswith("my-")
    assert default_name("...yaml").startswith("run-")
    file = written(OWN.replace("name: own\n", ""))
    for given, expected in (("", "my-sweep-1"), ("x", "x-1")):
        (words,) = experiment.named_runs(file, given, ["seed=1"])
        assert words[-1] == f"name={expected}"


def test_jobs_and_sweeps_get_a_file_that_needs_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(OWN)
    words = ["steps=8", "quantization.uaq.scale=1.5"]  # which the recipe has too
    expected = with_overrides(load_recipe(file).config, words)
    expected.recipe_file = dict(load_recipe(file).files)
    for options in (JobOptions(), None):
        launch(file, words, ["seed=1,2"], options=options, dry_run=True)
        texts = re.findall(r"<<< ('.+?')$", capsys.readouterr().out, re.M | re.S)
        for seed, text in zip((1, 2), texts, strict=True):
            (config,) = shlex.split(text)
            expected.seed, expected.name = seed, f"own-{seed}"
            stdin = SimpleNamespace(buffer=io.BytesIO(config.encode()))
            monkeypatch.setattr(sys, "stdin", stdin)
            read = load_recipe("-")
            assert read.config == expected and "quantization.uaq.scale" in read.given
            assert load_recipe(written(config, "job.yaml")).config == expected
            assert config.startswith(
                f"recipe: quickstart\nname: own-{seed}\nseed: {seed}\nsteps: 8"
            )


def test_a_recipe_of_the_package_wins_over_what_has_its_name() -> None:
    Path("grpo").mkdir()
    written("steps: 7\n", "grpo.yaml")
    assert load_recipe("grpo").config == grpo.recipe()
    assert load_recipe("grpo.yaml").config.steps == 7


def test_the_files_of_the_documentation_are_recipes() -> None:
    page = (Path(cli.__file__).parents[1] / "docs" / "own-model.md").read_text()
    blocks = [textwrap.dedent(text) for text in re.findall(r"(?:^(?: {4}.*)?\n)+", page, re.M)]
    ten_lines, laptop, much = [each for each in blocks if each.strip().startswith("recipe: ")]
    assert load_recipe(written(much)).config.prompts.weights == [1, 2]
    assert load_recipe(written(laptop)).config.rollout.prompts_per_step == 8
    assert len(ten_lines.split("\n\n")[0].splitlines()) <= 12
    (program,) = [block for block in blocks if block.strip().startswith("from qurl_megatron")]
    for file in (written(ten_lines), f"{written(program, 'my.py')}:recipe"):
        config = load_recipe(file).config
        assert (config.data, config.rollout.prompts_per_step) == ("problems.jsonl", 64)


def test_a_plan_and_a_rehearsal_take_a_file() -> None:
    file = written("recipe: scaling_32b\nmodel: Qwen2.5-32B\nrollout.max_completion_length: 4096\n")
    ended = CliRunner().invoke(cli.app, ["plan", file])
    assert ended.exit_code == 0, ended.stderr
    words = ["plan", "scaling_32b", "model=Qwen2.5-32B", "rollout.max_completion_length=4096"]
    assert ended.stdout == CliRunner().invoke(cli.app, words).stdout


def test_what_a_builder_returns_may_teach_the_model_until_it_is_as_good_as_asked_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["name=first", "prompts.options.size=150", "reward=exact"]
    build = "from functools import partial\nfrom qurl_megatron.recipes import quickstart\n"
    build += "def build(directory, seed):\n    quickstart.build_model(directory, seed)\n"
    Path("own.py").write_text(f"{build}    return partial(quickstart.teach, accuracy=0.0)\n")
    config, _ = prepare_new("quickstart", [*words, "model_builder=own.py:build"])
    assert re.fullmatch(SHOWN, capfd.readouterr().out)
    quickstart.build_model(Path("untaught"), config.seed)
    before, after = (
        load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
        for directory in (Path("untaught"), Path(config.model))
    )
    changed = (before != after).any(dim=1)
    assert changed.any() and after.isfinite().all()


def test_a_python_file_without_a_function_is_answered_with_its_functions(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def small():\n    pass\n\ndef helper(x):\n    pass\n\ndef large():\n    pass\n"
    )
    expected = f"{file}: which function? give {file}:small or :large, a function that takes nothing"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_recipe(str(file))


def test_config_without_a_recipe_lists_all_of_them() -> None:
    for help_option in ("-h", "--help"):
        assert "FIELD=VALUE" in CliRunner().invoke(cli.app, ["config", help_option]).stdout
    lines = CliRunner().invoke(cli.app, ["config"]).stdout.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(len(line.split()) > 4 for line in lines)  # each with its meaning
