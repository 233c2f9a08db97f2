"""Commands on models as Slurm jobs: the script, its words, and what is submitted."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qurl_megatron import cli
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import save
from qurl_megatron.learner.saved_masters import CONTENTS
from recipe_inputs import good_problems
from tiny import build_tiny_model

QURL = str(Path(sys.executable).with_name("qurl"))
UNSAFE = """a $(touch x)`touch x`;"'&|"""
LENGTHS = ["max_prompt_length=99", "max_completion_length=99"]
Qurl = Callable[..., str]


@pytest.fixture
def qurl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Qurl:
    """Return a function that runs a command beside a model and problems; it returns what is shown.

    That is its output, or its error.
    """
    monkeypatch.chdir(tmp_path)
    build_tiny_model(tmp_path / "model")
    Path("problems.jsonl").write_text("\n".join(good_problems(8)) + "\n")
    Path("step").mkdir()
    for name in CONTENTS:
        (Path("step") / name).touch()
    save(Config(), Path("step/config.yaml"))

    def qurl(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["qurl", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main()
        shown = capsys.readouterr()
        return shown.out or shown.err

    return qurl


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (["quantize", "model", "out", "--format=fp8", "--keep=*.o_proj", "--keep=*.1.mlp"], None),
        (["export", "step", "out"], None),
        (["eval", "model", "problems.jsonl", "k=4", *LENGTHS], "1"),
        (["eval", "model", "problems.jsonl", "server.tensor_parallel_size=2", *LENGTHS], "2"),
        (["mismatch", "model", "problems.jsonl", "--prompts=8", "--max-completion=9"], "1"),
    ],
    ids=["quantize", "export", "eval", "eval on two GPUs", "mismatch"],
)
def test_a_job_has_one_node_the_gpus_of_its_command_and_the_same_words(
    qurl: Qurl, words: list[str], gpus: str | None
) -> None:
    before = set(Path.cwd().iterdir())
    options = ["--executor=slurm", "--account", "a b", "--time=1:00:00", "--sbatch", "qos=high"]
    script = qurl(*words, *options, "--partition", "low", "--dry-run").splitlines()
    assert set(Path.cwd().iterdir()) == before
    assert script[0] == "#!/bin/bash"
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in script[1:-1])
    expected = {"nodes": "1", "exclusive": "", "job-name": f"qurl.{words[0]}", "time": "1:00:00"}
    expected |= {"account": "'a b'", "partition": "low", "qos": "high", "chdir": str(Path.cwd())}
    assert expected.items() <= asked.items()
    assert asked.get("gpus-per-node") == gpus
    options = [word for word in words[1:] if word.startswith("--")]
    arguments = [word for word in words[1:] if not word.startswith("--")]
    executed = shlex.split(script[-1])
    assert executed == ["exec", QURL, words[0], *options, "--", *arguments]


def test_a_job_does_what_its_command_does_and_no_word_reaches_the_shell(qurl: Qurl) -> None:
    script = qurl("quantize", "model", UNSAFE, "--format", "fp8", "--executor=slurm", "--dry-run")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (Path(UNSAFE) / "model.safetensors").exists()
    assert not Path("x").exists()


def test_a_job_is_submitted_from_a_machine_with_sbatch_only(
    qurl: Qurl, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["quantize", "model", "out", "--executor=slurm"]
    monkeypatch.setenv("PATH", "/no/such")
    assert "this machine has no sbatch; submit from a login node" in qurl(*words)
    (sbatch := Path("bin/sbatch")).parent.mkdir()
    sbatch.touch(0o755)
    sbatch.write_text("#!/bin/sh\ncat > script && echo 7\n")
    monkeypatch.setenv("PATH", f"{sbatch.parent.absolute()}:{os.defpath}")
    assert qurl(*words) == "quantize -- model out: job 7\n"
    assert Path("script").read_text() == qurl(*words, "--dry-run")
    assert Path("logs").is_dir() and not Path("out").exists()


def test_a_dry_run_on_this_machine_shows_the_command(qurl: Qurl) -> None:
    assert qurl("quantize", "model", "out", "--dry-run") == f"{QURL} quantize -- model out\n"
    assert not Path("out").exists()
