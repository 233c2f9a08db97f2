"""Random and hostile input to the commands, the data, run directories and a server's door.

    FUZZ_INPUTS=1000 .venv/bin/pytest -s tests/test_fuzz.py

runs these tests with so many inputs of each kind, which hypothesis draws, and prints how many were
refused:

    words    of the `qurl` command: commands, options, recipes, fields and anything else
    fields   one to three `FIELD=VALUE` of `qurl train`
    rows     a file of problems: JSON with the fields of problems, any JSON, or bytes
    runs     a run's directory with one file replaced, for `status`, `logs`, `report` and `resume`
    bodies   HTTP requests to a server's door: its routes and others, with bodies that almost fit

A command runs in a fork of this process, which has done its imports, in a directory of its own.
What would start servers, ranks or jobs ends it instead: its input was accepted. Every input must be
accepted, or refused with one line and code 2, within 20 s of CPU time, and no process may outlive
its command.
"""

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import psutil
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from qurl_megatron import cli
from qurl_megatron.config import text
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import leaf_values, with_overrides
from qurl_megatron.launch.recipe import recipe_names
from qurl_megatron.machine.processes import PR_SET_CHILD_SUBREAPER
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.recipes import grpo
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.rollout.wire import RUN_HEADER
from qurl_megatron.sglang_plugin.access import ROUTES, AccessControl
from qurl_megatron.weight_sync.bucket import model_tensors
from tiny import build_tiny_model

INPUTS = "FUZZ_INPUTS"  # in the environment: how many of each kind
CPU_LIMIT_S = 20
LIMIT_S = 300  # the machine may be busy

fuzzed = settings(
    max_examples=int(os.environ.get(INPUTS, 3)),
    derandomize=INPUTS not in os.environ,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TRAIN = """grpo model=model data=problems.jsonl rollout.max_prompt_length=100
    rollout.max_completion_length=100 rollout.prompts_per_step=8 reward=exact""".split()
HOSTILE = """-1 0 1 1e300 -0.0 nan inf NaN 9999999999999999999999 1e-320 0x10 1_000 true null None
    [] {} [1] {a:b} [[[[ }{ &a *a !!python/object:os.system ../../etc/passwd / . .. ~ - -- --help
    $(touch\\x20x) `x` ;x |x a\\x00b a\\nb a\\rb \\x1b[31m \\u202e \\ud800 \\xe9 \\u4e2d
    file:///x http://a:1 https://[::1 reasoning_gym: reasoning_gym:x model problems.jsonl
    runs/run quantized x:y:z a,b,,c =x x=y""".split()
FILES = """config.yaml data.txt metrics.jsonl samples.jsonl weights.jsonl summary.json mismatch.json
    owner.json logs/servers_here.json servers_at.json job.json logs/learner_rank0.log
    checkpoints/step_000001/state.json evaluation/step_000000/held_out.jsonl""".split()

STEP = {each.name: 1 for each in fields(StepMetrics) if each.default is each.default_factory}
"""A line of metrics.jsonl with what every step has."""

hostile = st.sampled_from(
    [word.encode("latin-1", "backslashreplace").decode("unicode_escape") for word in HOSTILE]
)
# The kernel ends a word at a NUL, and gives bytes that are not UTF-8 as lone surrogates.
usual = st.sampled_from(["1", "2", "8", "0.5", "true", "false", "none", "exact", "int8"])
values = st.one_of(
    usual, hostile, st.text(max_size=20), st.integers().map(str), st.floats().map(str)
).map(lambda value: value.replace("\0", ""))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | hostile,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)


def options() -> Iterator[str]:
    """Yield the options of all commands, such as `--dry-run`."""
    for command in cli.app.registered_commands:
        for name, kind in command.callback.__annotations__.items():
            if "Option" in str(kind):
                yield f"--{name.replace('_', '-')}"


paths = st.sampled_from(sorted(leaf_values(Config())))
one_field = st.tuples(paths | st.builds("{}.{}".format, paths, values), values)
words = st.one_of(
    st.sampled_from([*cli.COMMANDS, *recipe_names(), *sorted(options()), "runs/run", "model"]),
    one_field.map("=".join),
    values,
)
GOOD_ROWS = b"".join(b'{"question": "What is %d?", "answer": "1"}\n' % n for n in range(60))
row = st.one_of(
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ["question", "answer", "prompt", "messages", "reward_model", "metadata", "tools"],
            json_values,
        ),
    ),
    st.fixed_dictionaries({"question": st.text(max_size=30), "answer": json_values}),
    json_values,
)
content = st.one_of(
    st.binary(max_size=200),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.lists(row, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
    st.sampled_from([b"", b"[" * 2000, b"9" * 6000, b"a: &a [*a]", b'{"step": 1', b"\0" * 5000]),
)
average = st.dictionaries(st.sampled_from(["mean", "standard_error"]), json_values)
nearly_metrics = st.one_of(
    st.dictionaries(st.sampled_from([each.name for each in fields(StepMetrics)]), json_values),
    st.fixed_dictionaries({"evaluation": st.dictionaries(values, average | json_values)}),
    st.fixed_dictionaries(
        {"evaluation": st.dictionaries(values, st.dictionaries(values, average))}
    ),
    st.fixed_dictionaries({"by_staleness": st.dictionaries(values, json_values)}),
).map(lambda changed: json.dumps(STEP | changed).encode() + b"\n")
nearly_bodies = st.fixed_dictionaries(
    {},
    optional={
        name: json_values | st.lists(st.integers(-1, 9), max_size=4)
        for route in ROUTES.values()
        if route.body
        for name in route.body.model_fields
    },
).map(lambda body: json.dumps(body).encode())


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Yield a directory with a model, problems and a run; commands get a copy of it beside it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for module in (
        "evaluation.evaluate",
        "extensions.mismatch.mismatch",
        "launch.experiment",
        "launch.local",
    ):
        importlib.import_module(f"qurl_megatron.{module}")
    with tempfile.TemporaryDirectory(prefix="qurl-fuzz-") as scratch:
        home = Path(scratch) / "home"
        build_tiny_model(home / "model")
        (home / "problems.jsonl").write_bytes(GOOD_ROWS)
        for name in FILES:
            (home / "runs" / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        config = with_overrides(grpo.recipe(), [*TRAIN[1:], "name=run"])
        text.save(config, home / "runs" / "run" / "config.yaml")
        (home / "runs" / "run" / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
        with patch.object(tempfile, "tempdir", scratch):
            yield home


@pytest.fixture(scope="module")
def access(home: Path) -> AccessControl:
    held = model_tensors(Architecture.from_directory(home / "model"), "int8", [])
    return AccessControl(lambda: held)


@fuzzed
@given(st.tuples(st.sampled_from(sorted(cli.COMMANDS)), st.lists(words, max_size=5)))
def test_words(home: Path, command: tuple[str, list[str]]) -> None:
    run(renewed(home), command[0], *command[1])


@fuzzed
@given(st.lists(one_field, min_size=1, max_size=3))
def test_fields(home: Path, fields: list[tuple[str, str]]) -> None:
    run(renewed(home), "train", *TRAIN, "--dry-run", *map("=".join, fields))


@fuzzed
@given(st.one_of(content, content.map(lambda rows: GOOD_ROWS + rows)))
def test_rows(home: Path, rows: bytes) -> None:
    work = renewed(home)
    (work / "fuzz.jsonl").write_bytes(rows)
    run(work, "train", *TRAIN, "--dry-run", "data=fuzz.jsonl")


@fuzzed
@given(
    st.sampled_from(["status", "logs", "report", "resume"]),
    st.tuples(st.sampled_from(FILES), content)
    | st.tuples(st.just("metrics.jsonl"), nearly_metrics),
)
def test_runs(home: Path, command: str, file: tuple[str, bytes]) -> None:
    work = renewed(home)
    (work / "runs" / "run" / file[0]).write_bytes(file[1])
    run(work, command, "runs/run")


@fuzzed
@given(
    st.sampled_from(sorted(ROUTES))
    | st.tuples(st.sampled_from(["GET", "POST"]), values.map("/{}".format)),
    st.booleans(),
    content | nearly_bodies,
)
def test_bodies(access: AccessControl, route: tuple[str, str], has_run: bool, body: bytes) -> None:
    headers = [(RUN_HEADER.lower().encode(), b"own")] if has_run else []
    scope = {"type": "http", "method": route[0], "path": route[1], "headers": headers}
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    asyncio.run(access.guard(behind)(scope, receive, send))
    event("accepted" if statuses[0] == 200 else "refused")
    assert statuses[0] in (200, 400, 404, 409)


def renewed(home: Path) -> Path:
    """Return a new copy of the home, in which a command may write to a run's files."""
    work = home.with_name("work")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(home, work, copy_function=os.link, ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(home / "runs", work / "runs")
    return work


def run(work: Path, *words: str) -> None:
    """Run a `qurl` command in a directory; fail unless it is accepted, or refused with one line."""
    output = work.with_name("output")
    pid = os.fork()
    if pid == 0:
        be_command(words, work, output)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    orphans = end_children()
    shown = output.read_text(errors="replace")
    event("refused" if code == 2 else "accepted")
    assert "Traceback" not in shown and code in (0, 1, 2), shown
    # What is broken in a run's directory is named and left out: that is no refusal.
    lines = re.findall(r"^qurl: (?!.*left out)", shown, flags=re.MULTILINE)
    most = max(1, len(words) - 1) if words[0] == "status" else 1  # a line for each run
    assert code != 2 or 1 <= len(lines) <= most, shown
    assert orphans == []


def be_command(words: tuple[str, ...], directory: Path, output: Path) -> NoReturn:
    """Run a command in this fork and end it with the command's code."""

    def accepted(*_: object, **__: object) -> NoReturn:
        os._exit(0)

    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        signal.alarm(LIMIT_S)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with output.open("wb") as file, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        os.chdir(directory)
        sys.argv = ["qurl", *words]
        with contextlib.ExitStack() as stack:
            for name in (
                "launch.local.run",
                "launch.experiment.submit",
                "rollout.preload.start",
                "launch.experiment.run_here",
            ):
                stack.enter_context(patch(f"qurl_megatron.{name}", accepted))
            cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_children() -> list[str]:
    """Kill what a command has left, which this process has adopted; return its command lines."""
    deadline = time.monotonic() + 5  # to end by themselves
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    for process in left:
        process.kill()
        process.wait()
    return [str(process) for process in left]
