"""What a run shows: a log that can be read after ten hours, and a bar on a terminal."""

import io
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from logs import GOOD
from qurl_megatron.config.schema import Config
from qurl_megatron.report import console
from qurl_megatron.report.console import LEGEND, RunConsole, duration
from qurl_megatron.report.metrics import Evaluation, StepMetrics
from qurl_megatron.report.progress import show_progress

STEP: dict[str, Any] = GOOD | {
    "reward_mean": -0.125,
    "completion_length_mean": 3276.8,
    "completion_truncated_fraction": 1.0,
    "kl_behaviour_proximal_k3": 1.3e-4,
    "entropy": 0.5,
    "rollout_tokens_per_s": 12345.6,
    "memory_bytes": 79 * 2**30,
}
COLUMN = "time step s reward len cut KL entropy tok/s GiB left".split()
SHOWING = """
import dataclasses
from qurl_megatron.config.schema import Config
from qurl_megatron.report.console import RunConsole
from qurl_megatron.report.metrics import StepMetrics
zeros = {field.name: 0 for field in dataclasses.fields(StepMetrics)} | {"reward_counts": [(0, 1)]}
console = RunConsole(Config(name="first", steps=7), quiet=False)
console.start([])
for step in range(1, 8):
    console.step(StepMetrics(**(zeros | {"step": step})), None, 600)
console.stop()
"""


def shown(capsys: pytest.CaptureFixture[str], steps: int, **fields: Any) -> list[str]:
    """Return the lines of a run of 400 steps that are shown for its first steps."""
    shows = RunConsole(Config(steps=400), quiet=False)
    shows.start([])
    for step in range(1, steps + 1):
        metrics = StepMetrics(**(STEP | fields | {"step": step}))
        evaluation = Evaluation(0.412) if step == 23 else None
        shows.step(metrics, evaluation, left_s=3600.0 + step)
    shows.stop()
    return capsys.readouterr().out.splitlines()


def test_a_step_is_one_line_with_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    *legend, header, line = shown(capsys, 1)
    assert "\n".join(legend) == LEGEND
    assert header.split() == COLUMN
    assert re.fullmatch(r"\d\d:\d\d:\d\d", line.split()[0])
    expected = "step 1/400 0.0 -0.125 3277 100% 1.3e-04 0.500 12346 79.0 1 h 0 min"
    assert line.split()[1:] == expected.split()
    ends = [re.search(rf"(?<!\S){re.escape(name)}(?!\S)", header) for name in COLUMN[2:-1]]
    assert all(end and line[end.end() - 1] != " " for end in ends), "columns are aligned"
    assert all(end and line[end.end()] == " " for end in ends)
    assert len(line) <= 84


def test_a_log_has_the_first_steps_every_tenth_and_those_with_something_to_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, 400)
    rows = [line for line in lines if re.match(r"[\d:]{8} step \d", line)]
    numbers = [int(re.split("[ /]+", row)[2]) for row in rows]
    assert numbers == [*range(1, 11), 20, 23, 23, *range(30, 401, 10)]
    assert rows[12].endswith("step 23/400 held-out accuracy 41.2%")
    assert sum(line.split() == COLUMN for line in lines) == 2
    (place,) = [number for number, line in enumerate(lines) if line.startswith("warning")]
    assert "step 5/400" in lines[place - 1] and "100% of completions are cut" in lines[place]


def test_a_slow_run_has_a_line_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 25))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    rows = [line for line in shown(capsys, 22) if re.match(r"[\d:]{8} step \d", line)]
    numbers = [int(re.split("[ /]+", row)[2]) for row in rows]
    assert numbers == [*range(1, 11), 13, 16, 19, 20]
    assert rows[11].split()[3] == "25.0"  # seconds of that step alone
    assert shown(capsys, 1, time_proof_s=20.0)[-1].split()[3] == "5.0"  # and without a proof


def test_values_that_are_not_finite_keep_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    _, line = shown(capsys, 1, kl_behaviour_proximal_k3=float("nan"), entropy=float("inf"))[3:5]
    assert line.split()[7:9] == ["nan", "inf"]


def test_text_in_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    RunConsole(Config(), quiet=False).say("[bold]/runs/a[/]")
    assert capsys.readouterr().out == "[bold]/runs/a[/]\n"


def on_terminal(**environment: str) -> str:
    """Return what seven steps write to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables |= {"TERM": "xterm-256color", "COLUMNS": "80", **environment}
    process = subprocess.Popen(
        [sys.executable, "-c", SHOWING], stdout=theirs, stderr=subprocess.PIPE, env=variables
    )
    os.close(theirs)
    output = io.BytesIO()
    while True:
        try:
            output.write(os.read(ours, 65536))
        except OSError:  # the other side is closed
            break
    _, errors = process.communicate()
    os.close(ours)
    assert process.returncode == 0, errors
    return output.getvalue().decode()


def test_a_terminal_has_a_live_line_and_colours_and_no_color_takes_the_colours() -> None:
    yellow = "\x1b[33m"
    coloured, plain = on_terminal(), on_terminal(NO_COLOR="1")
    for text in (coloured, plain):
        assert "7/7" in text and "reward 0.000, 10 min 0 s left, this step for " in text
        assert text.count("step 3/7") == 1
    assert yellow in coloured
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)


def test_a_terminal_that_cannot_move_its_cursor_has_lines_only() -> None:
    text = on_terminal(TERM="dumb")
    assert "step 3/7" in text and "this step for" not in text and "\x1b[2K" not in text


def test_a_duration_has_its_two_largest_units() -> None:
    for seconds, text in {
        0.4: "0 s",
        59.6: "1 min 0 s",
        181: "3 min 1 s",
        3600: "1 h 0 min",
        90_061: "25 h 1 min",
    }.items():
        assert duration(seconds) == text


def test_an_evaluation_shows_its_progress_in_a_log_by_tenths() -> None:
    file = io.StringIO()
    console = Console(file=file, highlight=False)
    with show_progress("[x]/data.jsonl", 25, "requests", console) as answered:
        for _ in range(25):
            answered()
    lines = file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("[x]/data.jsonl: 3 of 25 requests, 0 s left")
    assert lines[-1] == "[x]/data.jsonl: 25 of 25 requests, 0 s left"


def test_a_slow_evaluation_shows_its_progress_in_a_log_each_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, file = iter(range(0, 10_000, 25)), io.StringIO()
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))
    shows = Console(file=file, highlight=False, get_time=lambda: 0.0)
    with show_progress("a", 50, "requests", shows) as answered:
        for _ in range(12):
            answered()
    lines = file.getvalue().splitlines()
    assert [int(re.split("[: ]+", line)[1]) for line in lines] == [3, 5, 8, 10]
    assert lines[0] == "a: 3 of 50 requests, 19 min 35 s left"


def test_an_evaluation_shows_a_bar_on_a_terminal() -> None:
    file = io.StringIO()
    console = Console(file=file, force_interactive=True, force_terminal=True, width=80)
    with show_progress("data", 3, "requests", console) as answered:
        answered()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "1/3 requests" in shown and "of 3" not in shown
