"""A short part of `benchmarks/fuzz.py`: random input is accepted, or refused with one line."""

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
KINDS = ("words", "fields", "rows", "runs", "bodies")


def test_random_input_gives_no_traceback_no_hang_and_no_orphan() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", "--inputs", "3", "--minutes", "2"]
        + ["--seed", "1", "--kinds", ",".join(KINDS)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    counts = dict(re.findall(r"^(\w+): (\d+) inputs", done.stdout, flags=re.MULTILINE))
    assert counts.keys() == set(KINDS) and all(map(int, counts.values())), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("tracebacks 0, hangs 0, orphans 0"), done.stdout
    assert done.returncode == 0
