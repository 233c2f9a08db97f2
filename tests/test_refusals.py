"""Wrong input ends a command with one line and code 2; nothing is started and nothing is written.

Each row of the tables below is one input and a part of the line that it must end with. The commands
run in this process, in a directory with a tiny model, problems and runs.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

import qurl_megatron.weight_sync.export  # noqa: F401  # it makes temporary files
from qurl_megatron import cli
from qurl_megatron.config import text
from qurl_megatron.config.schema import UaqConfig
from qurl_megatron.config.text import with_overrides
from qurl_megatron.launch import experiment, local, owner
from qurl_megatron.quantization import offline
from qurl_megatron.recipes import grpo
from recipe_inputs import good_problems
from tiny import build_tiny_model

TRAIN = """train grpo model=model data=problems.jsonl rollout.max_prompt_length=100
    rollout.max_completion_length=100 rollout.prompts_per_step=8 name=new""".split()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a model, problems, and a run; commands may not change it."""
    home = tmp_path_factory.mktemp("home")
    (home / "tmp").mkdir()
    model = build_tiny_model(home / "model")
    build_tiny_model(home / "short", max_position_embeddings=150)
    (home / "problems.jsonl").write_text("\n".join(good_problems(40)) + "\n")
    (home / "few.jsonl").write_text("\n".join(good_problems(3)) + "\n")
    offline.quantize_directory(model, home / "quantized", "int8", lambda done, total: None)
    offline.scale_directory(model, home / "scaled", UaqConfig(2), lambda done, total: None)
    words = [word for word in TRAIN[2:] if not word.startswith("name=")]
    config = with_overrides(grpo.recipe(), [*words, "name=run"])
    for name in ("run", "spoilt"):
        run_dir = home / "runs" / name
        run_dir.mkdir(parents=True)
        text.save(config, run_dir / "config.yaml")
    (home / "runs" / "spoilt" / "config.yaml").write_text("steps: [\n")
    (home / "runs" / "no_run").mkdir()
    (home / "own.py").write_text(OWN_PY)
    (home / "wrong.py").write_text("def recipe(:\n")
    (home / "runs.yaml").mkdir()
    (home / "link").symlink_to("nowhere")
    (home / "linked.partial").symlink_to("model")
    return home


Refuse = Callable[..., str]


@pytest.fixture
def refuse(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Refuse:
    """Return a function that runs a command, checks that it is refused, and returns its line."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.chdir(home)
    monkeypatch.setattr(tempfile, "tempdir", str(home / "tmp"))
    monkeypatch.setattr(local, "run", started)
    monkeypatch.setattr(experiment, "submit", started)
    monkeypatch.setattr("qurl_megatron.rollout.preload.start", started)

    def refuse(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["qurl", *words])
        before, children = contents(home), len(psutil.Process().children())
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capfd.readouterr()
        assert ended.value.code == 2, shown
        assert contents(home) == before
        assert len(psutil.Process().children()) == children
        # A library may log a line of its own when it is first imported.
        (line,) = [line for line in shown.err.split("\n") if line.startswith("qurl: ")]
        assert shown.err.endswith(f"{line}\n") and line.isprintable(), shown.err
        assert "Traceback" not in shown.out + shown.err
        return line

    return refuse


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """Return size and last change of every file but locks, and zeros for every directory."""
    stats = {path: path.lstat() for path in directory.rglob("*") if path.name != owner.OWNER_FILE}
    return {
        str(path): (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
        for path, stat in stats.items()
    }


def rows(table: str) -> list[tuple[str, str]]:
    """Return (input, part of the message) of each line; two spaces or more divide them."""
    lines = [line.strip() for line in table.strip().splitlines()]
    return [(line.partition("  ")[0], line.partition("  ")[2].strip()) for line in lines]


STAGE = "rollout.stages.9={max_completion_length: 9, completions_per_prompt: 2}"
FIELDS = rows(r"""
    steps=                                  valid integer
    steps=0                                 steps=0: input should be greater than or equal to 1
    steps=1\n2                              'steps=1\n2': input should be a valid integer
    optimizer.minibatches_per_step=7        do not divide into minibatches
    optimizer.min_learning_rate=1           is above learning_rate=
    objective.objective=ppo                 no such objective; there are naive, on_policy, decoupled
    objective.aggregation=mean              'sequence_mean', 'token_mean' or 'dr_grpo'
    prompts.weights=0                       has 0 problems to train on; a step must not repeat a pro
    prompts.weights=1e6                     less than or equal to 1000
    rollout.retire_after=2 & objective.advantage_estimator=reinforce_plus_plus  learns from groups o
    objective.advantage_estimator=ppo       'grpo', 'dr_grpo', 'rloo', 'reinforce_plus
    reward=maths                            reward=maths: no such verifier; there are math, gsm8k,
    reward=math,maths                       reward=math,maths: no such verifier; there are math, gsm
    steps=2 & epochs=2                      steps=2: epochs=2 sets it; leave it out, or give epochs=
    stop_above={reward: 1}                  stop_above.reward: no such metric; did you mean reward_m
    stop_above.held_out_accuracy=0.9 & evaluation.every_steps=0  measures it after the last step
    stop_above.held_out_accuracy=0.9 & evaluation.problems=0  no problem is held out; set evaluation
    stop_above.evaluation/a/Avg@1/mean=1 & evaluation.data.b=problems.jsonl  did you mean evaluation
    evaluation.k_of.a=4 & evaluation.data.b=problems.jsonl  has no such name; it has b
    evaluation.reward_of.a=math             evaluation.reward_of.a: evaluation.data has no such name
    evaluation.reward_of.a=maths            evaluation.reward_of.a=maths: no such verifier
    evaluation.reward_of.b=none.py:f & evaluation.data.b=problems.jsonl  none.py: no such file
    checkpoint.best_by=a                    evaluation.data has no such name; it has none
    scoring.by_source={gsm8k: maths}        scoring.by_source.gsm8k=maths: no such verifier; there a
    scoring.by_source=math                  not of the form {key: value}
    scoring.by_source={gsm8k: math}         scoring.by_source.gsm8k: no entry has this data_source;
    reward=[math, a.py:f, b.py:f]           two rewards of an entry are called f; rename a function,
    reward=[math, exact] & scoring.by_source={a: exact}  scoring.by_source.a=exact: two rewards of a
    reward=[math, a.py:accuracy]            accuracy is that of the first reward; rename the other f
    reward=math,dapo & scoring.weights=1    scoring.weights=[1.0]: there are 2 rewards; give one wei
    reward=math,dapo & scoring.weights=1,nan  scoring.weights.1=nan: input should be a finite number
    quantization.format=int3                'bf16', 'int8', 'int4', 'fp8', 'fp8-tensor' or 'fp8-bloc
    quantization.format=                    quantization.format=
    quantization.format=fp8-block           has 64 query channels; use format fp8
    quantization.format=int4                has 64 query channels; use groups of 32, or format int8
    quantization.group_size=32              quantization.group_size=32: format int8 has no groups
    quantization.group_size=64              group_size=64: input should be 32 or 128
    adapters.rank=4 & quantization.format=bf16  choose int8, int4 or fp8
    adapters.rank=4 & quantization.format=fp8-block  the base under adapters (adapters.rank=4) is
    adapters.rank=4 & quantization.uaq.scale=1.5  there is no update to make visible
    adapters.rank=4 & quantization.keep=[*.o_proj]  all linear layers of the base are quantized
    adapters.rank=4 & quantization.smoothing=0.5  the base under adapters (adapters.rank=4) is
    adapters.rank=4 & quantization.publish=delta  sends nothing but adapters
    adapters.rank=4 & objective.advantage_estimator=gae  critic is a whole model
    adapters.targets=[q_proj]  with adapters.rank=0 the whole model is trained
    adapters.rank=4 & rollout.servers_at=["http://localhost:1"]  servers elsewhere hold no adapters
    adapters.init=model                       adapters.init: with adapters.rank=0 the whole model
    adapters.rank=4 & adapters.init=model & objective.kl_coefficient=0  no directory of adapters
    adapters.rank=4 & adapters.init=a & objective.kl_coefficient=0.1  the base without those of ada
    adapters.rank=4096                        no rank above it adds anything
    adapters.rank=-1                          greater than or equal to 0
    adapters.alpha=0                          adapters.alpha=0
    adapters.rank=4 & adapters.targets=[lm_head]  adapters.targets=lm_head: matches no quantized
    quantization.keep=[*.q_proj]            a server holds them as one layer, so keep all or none
    quantization.publish=auto & quantization.transport=direct  =direct all tensors are written in
    quantization.transport=direct & rollout.servers_at=["http://localhost:1"]  are on other machines
    quantization.smoothing=0.5 & quantization.format=bf16  there is nothing to make easier
    quantization.smoothing=1.5              less than or equal to 1
    quantization.uaq.layer_scales.99=2      layers are numbered from 0 to 1
    quantization.uaq.layer_scales.-1=2      layers are numbered from 0 to 1
    quantization.uaq.layer_scales.two=2     layer_scales.two: input should be a valid integer
    quantization.uaq.through_up=perhaps     valid boolean
    learner.tensor_parallel_size=3          4 attention heads are not divisible by
    learner.pipeline_parallel_size=3        2 layers are not divisible by pipeline_parallel_size=3
    learner.data_parallel_size=7            do not divide into minibatches
    learner.virtual_pipeline_parallel_size=2  pipeline_parallel_size=1 has none; leave it at 1
    learner.layers_in_last_pipeline_stage=1   do not divide over the other 0
    learner.recompute_layers=1              only learner.recompute=full uses it
    learner.recompute_layers=3 & learner.recompute=full  a pipeline stage has 2 layers
    learner.dtype=float8                    'float32' or 'bfloat16'
    learner.quantized_forward=both          'weights' or 'all'
    learner.quantized_forward=all & quantization.format=bf16  bf16 quantizes nothing
    rollout.prompts_per_step=1000000000     problems to train on
    rollout.completions_per_prompt=1        needs at least two; gae and reinforce_plus_plus take one
    rollout.stop_token_ids=[1,256]          rollout.stop_token_ids: the model has no token 256
    rollout.stop_token_ids=[1,,2]           stop_token_ids.1=: input should be a valid integer
    rollout.stop_token_ids=[-1]             greater than or equal to 0
    prompts.template_date=2026-13-01        prompts.template_date=2026-13-01: a day is YYYY-MM-DD
    prompts.chat_template_options.a=1       prompts.chat_template_options.a=1: the chat template of
    objective.advantage_estimator=reinforce_plus_plus & rollout.dynamic_sampling_tries=2  from group
    objective.advantage_estimator=gae & rollout.dynamic_sampling_tries=2  from groups of equal rewar
    rollout.max_completion_length=5000        with rollout.max_prompt_length=100 that is 5100 tokens
    rollout.max_prompt_length=512           a completion needs some of them; set it lower
    rollout.soft_overlong_tokens=100        must be less than rollout.max_completion_length=100
    rollout.soft_overlong_tokens=9 & STAGE  less than rollout.stages.9.max_completion_length=9
    rollout.stages.9={max_completion_length: 9999, completions_per_prompt: 2}  with rollout.max
    rollout.stages.9={max_completion_length: 9, completions_per_prompt: 1}  stages.9.completions_per
    STAGE & optimizer.minibatches_per_step=64  x rollout.stages.9.completions_per_prompt) do not
    rollout.stages.9={max_completion_length: 9}  completions_per_prompt
    rollout.stages.9={max_completion_length: 9, completions_per_prompt: 2, x: 1}  stages.9.x=1
    quantization.keep=null                  quantization.keep=null: input should be a valid list
    rollout.stages.9={max_resp              not readable as YAML
    rollout.stages.9=[1]                    rollout.stages.9=[1]: input should be a dictionary
    rollout.max_staleness=2 & objective.objective=on_policy  on_policy treats every token as sampled
    objective.objective=gspo                objective.eps_low=0.2: objective.objective=gspo clips
    objective.objective=cispo & objective.dual_clip=3  objective.dual_clip=3: objective.objective=ci
    rollout.routing=replay                  rollout.routing=replay: the model has no experts
    rollout.agent=play                      rollout.agent=play: a function is FILE.py:NAME or
    rollout.agent=nowhere.py:play           nowhere.py
    rollout.agent=no_such_module:play       No module named 'no_such_module'
    rollout.agent=json:play                 agent=json:play: ImportError: json has no function play
    rollout.agent=json:dumps                agent=json:dumps: TypeError: it is not async; expected
    rollout.max_turns=3                     rollout.max_turns=3: there is no agent; give
    rollout.agent=json:dumps & rollout.max_episode_tokens=9999  _tokens=9999: the model has 512 posi
    rollout.agent=json:dumps & rollout.max_episode_tokens=8  a prompt of rollout.max_prompt_length=
    rollout.placement=colocated & rollout.max_staleness=1  rollout.max_staleness=1: with rollout.
    rollout.placement=colocated & rollout.servers_at=[https://a]  all servers are on the learner
    rollout.placement=colocated & quantization.publish=delta  quantization.publish=delta: 
    rollout.servers=0                       no server samples; give some, or rollout.servers_at
    rollout.min_servers=3 & rollout.servers_at=[http://a:1]  at most rollout.servers=1 plus 1
    rollout.servers_at=[http://a:1,http://a:1]  rollout.servers_at: lists a server twice
    rollout.server.tensor_parallel_size=3   rollout.server: 4 attention heads are not divisible
    rollout.server.expert_parallel_size=2   expert_parallel_size=2 divides experts, and this model
    rollout.server.max_total_tokens=1       one prompt and completion of
    checkpoint.every_minutes=5 & checkpoint.every_steps=0  every_steps=0 disables checkpoints
    evaluation.held_out_fraction=1e-9       leaves none to hold out
    evaluation.data.a/b=problems.jsonl      a name has letters, digits and _ - only
    evaluation.data.../../x=problems.jsonl  evaluation.data.../../x: no such field
    evaluation.data.-a=problems.jsonl       a name has letters, digits and _ - only
    evaluation.data.held_out=problems.jsonl  this name is reserved
    evaluation.data.test=no_such.jsonl      no_such.jsonl
    critic.tensor_parallel_size=2 & objective.advantage_estimator=gae  policy's 1 ranks
    critic.optimizer.minibatches_per_step=3 & objective.advantage_estimator=gae  of the critic
    STAGE & objective.advantage_estimator=gae & critic.optimizer.minibatches_per_step=32  16 complet
    critic.model=nowhere & objective.advantage_estimator=gae  critic: model directory 'nowhere'
    critic.model=quantized & objective.advantage_estimator=gae  is quantized already
    critic.model=short & objective.advantage_estimator=gae  short: rollout.max_completion_length=100
    prompts.options=9                       not of the form {key: value}; {} leaves no key
    prompts.options={                       prompts.options={: not readable as YAML
    prompts.options.a.b=9                   prompts.options.a.b: no such field
    prompts.options.--x=1                   an option's name has letters, digits and _ only
    prompts.options.$(touch x)=1            an option's name has letters, digits and _ only
    wandb_project=a\x1b[31m                 must not have line breaks or other control characters
    data=                                   data=: missing
    data=no_such.jsonl                      no_such.jsonl
    rollout.max_prompt_length=3             problems.jsonl: every prompt has more than
    data=a\x00b                             must not have line breaks or other control characters
    data=reasoning_gym:no_such_task         no_such_task
    data=reasoning_gym:                     reasoning_gym
    model=                                  model=: missing
    model=nowhere                           model directory 'nowhere' does not exist
    model=problems.jsonl                    model directory 'problems.jsonl' does not exist
    model=a\nb                              must not have line breaks or other control characters
    model=quantized                         'quantized' is quantized already
    name=../../escape                       a run's name has letters, digits and
    name=$(touch F)                         a run's name has letters, digits and
    name=a b                                a run's name has letters, digits and
    name=a\nb                               a run's name has letters, digits and
    name=--help                             a run's name has letters, digits and
    name=..                                 a run's name has letters, digits and
    name=a%j                                a run's name has letters, digits and
    name=a'b                                a run's name has letters, digits and
    name=*                                  a run's name has letters, digits and
    name=run                                exists; choose another name
    output_dir=-x                           a directory's name must not begin with -
    output_dir=$(touch F)                   a directory's name must not begin with -
    output_dir=a;b                          a directory's name must not begin with -
    output_dir=a\nb                         a directory's name must not begin with -
    output_dir=problems.jsonl               directory
    output_dir=/proc/nowhere                belongs to the system
    stepz=1                                 did you mean steps
    lr=1e-5                                 lr: no such field; here it is optimizer.learning_rate
    actor.optim.lr=1e-5                     here it is optimizer.learning_rate
    grpo.num-generations=4                  here it is rollout.completions_per_prompt
    algorithm.filter_groups.enable=true     here it is rollout.dynamic_sampling_tries
    actor.model.path=model                  did you mean model (Hugging Face directory
    options.size=9                          did you mean prompts.options (Options of the reasoning-g
    reward=mine.py                          reward=mine.py: which function? give mine.py:NAME
    objective.objective=mine.py             which function? give mine.py:NAME
    rollout.agent=mine.py                   which function? give mine.py:NAME
    rolout.temprature=1                     did you mean rollout.temperature (Sampling temperature
    objective.rato_cap=1                    Cap C on the ratio of proximal to behaviour probability
    temperature=1                           or evaluation.temperature (Sampling temperature of the
    rollout=1                               rollout: has no value of its own; give its fields
    rollout.server=1                        such as rollout.server.tensor_parallel_size
    prompts.options={a: 1, a: 2}            a is given twice, also in line 1
    prompts.options.a=!!python/name:os.system  the tag tag:yaml.org,2002:python/name:os.system is
    rollout.server.threads.x=1              rollout.server.threads.x: no such field
    =1                                      not of the form field=value
    steps                                   not of the form field=value
    learner.world_size=2                    no such field
    __class__=1                             no such field
""")


def unescaped(word: str) -> str:
    """Return a row's input with `\n`, `\x00` and the like replaced by the characters."""
    return word.encode("latin-1").decode("unicode_escape") if "\\" in word else word


@pytest.mark.parametrize(("word", "message"), FIELDS, ids=[word for word, _ in FIELDS])
def test_a_wrong_field_is_refused(refuse: Refuse, word: str, message: str) -> None:
    words = word.replace(
        "STAGE", "rollout.stages.9={max_completion_length: 9, completions_per_prompt: 2}"
    )
    assert message in refuse(*TRAIN, *(unescaped(each) for each in words.split(" & ")))


OWN_PY = """from qurl_megatron.config.schema import Config, PromptsConfig
from qurl_megatron.recipes import grpo


def fails():
    settings = {}
    return settings["x"]


def quits():
    raise SystemExit(3)


def nothing():
    pass


def takes(argument):
    return grpo.recipe()


def stray():
    config = grpo.recipe()
    config.rollout.tempratur = 0.6
    return config


def wrong():
    return Config(steps="many")


def strange():
    return Config(prompts=PromptsConfig(options={"x": object()}))


def moved():
    config = grpo.recipe()
    config.data_options = {}
    return config
"""
# A file's content, and what is said of it after its name.
FILES = rows(r"""
    recipe: gropo                           , line 1: gropo: no such recipe; did you mean grpo?
    recipe: other.yaml                      , line 1: other.yaml: no such file; a file of your own
    recipe: my.yaml                         , line 1: recipe: my.yaml would begin with itself
    recipe: own.py                          , line 1: own.py: which function? give own.py:fails
    recipe:                                 , line 1: recipe: name one, such as grpo, or leave it
    recipe: ''                              , line 1: recipe: name one, such as grpo, or leave it
    recipe: [grpo]                          , line 1: recipe: name one, such as grpo, or leave it
    steps: 7\n\nrollout:\n tempratur: 1     , line 4: rollout.tempratur: no such field; did you mean
    steps: 7\nrolout.temperature: 1         , line 2: rolout.temperature: no such field; did you
    rolout: {}                              , line 1: rolout: no such field
    rollout: 7                              , line 1: rollout: has no value of its own; give its
    rollout:\n temperature: warm            , line 2: rollout.temperature=warm: input should be a
    quantization: {format: int3}            , line 1: quantization.format=int3: input should be 'bf
    steps: yes                              , line 1: steps=yes: input should be a valid integer
    steps: 1e3                              , line 1: steps=1e3: input should be a valid integer
    steps:                                  , line 1: steps=null: input should be a valid integer
    prompts: {system_prompt: null}          valid string; an empty one is ''
    scoring.weights: ~                      valid list; an empty one is []
    rollout.stages.9: {max_completion_length: 9}  9.completions_per_prompt: field required
    model: [a, b]                           , line 1: model=['a', 'b']: input should be a valid
    quantization: {keep: [[a]]}             , line 1: quantization.keep.0=['a']: input should be
    data: ['a,b']                           , line 1: data=['a,b']: an item of this list
    evaluation.data.x: ['a,b']              , line 1: evaluation.data.x=['a,b']: an item of
    steps: 7\ndata:\n train_files: a        , line 3: data.train_files: no such field; here it
    steps: {a: 1}                           , line 1: steps.a: no such field; did you mean steps
    quantization: {keep: *.down_proj}       a text that begins with * needs quotes
    prompts.options: 7                      , line 1: prompts.options=7: not of the form {key: value
    steps: 7\nsteps: 8                      line 2: steps is given twice, also in line 1
    rollout.servers: 1\nrollout: {servers: 2}  , line 2: rollout.servers is given twice, also in
    prompts.options.size: 9\nprompts.options: {}  , line 2: prompts.options is given twice, also in
    data_options.size: 9\nprompts: {options: {}}  , line 2: prompts.options is given twice, also in
    shuffle: 1\nprompts:\n shuffle: false   , line 3: prompts.shuffle is given twice, also in line 1
    prompts.options: {size: 9, size: 8}     line 1: size is given twice, also in line 1
    - steps                                 : is a list; give lines such as `recipe: grpo`
    steps=7                                 : is a text; give lines such as `recipe: grpo`
    recipe: grpo\nsteps:7                   ; a field and its value are `steps: 100`
    # nothing                               : is empty; give lines such as `recipe: grpo`
    rollout:\n\tservers: 7                  YAML is indented with spaces
    steps: !!python/object/apply:os.getpid []  line 1: the tag tag:yaml.org,2002:python/object
    steps: &s 7\nseed: *s                   line 2: the alias *s is refused
    ? [a]\n: 7                              line 1: a key must be a name
    "\\x1b[31m": 7                          , line 1: \\x1b[31m: no such field
    steps: 7\x00                            : not readable as YAML (unacceptable character #x0000
    steps: 7\n---\nsteps: 8                 line 2: expected a single document
""")


@pytest.mark.parametrize(("content", "message"), FILES, ids=[content for content, _ in FILES])
def test_a_wrong_file_is_refused_with_its_name_and_the_line(
    refuse: Refuse, home: Path, content: str, message: str
) -> None:
    (home / "my.yaml").write_text(unescaped(content) + "\n")
    line = refuse("train", "my.yaml")
    assert line.startswith("qurl: my.yaml") and unescaped(message) in line


COMMANDS = rows("""
    train                                          Missing argument 'RECIPE'
    train no_such_recipe                           no_such_recipe: no such recipe
    train ../recipes/grpo                          ../recipes/grpo: no such recipe
    train gropo                                    gropo: no such recipe; did you mean grpo?
    train my                                       a file of your own is FILE.yaml or FILE.py:NAME
    train nowhere.yaml                             nowhere.yaml: no such file
    train runs.yaml                                runs.yaml: not a file
    launch nowhere.yml --executor slurm            nowhere.yml: no such file
    plan nowhere.yaml                              nowhere.yaml: no such file
    rehearse nowhere.py:recipe                     nowhere.py: no such file
    config own.py                                  own.py: which function? give own.py:fails
    config own.py:nowhere                          own.py:nowhere: ImportError: it has no function
    config own.py:fails                            own.py:fails, line 7: KeyError: 'x'
    config own.py:quits                            own.py:quits, line 11: SystemExit: 3
    config own.py:nothing                          own.py:nothing: returned NoneType; expected a
    config own.py:takes                            own.py:takes: TypeError: takes() missing 1
    config own.py:stray                            own.py:stray: rollout.tempratur: no such field
    config own.py:moved                            data_options: no such field; here it is prompts.o
    config own.py:wrong                            own.py:wrong: steps=many: input should be
    config own.py:strange                          own.py:strange: Object of type object is not
    config wrong.py:recipe                         wrong.py:recipe: SyntaxError
    train grpo --steps 3                           No such option: --steps
    train grpo                                     data=: missing
    train quickstart prompts.options.size=1e4      prompts.options.size=10000.0: must be a whole
    train quickstart prompts.options.size=-1       prompts.options.size=-1: must be a whole number
    train quickstart prompts.options.seed=a        prompts.options.seed=a: must be a whole number
    nonsense                                       No such command 'nonsense'
    --nonsense                                     No such option: --nonsense
    config no_such_recipe                          no such recipe
    config grpo evaluation.topp=1                  did you mean evaluation.top_p
    resume                                         Missing argument 'RUN'
    resume runs/nowhere                            not a run's directory, it has no config.yaml
    resume runs/no_run                             not a run's directory, it has no config.yaml
    resume problems.jsonl                          not a run's directory, it has no config.yaml
    resume runs/spoilt                             runs/spoilt/config.yaml: not readable as YAML
    status runs/nowhere                            not a run's directory, it has no config.yaml
    status                                         Missing argument 'RUN...'
    logs runs/nowhere                              the run has no logs
    logs runs/run --lines 0                        '--lines'
    report runs/nowhere                            runs/nowhere
    report runs/no_run                             runs/no_run
    export runs/run out                            not a checkpoint, it lacks megatron
    export nowhere out                             not a checkpoint
    export problems.jsonl out                      not a checkpoint
    export model out                               not a checkpoint
    eval model                                     Missing argument
    eval nowhere problems.jsonl                    model directory 'nowhere' does not exist
    eval model k=1                                 data: missing
    eval model problems.jsonl agent=json:dumps max_prompt_length=9 max_completion_length=9  async
    eval model problems.jsonl max_turns=3          max_turns=3: there is no agent; give agent, or
    eval model problems.jsonl agent=json:dumps max_episode_tokens=999  model has 512 positions
    agent json:dumps --model nowhere --data problems.jsonl  'nowhere' does not exist
    agent json:dumps --model model --data problems.jsonl adapters=model keep=[q]  keep: a base under
    agent json:dumps --model model --data problems.jsonl --episodes 0  '--episodes'
    agent json:dumps --model model --data problems.jsonl agent=a:b  agent=a:b: json:dumps is played
    agent json:dumps --model model --data problems.jsonl k=8  k=8: qurl agent shows episodes, and
    agent json:dumps --model model --data problems.jsonl reward=exact  reward=exact: qurl agent sh
    eval model no_such.jsonl max_prompt_length=99 max_completion_length=99  no_such.jsonl
    eval model problems.jsonl k=-1                 k=-1
    eval model problems.jsonl prompts.weights=1    weights: no such field; only a run has it
    eval model problems.jsonl k_of.a=2             data has no such name; it has problems.jsonl
    eval model problems.jsonl reward=math,dapo scoring.weights=1  there are 2 rewards
    eval model problems.jsonl format=int3          format=int3
    eval model problems.jsonl format=fp8-block     blocks of fp8-block are 128 wide
    eval model problems.jsonl group_size=32        group_size=32: format bf16 has no groups
    eval model problems.jsonl format=int4          groups of int4 are 128 wide
    eval model problems.jsonl smoothing=0.5        the served weights are in BF16
    eval model problems.jsonl format=int8 smoothing=2  less than or equal to 1
    eval model problems.jsonl format=int8 keep=[no] max_prompt_length=9 max_completion_length=9  no:
    eval model problems.jsonl max_prompt_length=9 max_completion_length=9 output=runs  runs: exists
    eval model problems.jsonl output=-x            must not begin with -
    eval model problems.jsonl max_prompt_length=1 max_completion_length=9  than max_prompt_length
    eval model problems.jsonl max_prompt_length=99 max_completion_length=999  set it to 413 or less
    eval model problems.jsonl server.tensor_parallel_size=3  4 attention heads
    eval model problems.jsonl kk=1                 did you mean k
    eval quantized problems.jsonl max_prompt_length=9 max_completion_length=9  is quantized already
    eval model problems.jsonl --executor ray       executors are local and slurm
    eval model problems.jsonl --account a          --account: only with --executor slurm
    eval nowhere problems.jsonl --executor slurm   model directory 'nowhere' does not exist
    eval model problems.jsonl --executor slurm server.tensor_parallel_size=3  4 attention heads
    quantize model out --executor slurm --time 1h  time=1h: not a time limit of Slurm
    export nowhere out --executor slurm            nowhere: not a checkpoint
    quantize nowhere out --executor slurm          model directory 'nowhere' does not exist
    quantize model runs --executor slurm           runs exists; choose another directory
    quantize model out --executor slurm --keep none  none
    quantize model out --executor slurm --sbatch qos  --sbatch qos: not of the form OPTION=VALUE
    mismatch model problems.jsonl --executor slurm --format bf16  is not quantized
    quantize model                                 Missing argument 'DST'
    quantize nowhere out                           model directory 'nowhere' does not exist
    quantize model runs                            runs exists; choose another directory
    quantize model model                           model exists; choose another directory
    quantize model link                            link exists; choose another directory
    quantize model linked                          linked.partial is a link, and may lead elsewhere
    uaq model linked                               linked.partial is a link, and may lead elsewhere
    quantize model out --smoothing 0.5             --smoothing: its scales come from the prompts of
    quantize model out --smoothing 2 --data problems.jsonl  --smoothing=2.0: input should be less
    quantize model out --smoothing 0.5 --data few.jsonl  3 prompts; it takes at least 4
    eval model problems.jsonl rounding=up          rounding=up: input should be 'unbiased' or
    quantize model out --rounding up               'up' is not one of 'unbiased', 'nearest'
    quantize model out --format int3               formats are bf16, int8
    quantize model out --format fp8-block          blocks of fp8-block are 128 wide
    quantize model out --format int4               groups of int4 are 128 wide
    quantize model out --format int4 --group-size 64  --group-size 64: must be 32 or 128
    quantize model out --group-size 32             --group-size 32: format int8 has no groups
    mismatch model problems.jsonl --format int4    groups of int4 are 128 wide
    mismatch model problems.jsonl --format bf16    --format bf16: is not quantized; choose int8
    mismatch model problems.jsonl --format int3    --format int3: formats are bf16, int8
    mismatch model problems.jsonl --format fp8-block  128
    mismatch nowhere problems.jsonl                nowhere
    mismatch model nothing.jsonl                   nothing.jsonl
    mismatch model few.jsonl                       3 prompts; it takes at least 4
    mismatch model problems.jsonl --max-completion 512  --max-completion 512: the model has 512
    mismatch model problems.jsonl --smoothing 2  --smoothing=2.0: input should be less than or equal
    mismatch model problems.jsonl --temperature 0  --temperature=0.0: input should be greater
    mismatch model problems.jsonl --temperature nan  --temperature=nan: input should be a finite
    mismatch model problems.jsonl --output model   exists; choose another file
    mismatch model problems.jsonl --output model/no/x.json  there is no directory
    quantize quantized out                         is quantized already
    quantize -m out                                No such option: -m; see qurl quantize --help
    train quickstart --steps 5                     No such option: --steps; give steps=5
    eval . . --temperature 0.5                     --temperature; see qurl eval --help
    train quickstart --learning-rate=1e-5          give optimizer.learning_rate=1e-5
    train quickstart --num_generations 4           give rollout.completions_per_prompt, as FIELD=VA
    train no_such.py                               no_such.py: no such file
    quantize -- -m out                             model directory '-m' does not exist
    uaq model                                      Missing argument 'DST'
    uaq nowhere out                                model directory 'nowhere' does not exist
    uaq model out --scale 0                        --scale=0.0: input should be greater
    uaq model out --scale nan                      --scale=nan
    uaq model out --scale much                     '--scale'
    uaq model runs                                 runs exists; choose another directory
    uaq model out --undo                           is not scaled: its config.json has no qurl_uaq
    uaq scaled out                                 is scaled already
    uaq quantized out                              is quantized already
    plan                                           Missing argument 'MODEL|RECIPE'
    plan nowhere                                   nowhere: no such directory, model
    plan grpo                                      model=: missing
    plan Qwen2.5-32B --gpus 0                      --gpus 0: must be numbers from 1 to 16384
    plan Qwen2.5-32B --gpus 1                      no layout of 1 GPU fits
    plan Qwen2.5-32B --gpus 100000                 --gpus 100000: must be numbers from 1
    plan Qwen2.5-32B --mean-prompt -1              --mean-prompt -1.0: must be from 1 to
    plan Qwen2.5-32B --mean-prompt nan             --mean-prompt nan: must be from 1 to
    plan Qwen2.5-32B --mean-completion inf           --mean-completion inf: must be from 1 to
    plan Qwen2.5-32B --mean-completion 1e9           rollout.max_completion_length=
    plan math_tools model=Qwen2.5-7B --mean-completion 16000  15360, the room of an episode
    plan Qwen2.5-32B rollout.placement=colocated rollout.max_staleness=1  the servers sleep while
    plan Qwen2.5-32B steps=0                       steps=0
    plan quantized                                 is quantized already
    plan quickstart model=nowhere                  model directory 'nowhere' does not exist
    plan problems.jsonl                            no such directory, model
    launch                                         Missing argument 'RECIPE'
    launch no_such_recipe                          no such recipe
    launch quickstart --executor ray               executors are local and slurm
    launch quickstart --account a                  --account: only with --executor slurm
    launch quickstart --max-restarts 5             --max-restarts: only with --executor slurm
    launch quickstart --time 1:00:00               --time: only with --executor slurm
    launch quickstart --sweep steps                --sweep steps: not of the form
    launch quickstart --sweep steps=1,             --sweep steps=1,: not of the form
    launch quickstart --sweep steps=1,1            --sweep steps=1,1: lists a value twice
    launch quickstart name=n --sweep data=a/b,a_b  data=a_b would both be called n-a_b
    launch quickstart --sweep steps=1,0            steps=0: input should be greater
    launch quickstart name=a;b --sweep steps=1,2   name=a;b: a run's name has
""")
SLURM = rows(r"""
    --time banana                                  time=banana: not a time limit of Slurm
    --time -5                                      time=-5: not a time limit of Slurm
    --time 1:2:3:4                                 time=1:2:3:4: not a time limit of Slurm
    --time 1h                                      time=1h: not a time limit of Slurm
    --sbatch time=banana                           time=banana: not a time limit of Slurm
    --max-restarts -1                              '--max-restarts'
    --max-restarts 99999999                        '--max-restarts'
    --gpus-per-node 0                              '--gpus-per-node'
    --gpus-per-node 100000                         '--gpus-per-node'
    --sbatch qos                                   --sbatch qos: not of the form OPTION=VALUE
    --sbatch =high                                 not of the form OPTION=VALUE
    --sbatch qos=                                  not of the form OPTION=VALUE
    --sbatch --qos=high                            --sbatch --qos=high: not an sbatch option
    --sbatch $(touch_F)=1                          not an sbatch option
    --sbatch qos;touch_F=1                         not an sbatch option
    --sbatch QOS=high                              not an sbatch option
    --container-mounts /data                       /data: not of the form HOST:CONTAINER
    --container-mounts /a:/a,:/b                   :/b: not of the form HOST:CONTAINER
    --container-mounts /a:/a                       --container-mounts: give --container-image too
    --container-image i.sqsh                       the container would not have this directory
    --setup nowhere                                --setup nowhere: not a file of shell lines
    --env A                                        --env A: not of the form NAME=VALUE
    --env A;touch_F=1                              --env A;touch_F: not the name of an environment
    --sbatch qos=a\ntouch_F                        must not have a line break
    --sbatch qos=a\x1b[31m                         another control character
    --account a\ntouch_F                           must not have a line break
    --partition a\rb                               must not have a line break
    --time 1\n--qos=high                           must not have a line break
    --container-image a\nb                         must not have a line break
    --container-mounts /a:/a\n/b:/b                must not have a line break
    name=$(touch_F)                                a run's name has letters
    rollout.server.tensor_parallel_size=4 --gpus-per-node 2  a server must fit on one node
    learner.data_parallel_size=3 --gpus-per-node 4  3
""")


@pytest.mark.parametrize(("command", "message"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_a_wrong_command_is_refused(refuse: Refuse, command: str, message: str) -> None:
    words = command.split()
    assert message in refuse(
        *words[:1], *(["--dry-run"] if words[0] == "launch" else []), *words[1:]
    )


@pytest.mark.parametrize(("words", "message"), SLURM, ids=[words for words, _ in SLURM])
def test_a_wrong_job_is_refused(refuse: Refuse, words: str, message: str) -> None:
    given = [unescaped(word) for word in words.split()]
    assert message in refuse("launch", *TRAIN[1:], "--executor", "slurm", "--dry-run", *given)


def change_config(model: Path, **changes: Any) -> None:
    """Change fields of config.json; the value ABSENT removes one."""
    path = model / "config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: v for name, v in fields.items() if v != "ABSENT"}))


def text_of(name: str, text: str | bytes) -> Callable[[Path], object]:
    """Return a function that replaces a file's content."""
    content = text if isinstance(text, bytes) else text.encode()
    return lambda model: (model / name).write_bytes(content)


def weights_with(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """Return a function that changes the stored tensors."""

    def rewrite(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return rewrite


def fewer_tokens(model: Path) -> None:
    """Cut the vocabulary of a model, but not that of its tokenizer."""
    change_config(model, vocab_size=128)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights_with(lambda t: t.update({name: t[name][:128].clone() for name in names}))(model)


def cut(size: int) -> Callable[[Path], object]:
    """Return a function that keeps the first bytes of the weights; a negative size drops some."""

    def cut(model: Path) -> None:
        path = model / "model.safetensors"
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)

    return cut


def index_of(files: Any, writes: str = "") -> Callable[[Path], object]:
    """Return a function that writes an index of the weights, and a file without them.

    `files` has the files of some weights, or is no mapping and takes the place of all.
    """

    def write(model: Path) -> None:
        weight_map: Any = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
        weight_map = weight_map | files if isinstance(files, dict) else files
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (model / "model.safetensors.index.json").write_text(text)
        if writes:
            save_file({"x": torch.ones(1)}, model / writes)

    return write


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
LLAMA3 = """rope_type: llama3, rope_theta: 10000.0, factor: 4.0, low_freq_factor: 1.0,
    high_freq_factor: 4.0, original_max_position_embeddings: 128"""
# Changed fields of config.json; the value ABSENT removes one. `test_architecture` has more of them,
# and `test_huggingface` more of wrong weights.
CONFIGS = rows(r"""
    {vocab_size: 300}                       config.json implies [300, 64]
    {vocab_size: 200}                       its tokenizer has token 255
    {num_hidden_layers: 4, layer_types: ABSENT}  lacks tensor
    {num_hidden_layers: 1, layer_types: ABSENT}  has unknown tensor
    {quantization_config: {quant_method: awq}}  is quantized already (quantization_config in its con
    {architectures: Qwen2}                  '(none)'
    {architectures: [MambaForCausalLM]}     'MambaForCausalLM'
    {model_type: llama}                     model_type 'llama' is not that
    {num_hidden_layers: "2"}                must be a positive integer
    {hidden_size: -64}                      'hidden_size' must be a positive
    {intermediate_size: 0.5}                must be a positive integer
    {vocab_size: true}                      'vocab_size' must be a positive
    {max_position_embeddings: null}         has no 'max_position_embeddings'
    {head_dim: null}                        'head_dim' is null; give the number
    {head_dim: 15}                          rotary positions need an even number
    {head_dim: 32}                          config.json implies
    {num_key_value_heads: 3}                do not divide into groups
    {rms_norm_eps: x}                       'rms_norm_eps' must be a positive
    {rms_norm_eps: -0.000001}               'rms_norm_eps' must be a positive
    {rope_theta: 1.0e+39}                   rope_theta
    {rope_parameters: {rope_type: default, rope_theta: 10000.0, factor: 4.0}}  has no field 'factor'
    {rope_parameters: {rope_type: yarn, rope_theta: 10000.0, factor: 4.0}}  no 'original_max_positi
    {rope_parameters: {rope_type: default, type: yarn}}  is both 'default' and 'yarn'; give one
    {rope_parameters: {rope_type: dynamic, factor: 2.0}}  'dynamic' is not supported
    {rope_scaling: {type: linear, factor: 2.0}}  rope_parameters and rope_scaling differ
    {rope_scaling: {LLAMA3}}                rope_parameters and rope_scaling differ
    {rope_theta: 500000.0}                  'rope_theta' is given as [10000.0, 5
    {rope_parameters: yarn}                 must be objects
    {rope_parameters: {rope_type: [yarn]}}  is not supported
    {rope_parameters: {full_attention: {rope_type: default}}}  has no field 'full_attention'
    {rope_parameters: {LLAMA3, factor: null}}  llama3 rope scaling has no 'factor'
    {rope_parameters: {LLAMA3, factor: 0}}  'factor' must be a positive number
    {rope_parameters: {LLAMA3, low_freq_factor: 4.0}}  low_freq_factor must be less than high_freq
    {partial_rotary_factor: 0.5}            partial_rotary_factor
    {layer_types: [full_attention, chunked_attention]}  'full_attention' for each of the 2 layers
    {layer_types: [full_attention]}         'layer_types' must
    {dtype: float8}                         dtype 'float8' must be bfloat16
    {dtype: save}                           dtype 'save' must be bfloat16
""")
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a cut shard": (cut(-1000), "model.safetensors is not a whole safetensors file"),
    "an empty shard": (cut(0), "is not a whole safetensors file"),
    "half a header": (cut(100), "is not a whole safetensors file"),
    "garbage": (text_of("model.safetensors", b"\xff" * 999), "is not a whole safetensors"),
    "an integer tensor": (
        weights_with(lambda t: t.update({UP: t[UP].to(torch.int8)})),
        f"has tensor '{UP}' in I8; weights must be in BF16, F16, F32",
    ),
    "an 8-bit tensor": (
        weights_with(lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)})),
        f"has tensor '{UP}' in F8_E4M3",
    ),
    "NaN": (weights_with(lambda t: t[UP][3].fill_(torch.nan)), f"'{UP}' holds nan at [3, 0]"),
    "infinity": (weights_with(lambda t: t[NORM][7:].fill_(-torch.inf)), "holds -inf at [7]"),
    "fewer tokens than the tokenizer has": (
        fewer_tokens,
        "its tokenizer has token 255, but the model's vocabulary has 128 tokens",
    ),
    "an index that is no JSON": (text_of("model.safetensors.index.json", "{"), "is not JSON"),
    "an empty index": (text_of("model.safetensors.index.json", "{}"), "has no 'weight_map'"),
    "an index of a list": (index_of([1]), "has no 'weight_map'"),
    "an index that leads outside": (
        index_of({UP: "../outside.safetensors"}),
        "names '../outside.safetensors'; files must be *.safetensors beside the index",
    ),
    "an index of another kind of file": (
        index_of({UP: "config.json"}),
        "names 'config.json'; files must be",
    ),
    "an index of a number": (index_of({UP: 7}), "names 7; files must"),
    "an index that places a tensor wrongly": (
        index_of({UP: "model-2.safetensors"}, writes="model-2.safetensors"),
        f"lacks tensor '{UP}': model.safetensors.index.json places it in model-2.safetensors",
    ),
    "a config in UTF-16": (text_of("config.json", b"\xff\xfe{"), "config.json is not JSON"),
    "a config of a list": (text_of("config.json", "[]"), "holds no JSON object, but list"),
    "deep JSON": (text_of("config.json", "[" * 99999), "config.json is not JSON"),
    "an end token beyond the vocabulary": (
        text_of("generation_config.json", '{"eos_token_id": [1, 256]}'),
        "generation_config.json: eos_token_id 256 is not a token of the vocabulary, 0 to 255",
    ),
    "an end token as text": (
        text_of("generation_config.json", '{"eos_token_id": "</s>"}'),
        "eos_token_id '</s>'",
    ),
    "a generation config that is no JSON": (text_of("generation_config.json", "{"), "is not JSON"),
    "no tokenizer": (lambda model: (model / "tokenizer.json").unlink(), "has no tokenizer"),
    "half a tokenizer": (text_of("tokenizer.json", '{"version": "1.0", "mod'), "tokenizer"),
    "a tokenizer of nothing": (text_of("tokenizer.json", "{}"), "its tokenizer cannot be loaded"),
    "a tokenizer config that is no JSON": (
        text_of("tokenizer_config.json", "{"),
        "its tokenizer cannot be loaded",
    ),
    "a chat template that is no template": (
        text_of("chat_template.jinja", "{% for message in"),
        "its tokenizer cannot be loaded (TemplateSyntaxError",
    ),
}


@pytest.fixture
def broken_model(home: Path) -> Any:
    """Yield a copy of the model, and remove it."""
    copy = Path(shutil.copytree(home / "model", home / "broken"))
    yield copy
    shutil.rmtree(copy)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused(refuse: Refuse, broken_model: Path, name: str) -> None:
    change, message = BROKEN[name]
    change(broken_model)
    assert message in refuse(*TRAIN, "model=broken")


@pytest.mark.parametrize(("fields", "message"), CONFIGS, ids=[fields for fields, _ in CONFIGS])
def test_a_model_with_a_wrong_config_is_refused(
    refuse: Refuse, broken_model: Path, fields: str, message: str
) -> None:
    change_config(broken_model, **yaml.safe_load(fields.replace("LLAMA3", LLAMA3)))
    assert message in refuse(*TRAIN, "model=broken")


@pytest.mark.parametrize("command", ["quantize", "uaq"])
@pytest.mark.parametrize("name", ["NaN", "infinity", "an index that leads outside", "a cut shard"])
def test_a_broken_model_is_not_rewritten(
    refuse: Refuse, broken_model: Path, name: str, command: str
) -> None:
    change, message = BROKEN[name]
    change(broken_model)
    assert message in refuse(command, "broken", "out")
