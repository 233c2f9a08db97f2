"""`qurl launch` before it starts anything: nodes, scripts, sweeps and refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from qurl_megatron import cli
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.yaml_file import load
from qurl_megatron.launch import experiment, local, status
from qurl_megatron.launch.owner import claim
from qurl_megatron.launch.placement import server_specs
from qurl_megatron.launch.prepare import prepare_new, prepare_resume
from qurl_megatron.recipes import quickstart
from recipe_inputs import RECIPES, write_inputs

pytestmark = pytest.mark.usefixtures("short_quickstart")

GPUS_PER_NODE = 8


@pytest.fixture(autouse=True)
def in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path / "runs" / ".nemo_run"))
    with open(os.devnull) as empty:  # nemo-run reads stdin, and pytest's raises
        monkeypatch.setattr(sys, "stdin", empty)
        yield


def inputs_of(recipe: str) -> list[str]:
    """Write a recipe's inputs outside the test's directory; return their overrides."""
    return write_inputs(recipe, Path.cwd().with_name(Path.cwd().name + "-inputs"))


def parts_of(script: str) -> list[dict[str, str]]:
    """Return the #SBATCH options of a script, for each component of the job."""
    parts: list[dict[str, str]] = [{}]
    for option in re.findall(r"^#SBATCH (.+)$", script, re.MULTILINE):
        if option == "hetjob":
            parts.append({})
        else:
            name, _, value = option.removeprefix("--").partition("=")
            parts[-1][name] = value
    return parts


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_becomes_a_job_with_the_nodes_it_needs(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*inputs_of(recipe), "name=first", "rollout.servers=3"]
    options = {
        "account": "acc",
        "gpus_per_node": GPUS_PER_NODE,
        "heterogeneous": True,
        "time": "04:00:00",
    }
    assert experiment.launch(recipe, words, slurm_options=options, dry_run=True) == 0
    script = capsys.readouterr().out
    learner, rollout = parts_of(script)
    config = experiment.make_job(recipe, words).config
    assert int(learner["nodes"]) * int(learner["gpus-per-node"]) == config.learner.world_size
    server_gpus = sum(spec.server.tensor_parallel_size for spec in server_specs(config))
    assert 0 <= int(rollout["nodes"]) * int(rollout["gpus-per-node"]) - server_gpus < GPUS_PER_NODE
    for part in (learner, rollout):
        assert int(part["gpus-per-node"]) <= GPUS_PER_NODE
        assert part["signal"] == "B:USR1@600"  # the default before a run has measured its steps
        assert {"requeue", "exclusive", "no-kill"} <= part.keys()
        assert (part["open-mode"], part["account"], part["time"]) == ("append", "acc", "04:00:00")
    # The batch process replaces the shell before nemo-run's srun lines.
    (command,) = re.findall(r"^exec (.+)$", script, re.MULTILINE)
    expected = [sys.executable, "-m", "qurl_megatron.launch.slurm", "run", recipe, *words]
    assert shlex.split(command) == expected
    assert script.index("exec ") < script.index("srun --het-group")
    assert list(Path.cwd().iterdir()) == []  # nothing is written


def test_one_allocation_has_nodes_for_both_sides_and_a_container_for_the_steps_only(
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
    experiment.launch("quickstart", words, slurm_options=options, max_restarts=3, dry_run=True)
    script = capsys.readouterr().out
    (part,) = parts_of(script)
    # Two ranks on one node. Seven servers, the evaluation server included, on two nodes of 4 GPUs.
    assert (part["nodes"], part["gpus-per-node"], part["qos"]) == ("3", "4", "high")
    assert "account" not in part
    assert "--container" not in script
    assert "export QURL_CONTAINER_IMAGE=i.sqsh\n" in script
    assert "export QURL_CONTAINER_MOUNTS=/d:/d,/e:/e\n" in script
    command = f"{sys.executable} -m qurl_megatron.launch.slurm run --max-restarts 3 quickstart"
    assert command in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_run_on_this_machine_is_qurl_train(capsys: pytest.CaptureFixture[str]) -> None:
    experiment.launch("quickstart", ["name=first"], dry_run=True)
    command = capsys.readouterr().out.splitlines()[-1]
    qurl = Path(sys.executable).with_name("qurl")
    assert shlex.split(command) == ["exec", str(qurl), "train", "quickstart", "name=first"]


def test_a_job_script_passes_every_word_to_the_run_as_it_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script's last line is run by bash, with `printf` in place of Python."""
    data = Path("""a $(touch x) `touch x` ;"'&|.jsonl""")
    data.write_text('{"question": "1 + 3?", "answer": "4"}\n')
    words = [f"evaluation.data.test={data}", "reward=exact", "name=first"]
    options = {
        "account": "$(touch x)",
        "container_image": "$(touch x)",
        "container_mounts": ["/d;touch x:/d"],
        "additional_parameters": {"qos": "`touch x`"},
    }
    experiment.launch("quickstart", words, slurm_options=options, dry_run=True)
    script = capsys.readouterr().out
    (command,) = re.findall(r"^exec \S+ -m \S+slurm run (.+)$", script, re.MULTILINE)
    exports = "\n".join(re.findall(r"^export QURL.+$", script, re.MULTILINE))
    comments = "\n".join(re.findall(r"^#SBATCH.+$", script, re.MULTILINE))
    shown = subprocess.run(
        [
            "bash",
            "-c",
            f"{comments}\n{exports}\nprintf '%s\\0' {command} \"$QURL_CONTAINER_MOUNTS\"",
        ],
        capture_output=True,
        text=True,
    )
    assert shown.stdout.split("\0") == ["quickstart", *words, "/d;touch x:/d", ""]
    assert shown.stderr == ""
    assert list(Path.cwd().iterdir()) == [Path.cwd() / data]  # nothing was touched


def test_a_run_on_this_machine_gets_every_word_of_a_sweep_as_it_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The scripts' last lines are run by bash, with `printf` in place of `qurl`."""
    values = ["""a $(touch x)`touch x`;"'&|""", "-rf *", "b > x"]
    for value in values:
        Path(value + ".jsonl").write_text('{"question": "1 + 3?", "answer": "4"}\n')
    before = sorted(Path.cwd().iterdir())
    words = ["reward=exact", "name=first"]
    sweep = "evaluation.data.test=" + ",".join(f"{value}.jsonl" for value in values)
    experiment.launch("quickstart", words, [sweep], dry_run=True)
    commands = re.findall(r"^exec \S+ train (.+)$", capsys.readouterr().out, re.MULTILINE)
    seen = []
    for command in commands:
        shell = ["bash", "-c", f"printf '%s\\0' {command}"]
        seen.append(subprocess.run(shell, capture_output=True, text=True).stdout.split("\0")[:-1])
    assert sorted(line[:4] for line in seen) == sorted(
        ["quickstart", *words, f"evaluation.data.test={value}.jsonl"] for value in values
    )
    assert all(re.fullmatch(r"name=[\w.+-]+", line[4]) for line in seen)
    assert sorted(Path.cwd().iterdir()) == before  # nothing was touched


def test_the_environment_of_an_executor_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"account": "a", "env_vars": {"WHERE": "$(touch x) b"}}
    experiment.launch("quickstart", ["name=first"], slurm_options=options, dry_run=True)
    (line,) = re.findall(r"^export WHERE=.+$", capsys.readouterr().out, re.MULTILINE)
    shown = subprocess.run(["bash", "-c", f'{line}; printf %s "$WHERE"'], capture_output=True)
    assert shown.stdout == b"$(touch x) b"
    assert list(Path.cwd().iterdir()) == []


def test_a_job_of_a_run_that_is_owned_is_refused_unless_it_waits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare_new("quickstart", ["name=first"])
    options: dict[str, Any] = {"account": "a"}
    with claim(Path("runs/first")):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* works on this run"):
            experiment.launch("quickstart", ["name=first"], slurm_options=options, dry_run=True)
        options["additional_parameters"] = {"dependency": "afterany:7"}
        experiment.launch("quickstart", ["name=first"], slurm_options=options, dry_run=True)
    assert "#SBATCH --dependency=afterany:7" in capsys.readouterr().out


def test_a_sweep_has_a_named_run_for_each_combination(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweeps = [
        "objective.objective=tis,acr",
        "quantization.format=int8,fp8",
        "quantization.uaq.scale=1,1.5,2",
    ]
    combinations = experiment.sweep_combinations(sweeps)
    names = [experiment.sweep_name("ablation", words) for words in combinations]
    assert len(set(names)) == 2 * 2 * 3
    assert names[0] == "ablation-tis-int8-1" and names[-1] == "ablation-acr-fp8-2"
    assert combinations[-1] == [
        "objective.objective=acr",
        "quantization.format=fp8",
        "quantization.uaq.scale=2",
    ]
    assert experiment.sweep_name("x", ["data=/a/b.jsonl"]) == "x-_a_b.jsonl"

    options = {"account": "acc", "gpus_per_node": GPUS_PER_NODE}
    small = ["name=ablation", "steps=2"]
    experiment.launch("quickstart", small, sweeps[:2], slurm_options=options, dry_run=True)
    shown = capsys.readouterr()
    assert shown.err.count("data: reasoning_gym:spell_backward\n") == 1  # the runs share it
    commands = re.findall(r"^exec .+ run (.+)$", shown.out, re.MULTILINE)
    assert sorted(commands) == sorted(
        f"quickstart name=ablation steps=2 objective.objective={objective} "
        f"quantization.format={weights} name=ablation-{objective}-{weights}"
        for objective in ("tis", "acr")
        for weights in ("int8", "fp8")
    )


@pytest.mark.parametrize("sweep", ["steps", "steps=", "steps=1,", "steps=1,1"])
def test_a_malformed_sweep_is_refused(sweep: str) -> None:
    with pytest.raises(ConfigError, match=f"--sweep {sweep}: not of the form"):
        experiment.sweep_combinations([sweep])


SLURM = ["--executor", "slurm"]


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
        (["quickstart", *SLURM, "--sbatch", "qos"], "--sbatch qos: not of the form"),
        (["grpo", *SLURM, "model=/no/such", "data=x.jsonl"], "/no/such"),
        (
            ["quickstart", *SLURM, "rollout.server.tensor_parallel_size=2"]
            + ["--gpus-per-node", "1"],
            "rollout.server.tensor_parallel_size=2: a server must fit on one node",
        ),
        (["quickstart", "name=$(touch x)"], "name=$(touch x): a run's name has letters"),
        (["quickstart", "name=a;b", "--sweep", "steps=1,2"], "name=a;b-1: a run's name has"),
        (["quickstart", "--", "--max-restarts=9"], "--max-restarts: no such field"),
        (["quickstart", "output_dir=/tmp/nemo_run", *SLURM], "replaces /nemo_run in job"),
        (["quickstart", *SLURM, "--sbatch", "--qos=high"], "--sbatch --qos=high: not an sbatch"),
        (["quickstart", *SLURM, "--sbatch", "qos=a\ntouch x"], "must not have a line break"),
        (["quickstart", *SLURM, "--account", "a\ntouch x"], "must not have a line break"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_submitted(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.app(["launch", "--dry-run", *words], standalone_mode=False)
    assert ended.value.code == 2
    shown = capsys.readouterr().err.splitlines()  # includes the progress bar of the built model
    (line,) = [line for line in shown if line.strip() and "model shards" not in line]
    assert line.startswith("qurl: ") and message in line
    assert list(Path.cwd().iterdir()) == []


def test_a_home_of_nemo_run_that_is_unsafe_in_a_shell_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NEMORUN_HOME", str(Path.cwd() / "$(touch x)"))
    with pytest.raises(ConfigError, match="passes this path to a shell unquoted"):
        experiment.launch("quickstart", [], slurm_options={"account": None}, dry_run=True)


def test_nothing_starts_without_sbatch_or_over_an_existing_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    with pytest.raises(ConfigError, match="this machine has no sbatch"):
        experiment.launch("quickstart", [], slurm_options={"account": None})
    prepare_new("quickstart", ["name=first"])
    with pytest.raises(ConfigError, match="runs/first exists; choose another name"):
        experiment.launch("quickstart", ["name=first"])
    # A job resumes it, and may change only what a resume may change.
    assert experiment.make_job("quickstart", ["name=first", "steps=9"]).config.steps == 9
    with pytest.raises(ConfigError, match="seed=1: the run has 0"):
        experiment.make_job("quickstart", ["name=first", "seed=1"])
    saved = yaml.safe_load(Path("runs/first/config.yaml").read_text())
    assert saved["steps"] == 80


def test_status_shows_the_progress_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status.shutil, "which", lambda name: None)
    run_dir = Path("runs/first")
    with pytest.raises(ConfigError, match="runs/first: not a run's directory"):
        status.status(run_dir)
    prepare_new("quickstart", ["name=first", "steps=40"])
    how = "qurl resume runs/first"
    assert status.status(run_dir) == (
        f"step 0 of 40, no checkpoint, not running; to start again: {how}"
    )
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    for name in ("step_000001", "step_000002.partial"):
        (run_dir / "checkpoints" / name).mkdir(parents=True)
    progress = "step 2 of 40, newest checkpoint step_000001"
    stopped = f"not running; to resume after step 1: {how}"
    assert status.status(run_dir) == f"{progress}, {stopped}"
    with claim(run_dir):
        assert status.status(run_dir) == f"{progress}, running here"
    assert status.status(run_dir) == f"{progress}, {stopped}"
    (run_dir / "checkpoints" / "best").symlink_to("step_000001")
    assert f"{progress}, best step_000001, {stopped}" == status.status(run_dir)


def test_status_tells_a_finished_run_from_one_that_was_extended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status.shutil, "which", lambda name: None)
    run_dir = Path("runs/first")
    prepare_new("quickstart", ["name=first", "steps=40"])
    (run_dir / "metrics.jsonl").write_text('{"step": 40}\n')
    (run_dir / "checkpoints" / "step_000040").mkdir(parents=True)
    (run_dir / "summary.json").write_text('{"steps": 40, "time_s": 100.0}')
    assert status.status(run_dir) == "step 40 of 40, newest checkpoint step_000040, finished"
    prepare_resume(run_dir, ["steps=60"])
    how = "to resume after step 40: qurl resume runs/first"
    extended = f"step 40 of 60, newest checkpoint step_000040, not running; {how}"
    assert status.status(run_dir) == extended
    prepare_resume(run_dir, ["time_limit_s=90"])
    assert status.status(run_dir).endswith("finished")  # it ran out of its time
    prepare_resume(run_dir, ["time_limit_s=200"])
    assert status.status(run_dir) == extended


@pytest.mark.parametrize("text", ["", '{"steps": 40, "ti', "[]"])
def test_status_of_a_run_whose_summary_is_not_whole_is_that_of_one_without(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status.shutil, "which", lambda name: None)
    run_dir = Path("runs/first")
    prepare_new("quickstart", ["name=first", "steps=40"])
    without = status.status(run_dir)
    (run_dir / "summary.json").write_text(text)
    assert status.status(run_dir) == without


def test_newest_logs_are_those_of_the_last_start() -> None:
    logs = Path("runs/first/logs")
    with pytest.raises(ConfigError, match="the run has no logs"):
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


@pytest.fixture
def nemorun(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return the `nemorun qurl train` command, which finds recipes by the package's entry point."""

    def nemorun(*words: str) -> None:
        from nemo_run.cli.api import create_cli

        monkeypatch.setattr(sys, "argv", ["nemorun", "qurl", "train", *words])
        create_cli()(standalone_mode=False)

    return nemorun


def test_nemorun_refuses_an_unknown_recipe_and_lists_the_recipes(
    nemorun: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        nemorun("--factory", "no_such_recipe", "--yes")
    assert ended.value.code == 2
    expected = f"qurl: --factory no_such_recipe: recipes are {', '.join(RECIPES)}\n"
    assert capsys.readouterr().err == expected


def test_nemorun_shows_a_recipe_with_the_fields_that_were_set(
    nemorun: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["name=first", "steps=7", "quantization.uaq.scale=2"]
    nemorun("--factory", "quickstart", *words, "--dryrun", "--yes")
    shown = capsys.readouterr().out
    for text in ("steps=7,", "scale=2.0,", "objective='acr'", "name='first'"):
        assert text in shown
    assert not Path("runs").exists()


def test_nemorun_helps_and_lists_the_recipes(
    nemorun: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    nemorun("--help")
    shown = capsys.readouterr().out
    assert all(recipe in shown for recipe in RECIPES)


def test_nemorun_with_an_executor_gives_it_the_job(
    nemorun: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import nemo_run as run

    from qurl_megatron.launch import nemo

    started: list[Any] = []

    def start(title: str, jobs: list[experiment.Job], executor: run.Executor) -> int:
        started.extend([title, jobs[0].overrides, type(executor)])
        return 3

    monkeypatch.setattr(nemo, "start", start)
    monkeypatch.setattr(
        nemo.Context, "parse_executor", lambda self, name: run.Config(run.LocalExecutor)
    )
    with pytest.raises(SystemExit) as ended:
        nemorun("--factory", "quickstart", "name=first", "run.executor=mine", "--yes")
    assert started == ["first", ["name=first"], run.LocalExecutor] and ended.value.code == 3


def test_nemorun_exports_a_recipe_to_a_file(nemorun: Callable[..., None]) -> None:
    words = ["name=first", "quantization.uaq.scale=2"]
    nemorun("--factory", "quickstart", *words, "--to-yaml", "first.yaml")
    fields = yaml.safe_load(Path("first.yaml").read_text())
    assert fields["config"]["name"] == "first"
    assert fields["config"]["quantization"]["uaq"]["scale"] == 2


def test_nemorun_keeps_a_field_that_is_given_as_the_recipe_has_it(
    nemorun: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In BF16 a recipe's scale is 1, unless a scale is given: the recipe's own is one."""
    monkeypatch.setattr(local, "run", lambda config: 0)
    for name, words, scale in (("a", ["quantization.uaq.scale=1.5"], 1.5), ("b", [], 1.0)):
        given = [f"name={name}", "quantization.format=bf16", *words]
        assert quickstart.recipe().quantization.uaq.scale == 1.5
        with pytest.raises(SystemExit) as ended:
            nemorun("--factory", "quickstart", *given, "--yes")
        assert ended.value.code == 0
        assert load(Path("runs") / name / "config.yaml").quantization.uaq.scale == scale


def test_nemorun_refuses_a_mistyped_field_in_one_line(
    nemorun: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        nemorun("--factory", "quickstart", "stepz=1", "--yes")
    assert ended.value.code == 2
    suggestion = "did you mean steps (Number of rollout steps)?"
    assert capsys.readouterr().err == f"qurl: stepz: no such field; {suggestion}\n"
    assert list(Path.cwd().iterdir()) == []
