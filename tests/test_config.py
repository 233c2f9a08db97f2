"""A configuration is typed, every wrong word is one clear line, and every recipe builds."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import recipes
from launch.placement import place_servers
from qurl_megatron.config.overrides import load, overrides_between, save, with_overrides
from qurl_megatron.config.schema import Config, ConfigError, CriticConfig, LearnerConfig
from qurl_megatron.config.validate import validate, validate_resume
from tiny import build_tiny_model

RECIPES = [module.name for module in pkgutil.iter_modules(recipes.__path__)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tiny_model(directory)
    return directory


def runnable(model_dir: Path, *overrides: str) -> Config:
    """A configuration that is right but for `overrides`."""
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


def test_task_options_may_be_new_and_keep_their_own_types() -> None:
    config = with_overrides(Config(), ["data_options.min_word_len=3", "data_options.mode=easy"])
    assert config.data_options == {"min_word_len": 3, "mode": "easy"}


def test_a_layer_may_be_given_a_scale_of_its_own() -> None:
    config = with_overrides(Config(), ["quantization.uaq.layer_scales.3=1.25"])
    assert config.quantization.uaq.layer_scales == {3: 1.25}


STAGES = [
    "rollout.stages.4={max_response_length: 12, completions_per_prompt: 4}",
    "rollout.stages.7={max_response_length: 10, completions_per_prompt: 2}",
]


def test_a_later_stage_changes_length_and_group_and_nothing_else() -> None:
    words = ["rollout.max_response_length=6", "rollout.completions_per_prompt=8"]
    rollout = with_overrides(Config(), [*STAGES, *words, "rollout.temperature=0.6"]).rollout
    shapes = [
        (rollout.at(step).max_response_length, rollout.at(step).completions_per_prompt)
        for step in (1, 3, 4, 6, 7, 100)
    ]
    assert shapes == [(6, 8), (6, 8), (12, 4), (12, 4), (10, 2), (10, 2)]
    assert rollout.at(4).temperature == 0.6
    assert rollout.max_length == rollout.max_prompt_length + 12  # the server's, in every stage


def test_files_to_evaluate_on_go_by_names() -> None:
    evaluation = with_overrides(
        Config(), ["evaluation.data.aime24=/data/aime", "evaluation.data.gsm8k=/data/gsm8k:test"]
    ).evaluation
    assert evaluation.data == {"aime24": "/data/aime", "gsm8k": "/data/gsm8k:test"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("evaluation.problems=8", True),
        ("evaluation.problems=0", False),
        ("evaluation.held_out_fraction=0", False),
        ("evaluation.problems=0 evaluation.data.aime=FILE", True),
    ],
)
def test_a_server_to_evaluate_on_is_wanted_where_there_is_something_to_measure(
    words: str, wanted: bool
) -> None:
    assert with_overrides(Config(), words.split()).evaluation.wanted is wanted


def test_a_saved_configuration_loads_as_it_was(tmp_path: Path) -> None:
    words = ["seed=3", "data_options.size=9", "time_limit_s=60", "evaluation.data.aime=FILE"]
    config = with_overrides(Config(), [*words, *STAGES])
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("steps", "steps: not of the form field=value"),
        ("rollout.temprature=1", "rollout.temprature: no such field; did you mean rollout.temper"),
        ("temperature=1", "temperature: no such field; did you mean rollout.temperature or eval"),
        ("rollout=1", "rollout: no such field"),
        ("rollout.server.threads.x=1", "no such field"),
        ("steps=many", "steps=many: input should be a valid integer"),
        ("steps=0", "steps=0: input should be greater than or equal to 1"),
        ("rollout.temperature=0", "rollout.temperature=0: input should be greater than 0"),
        ("rollout.completions_per_prompt=0", "greater than or equal to 1"),
        ("evaluation.held_out_fraction=1", "should be less than 1"),
        ("objective.objective=ppo", "'naive', 'on_policy', 'decoupled', 'tis' or 'acr'"),
        ("quantization.uaq.scale=inf", "quantization.uaq.scale=inf: input should be less than inf"),
        ("quantization.uaq.layer_scales.two=1.5", "should be a valid integer"),
        ("rollout.stages.4=12", "rollout.stages.4=12: input should be a dictionary or an instance"),
        ("rollout.stages.4={max_response_length: 12}", "rollout.stages.4.completions_per_prompt"),
        (
            "rollout.stages.4={max_response_length: 0, completions_per_prompt: 2}",
            "rollout.stages.4.max_response_length=0: input should be greater than or equal to 1",
        ),
        ("rollout.stages.4={max_response", "rollout.stages.4={max_response: not readable as YAML"),
        ("rollout.stages.1={}", "greater than or equal to 2"),
        ("evaluation.data.a/b=FILE", "evaluation.data.a/b"),
        ("evaluation.top_p=0", "evaluation.top_p=0: input should be greater than 0"),
        ("quantization.format=int3", "'bf16', 'int8', 'int4', 'fp8', 'fp8-tensor' or 'fp8-block'"),
    ],
)
def test_a_wrong_word_is_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_overrides(Config(), [word])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_fitting_configuration_is_accepted(model_dir: Path) -> None:
    assert validate(runnable(model_dir)).family == "qwen2"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.top_p=0.9", "training wants top_p=1 and top_k=-1"),
        ("rollout.top_k=50", "training wants top_p=1 and top_k=-1"),
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
            "positions",
        ),
        ("evaluation.data.held_out=FILE", "evaluation.data.held_out: problems of the run's own"),
        ("data=", "data=: missing"),
        ("model=", "model=: missing"),
        ("model=/no/such/directory", "/no/such/directory"),
        ("learner.tensor_parallel_size=3", "3"),
        ("learner.pipeline_parallel_size=5", "5"),
        (
            "rollout.server.tensor_parallel_size=3",
            "rollout.server: 4 attention heads are not divisible by",
        ),
        ("rollout.max_response_length=1000000", "positions"),
        ("quantization.uaq.layer_scales.2=1.5", "layers are numbered from 0 to 1"),
        ("objective.kl_coefficient=1 warmup.max_steps=5", "the model before its warm-up"),
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
        ("advantage_estimator=gae critic.model=/no/such/directory", "critic: "),
    ],
)
def test_what_does_not_fit_is_named(model_dir: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(runnable(model_dir, *word.split()))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_ppo_takes_one_completion_a_prompt(model_dir: Path) -> None:
    words = ["advantage_estimator=gae", "rollout.completions_per_prompt=1"]
    assert validate(runnable(model_dir, *words)).family == "qwen2"


def test_a_critic_has_a_layout_of_its_own_on_its_policys_ranks() -> None:
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


def test_a_warm_up_needs_evaluation_problems(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation.problems=0"):
        validate(runnable(model_dir, "warmup.max_steps=5", "evaluation.problems=0"))


@pytest.mark.parametrize("missing", ["tokenizer", "safetensors"])
def test_an_incomplete_model_directory_is_named(tmp_path: Path, missing: str) -> None:
    build_tiny_model(tmp_path)
    for path in tmp_path.iterdir():
        if missing in path.name or (missing == "tokenizer" and path.name == "vocab.json"):
            path.unlink()
    with pytest.raises(ConfigError, match=missing):
        validate(runnable(tmp_path))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_a_typed_configuration(name: str, tmp_path: Path) -> None:
    recipe = importlib.import_module(f"recipes.{name}")
    config = with_overrides(recipe.recipe(), [f"output_dir={tmp_path}"])
    if hasattr(recipe, "build_model"):
        recipe.build_model(tmp_path / "model", seed=0)
        config.model = str(tmp_path / "model")
        validate(config)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("quantization.uaq.scale=2", "weights are saved so"),
        ("learner.dtype=float32", "weights are saved so"),
        ("data=other.jsonl", "place in the data"),
        ("seed=1", "place in the data"),
        ("advantage_estimator=gae", "hold a critic or none"),
    ],
)
def test_a_run_does_not_go_on_under_what_its_checkpoints_contradict(
    word: str, message: str
) -> None:
    saved = Config(data="problems.jsonl")
    with pytest.raises(ConfigError, match=rf"^{re.escape(word.split('=')[0])}.*{message}"):
        validate_resume(saved, with_overrides(saved, [word]))
    validate_resume(saved, with_overrides(saved, ["learner.tensor_parallel_size=2", "steps=7"]))


def test_a_run_does_not_go_on_with_other_files_to_evaluate_on() -> None:
    saved = Config(data="problems.jsonl")
    with pytest.raises(ConfigError, match="^evaluation.data=.*place in the data"):
        validate_resume(saved, with_overrides(saved, ["evaluation.data.aime=FILE"]))


def test_weights_and_biases_is_wanted_only_where_it_is_asked_for(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate(runnable(model_dir, "wandb_project=project"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    validate(runnable(model_dir))
    with pytest.raises(ConfigError, match="wandb_project=project: the package wandb is not insta"):
        validate(runnable(model_dir, "wandb_project=project"))


def on_gpus(num_gpus: int, *words: str) -> dict[str, list[list[int]]]:
    small = ["rollout.server.mem_fraction_static=0.4", "evaluation.server.mem_fraction_static=0.4"]
    return place_servers(with_overrides(Config(), [*small, *words]), num_gpus)


def test_servers_come_after_the_learner_and_share_its_gpus_where_none_are_left() -> None:
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


def test_servers_that_leave_a_learner_on_their_gpu_no_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^rollout.*shares GPU 0 with rollout and evaluation"):
        on_gpus(1, "rollout.server.mem_fraction_static=0.5")
    assert on_gpus(2, "rollout.server.mem_fraction_static=0.9")["rollout"] == [[1]]


def test_overrides_between_two_configurations_make_the_one_of_the_other() -> None:
    words = [
        "steps=7",
        "data_options.size=100",
        "data_options.words=[1, b]",
        "quantization.uaq.layer_scales.3=2",
        "quantization.format=fp8",
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
