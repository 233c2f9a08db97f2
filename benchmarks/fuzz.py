"""Give random and hostile input to the commands, the data, run directories and a server's door.

    python -m benchmarks.fuzz --inputs 1000 --minutes 25 --seed 0

There are five kinds of input, which hypothesis draws:

    words    of the `qurl` command: commands, options, recipes, fields and anything else
    fields   one to three `FIELD=VALUE` of `qurl train`
    rows     a file of problems: JSON with the fields of problems, any JSON, or bytes
    runs     a run's directory with one file replaced, for `status`, `logs`, `report` and `resume`
    bodies   HTTP requests to a server's door: its routes and others, with bodies that almost fit

A command runs in a fork of this process, which has done its imports, in a directory of its own.
What would start servers, ranks or jobs ends it instead: its input was accepted. Every input must be
accepted, or refused with one line and code 2. The command prints, for each kind, how many inputs
were given and refused, and the inputs with

    tracebacks  an exception that nobody expected, or another exit code
    hangs       more than 20 s of CPU time, or five minutes
    orphans     processes that outlive the command

and ends with code 1 if there are any. As root it first becomes an ordinary user, who may read
every file but write only its own: no input reaches a device.
"""

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks import machine
from benchmarks.runs import write_sums, write_tiny_model
from qurl_megatron import cli
from qurl_megatron.config import text
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import leaf_values, with_overrides
from qurl_megatron.launch.recipe import recipe_names
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.process import PR_SET_CHILD_SUBREAPER
from qurl_megatron.recipes import grpo
from qurl_megatron.report.metrics import StepMetrics
from qurl_megatron.rollout.wire import RUN_HEADER
from qurl_megatron.sglang_plugin.access import ROUTES, AccessControl
from qurl_megatron.weight_sync.bucket import model_tensors

CPU_LIMIT_S = 20.0
LIMIT_S = 300.0  # the machine may be busy
NOBODY = "65534"
ORDINARY_USER = (
    *("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"),
    *("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"),
    *("--bounding-set", "-all,+dac_read_search"),
)
"""Makes root a user who owns nothing, and reads what root can read: Python may be in its home."""

TRAIN = """grpo model=model data=problems.jsonl rollout.max_prompt_length=100
    rollout.max_response_length=100 rollout.prompts_per_step=8 reward=exact""".split()
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


@dataclass
class Outcome:
    """What became of the inputs of one kind."""

    inputs: int = 0
    refused: int = 0
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """True if every input was accepted or refused."""
        return not (self.tracebacks or self.hangs or self.orphans)


class Fuzz:
    """A directory with a model, problems and a run, in which commands get input."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.work = directory / "work"  # a copy of the home for each command
        write_tiny_model(self.home / "model")
        write_sums(self.home / "problems.jsonl", 60)
        run_dir = self.home / "runs" / "run"
        for name in FILES:
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        text.save(with_overrides(grpo.recipe(), [*TRAIN[1:], "name=run"]), run_dir / "config.yaml")
        (run_dir / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
        held = model_tensors(Architecture.from_directory(self.home / "model"), "int8", [])
        self.door = AccessControl(lambda: held)

    def command(self, outcome: Outcome, *words: str, of: str = "") -> None:
        """Run a `qurl` command on the copy of the home, and note what becomes of it.

        `of` says what was done to the copy.
        """
        output = self.work.with_name("output")
        pid = os.fork()
        if pid == 0:
            _be_command(words, self.work, output)
        why = _wait(pid)
        shown = output.read_text(errors="replace")
        given = f"{of}qurl {' '.join(map(ascii, words))}"
        if isinstance(why, str):
            outcome.hangs.append(f"{given}: {why}")
        else:
            outcome.refused += why == 2
            # What is broken in a run's directory is named and left out: that is no refusal.
            lines = re.findall(r"^qurl: (?!.*left out)", shown, flags=re.MULTILINE)
            most = max(1, len(words) - 1) if words[0] == "status" else 1  # a line for each run
            is_told = 1 <= len(lines) <= most
            if "Traceback" in shown or why not in (0, 1, 2) or (why == 2 and not is_told):
                outcome.tracebacks.append(f"{given}: code {why}: {shown.strip()[-300:]!r}")
        outcome.orphans += [f"{given}: {name}" for name in _end_children()]

    def words(self, outcome: Outcome, words: list[str]) -> None:
        self._renew()
        self.command(outcome, *words)

    def fields(self, outcome: Outcome, fields: list[tuple[str, str]]) -> None:
        self._renew()
        self.command(outcome, "train", *TRAIN, "--dry-run", *map("=".join, fields))

    def rows(self, outcome: Outcome, content: bytes) -> None:
        self._renew()
        (self.work / "fuzz.jsonl").write_bytes(content)
        words = ["train", *TRAIN, "--dry-run", "data=fuzz.jsonl"]
        self.command(outcome, *words, of=f"{content[-200:]!r}: ")

    def runs(self, outcome: Outcome, what: tuple[str, tuple[str, bytes]]) -> None:
        self._renew()
        command, (name, content) = what
        path = self.work / "runs" / "run" / name
        path.write_bytes(content)
        self.command(outcome, command, "runs/run", of=f"{name} {content[:100]!r}: ")

    def bodies(self, outcome: Outcome, request: tuple[tuple[str, str], bool, bytes]) -> None:
        (method, path), has_run, body = request
        headers = [(RUN_HEADER.lower().encode(), b"own")] if has_run else []
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        async def behind(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})

        try:
            asyncio.run(self.door.guard(behind)(scope, receive, send))
        except Exception as error:
            outcome.tracebacks.append(f"{method} {path} {body[:200]!r}: {error!r}")
            return
        outcome.refused += statuses[0] in (400, 404, 409)
        if statuses[0] not in (200, 400, 404, 409):
            outcome.tracebacks.append(f"{method} {path} {body[:200]!r}: status {statuses[0]}")

    def _renew(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.home, self.work, copy_function=os.link)
        run_dir = self.work / "runs" / "run"
        for path in run_dir.rglob("*"):  # these may be written to
            if path.is_file():
                content = path.read_bytes()
                path.unlink()
                path.write_bytes(content)


def _be_command(words: tuple[str, ...], directory: Path, output: Path) -> NoReturn:
    """Run a command in this fork and end it with the command's code."""

    def accepted(*_: object, **__: object) -> NoReturn:
        os._exit(0)

    code = 70
    try:
        with output.open("wb") as file, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
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
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pid: int) -> int | str:
    """Return the exit code of a child, or why it was killed."""
    begin, process = time.monotonic(), psutil.Process(pid)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        with contextlib.suppress(psutil.Error):
            cpu_s = sum(process.cpu_times()[:2])
            if cpu_s > CPU_LIMIT_S or time.monotonic() - begin > LIMIT_S:
                process.kill()
                os.waitpid(pid, 0)
                return f"killed after {cpu_s:.0f} s of CPU time"
        time.sleep(0.01)


def _end_children() -> list[str]:
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


def strategies() -> dict[str, st.SearchStrategy[Any]]:
    """Return what draws the inputs of each kind."""
    paths = st.sampled_from(sorted(leaf_values(Config())))
    one_field = st.tuples(paths | st.builds("{}.{}".format, paths, values), values)
    options = sorted(
        option for command in cli.app.registered_commands for option in _options(command.callback)
    )
    words = st.one_of(
        st.sampled_from([*cli.COMMANDS, *recipe_names(), *options, "runs/run", "model"]),
        one_field.map("=".join),
        values,
    )
    command = st.sampled_from(sorted(cli.COMMANDS))
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
    good = b"".join(b'{"question": "What is %d?", "answer": "1"}\n' % n for n in range(30))
    lines = st.lists(row, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
    content = st.one_of(
        st.binary(max_size=200),
        json_values.map(lambda value: json.dumps(value).encode()),
        lines,
        st.sampled_from(
            [b"", b"[" * 2000, b"9" * 6000, b"a: &a [*a]", b'{"step": 1', b"\0" * 5000]
        ),
    )
    average = st.dictionaries(st.sampled_from(["mean", "standard_error"]), json_values)
    nearly = st.one_of(
        st.dictionaries(st.sampled_from([each.name for each in fields(StepMetrics)]), json_values),
        st.fixed_dictionaries({"evaluation": st.dictionaries(values, average | json_values)}),
        st.fixed_dictionaries(
            {"evaluation": st.dictionaries(values, st.dictionaries(values, average))}
        ),
        st.fixed_dictionaries({"by_staleness": st.dictionaries(values, json_values)}),
    ).map(lambda changed: json.dumps(STEP | changed).encode() + b"\n")
    files = st.tuples(st.sampled_from(FILES), content)
    bodies = st.one_of(
        content,
        st.fixed_dictionaries(
            {},
            optional={
                name: json_values | st.lists(st.integers(-1, 9), max_size=4)
                for route in ROUTES.values()
                if route.body
                for name in route.body.model_fields
            },
        ).map(lambda body: json.dumps(body).encode()),
    )
    known_routes = st.sampled_from(sorted(ROUTES))
    return {
        "words": st.builds(
            lambda first, rest: [first, *rest], command, st.lists(words, max_size=5)
        ),
        "fields": st.lists(one_field, min_size=1, max_size=3),
        "rows": st.one_of(content, content.map(lambda rows: good + rows)),
        "runs": st.tuples(
            st.sampled_from(["status", "logs", "report", "resume"]),
            files | st.tuples(st.just("metrics.jsonl"), nearly),
        ),
        "bodies": st.tuples(
            known_routes | st.tuples(st.sampled_from(["GET", "POST"]), values.map("/{}".format)),
            st.booleans(),
            bodies,
        ),
    }


def _options(function: Any) -> Iterator[str]:
    """Yield the options of a command, such as `--dry-run`."""
    for name, kind in function.__annotations__.items():
        if "Option" in str(kind):
            yield f"--{name.replace('_', '-')}"


def fuzz(
    directory: Path, kinds: list[str], inputs: int, minutes: float, number: int
) -> dict[str, Outcome]:
    """Give `inputs` of each kind, in equal parts of the time; return what became of them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for module in (
        "evaluation.avg_at_k",
        "evaluation.mismatch",
        "launch.experiment",
        "launch.local",
    ):
        importlib.import_module(f"qurl_megatron.{module}")
    target = Fuzz(directory)
    outcomes = {}
    for kind, strategy in strategies().items():
        if kind not in kinds:
            continue
        outcome = outcomes[kind] = Outcome()
        give: Callable[[Outcome, Any], None] = getattr(target, kind)
        until = time.monotonic() + 60 * minutes / len(kinds)

        @seed(number)
        @settings(
            max_examples=inputs,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def one(drawn: Any) -> None:
            if time.monotonic() < until:  # noqa: B023 - called in this round of the loop
                outcome.inputs += 1  # noqa: B023
                give(outcome, drawn)  # noqa: B023

        one()
        print(f"{kind}: {outcome.inputs} inputs, {outcome.refused} refused", flush=True)
    return outcomes


def report(outcomes: dict[str, Outcome]) -> int:
    """Print the counts and what went wrong; return the exit code."""
    counts: Counter[str] = Counter()
    for kind, outcome in outcomes.items():
        counts["inputs"] += outcome.inputs
        for name in ("tracebacks", "hangs", "orphans"):
            wrong = getattr(outcome, name)
            counts[name] += len(wrong)
            for line in wrong[:20]:
                print(f"WRONG: {kind}: {name}: {line}")
    names = ("inputs", "tracebacks", "hangs", "orphans")
    print(", ".join(f"{name} {counts[name]}" for name in names))
    return 0 if all(outcome.is_good for outcome in outcomes.values()) else 1


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--inputs", type=int, default=1000, help="of each kind")
    parser.add_argument("--minutes", type=float, default=25.0, help="no input is given after these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="words,fields,rows,runs,bodies")
    arguments = parser.parse_args()
    if os.geteuid() == 0:
        os.execvp("setpriv", [*ORDINARY_USER, sys.executable, *sys.orig_argv[1:]])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kinds = arguments.kinds.split(",")
    with tempfile.TemporaryDirectory(prefix="qurl-fuzz-") as name:
        tempfile.tempdir = name
        outcomes = fuzz(Path(name), kinds, arguments.inputs, arguments.minutes, arguments.seed)
    sys.exit(report(outcomes))


if __name__ == "__main__":
    main()
