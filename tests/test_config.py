"""Overrides, their types and their errors; checks of a configuration; field documentation."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
import yaml
from annotated_types import Ge, Gt, Le, Lt

from qurl_megatron.config.fields import describe, field_docs
from qurl_megatron.config.overrides import overrides_between, with_overrides
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    CriticConfig,
    LearnerConfig,
    OptimizerConfig,
    RecomputeMode,
    ServerConfig,
    StageConfig,
    UaqConfig,
)
from qurl_megatron.config.tree import from_tree
from qurl_megatron.config.validate import _FIXED, validate, validate_resume, validate_server
from qurl_megatron.config.yaml_file import commented_yaml, load, save
from qurl_megatron.evaluation.avg_at_k import EvalConfig
from qurl_megatron.launch.placement import place_servers
from qurl_megatron.launch.serve import ServeConfig
from qurl_megatron.recipes.qwen3_moe import ARCHITECTURES
from recipe_inputs import RECIPES
from tiny import build_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tiny_model(directory)
    return directory


def runnable(model_dir: Path, *overrides: str) -> Config:
    """Return a valid configuration with `overrides` applied."""
    words = [
        f"model={model_dir}",
        "data=problems.jsonl",
        "rollout.max_prompt_length=8",
        "rollout.max_response_length=8",
    ]
    return with_overrides(Config(), [*words, *overrides])


def test_overrides_take_the_type_of_their_field() -> None:
    config = with_overrides(
        Config(),
        ["steps=7", "rollout.temperature=0.6", "learner.dtype=float32", "time_limit_s=none"],
    )
    assert (config.steps, config.rollout.temperature) == (7, 0.6)
    assert (config.learner.dtype, config.time_limit_s) == ("float32", None)


def test_task_options_can_be_new_and_keep_their_yaml_types() -> None:
    config = with_overrides(Config(), ["data_options.min_word_len=3", "data_options.mode=easy"])
    assert config.data_options == {"min_word_len": 3, "mode": "easy"}


def test_a_free_form_dict_is_replaced_as_a_whole_or_key_by_key() -> None:
    config = Config(data_options={"size": 10, "mode": "easy"})
    assert with_overrides(config, ["data_options={}"]).data_options == {}
    words = ["data_options={size: 3, words: [1, b]}", "data_options.size=4"]
    assert with_overrides(config, words).data_options == {"size": 4, "words": [1, "b"]}
    server = with_overrides(Config(), ["rollout.server.options={dtype: half}"]).rollout.server
    assert server.options == {"dtype": "half"}


def test_layer_scales_are_keyed_by_layer_number() -> None:
    config = with_overrides(Config(), ["quantization.uaq.layer_scales.3=1.25"])
    assert config.quantization.uaq.layer_scales == {3: 1.25}


STAGES = [
    "rollout.stages.4={max_response_length: 12, completions_per_prompt: 4}",
    "rollout.stages.7={max_response_length: 10, completions_per_prompt: 2}",
]


def test_later_stage_changes_length_and_group_size_only() -> None:
    words = ["rollout.max_response_length=6", "rollout.completions_per_prompt=8"]
    rollout = with_overrides(Config(), [*STAGES, *words, "rollout.temperature=0.6"]).rollout
    shapes = [
        (rollout.at(step).max_response_length, rollout.at(step).completions_per_prompt)
        for step in (1, 3, 4, 6, 7, 100)
    ]
    assert shapes == [(6, 8), (6, 8), (12, 4), (12, 4), (10, 2), (10, 2)]
    assert rollout.at(4).temperature == 0.6
    assert (
        rollout.max_length == rollout.max_prompt_length + 12
    )  # the servers are started for the longest stage


def test_evaluation_files_have_names() -> None:
    evaluation = with_overrides(
        Config(), ["evaluation.data.aime24=/data/aime", "evaluation.data.gsm8k=/data/gsm8k:test"]
    ).evaluation
    assert evaluation.data == {"aime24": "/data/aime", "gsm8k": "/data/gsm8k:test"}


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("evaluation.problems=8", True),
        ("evaluation.problems=0", False),
        ("evaluation.held_out_fraction=0", False),
        ("evaluation.problems=0 evaluation.data.aime=FILE", True),
    ],
)
def test_evaluation_server_runs_only_if_there_is_something_to_measure(
    words: str, runs: bool
) -> None:
    assert with_overrides(Config(), words.split()).evaluation.enabled is runs


def test_a_file_of_a_run_that_recomputed_activations_loads_as_full_recomputation(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    cases: list[tuple[str, RecomputeMode | None]] = [("true", "full"), ("false", None)]
    for saved, mode in cases:
        path.write_text(f"learner: {{recompute_activations: {saved}}}\n")
        assert load(path) == Config(learner=LearnerConfig(recompute=mode))


def test_saved_configuration_loads_back_equal(tmp_path: Path) -> None:
    words = ["seed=3", "data_options.size=9", "time_limit_s=60", "evaluation.data.aime=FILE"]
    config = with_overrides(Config(), [*words, *STAGES])
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("steps", "steps: not of the form field=value"),
        (
            "rollout.topp=1",
            "rollout.topp: no such field; did you mean rollout.top_p (Must stay 1 in training: "
            "SGLang does not renormalize the log-probs of truncated sampling)?",
        ),
        ("rolout.temprature=1", "did you mean rollout.temperature (Sampling temperature in tra"),
        (
            "objective.rato_cap=1",
            "(Cap C on the ratio of proximal to behaviour probability (Eq. 5 ",
        ),
        (
            "temperature=1",
            "temperature: no such field; did you mean rollout.temperature (Sampling temperature in "
            "training) or evaluation.temperature (Sampling temperature of the answers for Avg@k)?",
        ),
        ("rollout=1", "rollout: no such field"),
        ("rollout={}", "rollout: no such field"),
        ("data_options=9", "data_options=9: not of the form {key: value}; {} leaves no key"),
        ("data_options={", "data_options={: not readable as YAML"),
        ("data_options.a.b=9", "data_options.a.b: no such field"),
        ("rollout.server.threads.x=1", "no such field"),
        ("steps=many", "steps=many: input should be a valid integer"),
        ("steps=0", "steps=0: input should be greater than or equal to 1"),
        (
            "rollout.temperature=0",
            "rollout.temperature=0: input should be greater than or equal to 0.01",
        ),
        ("rollout.completions_per_prompt=0", "greater than or equal to 1"),
        ("evaluation.held_out_fraction=1", "should be less than 1"),
        ("objective.objective=ppo", "'naive', 'on_policy', 'decoupled', 'tis' or 'acr'"),
        (
            "quantization.uaq.scale=inf",
            "quantization.uaq.scale=inf: input should be a finite number",
        ),
        ("quantization.uaq.layer_scales.two=1.5", "layer_scales.two: input should be a valid int"),
        ("rollout.stages.4=12", "rollout.stages.4=12: input should be a dictionary or an instance"),
        ("rollout.stages.4={max_response_length: 12}", "rollout.stages.4.completions_per_prompt"),
        (
            "rollout.stages.4={max_response_length: 0, completions_per_prompt: 2}",
            "rollout.stages.4.max_response_length=0: input should be greater than or equal to 1",
        ),
        ("rollout.stages.4={max_response", "rollout.stages.4={max_response: not readable as YAML"),
        ("rollout.stages.1={}", "rollout.stages.1: input should be greater than or equal to 2"),
        (
            "evaluation.data.a/b=FILE",
            "evaluation.data.a/b: a name has letters, digits and _ - only",
        ),
        ("evaluation.data.-a=FILE", "evaluation.data.-a: a name has letters"),
        ("data_options.--size=9", "data_options.--size: an option's name has letters"),
        ("data_options.a b=9", "data_options.a b: an option's name has letters"),
        ("steps=1\n2", r"'steps=1\n2': input should be a valid integer"),
        ("evaluation.top_p=0", "evaluation.top_p=0: input should be greater than 0"),
        ("quantization.format=int3", "'bf16', 'int8', 'int4', 'fp8', 'fp8-tensor' or 'fp8-block'"),
    ],
)
def test_wrong_override_is_named_on_one_line(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_overrides(Config(), [word])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["", "first", "sweep-acr-int8-1.5", "grpo-20261122-101500", "_x", "1e-6", "a+b"]
)
def test_run_names_that_are_safe_in_a_path_and_a_shell_are_accepted(name: str) -> None:
    assert with_overrides(Config(), [f"name={name}"]).name == name


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "..", ".x", "a b", "-rf", "$(x)", "a;b", "a\nb"]
)
def test_unsafe_run_names_are_refused_on_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_overrides(Config(), [f"name={name}"])
    assert "a run's name has letters, digits and _ . + - only" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["runs", "/data/my runs", "../runs", "~/runs_2.0", "a=b,c"])
def test_ordinary_output_directories_are_accepted(path: str) -> None:
    assert with_overrides(Config(), [f"output_dir={path}"]).output_dir == path


@pytest.mark.parametrize("path", ["-x", "a\nb", "$(x)", "`x`", "a;b", "a&b", "a|b", "a>b", "'a'"])
def test_unsafe_output_directories_are_refused_on_one_line(path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_overrides(Config(), [f"output_dir={path}"])
    assert "a directory's name must not begin with - or have" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", RECIPES)
def test_commented_yaml_loads_back_equal_and_documents_every_field(
    name: str, tmp_path: Path
) -> None:
    recipe = importlib.import_module(f"qurl_megatron.recipes.{name}").recipe()
    config = with_overrides(recipe, ["name=first", "data_options.words=[1, b]", *STAGES])
    path = tmp_path / "config.yaml"
    path.write_text(commented_yaml(config))
    assert load(path) == config
    comments = re.sub(r"\n *# ", " ", path.read_text())
    for field in describe(Config):
        assert field.meaning in comments, field.path
    assert max(map(len, path.read_text().splitlines())) <= 100


@pytest.mark.parametrize("text", ["", "- steps\n", "steps\n"])
def test_a_file_without_fields_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: not a mapping of fields to values$"):
        load(path)


def test_valid_configuration_is_accepted(model_dir: Path) -> None:
    assert validate(runnable(model_dir)).family == "qwen2"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.top_p=0.9", "training needs top_p=1 and top_k=-1"),
        ("rollout.top_k=50", "training needs top_p=1 and top_k=-1"),
        (
            "rollout.servers=0",
            "rollout.servers=0: nobody samples; give servers, or rollout.servers",
        ),
        (
            "rollout.servers_at=[http://127.0.0.1:1] rollout.min_servers=3",
            "rollout.min_servers=3: must be at most rollout.servers=1 plus 1 elsewhere",
        ),
        (
            "rollout.servers_at=[http://127.0.0.1:1,http://127.0.0.1:1]",
            "rollout.servers_at: lists a server twice",
        ),
        ("optimizer.minibatches_per_step=3", "do not divide into minibatches"),
        (
            "rollout.prompts_per_step=1 optimizer.minibatches_per_step=4"
            " rollout.stages.9={'max_response_length':8,'completions_per_prompt':6}",
            "rollout.stages.9.completions_per_prompt) do not divide into minibatches",
        ),
        (
            "rollout.soft_overlong_tokens=5"
            " rollout.stages.9={'max_response_length':5,'completions_per_prompt':8}",
            "less than rollout.stages.9.max_response_length=5",
        ),
        (
            "rollout.stages.9={'max_response_length':1000000,'completions_per_prompt':8}",
            "rollout.stages.9.max_response_length=1000000: with rollout.max_prompt_length=8",
        ),
        ("evaluation.data.held_out=FILE", "evaluation.data.held_out: this name is reserved"),
        ("data=", "data=: missing"),
        ("model=", "model=: missing"),
        ("model=/no/such/directory", "/no/such/directory"),
        ("learner.tensor_parallel_size=3", "tensor_parallel_size=3"),
        ("learner.pipeline_parallel_size=5", "pipeline_parallel_size=5"),
        (
            "rollout.server.tensor_parallel_size=3",
            "rollout.server: 4 attention heads are not divisible by",
        ),
        (
            "rollout.server.expert_parallel_size=2",
            "rollout.server: expert_parallel_size=2 divides experts, and this model has none",
        ),
        ("rollout.routing=replay", "rollout.routing=replay: the model has no experts"),
        ("rollout.max_response_length=1000000", "that is 1000008 tokens, and the model has"),
        ("rollout.max_prompt_length=1000000", "max_prompt_length=1000000: the model has"),
        ("quantization.uaq.layer_scales.2=1.5", "layers are numbered from 0 to 1"),
        ("quantization.keep=[*.q_proj]", "a server holds them as one layer, so keep all or none"),
        ("objective.kl_coefficient=1 warmup.max_steps=5", "the model before its warm-up"),
        (
            'quantization.transport=direct rollout.servers_at=["http://localhost:1"]',
            "quantization.transport=direct: the servers of rollout.servers_at are on other",
        ),
        (
            "quantization.transport=direct quantization.publish=auto",
            "quantization.publish=auto: with quantization.transport=direct all tensors are written",
        ),
        ("rollout.soft_overlong_tokens=8", "less than rollout.max_response_length=8"),
        ("quantization.format=fp8-block", "has 64 query channels; use format fp8"),
        ("learner.virtual_pipeline_parallel_size=2", "pipeline_parallel_size=1 has none"),
        ("learner.layers_in_last_pipeline_stage=1", "do not divide over the other 0"),
        ("rollout.completions_per_prompt=1", "advantage_estimator=gae takes one"),
        (
            "rollout.stages.9={'max_response_length':8,'completions_per_prompt':1}",
            "rollout.stages.9.completions_per_prompt=1: grpo compares",
        ),
        (
            "advantage_estimator=gae critic.optimizer.minibatches_per_step=64"
            " rollout.stages.9={'max_response_length':8,'completions_per_prompt':1}"
            " rollout.prompts_per_step=32",
            "a step's 32 completions do not divide",
        ),
        ("advantage_estimator=gae critic.tensor_parallel_size=2", "policy's 1 ranks"),
        ("advantage_estimator=gae critic.optimizer.minibatches_per_step=3", "of the critic"),
        (
            "advantage_estimator=gae critic.model=/no/such/directory",
            "critic: model directory '/no/such/",
        ),
    ],
)
def test_field_that_does_not_fit_is_named_on_one_line(
    model_dir: Path, word: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(runnable(model_dir, *word.split()))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_blocks_of_experts_must_lie_on_one_rank_of_a_server() -> None:
    """An expert of Qwen3-30B-A3B has 768 channels, 192 on each of four ranks that share it."""
    architecture = ARCHITECTURES["Qwen3-30B-A3B"]
    shared, whole = ServerConfig(4), ServerConfig(4, expert_parallel_size=4)
    validate_server("server", whole, architecture, "fp8-block", 100)
    validate_server("server", shared, architecture, "fp8", 100)
    with pytest.raises(ConfigError, match=r"^server: fp8-block's .* has 192 intermediate channels"):
        validate_server("server", shared, architecture, "fp8-block", 100)


@pytest.mark.parametrize("objective", ["naive", "decoupled", "tis", "acr"])
def test_stale_tokens_are_accepted_by_objectives_that_know_the_sampling_policy(
    model_dir: Path, objective: str
) -> None:
    stale = "rollout.max_staleness=2"
    validate(runnable(model_dir, stale, f"objective.objective={objective}"))
    with pytest.raises(ConfigError, match=r"^rollout.max_staleness=2: .*on_policy treats every"):
        validate(runnable(model_dir, stale, "objective.objective=on_policy"))


def test_ppo_accepts_one_completion_per_prompt(model_dir: Path) -> None:
    words = ["advantage_estimator=gae", "rollout.completions_per_prompt=1"]
    assert validate(runnable(model_dir, *words)).family == "qwen2"


def test_critic_has_its_own_layout_on_the_policy_ranks() -> None:
    policy = LearnerConfig(
        4, 2, 2, virtual_pipeline_parallel_size=2, layers_in_last_pipeline_stage=3
    )
    assert CriticConfig().layout(policy) == policy
    own = CriticConfig(tensor_parallel_size=2, pipeline_parallel_size=1).layout(policy)
    assert (own.tensor_parallel_size, own.pipeline_parallel_size, own.data_parallel_size) == (
        2,
        1,
        8,
    )
    assert (own.virtual_pipeline_parallel_size, own.layers_in_last_pipeline_stage) == (1, None)


def test_warmup_needs_evaluation_problems(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation.problems=0"):
        validate(runnable(model_dir, "warmup.max_steps=5", "evaluation.problems=0"))


@pytest.mark.parametrize("missing", ["tokenizer", "safetensors"])
def test_incomplete_model_directory_is_named(tmp_path: Path, missing: str) -> None:
    build_tiny_model(tmp_path)
    for path in tmp_path.iterdir():
        if missing in path.name or (missing == "tokenizer" and path.name == "vocab.json"):
            path.unlink()
    with pytest.raises(ConfigError, match=missing):
        validate(runnable(tmp_path))


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_of_a_recipe_is_valid_for_its_field(name: str) -> None:
    config = importlib.import_module(f"qurl_megatron.recipes.{name}").recipe()
    as_yaml = yaml.safe_dump(dataclasses.asdict(config))
    assert from_tree(Config, yaml.safe_load(as_yaml)) == config
    with_types = yaml.safe_dump(dataclasses.asdict(with_overrides(config, [])))
    assert with_types == as_yaml  # 1 where 1.0 belongs would differ here


def test_quickstart_fits_the_model_it_builds(tmp_path: Path) -> None:
    recipe = importlib.import_module("qurl_megatron.recipes.quickstart")
    recipe.build_model(tmp_path, seed=0)
    assert validate(with_overrides(recipe.recipe(), [f"model={tmp_path}"])).vocab_size == 259


# Words that change what must not change when a run resumes, each with the reason.
FIXED = {
    "model=other": "its weights depend on it",
    "learner.dtype=float32": "its weights depend on it",
    "critic.model=other": "its weights depend on it",
    "quantization.uaq.scale=2": "its weights depend on it",
    "quantization.uaq.through_up=true": "its weights depend on it",
    "advantage_estimator=gae": "made with or without a critic",
    "data=other.jsonl": "position in the data",
    "data_options.size=7": "position in the data",
    "question_key=text": "position in the data",
    "answer_key=text": "position in the data",
    "overlong_prompts=refuse": "position in the data",
    "rollout.max_prompt_length=9": "position in the data",
    "seed=1": "position in the data",
    "evaluation.held_out_fraction=0.3": "position in the data",
    "evaluation.data.aime=FILE": "position in the data",
    "warmup.max_steps=9": "its warm-up is over",
    "name=other": "is stored under it",
    "output_dir=elsewhere": "is stored there",
}


def prefix_of(word: str) -> str:
    return next(filter(word.startswith, _FIXED))


@pytest.mark.parametrize("word", FIXED)
def test_resume_refuses_changes_that_contradict_the_checkpoints(word: str) -> None:
    saved = Config(data="problems.jsonl")
    with pytest.raises(ConfigError, match=rf"^{re.escape(prefix_of(word))}.*{FIXED[word]}"):
        validate_resume(saved, with_overrides(saved, [word]))
    validate_resume(saved, with_overrides(saved, ["learner.tensor_parallel_size=2", "steps=7"]))


def test_every_field_that_resume_refuses_is_changed_above() -> None:
    assert {prefix_of(word) for word in FIXED} == _FIXED.keys()


@pytest.mark.parametrize(("before", "after"), [(8, 0), (0, 8)])
def test_resume_refuses_to_begin_or_to_end_holding_problems_out(before: int, after: int) -> None:
    saved = with_overrides(Config(), [f"evaluation.problems={before}"])
    word = f"evaluation.problems={after}"
    refusal = f"^{word}: the run has {before}, and with 0 nothing is held out, so its position in"
    with pytest.raises(ConfigError, match=refusal):
        validate_resume(saved, with_overrides(saved, [word]))
    # Neither another number of problems to measure on nor one that is not used moves a problem.
    validate_resume(saved, with_overrides(saved, [f"evaluation.problems={before and 9}"]))
    holds_none = with_overrides(saved, ["evaluation.held_out_fraction=0"])
    validate_resume(holds_none, with_overrides(holds_none, [word]))


def test_wandb_is_required_only_if_the_run_uses_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate(runnable(model_dir, "wandb_project=project"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    validate(runnable(model_dir))
    with pytest.raises(ConfigError, match="wandb_project=project: the package wandb is not insta"):
        validate(runnable(model_dir, "wandb_project=project"))


def test_fp8_is_refused_where_transformer_engine_is_not_installed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="^learner.fp8=blockwise: needs Transformer Engine on a"):
        validate(runnable(model_dir, "learner.fp8=blockwise"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "transformer_engine")
    validate(runnable(model_dir, "learner.fp8=blockwise"))


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("quantization.uaq.scale=1.5", "scale=1.5: a model with experts needs a power of two"),
        (
            "quantization.uaq.scale=2 quantization.uaq.layer_scales.1=3",
            "layer_scales.1=3: a model with experts needs a power of two",
        ),
        (
            "quantization.uaq.scale=2 learner.expert_parallel_size=3",
            "8 experts are not divisible by expert_parallel_size=3",
        ),
        (
            "quantization.uaq.scale=2 learner.expert_parallel_size=2",
            "must divide the 1 ranks of a pipeline stage",
        ),
        (
            "quantization.uaq.scale=2 rollout.server.tensor_parallel_size=5",
            "rollout.server: 4 attention heads are not",
        ),
    ],
)
def test_a_run_that_does_not_fit_experts_is_refused(
    experts_dir: Path, words: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        validate(runnable(experts_dir, *words.split()))


def test_experts_divide_over_ranks_that_the_learner_has(experts_dir: Path, model_dir: Path) -> None:
    words = ["quantization.uaq.scale=0.5", "learner.data_parallel_size=4"]
    validate(runnable(experts_dir, *words, "learner.expert_parallel_size=4"))
    with pytest.raises(ConfigError, match="expert_parallel_size=4 .* the model has none"):
        validate(runnable(model_dir, *words, "learner.expert_parallel_size=4"))


def on_gpus(num_gpus: int, *words: str) -> dict[str, list[list[int]]]:
    small = ["rollout.server.mem_fraction_static=0.4", "evaluation.server.mem_fraction_static=0.4"]
    return place_servers(with_overrides(Config(), [*small, *words]), num_gpus)


def test_servers_come_after_the_learner_and_share_its_gpus_if_none_are_left() -> None:
    words = ["learner.tensor_parallel_size=2", "rollout.server.tensor_parallel_size=2"]
    assert on_gpus(0, *words) == {"rollout": [[]], "evaluation": [[]]}
    assert on_gpus(5, *words) == {"rollout": [[2, 3]], "evaluation": [[4]]}
    assert on_gpus(4, *words) == {"rollout": [[2, 3]], "evaluation": [[0]]}
    assert on_gpus(3, *words) == {"rollout": [[0, 1]], "evaluation": [[2]]}
    assert on_gpus(1) == {"rollout": [[0]], "evaluation": [[0]]}
    assert on_gpus(1, "evaluation.problems=0") == {"rollout": [[0]]}
    with_files = on_gpus(1, "evaluation.problems=0", "evaluation.data.x=FILE")
    assert with_files == {"rollout": [[0]], "evaluation": [[0]]}
    two = on_gpus(7, *words, "rollout.servers=2")
    assert two == {"rollout": [[2, 3], [4, 5]], "evaluation": [[6]]}


def test_more_ranks_than_gpus_are_refused() -> None:
    for field in ("learner", "rollout.server"):
        with pytest.raises(ConfigError, match=rf"^{field}.tensor_parallel_size: 4.*machine has 2"):
            on_gpus(2, f"{field}.tensor_parallel_size=4")


def test_servers_that_leave_no_memory_for_the_learner_on_their_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^rollout.*shares GPU 0 with rollout and evaluation"):
        on_gpus(1, "rollout.server.mem_fraction_static=0.5")
    assert on_gpus(2, "rollout.server.mem_fraction_static=0.9")["rollout"] == [[1]]


def test_overrides_between_two_configurations_turn_one_into_the_other() -> None:
    words = [
        "steps=7",
        "data_options.size=100",
        "data_options.words=[1, b]",
        "quantization.uaq.layer_scales.3=2",
        "quantization.format=fp8",
        "rollout.servers_at=[http://10.0.0.1:30000, 'https://host/a']",
        "learner.layers_in_last_pipeline_stage=2",
    ]
    config = Config(data_options={"size": 10})
    changed = with_overrides(config, words)
    assert with_overrides(config, overrides_between(config, changed)) == changed
    assert overrides_between(changed, changed) == []
    back = overrides_between(changed, with_overrides(changed, ["time_limit_s=3"]))
    assert back == ["time_limit_s=3.0"]
    unset = with_overrides(changed, ["learner.layers_in_last_pipeline_stage=null"])
    assert overrides_between(changed, unset) == ["learner.layers_in_last_pipeline_stage=null"]
    fewer = Config(data_options={"size": 100})
    assert overrides_between(Config(data_options={"size": 100, "mode": "easy"}), fewer) == [
        'data_options={"size": 100}'
    ]
    none = with_overrides(changed, ["quantization.uaq.layer_scales={}", "data_options={}"])
    assert with_overrides(changed, overrides_between(changed, none)) == none


def config_dataclasses(kind: type) -> set[type]:
    """Return a configuration dataclass and every dataclass that its fields hold."""
    kinds = {kind}
    for hint in typing.get_type_hints(kind).values():
        for part in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                kinds |= config_dataclasses(part)
    return kinds


def test_every_field_has_a_docstring() -> None:
    kinds = {
        part for kind in (Config, EvalConfig, ServeConfig) for part in config_dataclasses(kind)
    }
    assert {StageConfig, UaqConfig, OptimizerConfig, ServerConfig, EvalConfig} < kinds
    for kind in kinds:
        docs = field_docs(kind)
        assert list(docs) == [field.name for field in dataclasses.fields(kind)]
        for name, meaning in docs.items():
            assert len(meaning.split()) > 1 and meaning.endswith("."), f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    ("ending", "unit"),
    [("_s", "seconds"), ("_bytes", "bytes"), ("_length", "tokens"), ("_tokens", "tokens")],
)
def test_docstrings_name_the_unit_of_a_size_or_time(ending: str, unit: str) -> None:
    fields = [
        field
        for kind in (Config, EvalConfig, ServeConfig)
        for field in describe(kind)
        if field.path.endswith(ending)
    ]
    assert fields
    assert [field.path for field in fields if unit not in field.meaning] == []


def test_description_of_a_field_says_what_it_accepts() -> None:
    fields = {field.path: field for field in describe(Config)}
    assert fields["steps"].type == "int >= 1"
    assert fields["evaluation.top_p"].type == "float > 0 and <= 1"
    assert fields["quantization.uaq.scale"].type == "float >= 0.001 and <= 1000"
    assert fields["optimizer.weight_decay"].type == "float >= 0"  # nobody meets its upper bound
    assert fields["time_limit_s"].type == "float > 0 or null"
    assert fields["learner.dtype"].type == '"float32" | "bfloat16"'
    assert fields["rollout.stages"].type == (
        "{int >= 2: {max_response_length: int >= 1, completions_per_prompt: int >= 1 "
        "and <= 65536}, ...}"
    )
    assert fields["optimizer.learning_rate"].default == "1e-06"
    assert fields["critic.optimizer.learning_rate"].default == "1e-05"  # not OptimizerConfig's own
    assert fields["rollout.server.threads"].section == "One SGLang server."


def test_descriptions_take_a_prefix_and_required_fields() -> None:
    paths = [(field.path, field.default) for field in describe(StageConfig, "stage.")]
    assert paths == [
        ("stage.max_response_length", "null"),
        ("stage.completions_per_prompt", "null"),
    ]


def test_field_without_a_docstring_is_named() -> None:
    with pytest.raises(LookupError, match=r"^Undocumented\.size has no docstring"):
        field_docs(Undocumented)


@dataclasses.dataclass
class Undocumented:
    size: int = 0


def numbers(kind: type, prefix: str = "") -> Iterator[tuple[str, typing.Any]]:
    """Yield the path and the type of every number in a dataclass and in what it holds."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        yield from numbers_in(hint, prefix + name)


def numbers_in(hint: typing.Any, path: str) -> Iterator[tuple[str, typing.Any]]:
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        yield from numbers(hint, f"{path}.")
    elif typing.get_origin(hint) is typing.Annotated:
        if typing.get_args(hint)[0] in (int, float):
            yield path, hint
    elif hint in (int, float):
        yield path, hint
    else:
        for part in typing.get_args(hint):
            yield from numbers_in(part, path)


@pytest.mark.parametrize("kind", [Config, EvalConfig, ServeConfig])
def test_every_number_has_a_lower_and_an_upper_bound(kind: type) -> None:
    unbounded = {"rollout.top_p", "rollout.top_k"}  # `validate` allows one value of each
    # SGLang's own options, which it checks itself.
    unbounded |= {"rollout.server.options", "evaluation.server.options", "server.options"}
    found = {path: hint for path, hint in numbers(kind) if path not in unbounded}
    assert len(found) > 8
    for path, hint in found.items():
        bounds = {type(bound) for bound in getattr(hint, "__metadata__", ())}
        assert bounds & {Ge, Gt} and bounds & {Le, Lt}, path
        with pytest.raises(pydantic.ValidationError):
            pydantic.TypeAdapter(hint).validate_python(1e300)
        with pytest.raises(pydantic.ValidationError):
            pydantic.TypeAdapter(hint).validate_python(float("nan"))
