"""What commands print: where it goes on, sizes, the ends of logs, commands that can be pasted."""

import contextlib
import io
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

LOG_TAIL_LINES = 20
LOG_LINE_LENGTH = 500
LOG_LINE_BYTES = 2**16  # to read for each line; most are far shorter
LOG_TAIL_BYTES = 2**27
CONSOLE_LOG = "console.log"  # in a run's directory


def qurl_command(*words: object) -> str:
    """Return a `qurl` command as a shell here takes it, with the program beside this Python."""
    program = Path(sys.executable).with_name("qurl")
    found = shutil.which("qurl")
    is_found = found is not None and program.exists() and program.samefile(found)
    shorter = os.path.relpath(program)
    name = "qurl" if is_found else str(program) if shorter.startswith("..") else shorter
    return shlex.join([name, *map(str, words)])


def gigabytes(num_bytes: float) -> str:
    """Return a size for a message, such as `1.5 GB` or `1.44 TB`."""
    return f"{num_bytes / 1e12:.3g} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g} GB"


def tail(log_file: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log, truncated: SGLang prints all its settings on one line.

    Only the end of the file is read, at most `LOG_TAIL_BYTES`.
    """
    with log_file.open("rb") as log:
        log.seek(
            -min(log.seek(0, os.SEEK_END), lines * LOG_LINE_BYTES, LOG_TAIL_BYTES), os.SEEK_END
        )
        text = log.read()
    last = text.decode(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:LOG_LINE_LENGTH] for line in last)


def outlive_output(run_dir: Path) -> None:
    """Let standard output and error never fail: what they cannot take goes to a run's console.log.

    So a run goes on if its reader ends (`head`, a terminal) or the disk is full. Forks of this
    process inherit this.
    """
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        stream.flush()
        buffer = io.BufferedWriter(_Output(stream.fileno(), run_dir / CONSOLE_LOG))
        lasting = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
        setattr(sys, name, lasting)


class _Output(io.FileIO):
    """An open file. What it cannot take goes to a log, and what that cannot take is dropped."""

    def __init__(self, descriptor: int, log_file: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._log_file = log_file

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        with contextlib.suppress(OSError), self._log_file.open("ab", buffering=0) as log:
            return log.write(data)
        return len(data)
