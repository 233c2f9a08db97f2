"""A run asks for the disk it needs; its directory and what it reads can be moved."""

import errno
import io
import json
import shutil
import stat
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from qurl_megatron.config.gpus import DGX_H100
from qurl_megatron.config.schema import (
    STOPPED_EARLY,
    Config,
    ConfigError,
    EvaluationConfig,
    ObjectiveConfig,
    RolloutConfig,
    ScoringConfig,
)
from qurl_megatron.config.text import load
from qurl_megatron.data.entries import DataError
from qurl_megatron.data.prompts import PromptStream, load_prompts
from qurl_megatron.launch import local, prepare, slurm
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.recipe import load_recipe
from qurl_megatron.launch.resume import prepare_resume, prepare_resume_or_new
from qurl_megatron.launch.sources import make_paths_absolute
from qurl_megatron.machine import memory
from qurl_megatron.machine.output import qurl_command
from qurl_megatron.memory import host
from qurl_megatron.model.tokenizer import load_tokenizer
from recipe_inputs import write_inputs

pytestmark = pytest.mark.usefixtures("short_quickstart")


@pytest.fixture(autouse=True)
def in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_whose_directory_could_not_be_completed_can_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quota is reached, or the process is killed."""
    with monkeypatch.context() as full:
        full.setattr(prepare, "write_whole", Mock(side_effect=OSError(errno.EDQUOT, "quota")))
        with pytest.raises(OSError, match="quota"):
            prepare_new("quickstart", ["name=first"])
    assert [*Path("runs").iterdir()] == []
    existed: list[bool] = []

    def save(config: Config, path: Path) -> None:
        existed.append(config.run_dir.exists())
        saved(config, path)

    saved = prepare.save
    monkeypatch.setattr(prepare, "save", save)
    config, _ = prepare_resume_or_new(load_recipe("quickstart", ["name=first"]), DGX_H100)
    assert load(Path("runs/first/config.yaml")) == config and existed == [False]
    assert Path("runs/first/model/config.json").is_file()
    assert Path("runs/first").stat().st_mode == Path("runs").stat().st_mode


def test_a_moved_and_renamed_run_is_resumed_from_any_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_new("quickstart", ["name=first", "steps=40"])
    place, elsewhere = tmp_path / "new place" / "second", tmp_path / "elsewhere"
    place.parent.mkdir()
    elsewhere.mkdir()
    shutil.move("runs/first", place)
    monkeypatch.chdir(elsewhere)
    config, _ = prepare_resume(place, ["steps=50"])
    assert (config.run_dir, config.name, config.steps) == (place, "second", 50)
    assert config.model == str(place / "model")
    assert load(place / "config.yaml") == config
    monkeypatch.chdir(place)
    assert prepare_resume(Path("."), [])[0].model == str(place / "model")
    monkeypatch.chdir(place / "model")
    assert prepare_resume(Path(".."), [])[0].run_dir == place


def test_paths_are_kept_as_seen_from_where_the_run_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = write_inputs("grpo", tmp_path)
    relative = [word.replace(f"{tmp_path}/", "") for word in words]
    assert relative != words
    prepare_new("grpo", [*relative, "name=first", "rollout.servers_key_file=key"])
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    config, _ = prepare_resume(tmp_path / "runs" / "first", [])
    assert Path(config.model).parent == Path(config.data).parent == tmp_path
    assert config.rollout.servers_key_file == str(tmp_path / "key")


def test_functions_of_a_user_are_found_from_any_working_directory(tmp_path: Path) -> None:
    config = Config(
        reward="judge.py:score,math",
        scoring=ScoringConfig(by_source={"puzzles": "judge.py:puzzle", "sums": "math"}),
        model_builder="models.py:build",
        objective=ObjectiveConfig(objective="losses.py:loss"),
        rollout=RolloutConfig(agent="agents.py:agent"),
        evaluation=EvaluationConfig(reward_of={"tests": "judge.py:test"}),
    )
    make_paths_absolute(config)
    assert config.reward == f"{tmp_path}/judge.py:score,math"
    puzzle = f"{tmp_path}/judge.py:puzzle"
    assert config.scoring.by_source == {"puzzles": puzzle, "sums": "math"}
    assert config.evaluation.reward_of == {"tests": f"{tmp_path}/judge.py:test"}
    assert config.model_builder == f"{tmp_path}/models.py:build"
    assert config.objective.objective == f"{tmp_path}/losses.py:loss"
    assert config.rollout.agent == f"{tmp_path}/agents.py:agent"


def test_a_run_reads_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, *others = write_inputs("grpo", tmp_path)
    data = next(word.removeprefix("data=") for word in others if word.startswith("data="))
    others = [word for word in others if not word.startswith("data=")]
    lines = Path(data).read_text().splitlines(keepends=True)
    (parts := tmp_path / "parts").mkdir()
    for number in range(3):
        (parts / f"{number}.jsonl").write_text("".join(lines[number::3]))
    words = [model, *others, "data=[parts/[01].jsonl, parts/2.jsonl]", "name=first"]
    config, summary = prepare_new("grpo", words)
    assert config.data == f"{parts}/[01].jsonl,{parts}/2.jsonl"
    assert f"{len(lines):,} entries" in summary
    run_dir = config.run_dir.absolute()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert prepare_resume(run_dir, [])[0].data == config.data
    assert prepare_resume(run_dir, [f"data=[{config.data}]"])[0].data == config.data
    with pytest.raises(ConfigError, match="^data=.*: the run has .*start a new run"):
        prepare_resume(run_dir, [f"data={parts}/*.jsonl"])
    shutil.move(parts, moved := tmp_path / "moved")
    assert prepare_resume(run_dir, [f"data={moved}/*.jsonl"])[0].data == f"{moved}/*.jsonl"


def test_a_run_keeps_the_text_of_its_chat_template(tmp_path: Path) -> None:
    words = write_inputs("grpo", tmp_path)
    template = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}A:"
    (file := tmp_path / "own.jinja").write_text(template)
    own = "prompts.chat_template=own.jinja"
    config, summary = prepare_new("grpo", [*words, "name=first", own])
    saved = load(config.run_dir / "config.yaml")
    assert config.prompts.chat_template == saved.prompts.chat_template == template
    assert "| Q: " in summary and "| A:" in summary
    prepare_resume(config.run_dir, [own])  # as a job repeats its words
    file.write_text(f"{template} ")
    assert prepare_resume(config.run_dir, [])[0].prompts.chat_template == template
    wrong = "^prompts.chat_template={% for .* the run has {% for"
    with pytest.raises(ConfigError, match=wrong) as refused:
        prepare_resume(config.run_dir, [own])
    assert "\n" not in str(refused.value)


def test_a_model_and_data_that_have_moved_are_given_by_their_new_place(tmp_path: Path) -> None:
    words = write_inputs("grpo", tmp_path)
    (tmp_path / "critic").mkdir()
    config, _ = prepare_new("grpo", [*words, "name=first", "critic.model=critic"])
    (new := tmp_path / "new").mkdir()
    moved = {"model": config.model, "data": config.data, "critic.model": config.critic.model}
    others = {field: f"{field}={new / Path(path).name}" for field, path in moved.items()}
    for path in moved.values():
        copy = shutil.copytree if Path(path).is_dir() else shutil.copy
        copy(path, new / Path(path).name)
    for word in others.values():
        with pytest.raises(ConfigError, match="the run has .*start a new run"):
            prepare_resume(config.run_dir, [word])
    shutil.rmtree(config.model)
    shutil.rmtree(config.critic.model)
    Path(config.data).unlink()
    assert prepare_resume(config.run_dir, [*others.values()])[0].model == str(new / "model")


def test_a_resume_without_a_file_to_evaluate_on_is_refused_although_the_file_is_gone(
    tmp_path: Path,
) -> None:
    (file := tmp_path / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    words = [*write_inputs("grpo", tmp_path), f"evaluation.data.test={file}"]
    config, _ = prepare_new("grpo", [*words, "name=first"])
    file.unlink()
    with pytest.raises(ConfigError, match="^evaluation.data={}: the run has .*test.jsonl"):
        prepare_resume(config.run_dir, ["evaluation.data={}"])
    moved = tmp_path / "moved.jsonl"
    moved.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    resumed, _ = prepare_resume(config.run_dir, [f"evaluation.data.test={moved}"])
    assert resumed.evaluation.data == {"test": str(moved)}


def test_a_run_is_not_resumed_to_fewer_steps_than_it_has_done() -> None:
    config, _ = prepare_new("quickstart", ["name=first", "steps=40"])
    (config.run_dir / "checkpoints" / "step_000030").mkdir(parents=True)
    with pytest.raises(ConfigError, match="^steps=20: the run has done 30; give more$"):
        prepare_resume(config.run_dir, ["steps=20"])
    assert load(config.run_dir / "config.yaml").steps == 40
    assert prepare_resume(config.run_dir, ["steps=30"])[0].steps == 30


def test_a_resume_says_and_keeps_which_fields_it_changed() -> None:
    config, _ = prepare_new("quickstart", ["name=first", "optimizer.learning_rate=1e-5"])
    (config.run_dir / "checkpoints" / "step_000030").mkdir(parents=True)
    assert "changed" not in prepare_resume(config.run_dir, [])[1]
    stages = "{40: {max_completion_length: 5, completions_per_prompt: 8}}"
    words = ["optimizer.learning_rate=3e-6", f"rollout.stages={stages}"]
    _, summary = prepare_resume(config.run_dir, words, writes=False)
    assert summary.startswith(
        "changed after step 30: optimizer.learning_rate=3e-06, 1e-05 before\n"
        "changed after step 30: rollout.stages={'40': {"
    )
    kept = config.run_dir / "changes.jsonl"
    assert not kept.exists()
    prepare_resume(config.run_dir, words)
    prepare_resume(config.run_dir, [])  # as a job does that is requeued
    first, second = map(json.loads, kept.read_text().splitlines())
    assert first == {
        "after_step": 30,
        "field": "optimizer.learning_rate",
        "before": 1e-5,
        "now": 3e-6,
    }
    assert second["field"] == "rollout.stages"


def test_a_run_is_not_resumed_on_other_prompts_than_its_checkpoint_has(tmp_path: Path) -> None:
    words = write_inputs("grpo", tmp_path)
    config, _ = prepare_new("grpo", [*words, "name=first"])
    (checkpoint := config.run_dir / "checkpoints" / "step_000001").mkdir(parents=True)
    prompts = load_prompts(config, load_tokenizer(Path(config.model))).train
    state = PromptStream(prompts, config.seed).state()
    (checkpoint / "state.json").write_text(json.dumps({"prompts": state}))
    prepare_resume(config.run_dir, [])
    whole = Path(config.data).read_text()
    Path(config.data).write_text(whole.partition("\n")[2])
    with pytest.raises(DataError, match="^the checkpoint was saved with other prompts than these"):
        prepare_resume(config.run_dir, [])


def test_without_a_gpu_a_real_model_uses_the_cores_unless_fields_say_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(3))
    given = [*write_inputs("grpo", tmp_path), "rollout.prompts_per_step=4", "name=first"]
    given += ["rollout.max_completion_length=64", "learner.micro_batch_size=1"]

    def layout(*words: str) -> tuple[int, int]:
        config, _ = prepare_new("grpo", [*given, *words], 0, writes=False)
        return config.learner.data_parallel_size, config.rollout.servers

    assert layout() == (1, 1)  # a tiny model
    monkeypatch.setattr(host, "REAL_WEIGHTS", 0)
    assert layout() == (2, 2)  # 3 do not divide the prompts
    assert layout("rollout.prompts_per_step=6") == (3, 3)
    assert layout("learner.dtype=float32") == (2, 2)
    assert layout("rollout.servers=1") == layout("learner.tensor_parallel_size=1") == (1, 1)

    def check_host(config: Config) -> None:
        if config.rollout.servers == 3:
            raise ConfigError("memory: too little")

    monkeypatch.setattr(host, "check_host", check_host)
    assert layout("rollout.prompts_per_step=6") == (2, 2)


def test_a_run_asks_for_the_shared_memory_of_its_semaphores_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(free_bytes: int, *words: str) -> str:
        monkeypatch.setattr(memory, "free_bytes", lambda path: free_bytes)
        try:
            prepare_new("quickstart", ["name=first", *words], 0, writes=False)
        except ConfigError as error:
            return str(error)
        return ""

    direct = ("quantization.transport=direct", "quantization.publish=full")
    assert refusal(65_536).startswith("/dev/shm has 0.1 MB free, and 4.0 are needed; make room")
    assert refusal(4_100_000) == ""
    assert refusal(4_100_000, *direct).startswith("/dev/shm has 4.1 MB free, and ")
    assert refusal(64_000_000, *direct) == ""
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_cannot_be_a_runs_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^output_dir=file/of/runs: file is a file; choose"):
        prepare_new("quickstart", ["output_dir=file/of/runs"], writes=False)
    prepare_new("quickstart", ["name=first"])
    shutil.move("runs/first", "runs/my run")
    with pytest.raises(ConfigError, match="^name=my run: a run's name has letters"):
        prepare_resume(Path("runs/my run"), [])


@pytest.mark.parametrize("code", [0, 1, STOPPED_EARLY, 130, 143])
@pytest.mark.parametrize("saved", [False, True])
def test_a_run_that_is_not_complete_ends_with_the_line_that_resumes_it(
    code: int,
    saved: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = Config(output_dir=str(tmp_path / "my runs"), name="first")
    (config.run_dir / "checkpoints").mkdir(parents=True)
    if saved:
        (config.run_dir / "checkpoints" / "step_000020").mkdir()
        (config.run_dir / "checkpoints" / "step_000040.partial").mkdir()
    place = "resume after step 20" if saved else "start again"
    line = f"to {place}: {qurl_command('resume', f'{tmp_path}/my runs/first')}\n"

    def failing(config: Config) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/first/logs/servers_here.json")

    monkeypatch.setattr(local, "_launch", lambda config: code)
    assert local.launch(config) == code
    assert capsys.readouterr().err == (line if code else "")
    monkeypatch.setattr(local, "_launch", failing)
    with pytest.raises(SystemExit):
        local.launch(config)
    full = "qurl: No space left on device: runs/first/logs/servers_here.json\n"
    assert capsys.readouterr().err == full + line


def test_a_job_continues_an_extended_run_and_not_a_finished_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []

    def run(config: Config, max_restarts: int) -> int:
        started.append(config.steps)
        return 0

    monkeypatch.setattr(slurm, "run", run)
    monkeypatch.setenv("QURL_MAX_RESTARTS", "20")
    Path("script").write_text("#!/bin/bash\n")  # Slurm's copy
    monkeypatch.setattr(sys, "argv", ["slurm", "run", "script"])

    def run_job(steps: str = "") -> None:
        text = f"recipe: quickstart\nname: first\n{steps}"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        slurm.main()

    config, _ = prepare_new("quickstart", ["name=first", "steps=40"])
    (config.run_dir / "summary.json").write_text('{"steps": 40, "time_s": 9.0}')
    run_job()
    assert started == [] and "runs/first is finished" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_job("steps: 60\n")
    assert started == [60]
    script = config.run_dir / "job.sh"  # what resumes the run
    assert script.read_text() == "#!/bin/bash\n" and stat.S_IMODE(script.stat().st_mode) == 0o600
