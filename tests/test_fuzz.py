"""Random input is accepted, or refused with one line: `tests/fuzz.py`, run by an ordinary user."""

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
NOBODY = "65534"
ORDINARY_USER = (
    *("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"),
    *("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"),
    *("--bounding-set", "-all,+dac_read_search"),
)
"""Makes root a user who owns nothing, and reads what root can read: Python may be in its home.

No input reaches a device, or a file outside of the tests' directory.
"""


def test_random_input_gives_no_traceback_no_hang_and_no_orphan() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    words += ["--hypothesis-show-statistics", "tests/fuzz.py"]
    done = subprocess.run(
        [*ORDINARY_USER, *words] if os.geteuid() == 0 else words,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0
