"""Overrides and their types; bounds; checks of a configuration; what its documentation says.

`test_refusals` has the overrides that a command refuses.
"""

import dataclasses
import importlib.util
import itertools
import json
import math
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import given
from hypothesis import strategies as st

from command_configs import COMMAND_CONFIGS
from qurl_megatron.config.gpus import H100
from qurl_megatron.config.meanings import commented_yaml, field_docs, field_meanings
from qurl_megatron.config.older import MOVED
from qurl_megatron.config.other_names import OTHER_NAMES
from qurl_megatron.config.resume import _FIXED, validate_resume
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    CriticConfig,
    LearnerConfig,
    PromptsConfig,
    ServerConfig,
)
from qurl_megatron.config.text import (
    Given,
    leaf_values,
    load,
    save,
    with_overrides,
)
from qurl_megatron.config.validate import validate, validate_server
from qurl_megatron.evaluation.evaluate import EvalConfig
from qurl_megatron.launch.gpus import check_shared_gpus, choose_placement
from qurl_megatron.launch.placement import place_servers
from qurl_megatron.launch.recipe import load_recipe
from qurl_megatron.model.architecture import ArchitectureError
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.report.metrics import Evaluation, RunSummary, StepMetrics
from recipe_inputs import RECIPES
from tiny import build_tiny_model, write_7b

STAGES = [
    "rollout.stages.4={max_completion_length: 12, completions_per_prompt: 4}",
    "rollout.stages.7={max_completion_length: 10, completions_per_prompt: 2}",
]


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def runnable(model_dir: Path, *overrides: str) -> Config:
    """Return a valid configuration with `overrides` applied."""
    words = [
        f"model={model_dir}",
        "data=problems.jsonl",
        "rollout.max_prompt_length=8",
        "rollout.max_completion_length=8",
    ]
    return with_overrides(Config(), [*words, *overrides])


def test_overrides_take_the_type_of_their_field() -> None:
    words = ["steps=7", "rollout.temperature=0.6", "learner.dtype=float32", "time_limit_s=none"]
    config = with_overrides(Config(), words)
    assert (config.steps, config.rollout.temperature) == (7, 0.6)
    assert (config.learner.dtype, config.time_limit_s) == ("float32", None)


def test_a_dict_is_replaced_as_a_whole_or_key_by_key() -> None:
    config = Config(prompts=PromptsConfig(options={"size": 10, "mode": "easy"}))
    assert with_overrides(config, ["prompts.options={}"]).prompts.options == {}
    words = ["prompts.options={size: 3, words: [1, b]}", "prompts.options.size=4"]
    words += ["quantization.uaq.layer_scales.3=1.25", "rollout.server.options={dtype: half}"]
    words += ["evaluation.data.aime24=/data/aime", "evaluation.data.gsm8k=/data/gsm8k:test"]
    config = with_overrides(config, words)
    assert config.prompts.options == {"size": 4, "words": [1, "b"]}
    assert config.quantization.uaq.layer_scales == {3: 1.25}
    assert config.rollout.server.options == {"dtype": "half"}
    assert config.evaluation.data == {"aime24": "/data/aime", "gsm8k": "/data/gsm8k:test"}


def test_later_stage_changes_length_and_group_size_only() -> None:
    words = ["rollout.max_completion_length=6", "rollout.completions_per_prompt=8"]
    rollout = with_overrides(Config(), [*STAGES, *words, "rollout.temperature=0.6"]).rollout
    shapes = [
        (rollout.at(step).max_completion_length, rollout.at(step).completions_per_prompt)
        for step in (1, 3, 4, 6, 7, 100)
    ]
    assert shapes == [(6, 8), (6, 8), (12, 4), (12, 4), (10, 2), (10, 2)]
    assert rollout.at(4).temperature == 0.6
    # The servers are started for the longest stage.
    assert rollout.max_length == rollout.max_prompt_length + 12


def test_evaluation_server_runs_only_if_there_is_something_to_measure() -> None:
    for words, runs in {
        "evaluation.problems=8": True,
        "evaluation.problems=0": False,
        "evaluation.held_out_fraction=0": False,
        "evaluation.problems=0 evaluation.data.aime=FILE": True,
    }.items():
        assert with_overrides(Config(), words.split()).evaluation.enabled is runs, words


def test_a_file_of_version_0_2_loads_and_what_is_gone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("learner: {fp8: null}\nsteps: 3\n")
    assert load(path) == Config(steps=3)
    assert load_recipe(str(path)).config.steps == 3
    for gone, message in {
        "rollout: {max_response_length: 5}": "rollout.max_response_length=5: not supported any mor",
        "learner: {fp8: blockwise}": "learner.fp8=blockwise: not supported any more; leave it out",
        "rollout: {top_k: 5}": "rollout.top_k=5: not supported any more; set rollout.top_p instead",
    }.items():
        path.write_text(f"{gone}\n")
        with pytest.raises(ConfigError, match=rf"^{path}: {message}"):
            load(path)


# A value of each field that version 0.2 had at the top.
OF_0_2 = """
    question_key: ask
    answer_key: info.answer
    incomplete: drop
    ignore_media: true
    system_prompt: Think.
    chat_template: "{{ messages }}"
    chat_template_options: {enable_thinking: false}
    template_date: 2024-02-29
    data_options: {size: 7}
    data_weights: [1, 2]
    overlong_prompts: refuse
    shuffle: false
    reward_right: 2
    reward_wrong: -1
    reward_partial: true
    reward_weights: [1]
    source_rewards: {gsm8k: exact}
    reward_timeout_s: 5
    reward_import_timeout_s: 7
    scoring_workers: 3
    advantage_estimator: rloo
"""


def test_names_of_version_0_2_are_read_as_those_of_now(tmp_path: Path) -> None:
    """In words, in a user's file, in a saved config.yaml and by `qurl eval`."""
    path, values = tmp_path / "config.yaml", yaml.safe_load(OF_0_2)
    values["template_date"] = str(values["template_date"])
    assert values.keys() == MOVED.keys()
    path.write_text(textwrap.dedent(OF_0_2))
    config = load(path)
    leaves, defaults = leaf_values(config), leaf_values(Config())
    assert {field for field in leaves if leaves[field] != defaults[field]} == {*MOVED.values()}
    assert all(leaves[now] == values[old] for old, now in MOVED.items())
    assert load_recipe(str(path)).config == config
    words = [f"{old}={value}" for old, value in values.items()]
    assert with_overrides(Config(), words) == config
    of_eval = with_overrides(EvalConfig(), ["data_options.size=7", "scoring_workers=3"])
    assert (of_eval.prompts.options, of_eval.scoring.workers) == ({"size": 7}, 3)


@pytest.mark.parametrize("old", MOVED)
def test_a_file_with_both_names_of_a_field_is_refused(tmp_path: Path, old: str) -> None:
    path, (section, _, name) = tmp_path / "config.yaml", MOVED[old].partition(".")
    value = json.dumps(yaml.safe_load(OF_0_2)[old], default=str)
    path.write_text(f"{old}: {value}\n{section}: {{{name}: {value}}}\n")
    with pytest.raises(ConfigError, match=f"^{path}: {old}: is {MOVED[old]} now, which is given"):
        load(path)
    with pytest.raises(ConfigError, match=f"^{path}, line 2: {MOVED[old]} is given twice, also"):
        load_recipe(str(path))


def test_a_day_in_a_file_needs_no_quotes(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("prompts: {template_date: 2024-02-29}\n")
    assert load(file).prompts.template_date == "2024-02-29"
    save(load(file), file)
    assert load(file).prompts.template_date == "2024-02-29"


@pytest.mark.parametrize("text", ["", "- steps\n", "steps\n"])
def test_a_file_without_fields_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: not a mapping of fields to values$"):
        load(path)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_field_by_field_and_loads_back_equal_from_yaml(
    name: str, tmp_path: Path
) -> None:
    recipe = importlib.import_module(f"qurl_megatron.recipes.{name}").recipe()
    as_yaml = yaml.safe_dump(dataclasses.asdict(recipe))
    with_types = yaml.safe_dump(dataclasses.asdict(with_overrides(recipe, [])))
    assert with_types == as_yaml  # 1 where 1.0 belongs would differ here
    words = ["name=first", "prompts.options.words=[1, b]", "time_limit_s=60", *STAGES]
    config = with_overrides(recipe, words)
    path = tmp_path / "config.yaml"
    save(config, path)
    assert load(path) == config
    path.write_text(commented_yaml(config))
    assert load(path) == config
    comments = re.sub(r"\n *# ", " ", path.read_text())
    for path_of_field, meaning in field_meanings(Config()).items():
        assert meaning in comments, path_of_field
    assert max(map(len, path.read_text().splitlines())) <= 100


def test_names_and_directories_that_are_safe_in_a_path_and_a_shell_are_accepted() -> None:
    for name in ("", "sweep-acr-int8-1.5", "grpo-20261122-101500", "_x", "1e-6", "a+b"):
        assert with_overrides(Config(), [f"name={name}"]).name == name
    for path in ("runs", "/data/my runs", "../runs", "a~/runs_2.0", "a=b,c"):
        assert with_overrides(Config(), [f"output_dir={path}"]).output_dir == path


def test_a_home_is_found_where_no_shell_has_replaced_it() -> None:
    words = ["model=~/model", "data=~/data:main:test", "output_dir=~/runs", "reward=~/own.py:score"]
    config = with_overrides(Config(), [*words, "evaluation.data.test=~/test.jsonl"])
    own = with_overrides(config, ["objective.objective=~/own.py:gain"])
    assert own.objective.objective == f"{Path.home()}/own.py:gain"
    home = str(Path.home())
    assert (config.model, config.data) == (f"{home}/model", f"{home}/data:main:test")
    assert (config.run_dir, config.reward) == (Path(home, "runs"), f"{home}/own.py:score")
    assert config.evaluation.data == {"test": f"{home}/test.jsonl"}


def test_blocks_of_experts_must_lie_on_one_rank_of_a_server() -> None:
    """An expert of Qwen3-30B-A3B has 768 channels, 192 on each of four ranks that share it."""
    architecture = KNOWN_MODELS["Qwen3-30B-A3B"]
    shared, whole = ServerConfig(4), ServerConfig(4, expert_parallel_size=4)
    validate_server("server", whole, architecture, "fp8-block", 100)
    validate_server("server", shared, architecture, "fp8", 100)
    with pytest.raises(ConfigError, match="^server: blocks of fp8-block .* has 192 intermediate"):
        validate_server("server", shared, architecture, "fp8-block", 100)


def test_fields_that_fit_each_other_and_the_model_are_accepted(model_dir: Path) -> None:
    assert validate(runnable(model_dir)).family == "qwen2"
    validate(
        runnable(model_dir, "objective.advantage_estimator=gae", "rollout.completions_per_prompt=1")
    )
    for objective in ("naive", "decoupled", "tis", "acr", "sequence_tis"):
        words = ["rollout.max_staleness=2", f"objective.objective={objective}"]
        validate(runnable(model_dir, *words))


def test_critic_has_its_own_layout_on_the_policy_ranks() -> None:
    policy = LearnerConfig(
        4, 2, 2, virtual_pipeline_parallel_size=2, layers_in_last_pipeline_stage=3
    )
    assert CriticConfig().layout(policy) == policy
    own = CriticConfig(tensor_parallel_size=2, pipeline_parallel_size=1).layout(policy)
    sizes = (own.tensor_parallel_size, own.pipeline_parallel_size, own.data_parallel_size)
    assert sizes == (2, 1, 8)
    assert (own.virtual_pipeline_parallel_size, own.layers_in_last_pipeline_stage) == (1, None)


# Words that change what must not change when a run resumes: one or more for each prefix of _FIXED.
FIXED = """
    model=other learner.dtype=float32 critic.model=other quantization.uaq.scale=2
    quantization.uaq.through_up=true objective.advantage_estimator=gae data=other.jsonl seed=1
    prompts.options.size=7 prompts.weights=2 prompts.system_prompt=Think. prompts.shuffle=false
    prompts.chat_template_options.enable_thinking=false rollout.max_prompt_length=9
    checkpoint.best_by=aime
    evaluation.held_out_fraction=0.3 evaluation.data.aime=FILE name=other evaluation.quantized=true
    output_dir=elsewhere evaluation.problems=0 evaluation.problems=9 adapters.rank=8
""".split()


def test_resume_refuses_changes_that_contradict_the_checkpoints() -> None:
    saved = Config(data="problems.jsonl")
    validate_resume(saved, with_overrides(saved, ["learner.tensor_parallel_size=2", "steps=7"]))
    validate_resume(saved, with_overrides(saved, ["objective.advantage_estimator=rloo"]))
    validate_resume(saved, with_overrides(saved, ["model_builder=models.py:build"]))
    targeted = with_overrides(saved, ["adapters.rank=8", "adapters.targets=[q_proj, v_proj]"])
    validate_resume(targeted, with_overrides(targeted, ["adapters.targets=[v_proj, q_proj]"]))
    with pytest.raises(ConfigError, match="adapters.targets=.*the run has "):
        validate_resume(targeted, with_overrides(targeted, ["adapters.targets=[v_proj]"]))
    of_epochs, more = with_overrides(saved, ["epochs=2"]), "rollout.prompts_per_step=128"
    validate_resume(of_epochs, with_overrides(of_epochs, [more, "epochs=0", "steps=7"]))
    with pytest.raises(ConfigError, match=f"^{more}: the run has 64, and epochs=2 counts its step"):
        validate_resume(of_epochs, with_overrides(of_epochs, [more]))
    refused = set()
    for word in FIXED:
        prefix = next(filter(word.startswith, _FIXED))
        refused.add(prefix)
        with pytest.raises(ConfigError, match=rf"^{re.escape(prefix)}.*{_FIXED[prefix]}"):
            validate_resume(saved, with_overrides(saved, [word]))
    assert refused == _FIXED.keys()


def test_a_package_is_required_only_if_the_run_uses_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installed, word, refusal in (
        ("wandb", "wandb_project=project", "wandb_project=project: the package wandb is not inst"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        validate(runnable(model_dir))
        with pytest.raises(ConfigError, match=f"^{refusal}"):
            validate(runnable(model_dir, word))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, it=installed: name == it)
        validate(runnable(model_dir, word))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("quantization.uaq.scale=1.5", "scale=1.5: a model with experts needs a power of two"),
        ("quantization.uaq.layer_scales.1=3", "layer_scales.1=3: a model with experts needs a pow"),
        ("learner.expert_parallel_size=3", "8 experts are not divisible by expert_parallel_size=3"),
        ("learner.expert_parallel_size=2", "must divide the 1 ranks of a pipeline stage"),
        ("rollout.server.tensor_parallel_size=5", "rollout.server: 4 attention heads are not"),
    ],
)
def test_a_run_that_does_not_fit_experts_is_refused(
    experts_dir: Path, words: str, expected: str
) -> None:
    with pytest.raises((ArchitectureError, ConfigError), match=expected):
        validate(runnable(experts_dir, "quantization.uaq.scale=2", *words.split()))


def test_experts_divide_over_ranks_that_the_learner_has(experts_dir: Path, model_dir: Path) -> None:
    words = ["quantization.uaq.scale=0.5", "learner.data_parallel_size=4"]
    validate(runnable(experts_dir, *words, "learner.expert_parallel_size=4"))
    with pytest.raises(ArchitectureError, match="expert_parallel_size=4 .* the model has none"):
        validate(runnable(model_dir, *words, "learner.expert_parallel_size=4"))


def on_gpus(num_gpus: int, *words: str) -> dict[str, list[list[int]]]:
    small = ["rollout.server.mem_fraction_static=0.4", "evaluation.server.mem_fraction_static=0.4"]
    config = with_overrides(Config(), [*small, *words])
    placed: dict[str, list[list[int]]] = {}
    for name, _, first in place_servers(config, num_gpus):
        size = getattr(config, name).server.tensor_parallel_size if num_gpus else 0
        placed.setdefault(name, []).append([*range(first, first + size)])
    return placed


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


def test_servers_that_take_turns_are_on_the_learners_gpus() -> None:
    layout = ["rollout.placement=colocated", "learner.tensor_parallel_size=4", "rollout.servers=2"]
    words = [*layout, "rollout.server.tensor_parallel_size=2"]
    assert on_gpus(4, *words) == {"rollout": [[0, 1], [2, 3]], "evaluation": [[0]]}
    assert on_gpus(0, *words) == {"rollout": [[], []], "evaluation": [[]]}
    with pytest.raises(ConfigError, match=r"^rollout.servers: .*2 servers .* take 8 GPUs, and"):
        on_gpus(4, *layout, "rollout.server.tensor_parallel_size=4")


@pytest.mark.parametrize(
    ("num_gpus", "words", "placement"),
    [
        (0, [], "separate"),
        (1, [], "colocated"),
        (2, [], "colocated"),  # learner, rollout and evaluation server
        (3, [], "separate"),
        (1, ["rollout.max_staleness=1"], "separate"),
        (2, ["rollout.servers=2"], "separate"),  # more than the learner's one GPU
        (1, ["rollout.placement=separate"], "separate"),  # as was asked for
    ],
)
def test_learner_and_servers_take_turns_where_gpus_are_too_few(
    num_gpus: int, words: list[str], placement: str
) -> None:
    config = with_overrides(Config(), words)
    said = choose_placement(config, [word.partition("=")[0] for word in words], num_gpus)
    assert config.rollout.placement == placement
    assert said.endswith("they take turns (rollout.placement=colocated)") == (
        placement == "colocated"
    )


def test_more_ranks_than_gpus_are_refused() -> None:
    for field in ("learner", "rollout.server"):
        with pytest.raises(ConfigError, match=rf"^{field}.*: 4 ranks.*machine has 2"):
            on_gpus(2, f"{field}.tensor_parallel_size=4")


def test_servers_that_leave_no_memory_for_the_learner_on_their_gpu_are_refused() -> None:
    refused = (
        r"^evaluation.*=0.4: GPU 0 is shared by learner and rollout and evaluation; the "
        r"servers ask for 0.90 of its memory; lower their sum to 0.8, or add GPUs$"
    )
    with pytest.raises(ConfigError, match=refused):
        on_gpus(1, "rollout.server.mem_fraction_static=0.5")
    assert on_gpus(2, "rollout.server.mem_fraction_static=0.9")["rollout"] == [[1]]


@given(
    num_gpus=st.integers(1, 8),
    ranks=st.integers(1, 8),
    servers=st.integers(1, 16),
    size=st.sampled_from([1, 2, 4]),
    percent=st.integers(5, 80),
)
def test_servers_are_spread_evenly_and_no_gpu_is_asked_for_more_than_it_has(
    num_gpus: int, ranks: int, servers: int, size: int, percent: int
) -> None:
    fraction = percent / 100
    words = [
        f"learner.data_parallel_size={min(ranks, num_gpus)}",
        f"rollout.servers={servers}",
        f"rollout.server.tensor_parallel_size={min(size, num_gpus)}",
        f"rollout.server.mem_fraction_static={fraction}",
        "evaluation.problems=0",
    ]
    try:
        placed = on_gpus(num_gpus, *words)["rollout"]
    except ConfigError as refused:
        assert "lower their sum to" in str(refused)
        return
    load = [0.2 * (gpu < min(ranks, num_gpus)) for gpu in range(num_gpus)]
    for gpu in itertools.chain.from_iterable(placed):
        load[gpu] += fraction
    assert max(load) <= 1 + 1e-9
    if size == 1:
        assert max(load) - min(load) <= max(fraction, 0.2) + 1e-9


def test_eight_servers_beside_eight_ranks_get_a_gpu_each() -> None:
    words = ["learner.data_parallel_size=8", "rollout.servers=8", "evaluation.problems=0"]
    assert on_gpus(8, *words)["rollout"] == [[gpu] for gpu in range(8)]


def test_the_planned_memory_of_the_learner_counts_on_a_gpu_that_servers_share(
    tmp_path: Path,
) -> None:
    """Of a 7B model on four H100s, which a fraction of 0.8 would end in its first update."""
    write_7b(tmp_path)
    words = ["learner.tensor_parallel_size=4", f"model={tmp_path}", "evaluation.problems=0"]
    words += ["rollout.server.tensor_parallel_size=4", "learner.dtype=bfloat16"]

    def check(fraction: float) -> None:
        word = f"rollout.server.mem_fraction_static={fraction}"
        config = with_overrides(Config(), [*words, word])
        check_shared_gpus(config, place_servers(config, 4), H100.memory_bytes)

    with pytest.raises(ConfigError, match=r"rank 0 is planned to take \d.* GB of GPU 0") as refused:
        check(0.8)
    room = float(re.search(r"lower these to (\S+)", str(refused.value)).group(1))  # type: ignore
    check(room)
    with pytest.raises(ConfigError):
        check(room + 0.01)


def test_the_values_of_one_configuration_turn_another_into_it() -> None:
    words = [
        "steps=7",
        "time_limit_s=3",
        "prompts.options.size=100",
        "prompts.options.words=[1, b]",
        "quantization.uaq.layer_scales.3=2",
        "quantization.format=fp8",
        "rollout.servers_at=[http://10.0.0.1:30000, 'https://host/a']",
        "learner.layers_in_last_pipeline_stage=2",
        *STAGES,
    ]
    config = Config(prompts=PromptsConfig(options={"size": 10}))
    changed = with_overrides(config, words)
    for before, after in ((config, changed), (changed, config)):
        given = [Given(*each) for each in leaf_values(after).items()]
        assert with_overrides(before, given) == after


def test_every_field_has_a_docstring_that_names_the_unit_of_a_size_or_a_time() -> None:
    units = {"_s": "seconds", "_bytes": "bytes", "_length": "tokens", "_tokens": "tokens"}
    for kind in (Config, *COMMAND_CONFIGS.values()):
        for path, meaning in field_meanings(kind()).items():
            assert len(meaning.split()) > 1, path
            unit = next((unit for end, unit in units.items() if path.endswith(end)), "")
            assert unit in meaning, path
    for measured in (Evaluation, StepMetrics, RunSummary):
        assert list(field_docs(measured)) == [field.name for field in dataclasses.fields(measured)]


def is_annotated(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Annotated


def numbers(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the type of every number in a dataclass and in what it holds."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for part in (hint,) if is_annotated(hint) else (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                yield from numbers(part, f"{prefix}{name}.")
            elif (typing.get_args(part) if is_annotated(part) else (part,))[0] in (int, float):
                yield prefix + name, part


NUMBERS = [
    (kind, path, hint)
    for kind in (Config, *COMMAND_CONFIGS.values())
    for path, hint in numbers(kind)
    if (path, hint) != ("quantization.uaq.layer_scales", int)  # `validate` asks the model
]
WITHIN_DICTS = {  # the word that gives a number in a dict
    "quantization.uaq.layer_scales": "quantization.uaq.layer_scales.0={}",
    "stop_above": "stop_above.reward_mean={}",
    "evaluation.k_of": "evaluation.k_of.a={}",
    "k_of": "k_of.a={}",
    "rollout.stages": "rollout.stages.{}={{max_completion_length: 9, completions_per_prompt: 9}}",
    "rollout.stages.max_completion_length": (
        "rollout.stages.9={{max_completion_length: {}, completions_per_prompt: 9}}"
    ),
    "rollout.stages.completions_per_prompt": (
        "rollout.stages.9={{max_completion_length: 9, completions_per_prompt: {}}}"
    ),
}


@pytest.mark.parametrize(("kind", "path", "hint"), NUMBERS, ids=lambda part: str(part)[:60])
def test_a_number_has_two_bounds_and_is_refused_just_beyond_them(
    kind: type, path: str, hint: Any
) -> None:
    number, *metadata = typing.get_args(hint)
    lower, upper = (bound for bound in metadata if isinstance(bound, Ge | Gt | Le | Lt))
    word = WITHIN_DICTS.get(path, path + "={}")
    for bound, direction in ((lower, -math.inf), (upper, math.inf)):
        assert isinstance(bound, Ge | Gt if direction < 0 else Le | Lt)
        edge = number(dataclasses.astuple(bound)[0])
        step = math.copysign(1, direction)
        beyond = edge + int(step) if number is int else math.nextafter(edge, direction)
        within = edge - int(step) if number is int else math.nextafter(edge, -direction)
        is_closed = isinstance(bound, Ge | Le)
        with_overrides(kind(), [word.format(edge if is_closed else within)])
        refused = word.format(beyond if is_closed else edge)
        field = re.escape(refused.partition("=")[0])
        message = rf"^{field}\S*: input should be {'greater' if direction < 0 else 'less'} than"
        with pytest.raises(ConfigError, match=message):
            with_overrides(kind(), [refused])
    for value in ("nan", "inf") if number is float else ():
        with pytest.raises(ConfigError):
            with_overrides(kind(), [word.format(value)])


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_of_another_framework_is_answered_with_fields_that_exist(name: str) -> None:
    fields = leaf_values(Config())
    named = re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", OTHER_NAMES[name])
    named += re.findall(r"^[a-z_]+(?=$|=)", OTHER_NAMES[name])
    assert named and set(named) <= fields.keys()
    assert name not in fields  # else it would have no answer
    for field, value in re.findall(r"^(\S+)=(\S+)$", OTHER_NAMES[name]):
        with_overrides(Config(), [f"{field}={value}"])
    with pytest.raises(ConfigError, match=f"{name}: no such field; here it is {named[0]}"):
        with_overrides(Config(), [f"trainer.{name}=1"])
