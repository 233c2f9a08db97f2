"""`qurl launch` before anything is started: nodes, scripts, sweeps and refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launch import experiment, status
from launch.attempt import wanted_servers
from qurl_megatron import cli
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    LearnerConfig,
    RolloutConfig,
    ServerConfig,
)
from test_cli import RECIPES, write_inputs

GPUS = 8  # a node


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "runs" / ".nemo_run"))
    with open(os.devnull) as nothing:  # nemo-run's commands read it, which pytest's refuses
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


def words_for(recipe: str) -> list[str]:
    """Those that name what `write_inputs` wrote, outside the directory of the test."""
    return write_inputs(recipe, Path.cwd().with_name(Path.cwd().name + "-inputs"))


def parts_of(script: str) -> list[dict[str, str]]:
    """The #SBATCH options of a script, of each kind of nodes."""
    parts: list[dict[str, str]] = [{}]
    for option in re.findall(r"^#SBATCH (.+)$", script, re.MULTILINE):
        if option == "hetjob":
            parts.append({})
        else:
            name, _, value = option.removeprefix("--").partition("=")
            parts[-1][name] = value
    return parts


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_becomes_a_job_of_the_nodes_it_takes(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words_for(recipe), "name=first", "rollout.servers=3"]
    options = {"account": "acc", "gpus_per_node": GPUS, "heterogeneous": True, "time": "04:00:00"}
    assert experiment.launch(recipe, words, slurm_options=options, dry_run=True) == 0
    script = capsys.readouterr().out
    learner, rollout = parts_of(script)
    config = experiment.check(recipe, words).config
    assert int(learner["nodes"]) * int(learner["gpus-per-node"]) == config.learner.world_size
    servers = sum(one.server.tensor_parallel_size for one in wanted_servers(config))
    assert 0 <= int(rollout["nodes"]) * int(rollout["gpus-per-node"]) - servers < GPUS
    for part in (learner, rollout):
        assert int(part["gpus-per-node"]) <= GPUS
        assert part["signal"] == "B:USR1@600"  # nothing is measured yet
        assert "requeue" in part and "exclusive" in part
        assert (part["open-mode"], part["account"], part["time"]) == ("append", "acc", "04:00:00")
    # The batch process takes the shell's place before any srun of nemo-run's that would wait.
    (command,) = re.findall(r"^exec (.+)$", script, re.MULTILINE)
    expected = [sys.executable, "-m", "launch.slurm", "run", recipe, *words]
    assert shlex.split(command) == expected
    assert script.index("exec ") < script.index("srun --het-group")
    assert list(Path.cwd().iterdir()) == []  # nothing is written


def test_one_allocation_has_nodes_for_both_and_a_container_for_the_steps_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {
        "gpus_per_node": 4,
        "account": None,
        "container_image": "i.sqsh",
        "container_mounts": ["/d:/d", "/e:/e"],
        "additional_parameters": {"qos": "high"},
    }
    words = ["name=first", "rollout.servers=6"]
    settings = {"slurm_options": options, "max_restarts": 3, "dry_run": True}
    experiment.launch("quickstart", words, **settings)  # type: ignore[arg-type]
    script = capsys.readouterr().out
    (part,) = parts_of(script)
    # Two ranks on one node; seven servers, that of evaluation included, on two of four GPUs.
    assert (part["nodes"], part["gpus-per-node"], part["qos"]) == ("3", "4", "high")
    assert "account" not in part
    assert "--container" not in script
    assert "export QURL_CONTAINER_IMAGE=i.sqsh\n" in script
    assert "export QURL_CONTAINER_MOUNTS=/d:/d,/e:/e\n" in script
    assert f"{sys.executable} -m launch.slurm run --max-restarts 3 quickstart" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_run_on_this_machine_is_qurl_train(capsys: pytest.CaptureFixture[str]) -> None:
    experiment.launch("quickstart", ["name=first"], dry_run=True)
    command = capsys.readouterr().out.splitlines()[-1]
    qurl = Path(sys.executable).with_name("qurl")
    assert shlex.split(command) == ["exec", str(qurl), "train", "quickstart", "name=first"]


def config_of(ranks: int, servers: int, gpus_a_server: int, problems: int = 0) -> Config:
    server = ServerConfig(tensor_parallel_size=gpus_a_server)
    config = Config(
        learner=LearnerConfig(tensor_parallel_size=ranks),
        rollout=RolloutConfig(servers=servers, server=server),
    )
    config.evaluation.problems = problems
    return config


def test_nodes_are_as_few_as_hold_the_ranks_and_the_servers() -> None:
    learner, rollout = experiment.nodes_of(config_of(16, 5, 4, problems=1), gpus_per_node=8)
    assert [node.ranks for node in learner] == [8, 8]
    assert [len(node.servers) for node in rollout] == [2, 2, 2]
    assert [node.gpus for node in rollout] == [8, 8, 5]  # evaluation has a GPU of its own
    learner, rollout = experiment.nodes_of(config_of(1, 1, 1), gpus_per_node=8)
    assert ([node.gpus for node in learner], [node.gpus for node in rollout]) == ([1], [1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of(9, 1, 1), "its 9 ranks do not divide"),
        (config_of(8, 1, 16), "rollout.server.tensor_parallel_size=16: a server lies within one"),
    ],
)
def test_what_fits_no_nodes_is_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment.nodes_of(config, gpus_per_node=8)


def test_a_sweep_is_every_combination_each_with_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweeps = [
        "objective.objective=tis,acr",
        "quantization.format=int8,fp8",
        "quantization.uaq.scale=1,1.5,2",
    ]
    combinations = experiment.combinations(sweeps)
    names = [experiment.name_of("ablation", words) for words in combinations]
    assert len(set(names)) == 2 * 2 * 3
    assert names[0] == "ablation-tis-int8-1" and names[-1] == "ablation-acr-fp8-2"
    assert combinations[-1] == [
        "objective.objective=acr",
        "quantization.format=fp8",
        "quantization.uaq.scale=2",
    ]
    assert experiment.name_of("x", ["data=/a/b.jsonl"]) == "x-_a_b.jsonl"

    options = {"account": "acc", "gpus_per_node": GPUS}
    small = ["name=ablation", "steps=2"]
    experiment.launch("quickstart", small, sweeps[:2], slurm_options=options, dry_run=True)
    commands = re.findall(r"^exec .+ run (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert sorted(commands) == sorted(
        f"quickstart name=ablation steps=2 objective.objective={objective} "
        f"quantization.format={weights} name=ablation-{objective}-{weights}"
        for objective in ("tis", "acr")
        for weights in ("int8", "fp8")
    )


@pytest.mark.parametrize("sweep", ["steps", "steps=", "steps=1,", "steps=1,1"])
def test_a_sweep_of_another_form_is_refused(sweep: str) -> None:
    with pytest.raises(ConfigError, match=f"--sweep {sweep}: not of the form"):
        experiment.combinations([sweep])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_recipe"], "no_such_recipe: no such recipe"),
        (
            ["quickstart", "stepz=1"],
            "stepz: no such field; did you mean steps (Number of rollout steps)?",
        ),
        (["quickstart", "--sweep", "objective.objective=tis,acl"], "objective.objective=acl"),
        (["quickstart", "--executor", "ray"], "--executor ray: executors are local and slurm"),
        (["quickstart", "--account", "a"], "--account: only with --executor slurm"),
        (["quickstart", "--executor", "slurm", "--sbatch", "qos"], "--sbatch qos: not of the form"),
        (["grpo", "--executor", "slurm", "model=/no/such", "data=x.jsonl"], "/no/such"),
        (
            ["quickstart", "--executor", "slurm", "rollout.server.tensor_parallel_size=2"]
            + ["--gpus-per-node", "1"],
            "rollout.server.tensor_parallel_size=2: a server lies within one node",
        ),
    ],
)
def test_bad_input_is_one_line_before_anything_is_submitted(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.app(["launch", *words, "--dry-run"], standalone_mode=False)
    assert ended.value.code == 2
    shown = capsys.readouterr().err.splitlines()  # with the bar of writing the start model
    (line,) = [line for line in shown if line.strip() and "model shards" not in line]
    assert line.startswith("qurl: ") and message in line
    assert list(Path.cwd().iterdir()) == []


def test_without_sbatch_and_over_a_run_that_is_there_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    with pytest.raises(ConfigError, match="no sbatch here"):
        experiment.launch("quickstart", [], slurm_options={"account": None})
    cli.prepare("quickstart", ["name=first"])
    with pytest.raises(ConfigError, match="runs/first exists; choose another name"):
        experiment.launch("quickstart", ["name=first"])
    # A job goes on with it, and only as far as a resume may change it.
    assert experiment.check("quickstart", ["name=first", "steps=9"]).config.steps == 9
    with pytest.raises(ConfigError, match="seed=1: the run has 0"):
        experiment.check("quickstart", ["name=first", "seed=1"])
    saved = yaml.safe_load(Path("runs/first/config.yaml").read_text())
    assert saved["steps"] == 80


def test_status_says_how_far_a_run_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status.shutil, "which", lambda name: None)
    run_dir = Path("runs/first")
    with pytest.raises(ConfigError, match="runs/first: not a run's directory"):
        status.status(run_dir)
    cli.prepare("quickstart", ["name=first", "steps=40"])
    goes_on = "not running; qurl resume runs/first goes on"
    assert status.status(run_dir) == f"step 0 of 40, no checkpoint, {goes_on}"
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    for name in ("step_000001", "step_000002.partial"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
    come = "step 2 of 40, newest checkpoint step_000001"
    assert status.status(run_dir) == f"{come}, {goes_on}"
    words = [sys.executable, "-c", "input()", "-m", "qurl_megatron.loop.train", "runs/first"]
    rank = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        assert status.status(run_dir) == f"{come}, running here"
    finally:
        rank.communicate(b"\n")
    (run_dir / "summary.json").write_text("{}")
    assert status.status(run_dir) == "step 2 of 40, finished"


def test_logs_are_those_of_the_last_start() -> None:
    logs = Path("runs/first/logs")
    with pytest.raises(ConfigError, match="no logs"):
        status.newest_logs(Path("runs/first"))
    for directory in (logs, logs / "resumed_2", logs / "resumed_10"):
        directory.mkdir(parents=True)
        (directory / "learner_rank0.log").touch()
    Path("job.out").touch()
    job = {"id": "7", "output": str(Path("job.out").absolute())}
    (logs / "resumed_10" / "job.json").write_text(json.dumps(job))
    assert status.newest_logs(Path("runs/first")) == [
        Path("job.out").absolute(),
        logs / "resumed_10" / "learner_rank0.log",
    ]


def nemorun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("nemorun"), "qurl", "train", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_nemorun_finds_every_recipe_by_the_entry_point() -> None:
    ended = nemorun("--factory", "no_such_recipe", "--yes")
    assert ended.returncode == 2
    assert ended.stderr == f"qurl: --factory no_such_recipe: recipes are {', '.join(RECIPES)}\n"


def test_nemorun_shows_a_recipe_with_the_fields_that_were_set() -> None:
    words = ["name=first", "steps=7", "quantization.uaq.scale=2"]
    ended = nemorun("--factory", "quickstart", *words, "--dryrun", "--yes")
    assert ended.returncode == 0, ended.stderr
    for shown in ("steps=7,", "scale=2.0,", "objective='acr'", "name='first'"):
        assert shown in ended.stdout
    assert not Path("runs").exists()


def test_nemorun_names_a_mistyped_field_in_one_line() -> None:
    ended = nemorun("--factory", "quickstart", "stepz=1", "--yes")
    assert ended.returncode == 2
    assert (
        ended.stderr
        == "qurl: stepz: no such field; did you mean steps (Number of rollout steps)?\n"
    )
    assert list(Path.cwd().iterdir()) == []
