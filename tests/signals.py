"""Every signal to every command in every phase, with a tiny model and real servers.

    .venv/bin/pytest -s tests/signals.py                 # a sample of the runs, all others
    SIGNALS=all .venv/bin/pytest -s tests/signals.py     # every cell
    .venv/bin/pytest -s tests/signals.py -k "eval or serve"

The sample sends each phase of `train` INT, TERM, USR1 and one of the others, in turn; to `launch`,
which ends in the same program, it sends these three in three phases, and to `train` with colocated
servers in those of a step.

Each cell is one run: the signal is sent when the command's output or its files show the phase. Of a
phase within a step it is the middle, as the step before it lasted. INT, QUIT and HUP go to the
command's process group, as a terminal sends them. A cell prints the exit code and the seconds until
the command ended. The code is that of the signal (128 and its number; 75 for USR1 to a run, which
saves; 0 for PIPE, which changes nothing). A command other than a run ends at once. No process is
left.
"""

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from e2e.running import Command, middle_s
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.files import PARTIAL
from tiny import build_tiny_model

SIGNALS = ("INT", "TERM", "USR1", "HUP", "QUIT", "PIPE")
FROM_TERMINALS = ("INT", "HUP", "QUIT")
AT_ONCE_S = 3.0  # for a command without a run to end; the machine may be busy
# A run as short as a phase permits: no evaluation, unless that is the phase.
RUN = """quickstart name=run steps=3 prompts.options.size=500 reward=exact evaluation.problems=0
    rollout.prompts_per_step=8 rollout.completions_per_prompt=4 checkpoint.every_steps=1
    model_builder=qurl_megatron.recipes.quickstart:build_model""".split()
RUNS_OF_PHASES = {"evaluation": ["evaluation.problems=8"], "end": ["steps=1"]}
SERVER = "server.max_total_tokens=20000 server.mem_fraction_static=0.3"
COLOCATED = "train colocated"
WORDS = {
    "train": ["train", *RUN],
    COLOCATED: ["train", *RUN, "rollout.placement=colocated"],
    "launch": ["launch", *RUN],
    "eval": f"""eval model problems.jsonl reward=exact k=4 max_prompt_length=64
        max_completion_length=200 output=out server.max_running_requests=8 {SERVER}""".split(),
    "mismatch": "mismatch model problems.jsonl --prompts 40 --max-completion 400".split(),
    "serve": f"serve model key_file=key max_length=512 {SERVER}".split(),
}
RUNS = ("train", COLOCATED, "launch")


def has_started(run: Command) -> bool:
    """Return whether it imports and checks: before, Python has begun, and the kernel ends it."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{run.process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], base=16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


def has(pattern: str) -> Callable[[Command], bool]:
    """Return a function that is true once a file of the command's directory matches."""
    return lambda run: next(run.output.parent.glob(pattern), None) is not None


def says(*texts: str) -> Callable[[Command], bool]:
    """Return a function that is true once the command has printed one of these."""
    return lambda run: any(text in run.text() for text in texts)


def in_second_step(phase: str) -> Callable[[Command], bool]:
    """Return a function that is true from the middle of a phase of the second step on."""

    def has_come(run: Command) -> bool:
        path = run.run_dir / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = path.read_text().splitlines()
            begin = path.stat().st_ctime if len(lines) == 1 else 0.0
            return time.time() >= begin + middle_s(json.loads(lines[0]), phase)
        return False

    return has_come


# How to know the phases of each command; in the order of time.
OF_RUNS = {
    "start": has_started,
    "servers": has("runs/run/logs/server_*.log"),
    "evaluation": has("runs/run/evaluation/*"),
    "sampling": in_second_step("rollout"),
    "update": in_second_step("update"),
    "publish": in_second_step("publish"),
    "save": has(f"runs/run/checkpoints/*{PARTIAL}"),
    "end": has("runs/run/final_model*"),
}
OF_TURNS = ("evaluation", "sampling", "update", "publish", "save")
PHASES = dict.fromkeys(RUNS, OF_RUNS) | {
    "eval": {
        "start": has_started,
        "servers": has("out/server.log"),
        "sampling": says("requests,"),
        "end": has("out/answers_0.jsonl"),
    },
    "mismatch": {"start": has_started, "sampling": says("40 to evaluate", "comparing")},
    "serve": {
        "start": has_started,
        "servers": says("starting a server"),
        "serving": says("ready:"),
    },
}


def in_sample(command: str, phase: str, name: str) -> bool:
    """Return whether a cell is in the sample."""
    if command == "launch":
        return phase in ("start", "sampling", "save") and name in SIGNALS[:3]
    if command == COLOCATED:
        return phase in OF_TURNS and name in SIGNALS[:3]
    turn = SIGNALS[3 + list(OF_RUNS).index(phase) % 3] if command == "train" else ""
    return command not in RUNS or name in (*SIGNALS[:3], turn)


CELLS = [
    (command, phase, name)
    for command, phases in PHASES.items()
    for phase in phases
    for name in SIGNALS
    if os.environ.get("SIGNALS") == "all" or in_sample(command, phase, name)
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with what the commands read."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's would be inherited
    home = tmp_path_factory.mktemp("home")
    build_tiny_model(home / "model")
    problems = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    (home / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)) + "\n")
    (home / "key").write_text(secrets.token_hex(32))
    (home / "key").chmod(0o600)
    return home


@pytest.mark.parametrize(("command", "phase", "name"), CELLS)
def test_a_signal_ends_a_command_in_order(
    home: Path, tmp_path: Path, command: str, phase: str, name: str
) -> None:
    number = signal.Signals[f"SIG{name}"]
    for path in home.iterdir():
        (tmp_path / path.name).symlink_to(path)
    of_phase = RUNS_OF_PHASES.get(phase, []) if command in RUNS else []
    run = Command(tmp_path, *WORDS[command], *of_phase, is_fork=False)
    try:
        run.wait_until(lambda: PHASES[command][phase](run))
        if phase == "start":
            time.sleep(0.5)
        sent_at = time.monotonic()
        (os.killpg if name in FROM_TERMINALS else os.kill)(run.process.pid, number)
        if name == "PIPE" and command == "serve":
            time.sleep(AT_ONCE_S)
            assert run.poll() is None
            number, sent_at = signal.SIGTERM, time.monotonic()
            run.process.send_signal(number)
        code, took_s = run.exit_code(), time.monotonic() - sent_at
        _, left = psutil.wait_procs(run.survivors(), timeout=10)
    finally:
        for process in run.survivors():
            process.kill()
    print(f"| {command} | {phase} | {name} | {code}, {took_s:.1f} s |")
    right = 128 + number
    if number == signal.SIGPIPE:
        right = 0
    elif command in RUNS and number == signal.SIGUSR1 and phase != "start":
        right = 0 if phase == "end" else STOPPED_EARLY
    assert code == right and "Traceback" not in run.text(), run.text()
    assert left == []
    if command not in RUNS and number != signal.SIGPIPE:
        assert took_s <= AT_ONCE_S
        assert run.text().count("qurl: interrupted by") == 1
