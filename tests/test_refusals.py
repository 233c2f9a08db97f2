"""Wrong input ends a command with one line and code 2; nothing is started and nothing is written.

Each row of the tables below is one input and a part of the line that it must end with. The commands
run in this process, in a directory with a tiny model, problems and runs.
"""

from __future__ import annotations

import dataclasses
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
from safetensors.torch import load_file, save_file
from torch import Tensor

import qurl_megatron.weight_sync.export  # noqa: F401  # it makes temporary files
from qurl_megatron import cli
from qurl_megatron.config import yaml_file
from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import UaqConfig
from qurl_megatron.launch import experiment, local, owner
from qurl_megatron.quantization import offline
from qurl_megatron.recipes import grpo
from recipe_inputs import good_problems
from tiny import build_tiny_model

TRAIN = """train grpo model=model data=problems.jsonl rollout.max_prompt_length=100
    rollout.max_response_length=100 rollout.prompts_per_step=8 name=new""".split()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a model, problems, and a run; commands may not change it."""
    home = tmp_path_factory.mktemp("home")
    (home / "tmp").mkdir()
    model = build_tiny_model(home / "model")
    (home / "problems.jsonl").write_text("\n".join(good_problems(40)) + "\n")
    offline.quantize_directory(model, home / "quantized", "int8", lambda done, total: None)
    offline.scale_directory(model, home / "scaled", UaqConfig(2), lambda done, total: None)
    words = [word for word in TRAIN[2:] if not word.startswith("name=")]
    config = with_overrides(grpo.recipe(), [*words, "name=run"])
    for name in ("run", "spoilt"):
        run_dir = home / "runs" / name
        run_dir.mkdir(parents=True)
        yaml_file.save(config, run_dir / "config.yaml")
    (home / "runs" / "spoilt" / "config.yaml").write_text("steps: [\n")
    (home / "runs" / "no_run").mkdir()
    (home / "runs" / "owned").mkdir()
    yaml_file.save(config, home / "runs" / "owned" / "config.yaml")
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
    stats = {path: path.lstat() for path in directory.rglob("*") if path.name != owner.FILE_NAME}
    return {
        str(path): (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
        for path, stat in stats.items()
    }


def rows(table: str) -> list[tuple[str, str]]:
    """Return (input, part of the message) of each line; two spaces or more divide them."""
    lines = [line.strip() for line in table.strip().splitlines()]
    return [(line.partition("  ")[0], line.partition("  ")[2].strip()) for line in lines]


FIELDS = rows(r"""
    seed=-1                                 seed=-1: input should be greater than or equal to 0
    seed=2147483648                         less than 2147483648
    seed=1.5                                valid integer
    seed=nan                                valid integer
    steps=0                                 greater than or equal to 1
    steps=-5                                greater than or equal to 1
    steps=10000000000                       less than or equal to 1000000000
    steps=1e400                             valid integer
    steps=                                  valid integer
    time_limit_s=0                          greater than 0
    time_limit_s=-1                         greater than 0
    time_limit_s=nan                        finite number
    time_limit_s=inf                        finite number
    optimizer.learning_rate=nan             finite number
    optimizer.learning_rate=inf             finite number
    optimizer.learning_rate=-1e-6           greater than or equal to 0
    optimizer.learning_rate=1e3             less than or equal to 1
    optimizer.beta1=1                       less than 1
    optimizer.beta1=-0.1                    greater than or equal to 0
    optimizer.beta1=nan                     finite number
    optimizer.beta2=1.0                     less than 1
    optimizer.beta2=2                       less than 1
    optimizer.beta2=-1                      greater than or equal to 0
    optimizer.epsilon=0                     0.00000000000000000001
    optimizer.epsilon=-1e-8                 0.00000000000000000001
    optimizer.epsilon=1e-320                0.00000000000000000001
    optimizer.epsilon=inf                   finite number
    optimizer.weight_decay=-1               greater than or equal to 0
    optimizer.weight_decay=nan              finite number
    optimizer.weight_decay=1e300            less than or equal to
    optimizer.clip_grad=-1                  greater than or equal to 0
    optimizer.clip_grad=inf                 finite number
    optimizer.warmup_steps=-1               greater than or equal to 0
    optimizer.minibatches_per_step=0        greater than or equal to 1
    optimizer.minibatches_per_step=7        do not divide into minibatches
    critic.optimizer.beta1=1                critic.optimizer.beta1=1: input should be less than 1
    critic.optimizer.epsilon=0              critic.optimizer.epsilon=0
    critic.value_clip=0                     greater than or equal to 0.000001
    critic.discount=1.01                    less than or equal to 1
    critic.discount=0                       greater than 0
    critic.gae_lambda=-0.1                  greater than or equal to 0
    critic.gae_lambda=nan                   finite number
    critic.tensor_parallel_size=0           greater than or equal to 1
    objective.objective=ppo                 'naive', 'on_policy', 'decoupled', 'tis' or 'acr'
    objective.eps_low=1.5                   less than or equal to 1
    objective.eps_low=-0.1                  greater than or equal to 0
    objective.eps_high=inf                  finite number
    objective.ratio_cap=0                   greater than or equal to 0.000001
    objective.ratio_cap=-2                  greater than or equal to 0.000001
    objective.ratio_cap=1e300               less than or equal to
    objective.kl_coefficient=-0.1           greater than or equal to 0
    objective.kl_coefficient=nan            finite number
    objective.aggregation=mean              'sequence_mean' or 'token_mean'
    advantage_estimator=ppo                 'grpo' or 'gae'
    reward=maths                            reward=maths
    quantization.format=int3                'int4'
    quantization.format=                    quantization.format=
    quantization.bucket_bytes=1             greater than or equal to 1048576
    quantization.bucket_bytes=1000000000000000000          less than or equal to
    quantization.uaq.scale=0                greater than or equal to 0.001
    quantization.uaq.scale=-1.5             greater than or equal to 0.001
    quantization.uaq.scale=1e300            less than or equal to 1000
    quantization.uaq.scale=1e-300           greater than or equal to 0.001
    quantization.uaq.scale=nan              finite number
    quantization.uaq.layer_scales.0=1e300   less than or equal to 1000
    quantization.uaq.layer_scales.99=2      layers are numbered from 0 to 1
    quantization.uaq.layer_scales.-1=2      layers are numbered from 0 to 1
    quantization.uaq.layer_scales.x=2       valid integer
    quantization.uaq.through_up=perhaps     valid boolean
    learner.tensor_parallel_size=0          greater than or equal to 1
    learner.tensor_parallel_size=3          4 attention heads are not divisible by
    learner.tensor_parallel_size=1000000    less than or equal to 4096
    learner.pipeline_parallel_size=3        2 layers are not divisible by pipeline_parallel_size=3
    learner.data_parallel_size=-1           greater than or equal to 1
    learner.data_parallel_size=100000       less than or equal to 4096
    learner.data_parallel_size=7            do not divide into minibatches
    learner.virtual_pipeline_parallel_size=2  leave it at 1
    learner.layers_in_last_pipeline_stage=9   layers_in_last_pipeline_stage=9
    learner.dtype=float8                    'float32' or 'bfloat16'
    learner.micro_batch_size=0              greater than or equal to 1
    learner.micro_batch_size=100000            less than or equal to 65536
    learner.threads_per_rank=0              greater than or equal to 1
    learner.threads_per_rank=100000         less than or equal to 1024
    rollout.prompts_per_step=0              greater than or equal to 1
    rollout.prompts_per_step=1000           problems to train on; a step must not repeat a prompt
    rollout.prompts_per_step=1000000000     problems to train on
    rollout.prompts_per_step=10000000000    less than or equal to
    rollout.completions_per_prompt=1        grpo compares the completions of a prompt
    rollout.completions_per_prompt=0        greater than or equal to 1
    rollout.completions_per_prompt=100000   less than or equal to 65536
    rollout.temperature=0                   greater than or equal to 0.01
    rollout.temperature=1e-30               greater than or equal to 0.01
    rollout.temperature=-1                  greater than or equal to 0.01
    rollout.temperature=1e30                less than or equal to 10
    rollout.temperature=nan                 finite number
    rollout.temperature=inf                 finite number
    rollout.top_p=0.9                       training needs top_p=1
    rollout.top_p=nan                       training needs top_p=1
    rollout.top_k=5                         training needs top_p=1 and top_k=-1
    rollout.max_prompt_length=0             greater than or equal to 1
    rollout.max_prompt_length=2000000000    less than or equal to
    rollout.max_response_length=0           greater than or equal to 1
    rollout.max_response_length=5000        with rollout.max_prompt_length=100 that is 5100 tokens
    rollout.max_prompt_length=512           a response needs some of them; set it lower
    rollout.dynamic_sampling_tries=-1       greater than or equal to 0
    rollout.soft_overlong_tokens=-1         greater than or equal to 0
    rollout.soft_overlong_tokens=100        must be less than rollout.max_response_length=100
    rollout.stages.1={max_response_length: 9, completions_per_prompt: 2}  equal to 2
    rollout.stages.9={max_response_length: 9999, completions_per_prompt: 2}  with rollout.max_prompt
    rollout.stages.9={max_response_length: 9, completions_per_prompt: 1}  at least two
    rollout.stages.9={max_response_length: 9}  completions_per_prompt
    rollout.stages.9={max_resp              not readable as YAML
    rollout.stages.9=[1]                    rollout.stages.9=[1]
    rollout.servers=0                       nobody samples; give servers, or rollout.servers_at
    rollout.servers=-1                      greater than or equal to 0
    rollout.servers=1000                    less than or equal to 512
    rollout.server.tensor_parallel_size=3   4 attention heads are not divisible
    rollout.server.mem_fraction_static=0    greater than 0
    rollout.server.mem_fraction_static=1    less than 1
    rollout.server.mem_fraction_static=nan  finite number
    rollout.server.max_running_requests=0   greater than or equal to 1
    rollout.server.max_running_requests=100000  less than or equal to 65536
    rollout.server.max_total_tokens=-1      greater than or equal to 1
    rollout.server.max_total_tokens=1       one prompt and response of
    rollout.server.threads=0                greater than or equal to 1
    rollout.server.threads=100000           less than or equal to 1024
    rollout.server.start_timeout_s=0        greater than 0
    rollout.server.start_timeout_s=inf      finite number
    warmup.max_steps=-1                     greater than or equal to 0
    warmup.max_steps=5                      the supervised warm-up
    warmup.target_accuracy=1                less than 1
    warmup.batch_size=0                     greater than or equal to 1
    warmup.learning_rate=inf                finite number
    warmup.check_every_steps=0              greater than or equal to 1
    evaluation.problems=-1                  greater than or equal to 0
    evaluation.held_out_fraction=1          less than 1
    evaluation.held_out_fraction=-0.1       greater than or equal to 0
    evaluation.held_out_fraction=nan        finite number
    evaluation.held_out_fraction=1e-9       leaves none to hold out
    evaluation.k=-1                         greater than or equal to 0
    evaluation.k=100000                        less than or equal to 65536
    evaluation.temperature=1e-30            greater than or equal to 0.01
    evaluation.top_p=0                      greater than 0
    evaluation.top_p=1.1                    less than or equal to 1
    evaluation.every_steps=-1               greater than or equal to 0
    evaluation.data.a/b=problems.jsonl      a name has letters, digits and _ - only
    evaluation.data.../../x=problems.jsonl  evaluation.data.../../x: no such field
    evaluation.data.-a=problems.jsonl       a name has letters, digits and _ - only
    evaluation.data.held_out=problems.jsonl  this name is reserved
    evaluation.data.test=no_such.jsonl      no_such.jsonl
    checkpoint.every_steps=-1               greater than or equal to 0
    checkpoint.keep_last=0                  greater than or equal to 1
    data_options.--x=1                      an option's name has letters, digits and _ only
    data_options.$(touch x)=1               an option's name has letters, digits and _ only
    wandb_project=a\x1b[31m                 must not have line breaks or other control characters
    data=                                   data=: missing
    data=no_such.jsonl                      no_such.jsonl
    data=a\x00b                             must not have line breaks or other control characters
    data=reasoning_gym:no_such_task         no_such_task
    data=reasoning_gym:                     reasoning_gym
    model=                                  model=: missing
    model=nowhere                           model directory 'nowhere' does not exist
    model=problems.jsonl                    model directory 'problems.jsonl' does not exist
    model=a\nb                              must not have line breaks or other control characters
    model=-m                                model directory '-m' does not exist
    model=$(touch x)                        model directory '$(touch x)' does not exist
    model=quantized                         'quantized' is quantized already
    critic.model=quantized                  is quantized already
    name=../../escape                       a run's name has letters, digits and
    name=/tmp/absolute                      a run's name has letters, digits and
    name=a;touch F;                         a run's name has letters, digits and
    name=$(touch F)                         a run's name has letters, digits and
    name=`touch F`                          a run's name has letters, digits and
    name=a b                                a run's name has letters, digits and
    name=a\nb                               a run's name has letters, digits and
    name=-rf                                a run's name has letters, digits and
    name=--help                             a run's name has letters, digits and
    name=.hidden                            a run's name has letters, digits and
    name=..                                 a run's name has letters, digits and
    name=a%j                                a run's name has letters, digits and
    name=a'b                                a run's name has letters, digits and
    name=a&b                                a run's name has letters, digits and
    name=*                                  a run's name has letters, digits and
    name=run                                exists; choose another name
    output_dir=-x                           a directory's name must not begin with -
    output_dir=$(touch F)                   a directory's name must not begin with -
    output_dir=a;b                          a directory's name must not begin with -
    output_dir=a\nb                         a directory's name must not begin with -
    output_dir=problems.jsonl               directory
    output_dir=/proc/nowhere                and has 0 GB free
    stepz=1                                 did you mean steps
    rollout=1                               rollout: no such field
    rollout.server=1                        rollout.server: no such field
    =1                                      no such field
    steps                                   not of the form field=value
    learner.world_size=2                    no such field
    __class__=1                             no such field
""")


def unescaped(word: str) -> str:
    """Return a row's input with `\n`, `\x00` and the like replaced by the characters."""
    return word.encode("latin-1").decode("unicode_escape") if "\\" in word else word


@pytest.mark.parametrize(("word", "message"), FIELDS, ids=[word for word, _ in FIELDS])
def test_a_wrong_field_is_refused(refuse: Refuse, word: str, message: str) -> None:
    extra = ["advantage_estimator=gae"] if word.startswith("critic.model=") else []
    extra += ["evaluation.problems=0"] if word == "warmup.max_steps=5" else []
    assert message in refuse(*TRAIN, *extra, unescaped(word))


COMMANDS = rows("""
    train                                          Missing argument 'RECIPE'
    train no_such_recipe                           no_such_recipe: no such recipe
    train ../recipes/grpo                          ../recipes/grpo: no such recipe
    train grpo --steps 3                           No such option: --steps
    train grpo                                     data=: missing
    train quickstart data_options.size=1e4         data_options.size=1e4: must be a whole number
    train quickstart data_options.size=-1          data_options.size=-1: must be a whole number
    train quickstart data_options.seed=a           data_options.seed=a: must be a whole number
    nonsense                                       No such command 'nonsense'
    --nonsense                                     No such option: --nonsense
    config no_such_recipe                          no such recipe
    config grpo rollout.topp=1                     did you mean rollout.top_p
    config grpo steps=0                            greater than or equal to 1
    resume                                         Missing argument 'RUN'
    resume runs/nowhere                            not a run's directory, it has no config.yaml
    resume runs/no_run                             not a run's directory, it has no config.yaml
    resume problems.jsonl                          not a run's directory, it has no config.yaml
    resume runs/spoilt                             runs/spoilt/config.yaml: not readable as YAML
    status runs/nowhere                            not a run's directory, it has no config.yaml
    status                                         Missing argument 'RUN...'
    logs runs/nowhere                              the run has no logs
    logs runs/run --lines -1                       '--lines'
    logs runs/run --lines 0                        '--lines'
    logs runs/run --lines many                     '--lines'
    report runs/nowhere                            runs/nowhere
    report runs/no_run                             runs/no_run
    export runs/run out                            not a checkpoint, it lacks megatron
    export nowhere out                             not a checkpoint
    export problems.jsonl out                      not a checkpoint
    export model out                               not a checkpoint
    eval model                                     Missing argument
    eval nowhere problems.jsonl                    model directory 'nowhere' does not exist
    eval model k=1                                 data: missing
    eval model no_such.jsonl max_prompt_length=99 max_response_length=99  no_such.jsonl
    eval model problems.jsonl k=-1                 k=-1
    eval model problems.jsonl k=100000                k=100000
    eval model problems.jsonl temperature=1e-30    greater than or equal to 0.01
    eval model problems.jsonl temperature=nan      temperature=nan
    eval model problems.jsonl top_p=2              less than or equal to 1
    eval model problems.jsonl format=int3          format=int3
    eval model problems.jsonl format=fp8-block     SGLang's own fp8 layers need a GPU
    eval model problems.jsonl format=int8 keep=[no] max_prompt_length=99 max_response_length=9  no:
    eval model problems.jsonl seed=-1              seed=-1
    eval model problems.jsonl output=runs          output=runs: exists
    eval model problems.jsonl output=-x            must not begin with -
    eval model problems.jsonl max_prompt_length=1 max_response_length=9  more than max_prompt_length
    eval model problems.jsonl max_prompt_length=99 max_response_length=999  set it to 413 or less
    eval model problems.jsonl server.tensor_parallel_size=3  4 attention heads
    eval model problems.jsonl kk=1                 did you mean k
    eval quantized problems.jsonl                  is quantized already
    quantize model                                 Missing argument 'DST'
    quantize nowhere out                           model directory 'nowhere' does not exist
    quantize model runs                            runs exists; choose another directory
    quantize model model                           model exists; choose another directory
    quantize model link                            link exists; choose another directory
    quantize model linked                          linked.partial is a link, and may lead elsewhere
    uaq model linked                               linked.partial is a link, and may lead elsewhere
    quantize model out --format int3               formats are bf16, int8
    quantize model out --format fp8-block          blocks are 128 wide
    quantize quantized out                         is quantized already
    quantize -m out                                No such option: -m
    quantize -- -m out                             model directory '-m' does not exist
    uaq model                                      Missing argument 'DST'
    uaq nowhere out                                model directory 'nowhere' does not exist
    uaq model out --scale 0                        --scale=0.0: input should be greater
    uaq model out --scale -1                       --scale=-1.0
    uaq model out --scale 1e300                    --scale=1e+300: input should be less
    uaq model out --scale nan                      --scale=nan
    uaq model out --scale inf                      --scale=inf
    uaq model out --scale much                     '--scale'
    uaq model runs                                 runs exists; choose another directory
    uaq model out --undo                           is not scaled: its config.json has no qurl_uaq
    uaq scaled out                                 is scaled already
    uaq quantized out                              is quantized already
    plan                                           Missing argument 'MODEL|RECIPE'
    plan nowhere                                   nowhere: no such directory, model
    plan grpo                                      model=: missing
    plan Qwen2.5-32B --gpus 1                      '--gpus'
    plan Qwen2.5-32B --gpus 100000                 '--gpus'
    plan Qwen2.5-32B --gpus -8                     '--gpus'
    plan Qwen2.5-32B --gpus many                   '--gpus'
    plan Qwen2.5-32B --mean-prompt -1              --mean-prompt -1.0: must be from 1 to
    plan Qwen2.5-32B --mean-prompt nan             --mean-prompt nan: must be from 1 to
    plan Qwen2.5-32B --mean-response inf           --mean-response inf: must be from 1 to
    plan Qwen2.5-32B --mean-response 1e9           rollout.max_response_length=
    plan Qwen2.5-32B steps=0                       steps=0
    plan quickstart model=nowhere                  model directory 'nowhere' does not exist
    plan problems.jsonl                            no such directory, model
    launch                                         Missing argument 'RECIPE'
    launch no_such_recipe                          no such recipe
    launch quickstart --executor ray               executors are local and slurm
    launch quickstart --account a                  --account: only with --executor slurm
    launch quickstart --time 1:00:00               --time: only with --executor slurm
    launch quickstart --sweep steps                --sweep steps: not of the form
    launch quickstart --sweep steps=1,             --sweep steps=1,: not of the form
    launch quickstart --sweep steps=1,1            --sweep steps=1,1: not of the form
    launch quickstart --sweep steps=1,0            steps=0: input should be greater
    launch quickstart --max-restarts -1            '--max-restarts'
    launch quickstart --gpus-per-node 0            '--gpus-per-node'
    launch quickstart name=../../escape            a run's name has letters
    launch quickstart name=a;b --sweep steps=1,2   name=a;b-1: a run's name has
""")
SLURM = rows("""
    --time banana                                  time=banana: not a time limit of Slurm
    --time -5                                      time=-5: not a time limit of Slurm
    --time 1:2:3:4                                 time=1:2:3:4: not a time limit of Slurm
    --time 1h                                      time=1h: not a time limit of Slurm
    --sbatch time=banana                           time=banana: not a time limit of Slurm
    --max-restarts -1                              '--max-restarts'
    --max-restarts many                            '--max-restarts'
    --max-restarts 99999999                        '--max-restarts'
    --gpus-per-node 0                              '--gpus-per-node'
    --gpus-per-node -8                             '--gpus-per-node'
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
    name=a;touch_F;                                a run's name has letters
    name=$(touch_F)                                a run's name has letters
    name=-x                                        a run's name has letters
    output_dir=$(touch_F)                          a directory's name must not begin with -
    output_dir=-x                                  a directory's name must not begin with -
    data_options.a;b=1                             an option's name has letters
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
    given = ["launch", *TRAIN[1:], "--executor", "slurm", "--dry-run", *words.split()]
    assert message in refuse(*given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sbatch", "qos=a\ntouch F"], "must not have a line break"),
        (["--sbatch", "qos=a\x1b[31m"], "another control character"),
        (["--account", "a\ntouch F"], "must not have a line break"),
        (["--partition", "a\rb"], "must not have a line break"),
        (["--time", "1\n--qos=high"], "must not have a line break"),
        (["--container-image", "a\nb"], "must not have a line break"),
        (["--container-mounts", "/a:/a\n/b:/b"], "must not have a line break"),
    ],
)
def test_an_option_with_a_control_character_is_refused(
    refuse: Refuse, options: list[str], message: str
) -> None:
    assert message in refuse("launch", *TRAIN[1:], "--executor", "slurm", "--dry-run", *options)


def config_with(**changes: Any) -> Callable[[Path], None]:
    """Return a function that changes fields of config.json; `...` removes one."""

    def change(model: Path) -> None:
        path = model / "config.json"
        fields = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: v for name, v in fields.items() if v is not ...}))

    return change


def text_of(name: str, text: str | bytes) -> Callable[[Path], None]:
    """Return a function that replaces a file's content."""

    def replace(model: Path) -> None:
        (model / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return replace


def weights_with(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Return a function that changes the stored tensors."""

    def rewrite(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return rewrite


def without(name: str) -> Callable[[Path], None]:
    """Return a function that removes a file."""
    return lambda model: (model / name).unlink()


def cut(size: int) -> Callable[[Path], None]:
    """Return a function that keeps the first bytes of the weights; a negative size drops some."""

    def cut(model: Path) -> None:
        path = model / "model.safetensors"
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)

    return cut


def index_of(files: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that writes an index of the weights, changed by `files`."""

    def write(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        weight_map: Any = dict.fromkeys(tensors, "model.safetensors")
        weight_map = files(weight_map) or weight_map
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (model / "model.safetensors.index.json").write_text(text)

    return write


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that makes several changes."""

    def change(model: Path) -> None:
        for each in changes:
            each(model)

    return change


UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
YARN = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclasses.dataclass(frozen=True)
class Broken:
    """A way in which a model directory is broken."""

    name: str
    change: Callable[[Path], None]
    message: str


BROKEN = [
    Broken("a cut shard", cut(-1000), "model.safetensors is not a whole safetensors file"),
    Broken("an empty shard", cut(0), "is not a whole safetensors file"),
    Broken("half a header", cut(100), "is not a whole safetensors file"),
    Broken("garbage", text_of("model.safetensors", b"\xff" * 999), "is not a whole safetensors"),
    Broken("a page of HTML", text_of("model.safetensors", "<html>" * 9), "is not a whole safetens"),
    Broken("no shard", without("model.safetensors"), "has no .safetensors file"),
    Broken(
        "a missing tensor", weights_with(lambda t: t.pop(UP)), f"lacks tensor '{UP}', according to"
    ),
    Broken(
        "an unknown tensor",
        weights_with(lambda t: t.update({"model.x": torch.ones(1)})),
        "has unknown tensor 'model.x'",
    ),
    Broken(
        "a misshapen tensor",
        weights_with(lambda t: t.update({UP: t[UP].t().contiguous()})),
        f"has tensor '{UP}' of shape [64, 160]; its config.json implies [160, 64]",
    ),
    Broken(
        "an integer tensor",
        weights_with(lambda t: t.update({UP: t[UP].to(torch.int8)})),
        f"has tensor '{UP}' in I8; weights must be in BF16, F16, F32",
    ),
    Broken(
        "an 8-bit tensor",
        weights_with(lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)})),
        f"has tensor '{UP}' in F8_E4M3",
    ),
    Broken("NaN", weights_with(lambda t: t[UP][3].fill_(torch.nan)), f"'{UP}' holds nan at [3, 0]"),
    Broken("infinity", weights_with(lambda t: t[NORM][7:].fill_(-torch.inf)), "holds -inf at [7]"),
    Broken("a larger vocabulary", config_with(vocab_size=300), "config.json implies [300, 64]"),
    Broken("a smaller vocabulary", config_with(vocab_size=200), "config.json implies [200, 64]"),
    Broken(
        "fewer tokens than the tokenizer has",
        both(
            config_with(vocab_size=128),
            weights_with(
                lambda t: t.update(
                    {
                        name: t[name][:128].clone()
                        for name in ("model.embed_tokens.weight", "lm_head.weight")
                    }
                )
            ),
        ),
        "its tokenizer has token 255, but the model's vocabulary has 128 tokens",
    ),
    Broken("more layers", config_with(num_hidden_layers=4, layer_types=...), "lacks tensor"),
    Broken("fewer layers", config_with(num_hidden_layers=1, layer_types=...), "has unknown tensor"),
    Broken("an index that is no JSON", text_of("model.safetensors.index.json", "{"), "is not JSON"),
    Broken("an empty index", text_of("model.safetensors.index.json", "{}"), "has no 'weight_map'"),
    Broken("an index of a list", index_of(lambda files: [1]), "has no 'weight_map'"),
    Broken(
        "an index of a missing file",
        index_of(lambda files: files.update({UP: "model-2.safetensors"})),
        "lacks model-2.safetensors, which its index names",
    ),
    Broken(
        "an index that leads outside",
        index_of(lambda files: files.update({UP: "../outside.safetensors"})),
        "names '../outside.safetensors'; files must be *.safetensors beside the index",
    ),
    Broken(
        "an index with an absolute path",
        index_of(lambda files: files.update({UP: "/tmp/outside.safetensors"})),
        "names '/tmp/outside.safetensors'; files must be",
    ),
    Broken(
        "an index of another kind of file",
        index_of(lambda files: files.update({UP: "config.json"})),
        "names 'config.json'; files must be",
    ),
    Broken(
        "an index of a number", index_of(lambda files: files.update({UP: 7})), "names 7; files must"
    ),
    Broken(
        "an index that places a tensor wrongly",
        both(
            index_of(lambda files: files.update({UP: "model-2.safetensors"})),
            lambda model: save_file({"x": torch.ones(1)}, model / "model-2.safetensors"),
        ),
        f"lacks tensor '{UP}': model.safetensors.index.json places it in model-2.safetensors",
    ),
    Broken(
        "quantized weights",
        config_with(quantization_config={"quant_method": "awq"}),
        "is quantized already (quantization_config in its config.json)",
    ),
    Broken("no config", without("config.json"), "has no config.json"),
    Broken("a config that is no JSON", text_of("config.json", "{"), "config.json is not JSON"),
    Broken("a config in UTF-16", text_of("config.json", b"\xff\xfe{"), "config.json is not JSON"),
    Broken("a config of a list", text_of("config.json", "[]"), "holds no JSON object, but list"),
    Broken("deep JSON", text_of("config.json", "[" * 99999), "config.json is not JSON"),
    Broken("no architecture", config_with(architectures=...), "architecture '(none)'"),
    Broken("an architecture that is text", config_with(architectures="Qwen2"), "'(none)'"),
    Broken("another architecture", config_with(architectures=["MambaForCausalLM"]), "'Mamba"),
    Broken("another model type", config_with(model_type="llama"), "model_type 'llama' is not that"),
    Broken("sizes as text", config_with(num_hidden_layers="2"), "must be a positive integer"),
    Broken("a negative size", config_with(hidden_size=-64), "'hidden_size' must be a positive"),
    Broken("a fraction of a size", config_with(intermediate_size=0.5), "must be a positive integ"),
    Broken("a Boolean size", config_with(vocab_size=True), "'vocab_size' must be a positive"),
    Broken("no size", config_with(hidden_size=...), "has no 'hidden_size'"),
    Broken("no positions", config_with(max_position_embeddings=None), "has no 'max_position_emb"),
    Broken("head_dim null", config_with(head_dim=None), "'head_dim' is null; give the number"),
    Broken("an odd head_dim", config_with(head_dim=15), "rotary positions need an even number"),
    Broken("another head_dim", config_with(head_dim=32), "config.json implies"),
    Broken("uneven groups", config_with(num_key_value_heads=3), "do not divide into groups"),
    Broken("epsilon null as text", config_with(rms_norm_eps="x"), "'rms_norm_eps' must be a pos"),
    Broken("a negative epsilon", config_with(rms_norm_eps=-1e-6), "'rms_norm_eps' must be a pos"),
    Broken("an infinite rope base", config_with(rope_theta=1e39), "rope_theta"),
    Broken(
        "YaRN under the name of plain rope",
        config_with(rope_parameters={**YARN, "rope_type": "default"}),
        "rope scaling 'default' has no field 'factor'",
    ),
    Broken(
        "YaRN", config_with(rope_parameters={**YARN, "rope_type": "yarn"}), "'yarn' is not support"
    ),
    Broken(
        "YaRN beside plain rope",
        config_with(rope_scaling={"type": "yarn", "factor": 4.0}),
        "'yarn' is not supported",
    ),
    Broken(
        "YaRN as an older name of plain rope",
        config_with(rope_parameters={"rope_type": "default", "type": "yarn"}),
        "'yarn' is not supported",
    ),
    Broken(
        "dynamic rope",
        config_with(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "'dynamic' is not supported",
    ),
    Broken(
        "linear rope", config_with(rope_scaling={"type": "linear", "factor": 2}), "'linear' is not"
    ),
    Broken(
        "two kinds of rope",
        config_with(rope_scaling=LLAMA3),
        "rope_parameters and rope_scaling dif",
    ),
    Broken("two rope bases", config_with(rope_theta=5e5), "'rope_theta' is given as [10000.0, 5"),
    Broken("rope as text", config_with(rope_parameters="yarn"), "must be objects"),
    Broken(
        "rope of a list", config_with(rope_parameters={"rope_type": ["yarn"]}), "is not supported"
    ),
    Broken(
        "rope for each kind of layer",
        config_with(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "has no field 'full_attention'",
    ),
    Broken(
        "llama3 rope without a factor",
        config_with(rope_parameters={**LLAMA3, "factor": None}),
        "llama3 rope scaling has no 'factor'",
    ),
    Broken(
        "llama3 rope with a factor of 0",
        config_with(rope_parameters={**LLAMA3, "factor": 0}),
        "'factor' must be a positive number",
    ),
    Broken(
        "llama3 rope with equal frequencies",
        config_with(rope_parameters={**LLAMA3, "low_freq_factor": 4.0}),
        "low_freq_factor must be less than high_freq_factor",
    ),
    Broken("a part of rope", config_with(partial_rotary_factor=0.5), "partial_rotary_factor"),
    Broken(
        "sliding layers",
        config_with(layer_types=["full_attention", "sliding_attention"]),
        "sliding window attention is not supported",
    ),
    Broken(
        "chunked layers",
        config_with(layer_types=["full_attention", "chunked_attention"]),
        "'layer_types' must be 'full_attention' for each of the 2 layers",
    ),
    Broken(
        "too few layer types", config_with(layer_types=["full_attention"]), "'layer_types' must"
    ),
    Broken(
        "a sliding window",
        config_with(
            layer_types=..., use_sliding_window=True, sliding_window=8, max_window_layers=1
        ),
        "sliding window attention is not supported",
    ),
    Broken("another activation", config_with(hidden_act="gelu"), "hidden_act 'gelu'"),
    Broken("attention biases", config_with(attention_bias=True), "'attention_bias' must be false"),
    Broken("an unknown dtype", config_with(dtype="float8"), "dtype 'float8' must be bfloat16"),
    Broken("a dtype that is code", config_with(dtype="save"), "dtype 'save' must be bfloat16"),
    Broken(
        "an end token beyond the vocabulary",
        both(without("generation_config.json"), config_with(eos_token_id=256)),
        "config.json: eos_token_id 256 is not a token of the vocabulary, 0 to 255",
    ),
    Broken(
        "an end token as text",
        text_of("generation_config.json", '{"eos_token_id": "</s>"}'),
        "eos_token_id '</s>'",
    ),
    Broken(
        "a generation config that is no JSON", text_of("generation_config.json", "{"), "is not JSON"
    ),
    Broken(
        "generation with an unknown end token",
        text_of("generation_config.json", '{"eos_token_id": [1, 256]}'),
        "generation_config.json: eos_token_id 256 is not a token",
    ),
    Broken("no tokenizer", without("tokenizer.json"), "has no tokenizer"),
    Broken("half a tokenizer", text_of("tokenizer.json", '{"version": "1.0", "mod'), "tokenizer"),
    Broken("an empty tokenizer", text_of("tokenizer.json", ""), "its tokenizer cannot be loaded"),
    Broken(
        "a binary tokenizer", text_of("tokenizer.json", b"\xff\x00" * 99), "tokenizer cannot be"
    ),
    Broken("a tokenizer of a list", text_of("tokenizer.json", "[]"), "its tokenizer cannot be"),
    Broken("a tokenizer of nothing", text_of("tokenizer.json", "{}"), "its tokenizer cannot be"),
    Broken(
        "a tokenizer config that is no JSON",
        text_of("tokenizer_config.json", "{"),
        "its tokenizer cannot be loaded",
    ),
    Broken(
        "a chat template that is no template",
        text_of("chat_template.jinja", "{% for message in"),
        "the chat template refuses it",
    ),
]


@pytest.fixture
def broken_model(home: Path) -> Any:
    """Yield a copy of the model, and remove it."""
    copy = Path(shutil.copytree(home / "model", home / "broken"))
    yield copy
    shutil.rmtree(copy)


@pytest.mark.parametrize("broken", BROKEN, ids=[broken.name for broken in BROKEN])
def test_a_broken_model_is_refused(refuse: Refuse, broken_model: Path, broken: Broken) -> None:
    broken.change(broken_model)
    assert broken.message in refuse(*TRAIN, "model=broken")


@pytest.mark.parametrize("command", [["quantize"], ["uaq"]], ids=["quantize", "uaq"])
@pytest.mark.parametrize("name", ["NaN", "infinity", "an index that leads outside", "a cut shard"])
def test_a_broken_model_is_not_rewritten(
    refuse: Refuse, broken_model: Path, name: str, command: list[str]
) -> None:
    (broken,) = [broken for broken in BROKEN if broken.name == name]
    broken.change(broken_model)
    assert broken.message in refuse(*command, "broken", "out")


@pytest.mark.parametrize(
    "words",
    [["resume", "runs/owned"], ["resume", "runs/owned", "steps=9"]],
    ids=["resume", "resume with a field"],
)
def test_a_run_that_another_process_works_on_is_refused_with_its_owner(
    refuse: Refuse, home: Path, words: list[str]
) -> None:
    with owner.claim(home / "runs" / "owned"):
        assert f"process {os.getpid()} on {os.uname().nodename} works on this run" in refuse(*words)
    (home / "runs" / "owned" / "owner.json").unlink()
