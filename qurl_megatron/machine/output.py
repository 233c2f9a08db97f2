"""What commands print: where it goes on, the ends of logs, commands that can be pasted."""

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
    """Continue standard output and error in a run's console.log once they cannot be written.

    So a run goes on if its reader ends (`head`, a terminal) or the disk is full. Forks of this
    process inherit this.
    """
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        stream.flush()
        buffer = io.BufferedWriter(_Lasting(stream.fileno(), run_dir / CONSOLE_LOG))
        lasting = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
        setattr(sys, name, lasting)


class _Lasting(io.FileIO):
    """An open file that leads to another once it cannot be written, and at last to /dev/null."""

    def __init__(self, descriptor: int, log_file: Path) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._others = [log_file, Path(os.devnull)]

    def write(self, data: Any) -> int:
        while True:
            try:
                return super().write(data)
            except OSError as error:
                if not self._others:
                    raise
                self._lead_to(self._others.pop(0), error)

    def _lead_to(self, path: Path, error: OSError) -> None:
        with contextlib.suppress(OSError):
            other = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(other, self.fileno())
            os.close(other)
            reason = f"file descriptor {self.fileno()} cannot be written: {error.strerror}"
            os.write(self.fileno(), f"{reason}; its further output follows\n".encode())
