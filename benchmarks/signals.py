"""Send every signal to every command in every phase, and print the table of what becomes of it.

    python -m benchmarks.signals                   # a sample of the runs, all of the other commands
    python -m benchmarks.signals --all             # every cell
    python -m benchmarks.signals --commands eval,serve --signals TERM,INT

The signals are INT, TERM, HUP, QUIT, PIPE and USR1; the commands train, eval, mismatch, serve and
launch, with a tiny model and real servers. The sample sends each phase of `train` INT, TERM, USR1
and one of the others, in turn; to `launch`, which ends in the same program, it sends these three in
three phases, and to `train colocated`, whose servers have the learner's GPUs, in those of a step. A
cell of the table that is not in it is empty.

Each cell is one run: the signal is sent when the command's output or its files show the phase. Of a
phase within a step it is the middle, as the step before it lasted. INT, QUIT and HUP go to the
command's process group, as a terminal sends them. A cell has the exit code and the seconds until
the command ended. It begins with WRONG if the code is not the one of the signal (128 and its
number; 75 for USR1 to a run, which saves; 0 for PIPE, which changes nothing), if there is a
traceback, if a command other than a run took more than 2 s and `--slack`, or if a process is left.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from benchmarks.runs import QURL, middle_s, processes_with, write_sums, write_tiny_model
from qurl_megatron.config.schema import STOPPED_EARLY
from qurl_megatron.files import PARTIAL

SIGNALS = ("INT", "TERM", "USR1", "HUP", "QUIT", "PIPE")
FROM_TERMINALS = ("INT", "HUP", "QUIT")
MARK = "QURL_SIGNALS"  # in the environment of every process of a cell
AT_ONCE_S = 2.0  # for a command without a run to end
LIMIT_S = 900.0
# A run as short as a phase permits: no evaluation, unless that is the phase.
RUN = """quickstart name=run steps=3 data_options.size=500 reward=exact evaluation.problems=0
    rollout.prompts_per_step=8 rollout.completions_per_prompt=4 checkpoint.every_steps=1
    model_builder=qurl_megatron.recipes.quickstart:build_model""".split()
EVALUATED = ["evaluation.problems=8"]
RUNS_OF_PHASES = {"evaluation": EVALUATED, "end": ["steps=1"]}
SERVER = ["server.max_total_tokens=20000", "server.mem_fraction_static=0.3"]
COLOCATED = "train colocated"
RUNS = ("train", COLOCATED, "launch")
OTHERS = {
    "eval": "eval model problems.jsonl reward=exact k=4 max_prompt_length=64".split()
    + ["max_response_length=200", "output=out", "server.max_running_requests=8", *SERVER],
    "mismatch": "mismatch model problems.jsonl --prompts 40 --max-response 400".split(),
    "serve": ["serve", "model", "key_file=key", *SERVER],
}


@dataclass
class Cell:
    """A command under way, in its own directory."""

    directory: Path
    process: subprocess.Popen[bytes]

    @property
    def run_dir(self) -> Path:
        """The directory of its run."""
        return self.directory / "runs" / "run"

    def shown(self) -> str:
        """Return what it has printed."""
        return (self.directory / "output").read_text(errors="replace")

    def says(self, text: str) -> bool:
        """Return whether it has printed a text."""
        return text in self.shown()

    def has(self, pattern: str) -> bool:
        """Return whether a file of its directory matches."""
        return next(self.directory.glob(pattern), None) is not None

    def is_within(self, phase: str) -> bool:
        """Return whether the middle of a phase of the second step has come."""
        path = self.run_dir / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = path.read_text().splitlines()
            begin = path.stat().st_ctime if len(lines) == 1 else 0.0
            return time.time() >= begin + middle_s(json.loads(lines[0]), phase)
        return False


def words(command: str, phase: str) -> list[str]:
    """Return the words of a command in which the phase comes soon."""
    if command in RUNS:
        placement = ["rollout.placement=colocated"] if command == COLOCATED else []
        return [command.split()[0], *RUN, *placement, *RUNS_OF_PHASES.get(phase, [])]
    return OTHERS[command]


def in_sample(command: str, phase: str, name: str) -> bool:
    """Return whether a cell is in the sample."""
    if command == "launch":
        return phase in ("start", "sampling", "save") and name in SIGNALS[:3]
    if command == COLOCATED:
        return phase in OF_TURNS and name in SIGNALS[:3]
    turn = SIGNALS[3 + list(OF_RUNS).index(phase) % 3] if command == "train" else ""
    return command in OTHERS or name in (*SIGNALS[:3], turn)


def has_started(cell: Cell) -> bool:
    """Return whether it imports and checks: before, Python has begun, and the kernel ends it."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{cell.process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], base=16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


# How to know the phases of each command; in the order of time.
OF_RUNS: dict[str, Callable[[Cell], bool]] = {
    "start": has_started,
    "servers": lambda cell: cell.has("runs/run/logs/server_*.log"),
    "evaluation": lambda cell: cell.has("runs/run/evaluation/*"),
    "sampling": lambda cell: cell.is_within("rollout"),
    "update": lambda cell: cell.is_within("update"),
    "publish": lambda cell: cell.is_within("publish"),
    "save": lambda cell: cell.has(f"runs/run/checkpoints/*{PARTIAL}"),
    "end": lambda cell: cell.has("runs/run/final_model*"),
}
OF_TURNS = ("evaluation", "sampling", "update", "publish", "save")
PHASES: dict[str, dict[str, Callable[[Cell], bool]]] = {
    "train": OF_RUNS,
    COLOCATED: OF_RUNS,
    "launch": OF_RUNS,
    "eval": {
        "start": has_started,
        "servers": lambda cell: cell.has("out/server.log"),
        "sampling": lambda cell: cell.says("requests,"),
        "end": lambda cell: cell.has("out/answers_0.jsonl"),
    },
    "mismatch": {
        "start": has_started,
        "sampling": lambda cell: cell.says("40 to evaluate") or cell.says("comparing"),
    },
    "serve": {
        "start": has_started,
        "servers": lambda cell: cell.says("starting a server"),
        "serving": lambda cell: cell.says("ready:"),
    },
}


def run_cell(home: Path, command: str, phase: str, name: str, slack_s: float) -> str:
    """Run a command, send it a signal in a phase, and return what became of it."""
    number = signal.Signals[f"SIG{name}"]
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="qurl-signals-") as scratch:
        directory = Path(scratch)
        for path in home.iterdir():
            (directory / path.name).symlink_to(path)
        with (directory / "output").open("wb") as output:
            process = subprocess.Popen(
                [*QURL, *words(command, phase)],
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: mark},
                start_new_session=True,
            )
        cell = Cell(directory, process)
        deadline = time.monotonic() + LIMIT_S
        try:
            while not PHASES[command][phase](cell):
                if process.poll() is not None or time.monotonic() > deadline:
                    return f"WRONG: no such phase: {cell.shown()[-200:]!r}"
                time.sleep(0.01)
            if phase == "start":
                time.sleep(0.5)
            sent_at = time.monotonic()
            (os.killpg if name in FROM_TERMINALS else os.kill)(process.pid, number)
            if number == signal.SIGPIPE and command == "serve":
                time.sleep(AT_ONCE_S)
                if process.poll() is not None:
                    return f"WRONG: {process.returncode}"
                number, sent_at = signal.SIGTERM, time.monotonic()
                process.send_signal(number)
            code = process.wait(timeout=LIMIT_S)
            took_s = time.monotonic() - sent_at
            return judge(cell, command, phase, number, code, took_s, slack_s, mark)
        except subprocess.TimeoutExpired:
            return f"WRONG: still runs after {LIMIT_S:.0f} s"
        finally:
            for left in processes_with(MARK, mark):
                left.kill()


def judge(
    cell: Cell,
    command: str,
    phase: str,
    number: signal.Signals,
    code: int,
    took_s: float,
    slack_s: float,
    mark: str,
) -> str:
    """Return a cell of the table."""
    right = {128 + number}
    if number == signal.SIGPIPE:
        right = {0}
    elif command in RUNS and number == signal.SIGUSR1 and phase != "start":
        right = {0 if phase == "end" else STOPPED_EARLY}
    wrong = []
    if code not in right:
        wrong.append(f"expected {' or '.join(map(str, sorted(right)))}")
    if "Traceback" in cell.shown():
        wrong.append("traceback")
    ends_at_once = command not in RUNS and number != signal.SIGPIPE
    if ends_at_once and took_s > AT_ONCE_S + slack_s:
        wrong.append("late")
    if ends_at_once and cell.shown().count("qurl: interrupted by") != 1:
        wrong.append("no line")
    deadline = time.monotonic() + 10
    while (left := processes_with(MARK, mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        wrong.append(f"{len(left)} processes are left")
    if wrong:
        print(cell.shown()[-4000:], file=sys.stderr)
    found = f"{code}, {took_s:.1f} s"
    return f"WRONG: {found}: {', '.join(wrong)}" if wrong else found


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--commands", default=",".join(PHASES))
    parser.add_argument("--phases", default="", help="empty: all")
    parser.add_argument("--signals", default=",".join(SIGNALS))
    parser.add_argument("--all", action="store_true", help="every cell, and not a sample")
    parser.add_argument("--slack", type=float, default=1.0, help="seconds, for a busy machine")
    arguments = parser.parse_args()
    machine.print_machine("torch", "sglang", "megatron-core")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's would be inherited
    names, is_wrong = arguments.signals.split(","), False
    with tempfile.TemporaryDirectory(prefix="qurl-signals-") as scratch:
        home = Path(scratch)
        write_tiny_model(home / "model")
        write_sums(home / "problems.jsonl", 40)
        (home / "key").write_text(secrets.token_hex(32))
        (home / "key").chmod(0o600)
        print(f"| command | phase | {' | '.join(names)} |\n|{'---|' * (2 + len(names))}")
        for command in arguments.commands.split(","):
            for phase in PHASES[command]:
                if arguments.phases and phase not in arguments.phases.split(","):
                    continue
                print(f"| {command} | {phase}", end="", flush=True)
                for name in names:
                    cell = ""
                    if arguments.all or in_sample(command, phase, name):
                        cell = run_cell(home, command, phase, name, arguments.slack)
                    is_wrong |= cell.startswith("WRONG")
                    print(f" | {cell}", end="", flush=True)
                print(" |")
    sys.exit(int(is_wrong))


if __name__ == "__main__":
    main()
