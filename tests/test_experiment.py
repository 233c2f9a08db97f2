"""`qurl launch` and `nemorun`: nodes, scripts, sweeps and refusals; what `qurl status` says."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import nemo_run
import psutil
import pytest
import yaml
from nemo_run.cli.api import create_cli
from typer.testing import CliRunner

from qurl_megatron.cli import app
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.gpus import DGX_H100, Node
from qurl_megatron.config.schema import (
    STOPPED_EARLY,
    Config,
    ConfigError,
    EvaluationConfig,
    ScoringConfig,
)
from qurl_megatron.config.server_options import CONTEXT_RESERVE
from qurl_megatron.config.servers import server_specs
from qurl_megatron.config.text import Given, with_overrides
from qurl_megatron.launch import code_copy, experiment, local, nemo, owner, status
from qurl_megatron.launch.experiment import Job, JobOptions, job_script, launch, named_runs
from qurl_megatron.launch.owner import claim
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.recipe import Recipe, load_recipe
from qurl_megatron.launch.resume import prepare_resume, prepare_resume_or_new
from qurl_megatron.machine import output
from qurl_megatron.memory import host
from qurl_megatron.memory.estimate import kv_bytes_per_token
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.recipes import quickstart
from qurl_megatron.report.console import RunConsole
from recipe_inputs import RECIPES

pytestmark = pytest.mark.usefixtures("short_quickstart")

GPUS_PER_NODE = 8
CODE = Path(experiment.__file__).parents[2]  # where the package is


@pytest.fixture(autouse=True)
def in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with open(os.devnull) as empty:  # nemo-run reads stdin, and pytest's raises
        monkeypatch.setattr(sys, "stdin", empty)
        yield


def script_of(*overrides: str, recipe: str = "quickstart", **options: Any) -> str:
    """Return the script of a job of a recipe."""
    read = load_recipe(recipe, ["name=first", *overrides])
    return job_script(read.config, read, JobOptions(**options))


def given_in(script: str) -> list[dict[str, Any]]:
    """Return the fields that each command of a script, or of several, gets on stdin."""
    texts = re.findall(r"<<< (.+?)(?=\n#!|\n/|\Z)", script, re.DOTALL)
    return [yaml.safe_load(shlex.split(text)[0]) for text in texts]


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
def test_every_recipe_becomes_a_job_with_the_nodes_it_needs(recipe: str) -> None:
    words = ["rollout.servers=3", "rollout.placement=separate"]
    script = script_of(
        *words,
        recipe=recipe,
        sbatch={"account": "acc", "time": "04:00:00", "partition": None},
        gpus_per_node=GPUS_PER_NODE,
        heterogeneous=True,
    )
    learner, rollout = parts_of(script)
    config = with_overrides(load_recipe(recipe).config, words)
    assert int(learner["nodes"]) * int(learner["gpus-per-node"]) == config.learner.world_size
    server_gpus = sum(spec.server.tensor_parallel_size for spec in server_specs(config))
    assert 0 <= int(rollout["nodes"]) * int(rollout["gpus-per-node"]) - server_gpus < GPUS_PER_NODE
    for part in (learner, rollout):
        assert int(part["gpus-per-node"]) <= GPUS_PER_NODE
        assert (part["signal"], part["mem"]) == ("B:USR1@600", "0")
        assert {"requeue", "exclusive", "no-kill"} <= part.keys()
        assert (part["open-mode"], part["account"], part["time"]) == ("append", "acc", "04:00:00")
        assert (part["job-name"], part["output"]) == ("qurl.first", "logs/%x-%j.out")
        assert part["comment"] == str(Path("runs/first").absolute())
        assert "partition" not in part
    # The batch process replaces the shell.
    command = [sys.executable, "-m", "qurl_megatron.launch.slurm", "run", "$0"]
    assert shlex.split(script.partition("\nexec ")[2].partition(" <<<")[0]) == command
    given = {"name": "first", "rollout.servers": 3, "rollout.placement": "separate"}
    assert given_in(script) == [{"recipe": recipe, **given}]
    assert parts_of(script)[0]["chdir"] == str(Path.cwd())  # from wherever it is submitted


def test_one_allocation_has_nodes_for_both_sides_and_a_container_for_the_steps_only() -> None:
    script = script_of(
        "rollout.servers=6",
        sbatch={"qos": "high", "no_kill": False},
        gpus_per_node=4,
        container_image="i.sqsh",
        container_mounts=["/:/", "/e:/e"],
        container_env=["HOME"],
        environment={"NCCL_DEBUG": "INFO"},
        setup_lines="module load cuda",
        srun_args=["--mpi=none"],
        max_restarts=3,
    )
    (part,) = parts_of(script)
    # Two ranks and seven servers, the evaluation server included, on three nodes of 4 GPUs.
    assert (part["nodes"], part["gpus-per-node"], part["qos"]) == ("3", "4", "high")
    assert not part.keys() & {"no-kill", "container-image"}
    container = (
        f"--container-image=i.sqsh --no-container-mount-home --container-workdir={Path.cwd()}"
    )
    container += " --container-mounts=/:/,/e:/e"
    container += " --container-env=PYTHONPATH,PYTHONSAFEPATH,HOME,NCCL_DEBUG"
    assert script.partition("\nexec ")[0].splitlines()[-14:] == [
        "export NCCL_DEBUG=INFO",
        "module load cuda",
        f"cd {Path.cwd()}",  # wherever these lines went
        "# Python does not prefer the working directory, which may be a checkout.",
        "export PYTHONSAFEPATH=1",
        f'export PYTHONPATH={CODE}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        "# With these, every process of a node would run on its first CPU.",
        "unset OMP_PROC_BIND OMP_PLACES GOMP_CPU_AFFINITY",
        "# For the batch process, which takes the shell's place, so that signals reach it.",
        "export QURL_PYTHON=python",
        "export QURL_MAX_RESTARTS=3",
        "export QURL_GPU=H100",
        "export QURL_SRUN_ARGS=--mpi=none",
        f"export QURL_CONTAINER_OPTIONS='{container}'",
    ]


def test_a_layout_that_is_planned_can_be_launched_on_as_many_gpus() -> None:
    for gpus in (8, 16):
        words = ["Qwen2.5-7B", f"--gpus={gpus}", "rollout.placement=separate"]
        shown = CliRunner().invoke(app, ["plan", *words]).stdout
        layout = shown.splitlines()[1]
        (part,) = parts_of(script_of(*layout.split(), recipe="scaling_32b"))
        assert int(part["nodes"]) * int(part["gpus-per-node"]) == gpus


@pytest.mark.parametrize(("gpus", "pipeline", "servers"), [(16, 4, 4), (8, 2, 2)])
def test_learner_and_servers_that_take_turns_have_all_gpus_of_one_group_of_nodes(
    gpus: int, pipeline: int, servers: int
) -> None:
    words = ["learner.tensor_parallel_size=4", f"learner.pipeline_parallel_size={pipeline}"]
    words += ["learner.layers_in_last_pipeline_stage=none", f"rollout.servers={servers}"]
    words += ["rollout.placement=colocated", "learner.offload_optimizer=true"]
    (part,) = parts_of(script_of(*words, recipe="scaling_32b"))
    assert (part["nodes"], part["gpus-per-node"]) == (str(gpus // 8), "8")
    assert "exclusive" in part
    with pytest.raises(ConfigError, match=r"^rollout.placement=colocated: a heterogeneous job has"):
        script_of(*words, recipe="scaling_32b", heterogeneous=True)


def test_a_job_has_at_least_the_nodes_that_its_run_needs_and_variables_with_names() -> None:
    assert parts_of(script_of(sbatch={"nodes": 3}))[0]["nodes"] == "3"
    assert parts_of(script_of(sbatch={"time": 10}))[0]["signal"] == "B:USR1@300"  # not sooner
    with pytest.raises(ConfigError, match="^nodes=1: too few; the run takes 2 of them"):
        script_of("rollout.servers=6", sbatch={"nodes": 1})
    with pytest.raises(ConfigError, match="^nodes=9: too many: rollout.servers=6: 8 rollout nodes"):
        script_of("rollout.servers=6", sbatch={"nodes": 9})
    with pytest.raises(ConfigError, match="^nodes=3: too many: --nodes=3 for the learner: its 2 r"):
        script_of("rollout.servers=6", sbatch={"nodes": 3}, heterogeneous=True)
    with pytest.raises(ConfigError, match="^nodes=2: too many; the run takes 1 of them"):
        script_of("rollout.placement=colocated", sbatch={"nodes": 2})
    with pytest.raises(ConfigError, match="^--env A B: not the name of an environment variable"):
        script_of(environment={"A B": "x"})


def test_a_container_must_have_what_the_run_reads_and_writes_where_this_machine_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("work", "model", "data", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path / "work")
    words = ["model=../model", "data=[../data:train, ../more]", "reward=[exact, ../mine.py:reward]"]
    words += [f"output_dir={tmp_path}/runs"]
    needed = [
        ("this directory", tmp_path / "work"),
        ("the code", CODE),
        ("output_dir", tmp_path / "runs"),
        ("model", tmp_path / "model"),
        ("data", tmp_path / "data"),
        ("data", tmp_path / "more"),
        ("reward", tmp_path / "mine.py"),
    ]
    mounts = ["/e:/e", f"{CODE}:/workspace"]  # elsewhere does not count
    for what, path in needed:
        refused = f"the container would not have {what}, {path}; add {path}:{path}, or a directory"
        with pytest.raises(ConfigError, match=f"^--container-mounts: {re.escape(refused)}"):
            script_of(*words, container_image="i.sqsh", container_mounts=mounts)
        mounts.append(f"{path}:{path}")
    assert "i.sqsh" in script_of(*words, container_image="i.sqsh", container_mounts=mounts)
    mounts.append(f"/e:{tmp_path}/model")  # which hides the other
    with pytest.raises(ConfigError, match="the container would not have model"):
        script_of(*words, container_image="i.sqsh", container_mounts=mounts)
    mounts[-1] = f"{tmp_path}/runs:{tmp_path}/runs:ro"
    with pytest.raises(ConfigError, match="output_dir, .*, would be read only"):
        script_of(*words, container_image="i.sqsh", container_mounts=mounts)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Return a function that puts a shell script of a name before all others of this name."""
    (directory := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def write(name: str, text: str) -> None:
        (directory / name).touch(0o755)
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")

    return write


@pytest.mark.parametrize(("gres", "counts"), [("gpu:h100:8", True), ("(null)", False)])
def test_a_job_asks_for_gpus_where_slurm_counts_them(
    gres: str, counts: bool, program: Callable[[str, str], None]
) -> None:
    program("sinfo", f"test \"$*\" = '--noheader --format=%G --partition=big' && echo '{gres}'")
    script = script_of(sbatch={"partition": "big"})
    assert ("gpus-per-node" in parts_of(script)[0]) == counts
    assert ("\nexport QURL_GPUS_PER_NODE=8\n" in script) == (not counts)


UNSAFE = ["""a $(touch x)`touch x`;"'&|""", "-rf *", "b > x"]


def test_a_job_script_passes_every_value_as_it_was_given() -> None:
    """The script is run by bash, whose `exec` prints what it is given."""
    values = {str(number): value for number, value in enumerate(UNSAFE)}
    words = [f"evaluation.data.{number}={value}" for number, value in values.items()]
    script = script_of(
        *words,
        sbatch={"account": UNSAFE[0], "qos": "`touch x`"},
        container_image="$(touch x)",
        container_mounts=["/:/", "/d;touch x:/d"],
        environment={"WHERE": UNSAFE[0]},
    )
    printing = r"""exec() { cat; printf '\0%s' "$QURL_CONTAINER_OPTIONS" "$WHERE"; }"""
    shown = subprocess.run(["bash", "-c", f"{printing}\n{script}"], capture_output=True, text=True)
    given, container, where = shown.stdout.split("\0")
    assert (yaml.safe_load(given)["evaluation.data"], shown.stderr) == (values, "")
    assert where == UNSAFE[0]
    assert "--container-image=$(touch x)" in shlex.split(container)
    assert "--container-mounts=/:/,/d;touch x:/d" in shlex.split(container)
    assert list(Path.cwd().iterdir()) == []  # nothing was touched


def test_a_run_on_this_machine_is_qurl_train_with_every_value_as_it_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in UNSAFE:
        Path(value + ".jsonl").write_text('{"question": "1 + 3?", "answer": "4"}\n')
    words = ["reward=exact", "name=first"]
    sweep = "evaluation.data.test=" + ",".join(f"{value}.jsonl" for value in UNSAFE)
    launch("quickstart", words, [sweep], dry_run=True)
    shown = capsys.readouterr().out
    assert shown.count(f"{Path(sys.executable).with_name('qurl')} train - <<< ") == len(UNSAFE)
    for given, value in zip(given_in(shown), UNSAFE, strict=True):
        assert (given["reward"], given["evaluation.data"]["test"]) == ("exact", f"{value}.jsonl")
        assert re.fullmatch(r"first-[\w.+-]+", given["name"])


def test_runs_on_this_machine_go_on_after_one_that_fails_or_is_stopped_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signals: None
) -> None:
    ends = {"a": 0, "b": STOPPED_EARLY, "c": 1}
    jobs = [
        Job((read := load_recipe("quickstart", [f"name={name}"])), read.config, "") for name in ends
    ]
    program = "import pathlib, sys, yaml; name = yaml.safe_load(sys.stdin)['name']\n"
    program += f"pathlib.Path(name).touch(); sys.exit({ends}[name])"
    monkeypatch.setattr(Job, "command", [sys.executable, "-c", program])
    codes = [experiment.run_here(jobs[:number]) for number in (1, 2, 3)]
    assert codes == [0, STOPPED_EARLY, 1]
    states = ["runs/a: succeeded", "runs/b: stopped early", "runs/c: failed"]
    assert capsys.readouterr().out.splitlines() == states[:1] + states[:2] + states
    assert sorted(path.name for path in Path.cwd().iterdir()) == [*ends]


def test_a_killed_sweep_leaves_no_run_behind() -> None:
    program = (
        "import sys; from types import SimpleNamespace as Job\n"
        "from qurl_megatron.launch.experiment import run_here\n"
        "recipe = Job(as_file=lambda: '')\n"
        "run_here([Job(recipe=recipe, command=['sh', '-c', 'echo $$; exec sleep 99'])])"
    )
    sweep = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert sweep.stdout
    run = psutil.Process(int(sweep.stdout.readline()))
    sweep.kill()
    sweep.wait()
    psutil.wait_procs([run], timeout=10)
    assert not run.is_running() or run.status() == psutil.STATUS_ZOMBIE


def test_each_run_of_a_sweep_is_submitted_as_a_job_of_its_own(
    program: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    program(
        "sbatch",
        'test "$*" = --parsable && cat >> scripts && echo "$(grep -c exec scripts);cluster"',
    )
    launch("quickstart", ["name=s"], ["steps=2,3"], options=JobOptions())
    assert capsys.readouterr().out == "runs/s-2: job 1\nruns/s-3: job 2\n"
    expected = [{"recipe": "quickstart", "name": f"s-{n}", "steps": n} for n in (2, 3)]
    assert given_in(Path("scripts").read_text()) == expected
    assert Path("logs").is_dir()  # where the jobs write
    program("sbatch", "(echo error: more; echo sbatch: error: no account) >&2; exit 1")
    with pytest.raises(ConfigError, match="^runs/s: sbatch: error: no account$"):
        launch("quickstart", ["name=s"], options=JobOptions())
    # A site's rule says why, before what sbatch always says; the second job is one too many.
    refusal = "(echo sbatch: error: two at most; echo sbatch: error: Unspecified error) >&2; exit 1"
    program("sbatch", f"if test -e one; then {refusal}; fi; touch one; echo 7")
    said = (
        "runs/s-3: sbatch: error: two at most; sbatch: error: Unspecified error; 1 of 2 jobs have"
    )
    with pytest.raises(ConfigError, match=f"^{said} been submitted$"):
        launch("quickstart", ["name=s"], ["steps=2,3"], options=JobOptions())


def test_a_job_has_the_options_of_its_script_whatever_the_shell_of_its_launch_has(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch prefers variables to a script, and hands on those of the job that it is run in."""
    program("sbatch", "cat > script; env > environment; echo 7")
    replacing = ["ACCOUNT", "TIMELIMIT", "MEM_PER_NODE", "NO_REQUEUE", "GPUS_PER_NODE", "SIGNAL"]
    of_job = ["SLURM_MEM_PER_CPU", "SLURM_HET_SIZE", "SLURM_RESTART_COUNT"]
    kept = ["SBATCH_RESERVATION", "SLURM_CONF", "NCCL_DEBUG"]
    for name in (*[f"SBATCH_{name}" for name in replacing], *of_job, *kept):
        monkeypatch.setenv(name, "3")

    def inherited() -> set[str]:
        options = JobOptions({"account": "a", "time": "2:00:00"})
        launch("quickstart", ["name=s"], options=options)
        names = {line.partition("=")[0] for line in Path("environment").read_text().splitlines()}
        return {name for name in names if name.startswith(("SBATCH_", "SLURM_", "NCCL_"))}

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert inherited() == {*of_job, *kept}
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    assert inherited() == {*kept}
    # A limit that the shell alone gives is the one by which Slurm's signal is timed.
    assert parts_of(script_of())[0]["signal"] == "B:USR1@90"


def test_threads_are_not_bound_to_the_first_cpu_of_a_node() -> None:
    script = script_of(
        setup_lines="export OMP_PROC_BIND=close", environment={"OMP_PLACES": "cores"}
    )
    shown = subprocess.run(
        ["bash", "-c", f"exec() {{ env; }}\n{script}"], capture_output=True, text=True
    )
    assert "PYTHONSAFEPATH=1" in shown.stdout and "OMP_P" not in shown.stdout


def test_a_job_runs_the_code_that_was_submitted(
    program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkout changes while it waits; it runs its first words again, as after a requeue."""
    checkout = Path("checkout")
    shutil.copytree(code_copy.PACKAGE, checkout / "qurl_megatron")
    monkeypatch.setattr(code_copy, "PACKAGE", checkout.absolute() / "qurl_megatron")
    program("sbatch", "cat > script && echo 7")
    launch("quickstart", ["name=s"], options=JobOptions())
    (code,) = Path("logs").absolute().iterdir()
    launch("quickstart", ["name=t"], options=JobOptions())  # the same code: no second copy
    assert list(code.parent.iterdir()) == [code]
    (checkout / "qurl_megatron" / "launch" / "slurm.py").write_text("raise SystemExit('changed')")
    assert code_copy.place_of(code_copy.read_code()) != code

    script = Path("script").read_text()
    asked = "import qurl_megatron, importlib.metadata as m\n"
    asked += "print(qurl_megatron.__file__, m.distribution('qurl-megatron').locate_file(''))"
    asking = f"exec() {{ {sys.executable} -c {shlex.quote(asked)}; }}"
    monkeypatch.chdir(checkout)  # which Python must not prefer
    shown = subprocess.run(["bash", "-c", f"{asking}\n{script}"], capture_output=True, text=True)
    assert shown.stdout.split() == [str(code / "qurl_megatron" / "__init__.py"), str(code)]
    code.rename("elsewhere")  # never other code in its place
    shown = subprocess.run(["bash", "-c", f"{asking}\n{script}"], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == f"qurl: {code} is missing; launch the run again\n"


def test_a_job_runs_the_reward_that_was_submitted_with_what_lies_beside_it(
    program: Callable[[str, str], None],
) -> None:
    """The file, its neighbours and a package change while the job waits; data may not."""
    program("sbatch", "cat > script && echo 7")
    own = Path("own")
    (own / "package").mkdir(parents=True)
    (own / "package" / "__init__.py").write_text("from .part import right\n")
    (own / "package" / "part.py").write_text("right = 1.0\n")
    (own / "words.txt").write_text("a word\n")
    (own / "mine.py").write_text(
        "import pathlib\nfrom package import right\n"
        "words = pathlib.Path(__file__).with_name('words.txt').read_text()\n"
        "def reward(completion, problem):\n    return right\n"
    )
    (own / "build.py").write_text(
        "from qurl_megatron.recipes.quickstart import build_model as build\n"
    )
    template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    (own / "own.jinja").write_text(template)
    (own / "run.yaml").write_text(
        "recipe: quickstart\nreward: [exact, own/mine.py:reward]\n"
        "model_builder: own/build.py:build\nprompts.chat_template: own/own.jinja\n"
    )
    launch("own/run.yaml", ["name=s"], options=JobOptions())
    for file in (own / "mine.py", own / "build.py", own / "package" / "part.py", own / "run.yaml"):
        file.write_text("raise SystemExit('changed')")
    given = {
        field: value
        for tree in given_in(Path("script").read_text())
        for field, value in tree.items()
    }
    assert given["prompts.chat_template"] == template
    (code,) = Path("logs").absolute().iterdir()
    first, reward = given["reward"].split(",")
    assert first == "exact"
    of_sources = {"a.b": "own/mine.py:reward", "c": "math"}
    (copied,) = code_copy.copies(Config(scoring=ScoringConfig(by_source=of_sources)), code)
    assert copied == Given("scoring.by_source", {"a.b": reward, "c": "math"})
    of_sets = EvaluationConfig(reward_of={"d": "own/mine.py:reward"})
    assert code_copy.copies(Config(evaluation=of_sets), code) == [
        Given("evaluation.reward_of", {"d": reward})
    ]
    # What is laid beside it later changes no code, so the next launch has the same copy.
    (own / "mine.py").write_text((code / Path(reward.partition(":")[0])).read_text())
    (own / "build.py").write_text(Path(given["model_builder"].partition(":")[0]).read_text())
    (own / "package" / "part.py").write_text("right = 1.0\n")
    (own / "run.yaml").unlink()
    (own / "later.txt").write_text("later\n")
    launch("quickstart", ["name=t", "reward=own/mine.py:reward"], options=JobOptions())
    assert [*Path("logs").absolute().iterdir()] == [code]
    assert Path(reward.partition(":")[0]).with_name("later.txt").read_text() == "later\n"
    for function in (reward, given["model_builder"]):
        copy = Path(function.partition(":")[0])
        assert copy.is_relative_to(code) and "changed" not in copy.read_text()
    asked = "from qurl_megatron.data.reward_functions import load_function as load\n"
    asked += f"f = load({reward!r})\n"
    asked += "print(f(None, None), f.__globals__['words'])"
    shown = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert shown.stdout.split() == ["1.0", "a", "word"], shown.stderr


def test_an_administrator_reads_what_made_a_script_how_to_resume_and_end_it_and_why() -> None:
    head = script_of().splitlines()
    job = Path("runs/first/job.sh").absolute()
    assert head[1].endswith(f": run {job.parent}, recipe quickstart")
    assert head[2] == f"# To run or resume it: sbatch {job}, or `qurl launch` with name=first"
    assert head[3].startswith(
        "# To end it: scancel JOB; it saves if its step and the save end in K"
    )
    assert head[4].endswith("scancel --signal=USR1 --batch JOB; then scancel ends it")
    for option, reason in experiment.REASONS.items():
        (place,) = [n for n, line in enumerate(head) if line.startswith(f"#SBATCH --{option}")]
        assert head[place - 1] == f"# {reason}"


def test_a_job_may_share_its_nodes_and_asks_for_gpus_in_one_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (part,) = parts_of(script_of(sbatch={"exclusive": False}, gpus_per_node=4))
    assert not part.keys() & {"exclusive", "mem"} and part["gpus-per-node"] == "4"
    for option in ("mem-per-cpu", "mem_per_gpu"):  # sbatch refuses either beside mem
        (part,) = parts_of(script_of(sbatch={option: "4G"}))
        assert part.keys() & {"mem", "mem-per-cpu", "mem-per-gpu"} == {option.replace("_", "-")}
    for option, value in {"gres": "gpu:8", "gpus": "8", "tres-per-node": "gres/gpu:8"}.items():
        with pytest.raises(ConfigError, match=f"^{option}={value}: the job asks for --gpus-per-no"):
            script_of(sbatch={option: value})
        (part,) = parts_of(script_of(sbatch={option: value, "gpus-per-node": False}))
        assert part[option] == value and "gpus-per-node" not in part
    assert parts_of(script_of(sbatch={"gres": "nvme:1"}))[0]["gres"] == "nvme:1"
    assert parts_of(script_of(sbatch={"gpus-per-node": "h100:8"}))[0]["gpus-per-node"] == "h100:8"
    with pytest.raises(ConfigError, match="^gpus-per-node=4: the run is laid out for --gpus-per"):
        script_of(sbatch={"gpus-per-node": "4"})
    launch("quickstart", ["name=s"], ["steps=2,3"], options=JobOptions({"time": "9"}), dry_run=True)
    said = "qurl: without --account, --partition the cluster's defaults hold\n"
    assert capsys.readouterr().err.count(said) == 1  # for both runs


def test_two_launches_at_once_keep_one_copy_of_the_code() -> None:
    Path("logs").mkdir()
    code = code_copy.read_code()
    place = code_copy.place_of(code)
    code_copy.keep_code(code, place)
    with patch.object(Path, "exists", lambda path: False):
        code_copy.keep_code(code, place)
    assert [*place.parent.iterdir()] == [place]


def test_what_the_plan_says_against_a_job_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def objections(config: Config, node: Node, limit_s: float, max_jobs: int) -> list[str]:
        return [f"{config.steps} {node.gpu.name} {node.gpus} {limit_s:.0f} {max_jobs}"]

    monkeypatch.setattr(needed("planning", "job", by="this test"), "objections", objections)
    options = JobOptions({"time": "10"}, gpus_per_node=4, gpu="A100", max_restarts=2)
    launch("quickstart", ["name=s"], ["steps=2,3"], options=options, dry_run=True)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    idle = "3 of the 8 GPUs of a job's 2 nodes stay idle: rollout.servers=5 would use them"
    assert warnings == [
        f"qurl: s-{steps}: warning: {said}"
        for steps in (2, 3)
        for said in (idle, f"{steps} A100 4 600 3")
    ]


def test_a_sweep_has_a_named_run_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = [
        "objective.objective=tis,acr",
        "quantization.format=int8,fp8",
        "quantization.uaq.scale=1,1.5,2",
    ]
    runs = named_runs("quickstart", "ablation", sweeps)
    assert len({words[-1] for words in runs}) == 2 * 2 * 3
    assert runs[0][-1] == "name=ablation-tis-int8-1"
    assert runs[-1] == [
        "objective.objective=acr",
        "quantization.format=fp8",
        "quantization.uaq.scale=2",
        "name=ablation-acr-fp8-2",
    ]
    ((_, name),) = named_runs("grpo", "", ["data=/a/b.jsonl"])
    assert name == "name=grpo-sweep-_a_b.jsonl"
    lists = named_runs("grpo", "", ["data=[a, b],c", "prompts.options={x: [1, 2], y: 3},{}"])
    assert [words[:2] for words in lists[::3]] == [
        ["data=[a, b]", "prompts.options={x: [1, 2], y: 3}"],
        ["data=c", "prompts.options={}"],
    ]
    ((name,),) = named_runs("grpo", "", [])
    assert re.fullmatch(r"name=grpo-\d{8}-\d{6}", name)
    words = ["name=x", "name=ablation"]
    launch("quickstart", words, sweeps[:2], options=JobOptions(), dry_run=True)
    shown = capsys.readouterr()
    assert shown.err.count("data: reasoning_gym:spell_backward\n") == 1  # the runs share it
    assert list(Path.cwd().iterdir()) == []  # nothing is written
    names = [
        f"ablation-{objective}-{form}" for objective in ("tis", "acr") for form in ("int8", "fp8")
    ]
    assert [given["name"] for given in given_in(shown.out)] == names


def test_nothing_starts_without_sbatch_or_over_a_run_that_exists_or_is_owned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dry_run(name: str, *overrides: str, **sbatch: str) -> None:
        words = [f"name={name}", *overrides]
        launch("quickstart", words, options=JobOptions(sbatch), dry_run=True)

    monkeypatch.setenv("PATH", "/no/such")
    with pytest.raises(ConfigError, match="this machine has no sbatch"):
        launch("quickstart", [], options=JobOptions())
    prepare_new("quickstart", ["name=first"])
    Path("runs/no_run").mkdir()
    with pytest.raises(ConfigError, match="runs/first exists; choose another name"):
        launch("quickstart", ["name=first"])
    with pytest.raises(ConfigError, match="runs/no_run exists and is not a run"):
        dry_run("no_run")
    # A job resumes it, and may change only what a resume may change.
    before = Path("runs/first/config.yaml").read_text()
    dry_run("first", "steps=9")
    with pytest.raises(ConfigError, match="^name=first: runs/first exists: seed=1: the run has 0"):
        dry_run("first", "seed=1")
    assert Path("runs/first/config.yaml").read_text() == before
    # Only one that waits may follow another.
    with claim(Path("runs/first")):
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* works on this run"):
            dry_run("first")
        dry_run("first", dependency="afterany:7")
    assert "#SBATCH --dependency=afterany:7" in capsys.readouterr().out


def test_a_launch_resumes_a_run_only_if_the_recipe_does_not_contradict_it() -> None:
    """What is given beside the recipe changes the run, as `qurl resume` does."""
    Path("own.yaml").write_text("recipe: quickstart\nsteps: 7\n")
    for recipe in ("quickstart", "own.yaml"):
        given = [f"name={recipe[:3]}", "rollout.completions_per_prompt=2"]

        def again(*changes: str, recipe: str = recipe, script: str = "") -> Config:
            how = {"writes": False, "asks_servers": False}
            return prepare_resume_or_new(load_recipe(recipe, changes), DGX_H100, script, **how)[0]

        config, _ = prepare_new(recipe, given)
        assert again(*given).steps == config.steps
        assert again(*given, "steps=9").steps == 9
        run = f"name={config.name}: {config.run_dir} exists: "
        ways = f"; choose another name; {owner.how_to_resume(config.run_dir)}"
        with pytest.raises(ConfigError) as refused:
            again(*given, recipe="quickstart_experts")
        first = "it has model_builder=qurl_megatron.recipes.quickstart:build_model, and quickstart_"
        assert str(refused.value).startswith(run + first) and str(refused.value).endswith(ways)
        with pytest.raises(ConfigError) as refused:  # a word is left out
            again(*given[:-1])
        assert str(refused.value) == (
            f"{run}it has rollout.completions_per_prompt=2, and quickstart 8{ways}"
        )
        # A requeued job does not contradict what the user has changed since.
        prepare_resume(config.run_dir, ["rollout.servers=3"])
        (config.run_dir / "job.sh").write_text("its script")
        assert again(*given, script="its script").rollout.servers == 3
        with pytest.raises(ConfigError, match="it has rollout.servers=3"):
            again(*given, script="another script")


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status.shutil, "which", lambda name: None)


def test_status_shows_the_progress_of_a_run(no_slurm: None) -> None:
    run_dir = Path("runs/first")
    with pytest.raises(ConfigError, match="runs/first: not a run's directory"):
        status.status(run_dir)
    prepare_new("quickstart", ["name=first", "steps=40"])
    how = output.qurl_command("resume", run_dir)
    before = f"step 0 of 40, no checkpoint, not running; to start again: {how}"
    assert status.status(run_dir) == before
    for text in ("", '{"steps": 40, "ti', "[]"):  # a summary that is not whole
        (run_dir / "summary.json").write_text(text)
        assert status.status(run_dir) == before
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
    state = run_dir / "checkpoints" / "best" / "state.json"
    state.write_text('{"step": 1, "accuracy": 0.46, "standard_error": 0.05}')
    assert f"{progress}, best step_000001 (46.0% ± 5.0%), {stopped}" == status.status(run_dir)
    (run_dir / "job.sh").touch()  # a Slurm job wrote it
    assert status.status(run_dir).endswith("to resume after step 1: sbatch runs/first/job.sh")


def test_a_run_whose_jobs_slurm_does_not_tell_is_not_said_to_have_none(
    program: Callable[[str, str], None],
) -> None:
    program("squeue", "echo slurm_load_jobs error: Socket timed out >&2; exit 1")
    prepare_new("quickstart", ["name=first"])
    run_dir = Path("runs/first")
    assert "not running" in status.status(run_dir)  # no job has ever worked on it
    (run_dir / "job.sh").touch()
    said = (
        "^runs/first: its jobs are not known: slurm_load_jobs error: Socket timed out; ask again$"
    )
    for ask in (status.status, experiment.check_unused):
        with pytest.raises(ConfigError, match=said):
            ask(run_dir)


def test_a_run_of_slurm_jobs_is_resumed_here_only_in_a_job_or_if_told_so(
    no_slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = prepare_new("quickstart", ["name=first"])
    resumed: list[Config] = []

    def run(config: Config) -> int:
        resumed.append(config)
        return 0

    monkeypatch.setattr(local, "run", run)
    monkeypatch.setattr(output, "outlive_output", lambda _: None)  # the runner's is no file
    (config.run_dir / "job.sh").touch()
    refused = CliRunner().invoke(app, ["resume", "runs/first"])
    line = "runs/first: Slurm jobs train this run; to start again: sbatch runs/first/job.sh; "
    assert refused.exit_code == 2
    assert f"{line}to run it on this machine, add --here" in refused.output
    shown = CliRunner().invoke(app, ["resume", "runs/first", "--here"])
    assert shown.exit_code == 0, shown.output
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert CliRunner().invoke(app, ["resume", "runs/first"]).exit_code == 0
    assert len(resumed) == 2


def test_a_run_that_this_machine_cannot_hold_is_refused_with_the_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host.device, "free_memory_bytes", lambda: 100_000_000)
    with pytest.raises(ConfigError) as refused:
        prepare_new("quickstart", ["name=first"], num_gpus=0)
    assert str(refused.value) == (
        "memory: without a GPU this needs 1.7 GB, and 0.1 GB are free here; lower what takes "
        "most: rollout.servers (0.613 GB), model (0.43 GB), evaluation.server (0.308 GB)"
    )
    assert not Path("runs").exists()
    prepare_new("quickstart", ["name=first"], num_gpus=0, writes=False)  # only checks
    prepare_new("quickstart", ["name=first"])  # a Slurm job's nodes have memory of their own


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.servers=200", r"lower what takes most: rollout.servers \(61\.\d GB\), "),
        ("rollout.server.max_total_tokens=100000000", r"\.server\.max_total_tokens \(230 GB\), "),
        ("learner.context_parallel_size=32", "64 learner ranks and 3 server ranks compute on 2 co"),
        ("scoring.workers=1000000000", r"scoring.workers=1000000000: they take 5e\+04 TB of mem"),
        ("reward=[exact,math] scoring.workers=1000000000", r": they take 1e\+05 TB of memory"),
    ],
)
def test_numbers_that_are_absurd_on_this_machine_are_refused_with_the_estimate(
    monkeypatch: pytest.MonkeyPatch, word: str, message: str
) -> None:
    monkeypatch.setattr(host.device, "free_memory_bytes", lambda: 24_000_000_000)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    with pytest.raises(ConfigError, match=message):
        prepare_new("quickstart", ["name=first", *word.split()], num_gpus=0)
    assert not Path("runs").exists()


def test_caches_without_a_gpu_share_what_the_learner_leaves_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["name=first", "rollout.server.max_total_tokens=none"]
    words.append(f"rollout.server.max_running_requests={(most := 60_000)}")
    config, _ = prepare_new("quickstart", words, num_gpus=0)
    assert config.rollout.server.max_total_tokens is None  # each start decides
    longest = config.rollout.max_length + CONTEXT_RESERVE
    token_bytes = kv_bytes_per_token(Architecture.from_directory(config.model))

    said: list[str] = []

    def settled(free: int, *words: str) -> list[int | None]:
        monkeypatch.setattr(host.device, "free_memory_bytes", lambda: free)
        changed = with_overrides(config, list(words))
        here = [spec.set_name for spec in server_specs(changed)]
        said[:] = host.settle_run(changed, here, changed.learner.world_size)
        return [changed.rollout.server.max_total_tokens, changed.evaluation.server.max_total_tokens]

    evaluation = config.evaluation.server.max_total_tokens
    assert settled(10**11) == [most * longest, evaluation] and not said
    # Half of what is added goes to each of two servers; SHARE of it may be used.
    small, larger = (settled(free)[0] or 0 for free in (30 * 10**8, 31 * 10**8))
    assert longest < small < larger < most * longest
    (line,) = said
    assert line.startswith(f"rollout.server.max_running_requests={most}: the memory that is free")
    assert f"holds {larger // longest} of them" in line
    assert larger - small == pytest.approx(host.SHARE * 10**8 / 2 / token_bytes, abs=1)
    assert (
        settled(10**11, "rollout.server.options.page_size=64")[0] == most * -(-longest // 64) * 64
    )
    with pytest.raises(ConfigError, match="lower what takes most: rollout.servers"):
        settled(10**9)


def test_status_tells_a_finished_run_from_one_that_was_extended(no_slurm: None) -> None:
    run_dir = Path("runs/first")
    prepare_new("quickstart", ["name=first", "steps=40"])
    (run_dir / "metrics.jsonl").write_text('{"step": 40}\n')
    (run_dir / "checkpoints" / "step_000040").mkdir(parents=True)
    (run_dir / "summary.json").write_text('{"steps": 40, "time_s": 100.0}')
    assert status.status(run_dir) == "step 40 of 40, newest checkpoint step_000040, finished"
    prepare_resume(run_dir, ["steps=60"])
    how = f"to resume after step 40: {output.qurl_command('resume', run_dir)}"
    extended = f"step 40 of 60, newest checkpoint step_000040, not running; {how}"
    assert status.status(run_dir) == extended
    prepare_resume(run_dir, ["time_limit_s=90"])
    assert status.status(run_dir).endswith("finished")  # it ran out of its time
    prepare_resume(run_dir, ["time_limit_s=200"])
    assert status.status(run_dir) == extended
    (run_dir / "summary.json").write_text('{"steps": 40, "time_s": 1, "reached": {"a/b": 0.5}}')
    prepare_resume(run_dir, ["stop_above={reward_mean: 0.4}"])
    assert status.status(run_dir) == extended
    (run_dir / "summary.json").write_text(
        '{"steps": 40, "time_s": 1, "reached": {"reward_mean": 1}}'
    )
    assert status.status(run_dir).endswith("finished")
    prepare_resume(run_dir, ["stop_above.reward_mean=2"])
    assert status.status(run_dir) == extended


def test_epochs_set_the_number_of_steps(no_slurm: None) -> None:
    config, said = prepare_new("quickstart", ["name=first", "epochs=1.5"])
    trained = re.search("([0-9,]+) to train on", said)
    assert trained
    problems, per_step = int(trained[1].replace(",", "")), config.rollout.prompts_per_step
    assert config.steps == -(-1.5 * problems // per_step)
    twice, _ = prepare_new("quickstart", ["name=twice", "epochs=1.5", "prompts.weights=2"])
    assert twice.steps == -(-3 * problems // per_step)
    run_dir = Path("runs/first")
    longer, _ = prepare_resume(run_dir, ["epochs=3"])
    assert longer.steps == -(-3 * problems // per_step)
    with pytest.raises(ConfigError, match="^steps=7: epochs=3 sets it; leave it out, or give epo"):
        prepare_resume(run_dir, ["steps=7"])
    assert prepare_resume(run_dir, ["steps=7", "epochs=0"])[0].steps == 7
    again = load_recipe("quickstart", ["name=first", "epochs=2"])
    resumed, _ = prepare_resume_or_new(again, DGX_H100, asks_servers=False)
    assert resumed.steps == -(-2 * problems // per_step)
    whole = {steps: steps * per_step / problems for steps in range(1, 500)}
    steps = next(n for n, epochs in whole.items() if epochs * problems / per_step > n)  # rounded up
    given = [f"epochs={whole[steps]!r}"]
    assert prepare_resume(Path("runs/twice"), given)[0].steps == 2 * steps
    of_code = load_recipe("quickstart", ["name=third"]).config
    of_code.epochs = 2.0  # beside its own steps
    assert prepare_new(Recipe("own.py:recipe", "", of_code))[0].steps == resumed.steps


def test_a_command_is_printed_as_a_shell_here_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Path("own/bin/qurl")
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(program.absolute().with_name("python")))
    assert output.qurl_command("resume", "a run") == "own/bin/qurl resume 'a run'"
    monkeypatch.setenv("PATH", str(program.parent.absolute()))
    assert output.qurl_command("resume", "run") == "qurl resume run"
    Path("elsewhere").mkdir()
    monkeypatch.setenv("PATH", "/no/such")
    monkeypatch.chdir("elsewhere")
    assert output.qurl_command() == str(Path("../own/bin/qurl").resolve())


def test_logs_follow_the_lines_of_steps_to_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, _ = prepare_new("quickstart", ["name=first", "steps=40"])
    console = RunConsole(config, quiet=False)
    RunConsole(config, quiet=True).say("of another rank")
    for number in range(3):
        console.say(f"line {number}")
    summary = '{"steps": 40, "time_s": 100.0}'

    def go_on(_: float) -> None:
        console.say("line 3")
        (config.run_dir / "summary.json").write_text(summary)

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=go_on))
    assert "".join(status.follow(config.run_dir, 2)) == "line 1\nline 2\nline 3\n"
    assert status.newest_logs(config.run_dir) == [config.run_dir / "steps.log"]


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
def nemorun(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return the `nemorun qurl train` command, which finds recipes by the package's entry point.

    It returns the exit code of what it starts, or None if it starts nothing.
    """

    def nemorun(*words: str) -> object:
        monkeypatch.setattr(sys, "argv", ["nemorun", "qurl", "train", *words])
        try:
            create_cli()(standalone_mode=False)
        except SystemExit as ended:
            return ended.code
        return None

    return nemorun


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_recipe"], f"no_such_recipe: no such recipe; there are {', '.join(RECIPES)}"),
        (["quickstart", "stepz=1"], "stepz: no such field; did you mean steps (Number of rollout"),
    ],
)
def test_nemorun_refuses_wrong_input_in_one_line(
    words: list[str],
    message: str,
    nemorun: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert nemorun("--factory", *words, "--yes") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"qurl: {message}")
    assert list(Path.cwd().iterdir()) == []


def test_nemorun_helps_and_lists_the_recipes(
    nemorun: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    nemorun("--help")
    shown = capsys.readouterr().out
    assert all(recipe in shown for recipe in RECIPES)


def test_nemorun_shows_the_job_of_a_slurm_executor_and_the_fields_that_were_set(
    nemorun: Callable[..., object],
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
        container_mounts=["/:/", "/d:/d"],
        container_env=["HOME"],
        srun_args=["--mpi=none"],
        env_vars={"WHERE": "a b"},
        setup_lines="module load cuda",
        additional_parameters={"qos": "high"},
    )
    monkeypatch.setattr(nemo.Context, "parse_executor", lambda self, name: executor)
    words = ["name=first", "steps=7", "quantization.uaq.scale=2", "run.executor=mine"]
    assert nemorun("--factory", "quickstart", *words, "--dryrun", "--yes") == 0
    shown, _, script = capsys.readouterr().out.partition("#!/bin/bash\n")
    for text in ("steps=7,", "scale=2.0,", "objective='acr'", "name='first'"):
        assert text in shown
    parts = parts_of(script)
    assert len(parts) == 2
    expected = {"account": "acc", "mem": "100G", "qos": "high", "time": "00:10:00"}
    for part in parts:
        assert expected.items() <= part.items() and part["ntasks-per-node"] == "1"
    for line in ("export WHERE='a b'", "module load cuda", "export QURL_SRUN_ARGS=--mpi=none"):
        assert f"\n{line}\n" in script
    assert "/:/,/d:/d --container-env=PYTHONPATH,PYTHONSAFEPATH,HOME,WHERE" in script
    assert not Path("runs").exists()


def test_nemorun_shows_a_job_whose_learner_and_servers_take_turns(
    nemorun: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        nemo.Context, "parse_executor", lambda self, name: slurm_executor(gpus_per_node=2)
    )
    Path("my.yaml").write_text("recipe: quickstart\nrollout: {placement: colocated, servers: 2}\n")
    words = ["name=first", "run.executor=mine"]
    assert nemorun("--factory", "my.yaml", *words, "--dryrun", "--yes") == 0
    (part,) = parts_of(capsys.readouterr().out.partition("#!/bin/bash\n")[2])
    assert (part["nodes"], part["gpus-per-node"]) == ("1", "2")


def slurm_executor(**fields: Any) -> nemo_run.SlurmExecutor:
    return nemo_run.SlurmExecutor(account="acc", **fields)


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        (
            slurm_executor(tunnel=nemo_run.SSHTunnel(host="h", user="u", job_dir="/j")),
            "tunnel: give a LocalTunnel, and submit from a login node",
        ),
        (slurm_executor(array="1-3"), "SlurmExecutor array='1-3': not honoured; leave it out"),
        (
            slurm_executor(nodes=4, heterogeneous=True),
            "nodes=4: a heterogeneous job has two groups of nodes, whose numbers follow from the",
        ),
        (nemo_run.LocalExecutor(launcher="torchrun"), "LocalExecutor launcher='torchrun': not"),
        (nemo_run.DockerExecutor(container_image="i"), "DockerExecutor: give a LocalExecutor or a"),
    ],
)
def test_what_an_executor_asks_and_cannot_have_is_refused(
    executor: nemo_run.Executor, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        nemo.job_options(executor)


def test_nemorun_exports_a_recipe_to_a_file_and_reads_it(
    nemorun: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["name=first", "quantization.uaq.scale=2"]
    nemorun("--factory", "quickstart", *words, "--to-yaml", "first.yaml")
    fields = yaml.safe_load(Path("first.yaml").read_text())
    assert fields["config"]["name"] == "first"
    assert fields["config"]["quantization"]["uaq"]["scale"] == 2
    # Which can be given in place of the recipe, with further words.
    launched: list[Any] = []
    monkeypatch.setattr(nemo, "launch", lambda recipe, **how: launched.append(recipe))
    nemorun("--yaml", "first.yaml", "config.steps=3", "--yes")
    read = load_recipe(launched[0])
    assert read.given == {"steps", "name", "quantization.uaq.scale"}
    assert read.config == load_recipe("quickstart", ["steps=3", *words]).config


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[", "not a file of --to-yaml (while parsing"),
        ("- 1", "not a file of --to-yaml ("),
        ("recipe: no_such\nconfig: {}", "no_such: no such recipe"),
        ("recipe: grpo", "not a file of --to-yaml ('config')"),
        ("recipe: grpo\nconfig: {stepz: 3}", "stepz=3: unexpected keyword argument"),
        ("recipe: grpo\nconfig: {rollout: {x: 3}}", "rollout.x=3: unexpected keyword argument"),
        ("recipe: grpo\nconfig: {}\nsteps: 3", "it has steps beside recipe and config"),
        ("recipe: grpo\nconfig: &a {rollout: *a}", "refers to itself, or is nested too deeply"),
    ],
)
def test_nemorun_refuses_a_file_that_it_did_not_export(
    text: str, reason: str, nemorun: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("first.yaml").write_text(text)
    assert nemorun("--yaml", "first.yaml", "--yes") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("qurl: --yaml first.yaml: ") and reason in line


def test_nemorun_runs_here_and_keeps_a_field_that_is_given_as_the_recipe_has_it(
    nemorun: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In BF16 a recipe's scale is 1, unless a scale is given: the recipe's own is one."""
    executor = nemo_run.Config(nemo_run.LocalExecutor, env_vars={"WHERE": "here"})
    monkeypatch.setattr(nemo.Context, "parse_executor", lambda self, name: executor)
    monkeypatch.setenv("WHERE", "there")
    launched: list[Any] = []
    monkeypatch.setattr(nemo, "launch", lambda *given, **how: launched.append([*given, how]))
    assert quickstart.recipe().quantization.uaq.scale == 1.5
    for words, scale in ((["quantization.uaq.scale=1.5", "run.executor=mine"], 1.5), ([], 1.0)):
        nemorun("--factory", "quickstart", "quantization.format=bf16", *words, "--yes")
        recipe, how = launched[-1]
        assert how == {"options": None, "dry_run": False}
        config, _ = prepare_new(recipe, writes=False)
        assert config.quantization.uaq.scale == scale
    assert os.environ["WHERE"] == "here"
