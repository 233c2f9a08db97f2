"""What a run writes is whole, also when the disk fills, and only regular files are replaced."""

import ast
import contextlib
import json
import os
import re
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import qurl_megatron
from logs import evaluation, run_log, write, write_run
from qurl_megatron import cli
from qurl_megatron.config.extensions import needed
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import load, save, with_overrides
from qurl_megatron.evaluation.avg_at_k import Answer, ProblemResult, write_answers
from qurl_megatron.files import append_lines, check_output, write_whole
from qurl_megatron.machine.disk import free_bytes
from qurl_megatron.model.huggingface import write_tensors
from qurl_megatron.report.metrics import Sample
from qurl_megatron.rollout.roster import save_roster
from qurl_megatron.rollout.server import Server
from tiny import build_tiny_model

PACKAGE = Path(qurl_megatron.__file__).parent
# The files that write in other ways than `write_whole` and `append_lines`, and what they write.
OWN_WAYS = {
    "files": "this is where those are",
    "extensions/agents/pool": "the logs of processes",
    "config/meanings": "YAML in memory",
    "config/text": "YAML in memory",
    "config/yaml_text": "YAML in memory",
    "data/alike": "entries, through a pipe",
    "launch/code_copy": "a copy of the code, in a directory that it renames",
    "extensions/elsewhere/serve": "a log, to see that it can be opened",
    "launch/recipe": "YAML, and JSON to see that it can be, in memory",
    "launch/slurm": "the logs of processes, and 256 MiB to see how fast a disk is; it deletes them",
    "launch/owner": "owner.json, which is locked, and so must stay the same file",
    "model/huggingface": "a file that `write_whole` renames",
    "model/smollm2": "a model, in a directory that the run renames",
    "extensions/planning/scaling": "a file that `write_whole` renames",
    "extensions/rehearsal/rehearsal": "what a process is to do, through a pipe",
    "report/console": "the lines of steps, which the console has too",
    "extensions/report/plots": "a picture in memory",
    "machine/environment": "a file to lock",
    "machine/output": "a log in place of a closed output",
    "machine/processes": "a file to lock",
    "rollout/preload": "the logs of processes",
}
WRITING_METHODS = {"write_text", "write_bytes", "savefig", "save_file", "to_csv", "dump"}


def opens_to_write(call: ast.Call) -> bool:
    """Return whether a call opens a file to write it: `open` of any kind, by its mode or flags."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    words = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [word.value for word in words if isinstance(word, ast.Constant)]
    is_mode = any(isinstance(mode, str) and re.fullmatch("r?[wax+]b?[+]?", mode) for mode in modes)
    return name == "open" and (is_mode or "O_CREAT" in ast.unparse(call))


def test_every_file_is_written_whole_or_by_lines() -> None:
    found = set()
    for folder in (PACKAGE, PACKAGE.parent / "launch", PACKAGE.parent / "recipes"):
        for path in folder.glob("**/*.py"):
            base = PACKAGE if folder == PACKAGE else PACKAGE.parent
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and (
                    getattr(node.func, "attr", getattr(node.func, "id", "")) in WRITING_METHODS
                    or opens_to_write(node)
                ):
                    found.add(str(path.relative_to(base).with_suffix("")))
    assert found == OWN_WAYS.keys()


# Each writes into a directory, which it may do again and again. What is called first prepares it.
Writer = Callable[[Path], Callable[[int], object]]


def config_yaml(run_dir: Path) -> Callable[[int], object]:
    return lambda number: save(Config(steps=number), run_dir / "config.yaml")


def metrics_jsonl(run_dir: Path) -> Callable[[int], object]:
    log = run_log(run_dir)
    log.start(evaluation(0.25))
    log._tensorboard = None  # the curves are another file
    return lambda number: write(log, number)


def weights_jsonl(run_dir: Path) -> Callable[[int], object]:
    log = run_log(run_dir)
    weights = {f"model.layers.{layer}": {"code_flip_fraction": 0.5} for layer in range(99)}
    log.write_weights(0, weights)
    return lambda number: log.write_weights(number, weights)


def samples_jsonl(run_dir: Path) -> Callable[[int], object]:
    log = run_log(run_dir)
    log.start(evaluation(0.25))
    texts = ("highest reward", "question" * 99, "answer" * 99)

    def sample(step: int) -> Sample:
        return Sample(step, *texts, 1.0, {}, 2, False, [1], ["a", "b"], [1.0, 1.0])

    return lambda number: log.write_samples([sample(number)] * 3)


def curves(run_dir: Path) -> Callable[[int], object]:
    log = run_log(run_dir)
    log.start(evaluation(0.25))
    return lambda number: log._write_curves(number, {f"metric{i}": i for i in range(99)})


def mismatch_json(run_dir: Path) -> Callable[[int], object]:
    log = run_log(run_dir)
    return lambda number: log.write_mismatch(
        {"rollout": dict.fromkeys(map(str, range(999 * number)), 1)}
    )


def answers(run_dir: Path) -> Callable[[int], object]:
    answer = Answer("text", 1.0, False, False, 1.0, "")
    result = ProblemResult(0, "question", "answer", answer, [answer] * 9)
    return lambda number: write_answers([result] * 8 * number, run_dir / "answers.jsonl")


def report(run_dir: Path) -> Callable[[int], object]:
    run = write_run(run_dir.parent / "reported")
    page = needed("report", "page", by="this test")
    return lambda number: page.write_report([run], run_dir / f"{number}.html")


def roster(run_dir: Path) -> Callable[[int], object]:
    server = Server("http://127.0.0.1:1", "key" * 9)
    return lambda number: save_roster(
        run_dir / "servers.json", {"rollout": dict.fromkeys(range(9 * number), server)}
    )


def tensors(run_dir: Path) -> Callable[[int], object]:
    return lambda number: write_tensors(
        {"weight": torch.ones(number, 9999)}, run_dir / "model.safetensors"
    )


WRITERS = [config_yaml, metrics_jsonl, weights_jsonl, samples_jsonl, curves, mismatch_json]
WRITERS += [answers, report, roster, tensors]


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Let this process write no file beyond a size, as a quota or a limit of the shell does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def write_until_full(write_next: Callable[[int], object], run_dir: Path) -> None:
    """Write again and again until it fails; check that the failure names the file and left none."""
    before = contents(run_dir)
    with pytest.raises(OSError) as failure:
        for number in range(1, 99):
            before = contents(run_dir)
            write_next(number)
    shown = f"{failure.value}"
    assert "No space left on device" in shown or "File too large" in shown, shown
    assert contents(run_dir) == before, "what was there is as it was, and nothing is beside it"
    for path in before:
        if path.suffix == ".jsonl":
            assert all(map(json.loads, path.read_text().splitlines()))


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_full_disk_leaves_what_was_written_whole(writer: Writer, small_disk: Path) -> None:
    write_next = writer(small_disk)
    (small_disk / "other").write_bytes(bytes(free_bytes(small_disk)))
    write_until_full(write_next, small_disk)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_limit_of_file_sizes_leaves_what_was_written_whole(
    writer: Writer, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_next = writer(run_dir)
    with limited(1024 if writer is config_yaml else 32768):
        write_until_full(write_next, run_dir)


def test_a_resume_under_a_limit_of_file_sizes_keeps_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save(Config(steps=80), path)
    assert path.stat().st_size > 1024
    with limited(1024), pytest.raises(OSError, match="File too large.*config.yaml"):
        save(Config(steps=90), path)
    assert load(path).steps == 80
    assert [*tmp_path.iterdir()] == [path]


def test_lines_follow_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start in ('{"step": 1}\n{"st', "{" * 100_000):  # of a writer that was killed
        path.write_text(start)
        append_lines(path, [{"step": 2}, {"step": 3}])
        kept = start.splitlines(keepends=True)[:-1]
        assert path.read_text() == "".join(kept) + '{"step": 2}\n{"step": 3}\n'


def test_files_of_all_libraries_have_the_mode_of_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_tensors({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
        write_whole(tmp_path / "config.json", "{}")
        write_whole(tmp_path / "key", "secret", private=True)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"model.safetensors": 0o640, "config.json": 0o640, "key": 0o600}


def test_a_link_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "page.html.unfinished").symlink_to(tmp_path / "mine")
    write_whole(tmp_path / "page.html", "page")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "page.html").is_symlink()


def special_files(directory: Path) -> Iterator[Path]:
    """Yield what is no regular file: a pipe, links, a directory, and as root a device."""
    names = ("pipe", "link", "nowhere", "directory")
    os.mkfifo(directory / "pipe.csv")
    (directory / "file").write_text("mine")
    (directory / "link.csv").symlink_to("file")
    (directory / "nowhere.csv").symlink_to("nothing")
    (directory / "directory.csv").mkdir()
    yield from (directory / f"{name}.csv" for name in names)
    with contextlib.suppress(PermissionError):
        os.mknod(directory / "null.csv", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        yield directory / "null.csv"


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    for place in special_files(tmp_path):
        before = place.lstat()
        with pytest.raises(FileExistsError, match="is not a regular file"):
            write_whole(place, "page")
        assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        "report RUN --output PIPE",
        "plan Qwen2.5-7B --gpus 8 --output PIPE",
        "mismatch MODEL reasoning_gym:spell_backward --output PIPE",
        "quantize MODEL PIPE",
        "uaq MODEL PIPE",
        "eval MODEL questions max_prompt_length=9 max_completion_length=9 output=PIPE",
        "serve MODEL key_file=KEY max_length=64 log_file=PIPE",
    ],
)
def test_a_command_refuses_to_replace_a_pipe_with_one_line(
    words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name.upper(): tmp_path / name for name in ("run", "model", "key", "pipe")}
    places["PIPE"] = places["PIPE"].with_suffix(".csv")
    os.mkfifo(places["PIPE"])
    if "RUN" in words:
        write_run(places["RUN"])
    if "MODEL" in words:
        build_tiny_model(places["MODEL"])
    write_whole(places["KEY"], "k" * 32, private=True)
    for name, place in places.items():
        words = words.replace(name, str(place))
    words = words.replace("questions", "reasoning_gym:spell_backward")
    monkeypatch.setattr(sys, "argv", ["qurl", *words.split()])
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    line = capfd.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert line.startswith("qurl: ") and "exists" in line and str(places["PIPE"]) in line
    assert places["PIPE"].is_fifo()


@pytest.mark.parametrize("place", ["/", "/etc", "/etc/runs", "/usr/bin", "/dev", "/proc/1", "/lib"])
def test_directories_of_the_system_are_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=f"^output_dir={place}: belongs to the system"):
        with_overrides(Config(), [f"output_dir={place}"])
    with pytest.raises(PermissionError, match="belongs to the system"):
        check_output(Path(place))


def test_space_for_users_is_not_the_systems(tmp_path: Path) -> None:
    for place in ("/runs", "/home/someone", "/dev/shm/runs", "/usr/workspace/runs", tmp_path):
        with_overrides(Config(), [f"output_dir={place}"])
        check_output(Path(place) / "new")
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(PermissionError):
        check_output(tmp_path / "link" / "page.html")
