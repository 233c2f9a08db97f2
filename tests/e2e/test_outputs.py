"""A run outlives its standard output, and ends with a line when its disk is full."""

import json
import os
import select
import subprocess
from pathlib import Path

from e2e.running import QUICK, Start
from qurl_megatron.machine.disk import free_bytes
from qurl_megatron.machine.output import CONSOLE_LOG
from qurl_megatron.report.record import list_checkpoints


def steps_of(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()]


def test_a_run_whose_output_is_closed_after_three_lines_completes(
    start: Start, tmp_path: Path
) -> None:
    """As in `qurl train ... 2>&1 | head -3`."""
    os.mkfifo(tmp_path / "output")
    pipe = os.open(tmp_path / "output", os.O_RDWR)  # would wait for a writer if it only read
    run = start("train", *QUICK)
    read = b""
    while read.count(b"\n") < 3:
        assert run.poll() is None, read
        if select.select([pipe], [], [], 0.1)[0]:
            read += os.read(pipe, 80)
    os.close(pipe)
    assert read.startswith(b"the run needs"), read
    assert run.exit_code() == 0
    log = (run.run_dir / CONSOLE_LOG).read_text()
    assert "step 2/2" in log and "weight versions published" in log
    assert steps_of(run.run_dir) == [1, 2]
    assert (run.run_dir / "final_model" / "config.json").exists()


def test_a_full_disk_ends_a_run_with_a_line_and_the_run_resumes(
    start: Start, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,size=256m", small_disk], check=True)
    words = [f"output_dir={small_disk}", "checkpoint.every_steps=100"]
    run = start("train", *QUICK, "steps=100", *words)
    run.wait_for("step 2/")
    run_dir, other = small_disk / "run", small_disk / "other"
    with other.open("wb", buffering=0) as file:
        while free_bytes(small_disk):
            file.write(bytes(min(2**20, free_bytes(small_disk))))
    assert run.exit_code() == 1, run.text()
    (checkpoint,) = list_checkpoints(run_dir)
    assert f"No space left on device; the last whole checkpoint is {checkpoint}" in run.text()
    assert "Traceback" not in run.text()
    assert run.says_how_to_resume(1, run_dir), run.text()
    assert run.survivors() == []
    assert list(run_dir.rglob("*.unfinished")) == []
    steps = steps_of(run_dir)  # every line is whole
    assert steps == [*range(1, len(steps) + 1)]
    other.unlink()
    resumed = start("resume", run_dir, "steps=3")
    assert resumed.exit_code() == 0, resumed.text()
    assert steps_of(run_dir) == [1, 2, 3]
