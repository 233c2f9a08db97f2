"""`qurl launch` and `nemorun`: nodes, scripts, sweeps and refusals; what `qurl status` says."""

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

import nemo_run
import pytest
import yaml

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.launch import experiment, nemo, status
from qurl_megatron.launch.experiment import Job, launch, named_runs
from qurl_megatron.launch.job_script import JobOptions
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
    with open(os.devnull) as empty:  # nemo-run reads stdin, and pytest's raises
        monkeypatch.setattr(sys, "stdin", empty)
        yield


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
    inputs = write_inputs(recipe, Path.cwd().with_name(Path.cwd().name + "-inputs"))
    words = [*inputs, "name=first", "rollout.servers=3"]
    asked = {"account": "acc", "time": "04:00:00", "partition": None}
    options = JobOptions(asked, GPUS_PER_NODE, heterogeneous=True)
    assert launch(recipe, words, options=options, dry_run=True) == 0
    script = capsys.readouterr().out
    learner, rollout = parts_of(script)
    config, _ = prepare_new(recipe, words, writes=False)
    assert int(learner["nodes"]) * int(learner["gpus-per-node"]) == config.learner.world_size
    server_gpus = sum(spec.server.tensor_parallel_size for spec in server_specs(config))
    assert 0 <= int(rollout["nodes"]) * int(rollout["gpus-per-node"]) - server_gpus < GPUS_PER_NODE
    for part in (learner, rollout):
        assert int(part["gpus-per-node"]) <= GPUS_PER_NODE
        assert part["signal"] == "B:USR1@600"  # the default before a run has measured its steps
        assert {"requeue", "exclusive", "no-kill"} <= part.keys()
        assert (part["open-mode"], part["account"], part["time"]) == ("append", "acc", "04:00:00")
        assert (part["job-name"], part["output"]) == ("qurl.first", "logs/%x-%j.out")
        assert part["comment"] == str(Path("runs/first").absolute())
        assert "partition" not in part
    # The batch process replaces the shell.
    expected = [sys.executable, "-m", "qurl_megatron.launch.slurm", "run", recipe, *words]
    assert shlex.split(script.splitlines()[-1]) == ["exec", *expected]
    assert list(Path.cwd().iterdir()) == []  # nothing is written


def test_one_allocation_has_nodes_for_both_sides_and_a_container_for_the_steps_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = JobOptions(
        {"qos": "high", "no_kill": False},
        gpus_per_node=4,
        container_image="i.sqsh",
        container_mounts=["/d:/d", "/e:/e"],
        setup_lines="module load cuda",
        max_restarts=3,
    )
    launch("quickstart", ["name=first", "rollout.servers=6"], options=options, dry_run=True)
    script = capsys.readouterr().out
    (part,) = parts_of(script)
    # Two ranks on one node. Seven servers, the evaluation server included, on two nodes of 4 GPUs.
    assert (part["nodes"], part["gpus-per-node"], part["qos"]) == ("3", "4", "high")
    assert "no-kill" not in part and "--container" not in script
    lines = script.splitlines()
    assert lines[-6:-1] == [
        "module load cuda",
        "export QURL_PYTHON=python",
        "export QURL_MAX_RESTARTS=3",
        "export QURL_CONTAINER_IMAGE=i.sqsh",
        "export QURL_CONTAINER_MOUNTS=/d:/d,/e:/e",
    ]


def test_a_job_may_have_more_nodes_than_its_run_needs_and_not_fewer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch("quickstart", ["name=first"], options=JobOptions({"nodes": 3}), dry_run=True)
    assert parts_of(capsys.readouterr().out)[0]["nodes"] == "3"
    with pytest.raises(ConfigError, match="^nodes=1: too few; the run takes 2 of them"):
        launch("quickstart", ["name=first"], options=JobOptions({"nodes": 1}), dry_run=True)


def test_a_job_script_passes_every_word_as_it_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script is run by bash, whose `exec` prints the words."""
    data = Path("""a $(touch x) `touch x` ;"'&|.jsonl""")
    data.write_text('{"question": "1 + 3?", "answer": "4"}\n')
    words = [f"evaluation.data.test={data}", "reward=exact", "name=first"]
    options = JobOptions(
        {"account": "$(touch x)", "qos": "`touch x`"},
        container_image="$(touch x)",
        container_mounts=["/d;touch x:/d"],
        environment={"WHERE": "$(touch x) b"},
    )
    launch("quickstart", words, options=options, dry_run=True)
    script = capsys.readouterr().out
    printing = r"""exec() { shift 4; printf '%s\0' "$@" "$QURL_CONTAINER_MOUNTS" "$WHERE"; }"""
    shown = subprocess.run(["bash", "-c", f"{printing}\n{script}"], capture_output=True, text=True)
    expected = ["quickstart", *words, "/d;touch x:/d", "$(touch x) b", ""]
    assert shown.stdout.split("\0") == expected
    assert shown.stderr == ""
    assert list(Path.cwd().iterdir()) == [Path.cwd() / data]  # nothing was touched


def test_a_run_on_this_machine_is_qurl_train_with_every_word_as_it_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = ["""a $(touch x)`touch x`;"'&|""", "-rf *", "b > x"]
    for value in values:
        Path(value + ".jsonl").write_text('{"question": "1 + 3?", "answer": "4"}\n')
    words = ["reward=exact", "name=first"]
    sweep = "evaluation.data.test=" + ",".join(f"{value}.jsonl" for value in values)
    launch("quickstart", words, [sweep], dry_run=True)
    qurl = str(Path(sys.executable).with_name("qurl"))
    lines = capsys.readouterr().out.splitlines()
    for line, value in zip(lines, values, strict=True):
        *command, name = shlex.split(line)
        swept = f"evaluation.data.test={value}.jsonl"
        assert command == [qurl, "train", "quickstart", *words, swept]
        assert re.fullmatch(r"name=first-[\w.+-]+", name)


def test_runs_on_this_machine_go_on_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signals: None
) -> None:
    jobs = [Job([name], Config(name=name), "") for name in ("a", "b", "c")]
    program = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); sys.exit(sys.argv[1] == 'b')"
    monkeypatch.setattr(
        Job, "command", property(lambda job: [sys.executable, "-c", program, *job.words])
    )
    assert experiment.run_here(jobs[:1]) == 0
    assert experiment.run_here(jobs) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "runs/a: succeeded",
        "runs/b: failed",
        "runs/c: succeeded",
    ]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["a", "b", "c"]


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that puts a shell program in the place of sbatch."""

    def put(program: str) -> None:
        Path("bin").mkdir(exist_ok=True)
        Path("bin/sbatch").write_text(f"#!/bin/sh\n{program}\n")
        Path("bin/sbatch").chmod(0o755)

    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{os.environ['PATH']}")
    return put


def test_each_run_of_a_sweep_is_submitted_as_a_job_of_its_own(
    sbatch: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch('test "$*" = --parsable && cat >> scripts && echo "$(grep -c exec scripts);cluster"')
    launch("quickstart", ["name=s"], ["steps=2,3"], options=JobOptions())
    assert capsys.readouterr().out == "runs/s-2: job 1\nruns/s-3: job 2\n"
    executed = re.findall(r"^exec .+ run (.+)$", Path("scripts").read_text(), re.MULTILINE)
    assert executed == [f"quickstart name=s steps={n} name=s-{n}" for n in (2, 3)]
    assert Path("logs").is_dir()  # where the jobs write
    sbatch("echo 'error: more' >&2; echo 'sbatch: error: invalid account' >&2; exit 1")
    with pytest.raises(ConfigError, match="^sbatch: error: invalid account$"):
        launch("quickstart", ["name=s"], options=JobOptions())


def test_a_job_of_a_run_that_is_owned_is_refused_unless_it_waits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare_new("quickstart", ["name=first"])
    with claim(Path("runs/first")):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* works on this run"):
            launch("quickstart", ["name=first"], options=JobOptions(), dry_run=True)
        waits = JobOptions({"dependency": "afterany:7"})
        launch("quickstart", ["name=first"], options=waits, dry_run=True)
    assert "#SBATCH --dependency=afterany:7" in capsys.readouterr().out


def test_a_sweep_has_a_named_run_for_each_combination(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweeps = [
        "objective.objective=tis,acr",
        "quantization.format=int8,fp8",
        "quantization.uaq.scale=1,1.5,2",
    ]
    runs = named_runs("quickstart", ["name=x", "name=ablation"], sweeps)
    assert len({words[-1] for words in runs}) == 2 * 2 * 3
    assert runs[0][-1] == "name=ablation-tis-int8-1"
    assert runs[-1][2:] == [
        "objective.objective=acr",
        "quantization.format=fp8",
        "quantization.uaq.scale=2",
        "name=ablation-acr-fp8-2",
    ]
    ((_, name),) = named_runs("grpo", [], ["data=/a/b.jsonl"])
    assert name == "name=grpo-sweep-_a_b.jsonl"
    ((_, name),) = named_runs("grpo", ["steps=1"], [])
    assert re.fullmatch(r"name=grpo-\d{8}-\d{6}", name)

    small = ["name=ablation", "steps=2"]
    launch("quickstart", small, sweeps[:2], options=JobOptions(), dry_run=True)
    shown = capsys.readouterr()
    assert shown.err.count("data: reasoning_gym:spell_backward\n") == 1  # the runs share it
    commands = re.findall(r"^exec .+ run (.+)$", shown.out, re.MULTILINE)
    assert commands == [
        f"quickstart name=ablation steps=2 objective.objective={objective} "
        f"quantization.format={weights} name=ablation-{objective}-{weights}"
        for objective in ("tis", "acr")
        for weights in ("int8", "fp8")
    ]


def test_nothing_starts_without_sbatch_or_over_an_existing_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/no/such")
    with pytest.raises(ConfigError, match="this machine has no sbatch"):
        launch("quickstart", [], options=JobOptions())
    prepare_new("quickstart", ["name=first"])
    Path("runs/no_run").mkdir()
    with pytest.raises(ConfigError, match="runs/first exists; choose another name"):
        launch("quickstart", ["name=first"])
    with pytest.raises(ConfigError, match="runs/no_run exists and is not a run"):
        launch("quickstart", ["name=no_run"], options=JobOptions(), dry_run=True)
    # A job resumes it, and may change only what a resume may change.
    before = Path("runs/first/config.yaml").read_text()
    launch("quickstart", ["name=first", "steps=9"], options=JobOptions(), dry_run=True)
    with pytest.raises(ConfigError, match="seed=1: the run has 0"):
        launch("quickstart", ["name=first", "seed=1"], options=JobOptions(), dry_run=True)
    assert Path("runs/first/config.yaml").read_text() == before


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
    with pytest.raises(SystemExit) as ended:
        nemorun("--factory", "quickstart", *words, "--dryrun", "--yes")
    assert ended.value.code == 0
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


def slurm_executor(**fields: Any) -> nemo_run.SlurmExecutor:
    return nemo_run.SlurmExecutor(account="acc", **fields)


def test_nemorun_with_a_slurm_executor_is_a_job(
    nemorun: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    executor = nemo_run.Config(
        nemo_run.SlurmExecutor,
        account="acc",
        mem="100G",
        gpus_per_node=4,
        heterogeneous=True,
        ntasks_per_node=8,
        container_image="i.sqsh",
        container_mounts=["/d:/d"],
        env_vars={"WHERE": "a b"},
        setup_lines="module load cuda",
        additional_parameters={"qos": "high"},
    )
    monkeypatch.setattr(nemo.Context, "parse_executor", lambda self, name: executor)
    with pytest.raises(SystemExit) as ended:
        nemorun("--factory", "quickstart", "name=first", "run.executor=mine", "--dryrun", "--yes")
    assert ended.value.code == 0
    script = capsys.readouterr().out.partition("#!/bin/bash\n")[2]
    expected = {"account": "acc", "mem": "100G", "qos": "high", "time": "00:10:00"}
    for part in parts_of(script):
        assert expected.items() <= part.items() and part["ntasks-per-node"] == "1"
    assert len(parts_of(script)) == 2
    for line in ("export WHERE='a b'", "module load cuda", "export QURL_CONTAINER_MOUNTS=/d:/d"):
        assert f"\n{line}\n" in script
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        (
            slurm_executor(tunnel=nemo_run.SSHTunnel(host="h", user="u", job_dir="/j")),
            "tunnel: give a LocalTunnel, and submit from a login node",
        ),
        (slurm_executor(array="1-3"), "SlurmExecutor array='1-3': not honoured; leave it out"),
        (nemo_run.LocalExecutor(launcher="torchrun"), "LocalExecutor launcher='torchrun': not"),
        (nemo_run.DockerExecutor(container_image="i"), "DockerExecutor: give a LocalExecutor or a"),
    ],
)
def test_what_an_executor_asks_and_cannot_have_is_refused(
    executor: nemo_run.Executor, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        nemo.job_options(executor)


def test_a_local_executor_runs_here_with_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "there")
    assert nemo.job_options(nemo_run.LocalExecutor(env_vars={"WHERE": "here"})) is None
    assert os.environ["WHERE"] == "here"


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
    launched: list[list[str]] = []
    monkeypatch.setattr(nemo, "launch", lambda recipe, overrides, **_: launched.append(overrides))
    assert quickstart.recipe().quantization.uaq.scale == 1.5
    for words, scale in ((["quantization.uaq.scale=1.5"], 1.5), ([], 1.0)):
        with pytest.raises(SystemExit):
            nemorun("--factory", "quickstart", "quantization.format=bf16", *words, "--yes")
        config, _ = prepare_new("quickstart", launched[-1], writes=False)
        assert config.quantization.uaq.scale == scale


def test_nemorun_refuses_a_mistyped_field_in_one_line(
    nemorun: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        nemorun("--factory", "quickstart", "stepz=1", "--yes")
    assert ended.value.code == 2
    suggestion = "did you mean steps (Number of rollout steps)?"
    assert capsys.readouterr().err == f"qurl: stepz: no such field; {suggestion}\n"
    assert list(Path.cwd().iterdir()) == []
